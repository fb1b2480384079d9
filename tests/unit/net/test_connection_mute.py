"""A muted connection is not served for a while, and loses nothing."""

from __future__ import annotations

import asyncio

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, EventualResponse
from millstream_testing.listening import framed, listening, read_frame
from millstream_testing.waiting import until

NEVER_S = 3600.0
SHORT_S = 0.01


class MutesOnDemand:
    """Echoes frames; a frame that begins with `mute` mutes its connection."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.handled: list[bytes] = []
        self.connections: list[Connection] = []

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        body = bytes(frame)
        self.handled.append(body)
        if body.startswith(b"mute"):
            self.connections.append(connection)
            connection.mute(self._seconds)
        if body == b"mute later":
            return self._later(body)
        return [framed(body)]

    async def _later(self, body: bytes) -> list[bytes | bytearray | memoryview]:
        await asyncio.sleep(0)
        return [framed(body)]


async def echo(port: int, body: bytes) -> bytes:
    """Do a round trip of another client, during which the loop serves everything that it is going to serve."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(framed(body))
    response = await read_frame(reader)
    writer.close()
    return response


async def test_the_response_is_sent_and_later_requests_wait_until_the_mute_ends() -> None:
    service = MutesOnDemand(NEVER_S)
    budget = Budget(1 << 30)
    async with listening(service, budget=budget, drain_s=5) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"mute") + framed(b"behind it") + framed(b"and this"))
        assert await read_frame(reader) == b"mute"
        assert await echo(port, b"other") == b"other"
        assert service.handled == [b"mute", b"other"]
        # A stopping broker ends the mute: requests that were read get a response.
        drained = asyncio.create_task(listener.drain(5))
        assert await read_frame(reader) == b"behind it"
        assert await read_frame(reader) == b"and this"
        assert await reader.read() == b""
        await drained
        writer.close()
    assert budget.used_bytes == 0


async def test_a_mute_ends_by_itself() -> None:
    service = MutesOnDemand(SHORT_S)
    async with listening(service, drain_s=5) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        for _ in range(3):
            writer.write(framed(b"mute") + framed(b"mute later") + framed(b"behind it"))
            assert [await read_frame(reader) for _ in range(3)] == [b"mute", b"mute later", b"behind it"]
        writer.close()


async def test_the_longer_of_two_mutes_applies() -> None:
    service = MutesOnDemand(NEVER_S)
    async with listening(service, drain_s=5) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"mute") + framed(b"behind it"))
        assert await read_frame(reader) == b"mute"
        (connection,) = service.connections
        # A throttled client is not idle, and is not disconnected.
        assert not connection.is_idle
        connection.mute(0)
        assert await echo(port, b"other") == b"other"
        assert b"behind it" not in service.handled
        writer.close()


async def test_a_lost_muted_connection_releases_everything() -> None:
    service = MutesOnDemand(NEVER_S)
    budget = Budget(1 << 30)
    async with listening(service, budget=budget, drain_s=5) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"mute") + framed(b"behind it"))
        assert await read_frame(reader) == b"mute"
        assert budget.used_bytes > 0
        (connection,) = service.connections
        connection.abort()
        assert await reader.read() == b""
        writer.close()
        await until(lambda: not listener.connections)
        connection.mute(1)
        assert budget.used_bytes == 0
    assert service.handled == [b"mute"]


async def test_a_lifted_mute_serves_what_waits_and_a_restored_one_goes_on() -> None:
    service = MutesOnDemand(NEVER_S)
    async with listening(service, drain_s=5) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"mute") + framed(b"mute, behind it"))
        assert await read_frame(reader) == b"mute"
        (connection,) = service.connections
        connection.lift_mute()
        assert await read_frame(reader) == b"mute, behind it"
        writer.write(framed(b"read now"))
        assert await read_frame(reader) == b"read now"
        connection.restore_mute()
        assert connection.is_muted
        writer.write(framed(b"read later"))
        assert await echo(port, b"other") == b"other"
        assert service.handled[-1] == b"other"
        writer.close()
