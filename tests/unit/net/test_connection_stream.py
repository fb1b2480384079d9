"""Large responses that are read while they are sent."""

from __future__ import annotations

import asyncio
import gc
import struct
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, ConnectionLimits, EventualResponse
from millstream.broker.net.response import PIECE_BYTES, Outgoing, Piece, Stored, Stream
from millstream.core.errors import StorageFailure
from millstream_testing.listening import framed, listening
from millstream_testing.waiting import until

MEGABYTE = 1 << 20
LIMITS = ConnectionLimits(frame_bytes_max=1000)


class Part:
    """A part that counts the bytes read from it, and its instances."""

    alive = 0

    def __init__(self, content: bytes, fails_at: int | None = None) -> None:
        Part.alive += 1
        self.content = content
        self.fails_at = fails_at
        self.read_bytes = 0

    def __del__(self) -> None:
        Part.alive -= 1

    def __len__(self) -> int:
        return len(self.content)

    def read(self, at: int, size: int) -> bytes:
        if self.fails_at is not None and at + size > self.fails_at:
            raise StorageFailure("the file is gone")
        assert at == self.read_bytes
        self.read_bytes += size
        return self.content[at : at + size]


class Streams:
    """Responds to a frame of one letter with the prepared response, `m` from memory, and echoes any other."""

    def __init__(self, **prepared: Callable[[], list[Part]]) -> None:
        self.prepared = prepared
        self.given: list[Part] = []

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        name = str(frame, "ascii")
        if name not in self.prepared:
            return [struct.pack(">i", len(frame)), bytes(frame)]
        self.given = parts = self.prepared[name]()
        if name == "m":
            return [struct.pack(">i", sum(map(len, parts))), *(part.content for part in parts)]
        head = struct.pack(">i", sum(map(len, parts)))
        # In-memory bytes are interleaved with file parts, as in a fetch response.
        laid: list[Piece | Stored] = [head]
        for part in parts:
            laid += [part, b""]
        return Stream(laid)


def parts_of(count: int, size: int = MEGABYTE) -> list[Part]:
    return [Part(bytes([number % 251]) * size) for number in range(count)]


@given(
    sizes=st.lists(st.tuples(st.booleans(), st.integers(0, 50)), max_size=20),
    bytes_max=st.integers(1, 40),
)
def test_every_byte_is_read_once_and_in_order(sizes: list[tuple[bool, int]], bytes_max: int) -> None:
    parts: list[Piece | Stored] = []
    expected = b""
    for number, (stored, size) in enumerate(sizes):
        content = bytes([number]) * size
        parts.append(Part(content) if stored else content)
        expected += content
    in_memory = b"".join(bytes([not stored]) * size for stored, size in sizes)
    outgoing = Outgoing()
    outgoing.extend(parts)
    taken = b""
    while outgoing:
        piece = b"".join(outgoing.take(bytes_max))
        assert len(piece) <= bytes_max + bytes_max // 2
        taken += piece
        assert outgoing.held_bytes == in_memory[len(taken) :].count(1)
    assert taken == expected


async def test_a_slow_reader_costs_one_piece_of_memory_and_gets_every_byte() -> None:
    service = Streams(a=lambda: parts_of(40))
    budget = Budget(1 << 30)
    async with listening(service, limits=LIMITS, budget=budget) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(framed(b"a") + framed(b"after"))
        await until(lambda: budget.used_bytes != 0)
        await asyncio.sleep(0.05)
        # Bytes taken by the kernel are freed; of the rest, at most a piece or two is in memory.
        read = sum(part.read_bytes for part in service.given)
        assert read < 30 * MEGABYTE
        assert budget.used_bytes < 2 * PIECE_BYTES
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        received = await reader.readexactly(size)
        assert received == b"".join(bytes([number]) * MEGABYTE for number in range(40))
        assert await reader.readexactly(9) == framed(b"after")
        writer.close()


async def test_what_a_slow_reader_keeps_in_memory_counts() -> None:
    service = Streams(m=lambda: parts_of(20))
    budget = Budget(1 << 30)
    async with listening(service, limits=LIMITS, budget=budget) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(framed(b"m"))
        await until(lambda: budget.used_bytes)
        assert 2 * PIECE_BYTES < budget.used_bytes <= 20 * MEGABYTE + 4
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        assert len(await reader.readexactly(size)) == 20 * MEGABYTE
        assert budget.used_bytes == 0
        writer.close()


async def test_scarce_memory_makes_small_pieces() -> None:
    service = Streams(a=lambda: parts_of(20))
    budget = Budget(400_000)
    async with listening(service, limits=LIMITS, budget=budget) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"a"))
        await until(lambda: budget.used_bytes != 0)
        assert budget.used_bytes < 400_000
        (size,) = struct.unpack(">i", await reader.readexactly(4))
        assert len(await reader.readexactly(size)) == 20 * MEGABYTE
        writer.close()


async def test_a_client_that_disconnects_midway_leaves_nothing_behind() -> None:
    service = Streams(a=lambda: parts_of(40))
    gc.collect()
    before = Part.alive
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"a"))
        await reader.readexactly(5 * MEGABYTE)
        writer.transport.abort()
        await until(lambda: not listener.connections)
        service.given = []
        gc.collect()
        assert Part.alive == before


@pytest.mark.parametrize("failing", [0, 7, 39])
async def test_an_unreadable_part_closes_the_connection(failing: int) -> None:
    def parts() -> list[Part]:
        made = parts_of(40)
        made[failing] = Part(bytes(MEGABYTE), fails_at=0)
        return made

    async with listening(Streams(a=parts), limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"a") + framed(b"after"))
        with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
            await reader.readexactly(4 + 40 * MEGABYTE)
        assert listener.traffic.connections_failed == 1
        writer.close()
        # Other connections are still served.
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"well"))
        assert await reader.readexactly(8) == framed(b"well")
        writer.close()


async def test_a_client_that_shut_down_its_side_still_gets_the_whole_response() -> None:
    async with listening(Streams(a=lambda: parts_of(20)), limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"a") + framed(b"a") + framed(b"end"))
        writer.write_eof()
        received = await reader.read()
        assert len(received) == 2 * (4 + 20 * MEGABYTE) + 7
        assert received[-7:] == framed(b"end")
        writer.close()
        await until(lambda: not listener.connections)


async def test_others_are_served_while_a_large_response_is_sent() -> None:
    async with listening(Streams(a=lambda: parts_of(60)), limits=LIMITS) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        other_reader, other = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"a"))
        await reader.readexactly(4)
        other.write(framed(b"me"))
        assert await other_reader.readexactly(6) == framed(b"me")
        assert len(await reader.readexactly(60 * MEGABYTE)) == 60 * MEGABYTE
        writer.close()
        other.close()


async def test_a_small_response_may_come_from_a_file_too() -> None:
    service = Streams(a=lambda: parts_of(2, size=100))
    async with listening(service, limits=LIMITS) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"a") + framed(b"after"))
        assert await asyncio.wait_for(reader.readexactly(204 + 9), 60) == (
            struct.pack(">i", 200) + bytes(100) + b"\1" * 100 + framed(b"after")
        )
        writer.close()


async def test_a_queued_request_that_fails_closes_its_connection_and_later_ones_are_not_served() -> None:
    def fails() -> list[Part]:
        raise RuntimeError("a defect")

    service = Streams(a=lambda: parts_of(40), b=fails, c=lambda: parts_of(1))
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        # The first response is so large that the requests behind it have to wait until it is read.
        writer.write(framed(b"a") + framed(b"b") + framed(b"c"))
        assert len(await asyncio.wait_for(reader.readexactly(4 + 40 * MEGABYTE), 60)) == 4 + 40 * MEGABYTE
        assert await asyncio.wait_for(reader.read(), 60) == b""
        assert listener.traffic.connections_failed == 1
        assert len(service.given) == 40
        writer.close()
