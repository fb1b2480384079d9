"""Responses of a connection: promised ones, and large ones that are read from files while they are sent.

A promise is like an asyncio future at a fraction of the cost: its one waiter is called at once, without a turn of the
loop in between.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Iterable, Iterator
from contextlib import suppress
from typing import Any, Protocol, cast

from millstream.core.metric import Histogram

Piece = bytes | bytearray | memoryview


class Stored(Protocol):
    """A part of a response that is not in memory yet."""

    def __len__(self) -> int:
        """Return how many bytes there are."""

    def read(self, at: int, size: int, /) -> bytes:
        """Read some of them; an error ends the connection, because the client was promised their number."""


class Stream:
    """The parts of a response, to be sent one after the other."""

    __slots__ = ("parts",)

    def __init__(self, parts: list[Piece | Stored]) -> None:
        self.parts = parts

    def __iter__(self) -> Iterator[Piece]:
        """Yield the bytes of every part."""
        for part in self.parts:
            yield part if isinstance(part, Piece) else part.read(0, len(part))


Buffers = list[Piece]
EncodedResponse = Buffers | Stream


class Promise:
    """A place in the order of a connection's responses, which `resolve` fills."""

    __slots__ = (
        "_latency",
        "_started",
        "buffers",
        "cost_bytes",
        "held_bytes",
        "is_resolved",
        "on_resolved",
        "requests",
    )

    def __init__(self) -> None:
        self.buffers: EncodedResponse | None = None
        self.is_resolved = False
        self.cost_bytes = 0
        """The size that the request counts as until its response is sent."""
        self.held_bytes = 0
        """The size that the response counts as while it waits behind others."""
        self.on_resolved: Callable[[], None] | None = None
        """Called once, as soon as the promise is resolved."""
        self._latency: Histogram | None = None
        self._started = 0.0
        self.requests = 1
        """How many requests the response is for."""

    def observe(self, latency: Histogram, started: float, requests: int = 1) -> None:
        """Measure the time from `started` (of `time.perf_counter`) until the promise is resolved."""
        self._latency = latency
        self._started = started
        self.requests = requests

    def resolve(self, buffers: EncodedResponse | None) -> None:
        """Set the response; None means that the client expects none."""
        self.buffers = buffers
        self.is_resolved = True
        if self._latency is not None:
            self._latency.observe(time.perf_counter() - self._started, self.requests)
        # Without the reference, a promise is freed when it is sent, and leaves nothing to the garbage collector.
        on_resolved, self.on_resolved = self.on_resolved, None
        if on_resolved is not None:
            on_resolved()

    def __await__(self) -> Generator[Any, None, EncodedResponse | None]:
        """Wait for the response in a task."""
        if not self.is_resolved:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self.on_resolved = lambda: None if waiter.done() else waiter.set_result(None)
            yield from waiter
        return self.buffers


class Parked(Promise):
    """A promise that waits for others: the connection serves no further request until it is resolved."""

    __slots__ = ()

    def abandon(self) -> None:
        """Resolve the promise without a response, unless it is resolved already: the client has left."""
        raise NotImplementedError


def promise_of(future: asyncio.Future[Buffers | None], fail: Callable[[BaseException], None]) -> Promise:
    """Return a promise that a future resolves; call `fail` with its error otherwise."""
    promise = Promise()

    def settle(done: asyncio.Future[Buffers | None]) -> None:
        if done.cancelled():
            return
        error = done.exception()
        if error is not None:
            fail(error)
        else:
            promise.resolve(done.result())

    future.add_done_callback(settle)
    return promise


def start(
    coroutine: Coroutine[Any, Any, Buffers | None], *, is_abandoned_with_client: bool = False
) -> Buffers | Started | None:
    """Run a coroutine up to its first wait; return its result, or what a task continues from there.

    A task would take its first step in the next turn of the loop, and turns of a busy loop are long.
    """
    try:
        waits_for = coroutine.send(None)
    except StopIteration as done:
        return cast("Buffers | None", done.value)
    return Started(coroutine, waits_for, is_abandoned_with_client=is_abandoned_with_client)


class Started:
    """A coroutine that has taken its first step, as something a task can await."""

    __slots__ = (
        "_coroutine",
        "_is_continued",
        "_latency",
        "_started",
        "_waits_for",
        "is_abandoned_with_client",
        "spent_s",
    )

    def __init__(
        self,
        coroutine: Coroutine[Any, Any, EncodedResponse | None],
        waits_for: Any = None,
        *,
        is_abandoned_with_client: bool = False,
    ) -> None:
        self.is_abandoned_with_client = is_abandoned_with_client
        """Whether its task is cancelled when the client leaves."""
        self.spent_s = 0.0
        """How long its steps in a task have taken, without waits."""
        self._coroutine = coroutine
        self._waits_for = waits_for
        self._is_continued = False
        self._latency: Histogram | None = None
        self._started = 0.0

    def observe(self, latency: Histogram, started: float) -> None:
        """Measure the time from `started` (of `time.perf_counter`) until it ends."""
        self._latency = latency
        self._started = started

    def __await__(self) -> Generator[Any, Any, EncodedResponse | None]:
        """Continue in a task."""
        self._is_continued = True
        step: Callable[[Any], Any] = self._coroutine.send
        sent: Any = None
        waits_for = self._waits_for
        # It may only have waited for a task.
        may_continue = waits_for is None
        try:
            while True:
                if not may_continue:
                    try:
                        step, sent = self._coroutine.send, (yield waits_for)
                    except GeneratorExit:
                        self._coroutine.close()
                        raise
                    except BaseException as error:
                        step, sent = self._coroutine.throw, error
                may_continue = False
                began = time.perf_counter()
                try:
                    waits_for = step(sent)
                finally:
                    self.spent_s += time.perf_counter() - began
        except StopIteration as done:
            return cast("EncodedResponse | None", done.value)
        finally:
            if self._latency is not None:
                self._latency.observe(time.perf_counter() - self._started)

    def close(self) -> None:
        """Cancel it if no task has continued it, so that it releases what it holds."""
        if not self._is_continued:
            self._is_continued = True
            with suppress(asyncio.CancelledError, StopIteration):
                self._coroutine.throw(asyncio.CancelledError())
            self._coroutine.close()


PIECE_BYTES = 1024 * 1024
"""How much is read and passed to the transport at a time: a trade-off between calls and memory."""

SLACK = 2
"""A piece may be larger by half, so that a part hardly larger than a piece leaves no remainder."""


class Outgoing(deque[Piece | Stored]):
    """The parts of large responses that the transport does not have yet, in order."""

    __slots__ = ("_begun", "held_bytes")

    def __init__(self) -> None:
        super().__init__()
        self._begun = 0
        """How much of the first part is sent."""
        self.held_bytes = 0
        """How many of the bytes are in memory."""

    def extend(self, parts: Iterable[Piece | Stored]) -> None:
        for part in parts:
            self.append(part)
            if isinstance(part, Piece):
                self.held_bytes += len(part)

    def clear(self) -> None:
        super().clear()
        self._begun = self.held_bytes = 0

    def take(self, bytes_max: int) -> list[Piece]:
        """Return about this many of the next bytes, or all that are left; raise what reading them raises."""
        pieces: list[Piece] = []
        size = 0
        most = bytes_max + bytes_max // SLACK
        while self and size < bytes_max:
            part, begun = self[0], self._begun
            left = len(part) - begun
            if size and size + left > most:
                break
            left = left if left <= most else bytes_max
            if isinstance(part, Piece):
                pieces.append(memoryview(part)[begun : begun + left] if left < len(part) else part)
                self.held_bytes -= left
            else:
                pieces.append(part.read(begun, left))
            size += left
            if begun + left < len(part):
                self._begun += left
                break
            self._begun = 0
            self.popleft()
        return pieces
