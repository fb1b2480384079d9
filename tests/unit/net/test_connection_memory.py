"""The cost of partial frames and unread responses; no client waits for ever for memory that others hold."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import (
    WRITE_BUFFER_HIGH_BYTES,
    Connection,
    EventualResponse,
)
from millstream.broker.net.partial_frame import FRAME_COST_BYTES
from millstream.broker.net.response import Buffers, Parked, Promise, Stream
from millstream_testing.listening import LIMITS, framed, listening
from millstream_testing.waiting import until

MEGABYTE = bytes(1 << 20)
Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class Size:
    """Responds to every frame with its size, except those that begin with S."""

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        return None if frame[0] == ord("S") else [struct.pack(">ii", 4, len(frame))]


class Flood:
    """Responds to every frame with a megabyte, except those that begin with S."""

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        return None if frame[0] == ord("S") else [struct.pack(">i", 1 << 20), bytes(1 << 20)]


@asynccontextmanager
async def clients(port: int, count: int) -> AsyncIterator[list[Client]]:
    opened = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        yield opened
    finally:
        for _, writer in opened:
            writer.close()


async def reported_size(client: Client) -> int:
    size, reported = struct.unpack(">ii", await client[0].readexactly(8))
    assert size == 4
    return int(reported)


async def until_holding(budget: Budget, at_least: int) -> None:
    await until(lambda: budget.used_bytes >= at_least)


async def test_a_partial_frame_costs_what_has_arrived_of_it() -> None:
    budget = Budget(1 << 30)
    async with listening(Size(), budget=budget) as (_, port), clients(port, 50) as half:
        for _, writer in half:
            writer.write(struct.pack(">i", 30_000_000) + b"few bytes")
        await until_holding(budget, 50 * FRAME_COST_BYTES)
        assert budget.used_bytes < 50 * 8192


async def test_partial_frames_beyond_the_budget_do_not_deadlock() -> None:
    budget = Budget(1024 * 1024)
    sizes = [3_000_000, 5_000_000, 200_000, 9_000_000]
    async with listening(Size(), budget=budget) as (_, port), clients(port, len(sizes)) as senders:
        for size, (_, writer) in zip(sizes, senders, strict=True):
            writer.write(framed(bytes(size))[: size // 2])
        await until_holding(budget, 1024 * 1024)
        for size, (_, writer) in zip(sizes, senders, strict=True):
            writer.write(framed(bytes(size))[size // 2 :])
        assert await asyncio.gather(*map(reported_size, senders)) == sizes


async def test_small_requests_overtake_stuck_frames() -> None:
    # A budget in proportion to the buffers of large frames, as in a broker.
    budget = Budget(64 * 1024 * 1024)
    async with (
        listening(Size(), budget=budget) as (_, port),
        clients(port, 40) as senders,
        clients(port, 1) as (other,),
    ):
        for _, writer in senders:
            writer.write(struct.pack(">i", 1_400_000) + bytes(1_300_000))
        await until_holding(budget, 48 * 1024 * 1024)
        for size in (1, 100, 1000):
            other[1].write(framed(bytes(size)))
            assert await reported_size(other) == size


async def test_a_stalled_frame_is_disconnected_sooner_when_others_wait() -> None:
    budget = Budget(1 << 20)
    async with listening(Size(), budget=budget) as (listener, port), clients(port, 1) as (stuck,):
        stuck[1].write(struct.pack(">i", 1000) + b"half")
        await until_holding(budget, 1)
        (connection,) = listener.connections
        soon = connection.last_activity + LIMITS.pressed_stall_s + 1
        assert not connection.stalled(soon)
        assert connection.stalled(soon, pressed=True)
        # A slow one gets more time, but not for ever.
        connection.last_activity = late = soon + LIMITS.pressed_frame_s
        assert not connection.stalled(late)
        assert connection.stalled(late, pressed=True)


async def test_a_connection_shut_down_by_its_client_closes_once_its_responses_are_read() -> None:
    async with listening(Flood()) as (listener, port), clients(port, 1) as ((reader, writer),):
        # The first response fills the buffers, so the others wait; the last request has no response that could notice
        # the shutdown.
        writer.write(framed(b"a") * 20 + framed(b"S"))
        writer.write_eof()
        received = await asyncio.wait_for(reader.read(), 60)
        assert len(received) == 20 * (4 + (1 << 20))
        await until(lambda: not listener.connections)


async def test_unread_responses_count_against_the_budget() -> None:
    budget = Budget(1 << 30)
    async with listening(Flood(), budget=budget) as (_, port), clients(port, 1) as ((_, writer),):
        writer.write(framed(b"a") * 30)
        # The kernel decides how much of the last piece it takes; sending stops beyond this.
        await until_holding(budget, WRITE_BUFFER_HIGH_BYTES)
        await asyncio.sleep(0.05)
        # Nothing more is served while nothing is read.
        assert budget.used_bytes < 3 << 20


class SlowService:
    """Promises a response to P, parks Q, waits in a task for T, and responds to all others with a megabyte."""

    def __init__(self) -> None:
        self.first = Promise()
        self.parked = Parked()
        self.may_respond = asyncio.Event()

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        match bytes(frame[:1]):
            case b"P":
                return self.first
            case b"Q":
                return self.parked
            case b"T":
                return self._respond()
            case b"S":
                return Stream([MEGABYTE])
        return [MEGABYTE]

    async def _respond(self) -> Buffers:
        await self.may_respond.wait()
        return [MEGABYTE]


@pytest.mark.parametrize("kind", [b"Q", b"T", b"S", b"a"])
@pytest.mark.parametrize("is_closed", [False, True])
async def test_responses_behind_an_unfinished_one_count_against_the_budget(kind: bytes, is_closed: bool) -> None:
    service, budget = SlowService(), Budget(1 << 30)
    async with listening(service, budget=budget) as (listener, port), clients(port, 1) as ((reader, writer),):
        writer.write(framed(b"P") + framed(kind))
        if kind in (b"Q", b"T"):
            await until_holding(budget, 1)
            service.may_respond.set()
            service.parked.resolve([MEGABYTE])
        await until_holding(budget, len(MEGABYTE))
        await asyncio.sleep(0.01)
        assert len(MEGABYTE) <= budget.used_bytes < 2 * len(MEGABYTE)
        if is_closed:
            for connection in list(listener.connections):
                connection.abort()
        else:
            service.first.resolve([framed(b"kept")])
            assert await reader.readexactly(8 + len(MEGABYTE)) == framed(b"kept") + MEGABYTE
        await until(lambda: not budget.used_bytes)


class Late(Parked):
    """A response that is about to be kept, so that it is not abandoned."""

    def abandon(self) -> None:
        pass


async def test_a_promise_resolved_after_the_connection_is_lost_releases_its_memory() -> None:
    service, budget = SlowService(), Budget(1 << 30)
    service.parked = Late()
    async with listening(service, budget=budget) as (listener, port), clients(port, 1) as ((_, writer),):
        writer.write(framed(b"Q"))
        await until_holding(budget, FRAME_COST_BYTES)
        for connection in list(listener.connections):
            connection.abort()
        await until(lambda: not listener.connections)
        service.parked.resolve([MEGABYTE])
        assert budget.used_bytes == 0


async def test_a_request_that_cannot_be_abandoned_does_not_block_the_release_of_others() -> None:
    service, budget = SlowService(), Budget(1 << 30)
    async with listening(service, budget=budget) as (listener, port), clients(port, 1) as ((_, writer),):
        # A part of a large frame has arrived, too.
        writer.write(framed(b"Q") + struct.pack(">i", 1 << 20) + bytes(1000))
        await until_holding(budget, 2 * FRAME_COST_BYTES)
        for connection in list(listener.connections):
            connection.abort()
        await until(lambda: not listener.connections)
        assert budget.used_bytes == 0


@pytest.mark.parametrize("count", [1, 5])
def test_one_connection_at_a_time_may_exceed_the_budget(count: int) -> None:
    budget = Budget(100)
    budget.reserve(1000)
    grown: list[int] = []

    def grow(number: int) -> None:
        assert budget.acquire_pass(number)
        grown.append(number)

    assert budget.acquire_pass("first")
    for number in range(count):
        assert not budget.acquire_pass(number)
        budget.wait_to_grow(number, lambda number=number: grow(number))  # type: ignore[misc]
    assert budget.waiting == count
    budget.release_pass("somebody else")
    assert grown == []
    budget.release_pass("first")
    for number in range(count):
        assert grown == list(range(number + 1))
        budget.release_pass(number)
    assert budget.waiting == 0
