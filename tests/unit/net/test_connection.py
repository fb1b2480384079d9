"""Connections over a real loopback socket: framing, order, backpressure and bad input."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.broker.net import listener as listener_module
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, ConnectionLimits, EventualResponse
from millstream.broker.net.partial_frame import BUFFER_BYTES
from millstream.broker.net.response import Promise
from millstream.broker.net.turns import Flow, Turns
from millstream.core.errors import ProtocolViolation
from millstream.core.metric import Histogram
from millstream_testing.listening import LIMITS, framed, listening, read_frame
from millstream_testing.waiting import until


class Echo:
    """Responds to every frame with itself."""

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        return [struct.pack(">i", len(frame)), bytes(frame)]


class Scripted:
    """Responds through a function of the test."""

    def __init__(self, respond: Callable[[bytes], EventualResponse]) -> None:
        self._respond = respond

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        return self._respond(bytes(frame))


@asynccontextmanager
async def client(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.close()


@given(bodies=st.lists(st.binary(min_size=1, max_size=5000), min_size=1, max_size=20), data=st.data())
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_frames_survive_any_fragmentation(bodies: list[bytes], data: st.DataObject) -> None:
    stream = b"".join(map(framed, bodies))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(stream)), max_size=12)))

    async def exchange() -> list[bytes]:
        async with listening(Echo()) as (_, port), client(port) as (reader, writer):
            start = 0
            for cut in [*cuts, len(stream)]:
                writer.write(stream[start:cut])
                await writer.drain()
                await asyncio.sleep(0)
                start = cut
            return [await read_frame(reader) for _ in bodies]

    assert asyncio.run(exchange()) == bodies


async def test_a_large_frame_grows_its_buffer_and_arrives_whole() -> None:
    body = bytes(range(256)) * (BUFFER_BYTES // 256 * 5)
    budget = Budget(1 << 30)
    async with listening(Echo(), budget=budget) as (_, port), client(port) as (reader, writer):
        writer.write(framed(body) + framed(b"next"))
        assert await read_frame(reader) == body
        assert await read_frame(reader) == b"next"
    assert budget.used_bytes == 0


@pytest.mark.parametrize("length", [0, -1, -(2**31), 2**31 - 1, LIMITS.frame_bytes_max + 1])
async def test_an_invalid_length_closes_only_its_own_connection(length: int) -> None:
    async with listening(Echo()) as (listener, port), client(port) as (good_reader, good_writer):
        async with client(port) as (reader, writer):
            writer.write(struct.pack(">i", length) + b"garbage")
            assert await reader.read() == b""
        good_writer.write(framed(b"still here"))
        assert await read_frame(good_reader) == b"still here"
        assert listener.traffic.connections_failed == 1


async def test_an_announced_length_alone_costs_little_memory() -> None:
    budget = Budget(1 << 30)
    async with listening(Echo(), budget=budget) as (_, port), client(port) as (_, writer):
        writer.write(struct.pack(">i", LIMITS.frame_bytes_max) + b"x")
        await until(lambda: budget.used_bytes != 0)
        assert budget.used_bytes <= BUFFER_BYTES
    assert budget.used_bytes == 0


async def test_promised_responses_are_sent_in_request_order() -> None:
    promises: list[Promise] = []

    def promise(frame: bytes) -> EventualResponse:
        if frame == b"now":
            return [framed(b"now")]
        promises.append(Promise())
        return promises[-1]

    async with listening(Scripted(promise)) as (_, port), client(port) as (reader, writer):
        writer.write(framed(b"a") + framed(b"b") + framed(b"c") + framed(b"now"))
        await until(lambda: len(promises) >= 3)
        for number in (2, 0, 1):
            promises[number].resolve([framed(b"response %d" % number)])
        assert [await read_frame(reader) for _ in range(4)] == [b"response 0", b"response 1", b"response 2", b"now"]


async def test_a_promise_can_be_awaited_before_and_after_it_is_resolved() -> None:
    latency = Histogram()
    promise = Promise()
    promise.observe(latency, 0.0)
    waiting = asyncio.ensure_future(promise)
    await asyncio.sleep(0)
    promise.resolve([b"x"])
    assert await waiting == [b"x"]
    assert await promise == [b"x"]
    assert latency.observations == 1


async def test_a_coroutine_delays_only_later_requests_of_its_connection() -> None:
    gate = asyncio.Event()
    seen: list[bytes] = []

    def respond(frame: bytes) -> EventualResponse:
        seen.append(frame)

        async def slow() -> list[bytes | bytearray | memoryview]:
            await gate.wait()
            return [framed(frame)]

        return slow() if frame == b"slow" else [framed(frame)]

    async with listening(Scripted(respond)) as (_, port), client(port) as (reader, writer), client(port) as other:
        writer.write(framed(b"slow") + framed(b"after"))
        other[1].write(framed(b"other"))
        assert await read_frame(other[0]) == b"other"
        assert b"after" not in seen
        gate.set()
        assert [await read_frame(reader), await read_frame(reader)] == [b"slow", b"after"]


async def test_a_violation_closes_the_connection() -> None:
    def violate(frame: bytes) -> EventualResponse:
        raise ProtocolViolation("no")

    async with listening(Scripted(violate)) as (_, port), client(port) as (reader, writer):
        writer.write(framed(b"x"))
        assert await reader.read() == b""


async def test_a_client_that_never_reads_is_throttled() -> None:
    served = 0

    def respond(frame: bytes) -> EventualResponse:
        nonlocal served
        served += 1
        return [framed(bytes(1024 * 1024))]

    budget = Budget(1 << 30)
    async with listening(Scripted(respond), budget=budget) as (_, port), client(port) as (_, writer):
        for _ in range(200):
            writer.write(framed(b"more"))
        await writer.drain()
        before = -1
        while before != served:
            before = served
            await asyncio.sleep(0.05)
        # Socket buffers take a few megabytes; everything beyond waits with its request.
        assert served < 100
        assert 0 < budget.used_bytes < 64 * 1024 * 1024
    assert budget.used_bytes == 0


async def test_reading_pauses_when_the_budget_is_exhausted() -> None:
    gate = asyncio.Event()

    def respond(frame: bytes) -> EventualResponse:
        async def held() -> list[bytes | bytearray | memoryview]:
            await gate.wait()
            return [framed(b"done")]

        return held() if frame[:4] == b"hold" else [framed(frame)]

    budget = Budget(1024)
    async with listening(Scripted(respond), budget=budget) as (_, port), client(port) as first, client(port) as second:
        first[1].write(framed(b"hold" + bytes(2000)))
        await until(lambda: not budget.has_room)
        second[1].write(framed(b"a"))
        # The first read of a connection is accepted; after it the connection waits for memory.
        assert await read_frame(second[0]) == b"a"
        second[1].write(framed(b"b"))
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(second[0].readexactly(1), 0.1)
        gate.set()
        assert await read_frame(second[0]) == b"b"
        assert await read_frame(first[0]) == b"done"
    assert budget.used_bytes == 0


async def test_connections_beyond_the_limit_are_refused() -> None:
    async with listening(Echo(), connections_max=1) as (listener, port), client(port) as (reader, writer):
        writer.write(framed(b"in"))
        assert await read_frame(reader) == b"in"
        async with client(port) as (refused, _):
            assert await refused.read() == b""
        assert listener.traffic.connections_refused == 1


class NoTurns(Turns):
    """Makes every connection wait for a turn that never comes."""

    def spend(self, flow: Flow, cost_s: float, now: float, *, is_light: bool = False) -> bool:
        if not flow.is_waiting:
            self.wait(flow)
        return True

    def _run_soon(self) -> None:
        pass


@pytest.mark.parametrize("is_reset", [True, False])
async def test_clients_that_disconnect_while_waiting_for_their_turn_are_removed(
    is_reset: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener_module, "GONE_CHECK_MIN", 2)
    monkeypatch.setattr(listener_module, "CROWD_MAX", 1 if is_reset else 0)
    async with listening(Echo(), turns=NoTurns()) as (listener, port):
        for _ in range(10):
            async with client(port) as (reader, writer):
                writer.write(framed(b"in"))
                assert await read_frame(reader) == b"in"
                if is_reset:
                    writer.get_extra_info("socket").setsockopt(
                        socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)
                    )
        assert len(listener.connections) <= 5


async def test_a_stalled_partial_frame_is_disconnected() -> None:
    limits = ConnectionLimits(frame_bytes_max=1000, stall_s=10)
    async with listening(Echo(), limits=limits) as (listener, port), client(port) as (_, writer):
        writer.write(struct.pack(">i", 100) + b"half")
        await until(lambda: listener.connections and listener.traffic.bytes_in != 0)
        (connection,) = listener.connections
        assert not connection.stalled(connection.last_activity + 9)
        assert connection.stalled(connection.last_activity + 11)


async def test_draining_completes_requests_in_flight() -> None:
    promise: asyncio.Future[list[bytes | bytearray | memoryview] | None] = asyncio.get_running_loop().create_future()
    started = asyncio.Event()

    def respond(frame: bytes) -> EventualResponse:
        started.set()
        return promise

    async with listening(Scripted(respond)) as (listener, port), client(port) as (reader, writer):
        writer.write(framed(b"x"))
        await started.wait()
        drained = asyncio.create_task(listener.drain(5))
        await asyncio.sleep(0.01)
        promise.set_result([framed(b"last words")])
        assert await read_frame(reader) == b"last words"
        assert await reader.read() == b""
        await drained


async def test_a_frame_that_waits_for_a_coroutine_keeps_its_bytes() -> None:
    """Small frames are served from a buffer that all connections share; waiting frames have a copy."""
    gate = asyncio.Event()

    def respond(frame: bytes) -> EventualResponse:
        async def slow() -> list[bytes | bytearray | memoryview]:
            await gate.wait()
            return [framed(frame)]

        return slow() if frame == b"slow" else [framed(frame)]

    async with listening(Scripted(respond)) as (_, port), client(port) as (reader, writer), client(port) as other:
        writer.write(framed(b"slow") + framed(b"first") + framed(b"second"))
        for number in range(3):
            other[1].write(framed(b"overwritten %d" % number) * 5)
            assert [await read_frame(other[0]) for _ in range(5)] == [b"overwritten %d" % number] * 5
        gate.set()
        assert [await read_frame(reader) for _ in range(3)] == [b"slow", b"first", b"second"]


async def test_earlier_responses_are_sent_before_a_bad_request_closes_the_connection() -> None:
    def respond(frame: bytes) -> EventualResponse:
        if frame == b"bad":
            raise ProtocolViolation("bad")
        return [framed(frame)]

    async with listening(Scripted(respond)) as (_, port), client(port) as (reader, writer):
        writer.write(framed(b"good") + framed(b"bad"))
        assert await read_frame(reader) == b"good"
        assert await reader.read() == b""
