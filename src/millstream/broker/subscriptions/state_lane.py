"""The way of writes to one partition of `__subscriptions`: in order, gathered, and tried again until they are in.

Everything that queues write in one turn of the loop goes as one batch; several batches may be under way. When one
fails for a reason that passes, everything that is not durable is sent again in its order, which does no harm, since
writes are numbered. What cannot pass, such as a leader that was replaced, is told to whoever wrote.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from typing import Any, Final, NamedTuple

from millstream.broker.subscriptions.state_shard import WriteResult
from millstream.broker.subscriptions.state_store import QueueWrite
from millstream.core.backoff import Backoff
from millstream.core.errors import (
    BrokerUnreachable,
    CoordinatorUnavailable,
    LogUnavailable,
    MillstreamError,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeader,
    OutOfOrderSequence,
    RequestTimedOut,
)
from millstream.core.subscription import QueueKey

UNDER_WAY_MAX: Final = 4
BATCH_BYTES_MAX: Final = 4 * 1024 * 1024
UNWRITTEN_BYTES_MAX: Final = 32 * 1024 * 1024

PASSING: Final = (
    BrokerUnreachable,
    CoordinatorUnavailable,
    LogUnavailable,
    NotEnoughReplicas,
    NotLeader,
    RequestTimedOut,
)
"""What may be over at the next attempt, as an answer to a whole batch."""

Send = Callable[[Sequence[QueueWrite]], Awaitable[list[WriteResult]]]
"""Writes a batch: begins at once, so that batches keep their order, and is done when it is durable."""


class _Entry(NamedTuple):
    number: int
    write: QueueWrite
    future: asyncio.Future[None]


class StateLane:
    """Writes to one partition."""

    def __init__(self, send: Send, backoff: Backoff) -> None:
        self._send = send
        self._backoff = backoff
        # By number and in order: everything that is not known to be durable, and of it what is not under way.
        self._unsettled: dict[int, _Entry] = {}
        self._unsent: deque[_Entry] = deque()
        self._last_number = 0
        self._bytes = 0
        self._under_way: set[asyncio.Future[list[WriteResult]]] = set()
        # Batches that were sent before a failure have nothing to say about those sent again.
        self._generation = 0
        self._pausing: asyncio.Task[None] | None = None
        self._is_due = False
        self._closed = False

    @property
    def has_room(self) -> bool:
        """Whether what is not durable yet is within bounds."""
        return self._bytes < UNWRITTEN_BYTES_MAX

    def write(self, write: QueueWrite) -> asyncio.Future[None]:
        """Write behind everything before; the future tells when it is durable."""
        loop = asyncio.get_running_loop()
        self._last_number += 1
        entry = _Entry(self._last_number, write, loop.create_future())
        self._unsettled[entry.number] = entry
        self._unsent.append(entry)
        self._bytes += len(write.deltas)
        if self._closed:
            self._settle(entry, NotCoordinator("the store of queues was closed"))
        elif not self._is_due:
            self._is_due = True
            loop.call_soon(self._flush)
        return entry.future

    async def settled(self, key: QueueKey) -> None:
        """Wait until it is known of every write of a queue whether it is in."""
        under_way = [entry.future for entry in self._unsettled.values() if entry.write.key == key]
        if under_way:
            await asyncio.wait(under_way)

    async def close(self, *, patience_s: float) -> None:
        """Wait for what is under way, for a bounded time; what is left then is told so."""
        if self._unsettled:
            await asyncio.wait([entry.future for entry in self._unsettled.values()], timeout=patience_s)
        self._closed = True
        tasks: list[asyncio.Future[Any]] = [*self._under_way]
        if self._pausing is not None:
            tasks.append(self._pausing)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        for entry in list(self._unsettled.values()):
            self._settle(entry, NotCoordinator("the store of queues was closed"))

    def _flush(self) -> None:
        self._is_due = False
        while self._unsent and len(self._under_way) < UNDER_WAY_MAX and self._pausing is None and not self._closed:
            batch = self._next_batch()
            sending = asyncio.ensure_future(self._send([entry.write for entry in batch]))
            self._under_way.add(sending)
            sending.add_done_callback(partial(self._sent, batch, self._generation))

    def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        while self._unsent and (not batch or size + len(self._unsent[0].write.deltas) <= BATCH_BYTES_MAX):
            entry = self._unsent.popleft()
            size += len(entry.write.deltas)
            batch.append(entry)
        return batch

    def _sent(self, batch: list[_Entry], generation: int, sending: asyncio.Future[list[WriteResult]]) -> None:
        self._under_way.discard(sending)
        if sending.cancelled():
            return
        error = sending.exception()
        failed = isinstance(error, PASSING)
        if error is None:
            self._backoff.succeeded()
            failed = self._take_results(batch, sending.result())
        elif not failed:
            for entry in batch:
                self._settle(entry, error)
        if failed and generation == self._generation:
            self._begin_again()
        self._flush()

    def _take_results(self, batch: list[_Entry], results: list[WriteResult]) -> bool:
        """Tell each write how it went; whether some have to be sent again, since some before them were not in."""
        again = False
        for entry, result in zip(batch, results, strict=True):
            if isinstance(result, OutOfOrderSequence) and self._is_behind_others(entry):
                again = True
            else:
                self._settle(entry, result)
        return again

    def _is_behind_others(self, entry: _Entry) -> bool:
        """Whether writes of the same queue before it are still on their way. If not, they are lost, and so is it."""
        key = entry.write.key
        return any(other.number < entry.number and other.write.key == key for other in self._unsettled.values())

    def _begin_again(self) -> None:
        self._generation += 1
        self._unsent = deque(self._unsettled.values())
        if not self._closed and self._pausing is None:
            self._pausing = asyncio.ensure_future(self._pause())

    async def _pause(self) -> None:
        await self._backoff.pause()
        self._pausing = None
        self._flush()

    def _settle(self, entry: _Entry, error: BaseException | None) -> None:
        if self._unsettled.pop(entry.number, None) is None:
            return
        self._bytes -= len(entry.write.deltas)
        if entry.future.done():
            return
        if error is None:
            entry.future.set_result(None)
            return
        known = error if isinstance(error, MillstreamError) else CoordinatorUnavailable(str(error))
        entry.future.set_exception(known)
        # A queue that was closed meanwhile does not ask any more, and that is no reason for a warning.
        entry.future.exception()
