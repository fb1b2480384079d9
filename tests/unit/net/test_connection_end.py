"""Requests of a client that has shut down its side of the connection, or is gone."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, ConnectionLimits, EventualResponse
from millstream.broker.net.listener import Listener
from millstream.broker.net.presence import Hangups, Presence
from millstream.broker.net.response import Buffers, Parked, Promise
from millstream_testing.listening import framed, listening
from millstream_testing.waiting import until

LIMITS = ConnectionLimits(frame_bytes_max=1000)


class Waiting(Parked):
    """A request that waits until the test responds to it."""

    def __init__(self, polls: Polls) -> None:
        super().__init__()
        self._polls = polls

    def abandon(self) -> None:
        self._polls.given_up += 1
        self.resolve(None)


class Polls:
    """Long polls that end when the client leaves ("poll"), or are abandoned ("join", "park"); promises; and echoes."""

    def __init__(self) -> None:
        self.polls = 0
        self.given_up = 0
        self.promises: list[Promise] = []
        self.parked: list[Waiting] = []
        self.undone = 0
        """Responses that never left."""

    def handle(self, frame: memoryview, connection: Connection) -> EventualResponse:
        name = bytes(frame)
        if name == b"poll":
            return self._poll(connection.presence)
        if name == b"join":
            return self._join(connection.presence)
        if name == b"park":
            self.polls += 1
            self.parked.append(Waiting(self))
            return self.parked[-1]
        if name.startswith(b"lease"):
            return self._lease(connection.presence, int(name[5:]))
        if name == b"promise":
            self.promises.append(Promise())
            return self.promises[-1]
        return [framed(name)]

    def _poll(self, presence: Presence) -> Coroutine[Any, Any, Buffers | None]:
        async def poll() -> Buffers:
            ended = asyncio.get_running_loop().create_future()
            self.polls += 1
            if not presence.has_left:
                presence.on_leave(lambda: ended.set_result(None))
                await ended
            return [framed(b"what there is")]

        return poll()

    def _lease(self, presence: Presence, size: int) -> Coroutine[Any, Any, Buffers | None]:
        async def lease() -> Buffers:
            self.polls += 1
            presence.on_undelivered(self._undo)
            return [framed(b"x" * size)]

        return lease()

    def _undo(self) -> None:
        self.undone += 1

    def _join(self, presence: Presence) -> Coroutine[Any, Any, Buffers | None]:
        async def join() -> Buffers:
            task = asyncio.current_task()
            assert task is not None
            presence.on_leave(task.cancel)
            self.polls += 1
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                self.given_up += 1
            return []

        return join()


async def until_closed(listener: Listener) -> None:
    await until(lambda: not listener.connections)


async def until_polling(service: Polls, count: int = 1) -> None:
    await until(lambda: service.polls >= count)


async def test_a_long_poll_returns_what_it_has_when_the_client_shuts_down_its_side() -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"first") + framed(b"poll") + framed(b"poll") + framed(b"last"))
        await until_polling(service)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 60) == (
            framed(b"first") + framed(b"what there is") * 2 + framed(b"last")
        )
        await until_closed(listener)
        writer.close()


async def test_requests_behind_a_waiting_one_are_served_after_it() -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (_, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"first") + framed(b"park") + framed(b"park") + framed(b"last"))
        for count in (1, 2):
            await until_polling(service, count)
            assert len(service.parked) == count
            service.parked[-1].resolve([framed(b"what came")])
        expected = framed(b"first") + framed(b"what came") * 2 + framed(b"last")
        assert await reader.readexactly(len(expected)) == expected
        writer.close()


@pytest.mark.parametrize("behind", [b"", framed(b"last")])
async def test_waiting_requests_are_abandoned_when_the_client_shuts_down_its_side(behind: bytes) -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"park") + behind)
        await until_polling(service)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 60) == behind
        await asyncio.wait_for(until_closed(listener), 60)
        assert service.given_up == 1
        writer.close()


@pytest.mark.parametrize("kind", [b"poll", b"join", b"park"])
async def test_a_client_that_closes_leaves_no_waiting_request(kind: bytes) -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(kind))
        await until_polling(service)
        writer.close()
        await asyncio.wait_for(until_closed(listener), 60)
        assert service.given_up == (kind != b"poll")


@pytest.mark.parametrize("ends_its_side", [True, False])
async def test_a_response_that_was_sent_is_not_undone(ends_its_side: bool) -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # Large enough to be sent in pieces; behind it, another response waits.
        writer.write(framed(b"lease1000000") + framed(b"lease5"))
        if ends_its_side:
            writer.write_eof()
        assert len(await asyncio.wait_for(reader.readexactly(1_000_004 + 9), 60)) == 1_000_013
        writer.close()
        await asyncio.wait_for(until_closed(listener), 60)
        assert service.undone == 0


async def test_a_response_that_was_not_sent_is_undone() -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1000)
        writer.write(framed(b"lease50000000"))
        await asyncio.wait_for(reader.readexactly(4), 60)
        writer.transport.abort()
        await asyncio.wait_for(until_closed(listener), 60)
        assert service.undone == 1


async def test_an_abandoned_request_has_no_response_and_later_ones_do() -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"join") + framed(b"last"))
        await until_polling(service)
        writer.write_eof()
        assert await asyncio.wait_for(reader.read(), 60) == framed(b"last")
        await until_closed(listener)
        writer.close()


@pytest.mark.parametrize("kind", [b"poll", b"join"])
async def test_a_shutdown_is_noticed_while_reading_is_paused(kind: bytes) -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        # So many requests wait behind the poll that reading pauses, and the shutdown is behind even more.
        count = 200
        writer.write(framed(kind))
        await until_polling(service)
        for number in range(count):
            writer.write(framed(b"%d" % number))
            await asyncio.sleep(0)
        writer.write_eof()
        expected = b"".join(framed(b"%d" % number) for number in range(count))
        received = await asyncio.wait_for(reader.read(), 60)
        assert received == (framed(b"what there is") if kind == b"poll" else b"") + expected
        await until_closed(listener)
        writer.close()


async def test_a_shutdown_is_noticed_without_memory_to_read() -> None:
    service = Polls()
    budget = Budget(10_000)
    async with listening(service, limits=LIMITS, budget=budget) as (listener, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        budget.reserve(10_000)
        writer.write(framed(b"poll"))
        await until_polling(service)
        writer.close()
        await asyncio.wait_for(until_polling_ends(listener), 60)
        budget.release(10_000)
        await asyncio.wait_for(until_closed(listener), 60)


async def until_polling_ends(listener: Listener) -> None:
    while any(connection._task is not None for connection in listener.connections):
        await asyncio.sleep(0.001)


async def test_promises_are_kept_after_the_client_shut_down_its_side() -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"promise") + framed(b"last"))
        writer.write_eof()
        await until(lambda: service.promises)
        await asyncio.sleep(0.01)
        assert listener.connections
        service.promises[0].resolve([framed(b"kept")])
        assert await asyncio.wait_for(reader.read(), 60) == framed(b"kept") + framed(b"last")
        writer.close()


async def test_a_connection_that_is_read_again_is_not_watched() -> None:
    service = Polls()
    async with listening(service, limits=LIMITS) as (listener, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(framed(b"poll"))
        await until_polling(service)
        for _ in range(100):
            writer.write(framed(b"x"))
            await asyncio.sleep(0)
        await until(lambda: len(listener._hangups))
        (connection,) = listener.connections
        connection.presence.leave()
        await until(lambda: not len(listener._hangups))
        writer.close()


async def test_a_reused_descriptor_belongs_to_another_connection() -> None:
    hangups = Hangups()
    reported: list[str] = []
    ours, theirs = socket.socketpair()

    def first() -> None:
        reported.append("first")

    def second() -> None:
        reported.append("second")

    hangups.watch(ours.fileno(), first)
    hangups.forget(ours.fileno(), first)
    hangups.watch(ours.fileno(), second)
    hangups.forget(ours.fileno(), first)
    theirs.shutdown(socket.SHUT_WR)
    await until(lambda: reported)
    assert reported == ["second"]
    hangups.forget(ours.fileno(), second)
    hangups.close()
    ours.close()
    theirs.close()


async def test_a_connection_that_is_closing_does_not_take_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with listening(Polls(), limits=LIMITS) as (listener, port):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        await until(lambda: listener.connections)
        (connection,) = listener.connections
        # A TLS transport that is closing may have no socket any more.
        closing = SimpleNamespace(is_closing=lambda: True, get_extra_info=lambda _name: None)
        with monkeypatch.context() as patched:
            patched.setattr(connection, "_transport", closing)
            connection._take_turn()
        writer.close()
