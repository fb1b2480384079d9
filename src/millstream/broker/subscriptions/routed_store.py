"""Store the states of queues in `__subscriptions`, on whichever node leads the partition."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from random import Random
from typing import Final, NamedTuple

from millstream.broker.coordination.peers import Peers, ask_peer
from millstream.broker.subscriptions.state_shard import (
    LoadQueue,
    ReadFrames,
    StateCoordinator,
    WriteQueues,
    WriteResult,
)
from millstream.broker.subscriptions.state_store import PendingWrite, QueueWrite, StoredQueue
from millstream.core.backoff import Backoff
from millstream.core.errors import (
    BrokerUnreachable,
    CoordinatorUnavailable,
    FencedLeaderEpoch,
    LogUnavailable,
    MillstreamError,
    NotCoordinator,
    NotEnoughReplicas,
    NotLeader,
    OutOfOrderSequence,
    ProtocolViolation,
    RequestTimedOut,
)
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.core.tasks import cancel_and_wait
from millstream.protocol.wire.error_codes import error_from_code

IN_FLIGHT_MAX: Final = 4

BATCH_BYTES_MAX: Final = 4 * 1024 * 1024

UNWRITTEN_BYTES_MAX: Final = 32 * 1024 * 1024

TRANSIENT_ERRORS: Final = (
    BrokerUnreachable,
    CoordinatorUnavailable,
    LogUnavailable,
    NotEnoughReplicas,
    NotLeader,
    RequestTimedOut,
)
"""Errors of a whole batch that may be gone at the next attempt."""

Finish = Callable[[list[WriteResult] | BaseException], None]
"""Takes the result of each write of a batch, or the error of all of them."""

Send = Callable[[Sequence[QueueWrite], Finish], None]
"""Writes a batch: starts immediately, so that batches keep their order, and calls back once they are durable. That may
be before it returns; what is called back sends nothing itself."""


class _Entry(NamedTuple):
    number: int
    write: QueueWrite
    pending: PendingWrite


class StateLane:
    """Pipelined writes to one state partition."""

    def __init__(self, send: Send, backoff: Backoff) -> None:
        self._send = send
        self._backoff = backoff
        # By number and in order: all writes that may not be durable, and those of them that are not in flight.
        self._pending: dict[int, _Entry] = {}
        self._queued: deque[_Entry] = deque()
        self._last_number = 0
        self._bytes = 0
        self._in_flight = 0
        # Batches sent before a failure do not decide about those sent again.
        self._generation = 0
        self._pause_task: asyncio.Task[None] | None = None
        self._is_flush_scheduled = False
        self._is_closing = False
        self._closed = False

    @property
    def has_room(self) -> bool:
        """Whether the writes that are not durable yet are within bounds."""
        return self._bytes < UNWRITTEN_BYTES_MAX

    def write(self, write: QueueWrite) -> PendingWrite:
        """Write after all earlier writes."""
        self._last_number += 1
        entry = _Entry(self._last_number, write, PendingWrite())
        self._pending[entry.number] = entry
        self._queued.append(entry)
        self._bytes += len(write.deltas)
        if self._closed:
            self._finish_write(entry, NotCoordinator("the state store was closed"))
        else:
            self._flush_soon()
        return entry.pending

    async def wait_settled(self, key: QueueKey) -> None:
        """Wait until the outcome of every write of a queue is known."""
        await _all_finished([entry for entry in self._pending.values() if entry.write.key == key])

    async def close(self, *, patience_s: float) -> None:
        """Wait a bounded time for writes in flight, and fail the rest.

        Nothing is sent again: the node that stores the partition has usually stopped as well, and workers whose
        acknowledgements are not confirmed get their messages again.
        """
        self._is_closing = True
        if self._pause_task is None:
            with suppress(TimeoutError):
                async with asyncio.timeout(patience_s):
                    await _all_finished(list(self._pending.values()))
        self._closed = True
        if self._pause_task is not None:
            await cancel_and_wait(self._pause_task)
        self._fail_pending()

    def _fail_pending(self) -> None:
        for entry in list(self._pending.values()):
            self._finish_write(entry, NotCoordinator("the state store was closed"))

    def _flush_soon(self) -> None:
        if not self._is_flush_scheduled:
            self._is_flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._is_flush_scheduled = False
        while self._queued and self._in_flight < IN_FLIGHT_MAX and self._pause_task is None and not self._closed:
            batch = self._next_batch()
            self._in_flight += 1
            self._send([entry.write for entry in batch], partial(self._batch_finished, batch, self._generation))

    def _next_batch(self) -> list[_Entry]:
        batch: list[_Entry] = []
        size = 0
        while self._queued and (not batch or size + len(self._queued[0].write.deltas) <= BATCH_BYTES_MAX):
            entry = self._queued.popleft()
            size += len(entry.write.deltas)
            batch.append(entry)
        return batch

    def _batch_finished(self, batch: list[_Entry], generation: int, outcome: list[WriteResult] | BaseException) -> None:
        self._in_flight -= 1
        failed = isinstance(outcome, TRANSIENT_ERRORS)
        if not isinstance(outcome, BaseException):
            self._backoff.reset()
            failed = self._apply_results(batch, outcome)
        elif not failed:
            for entry in batch:
                self._finish_write(entry, outcome)
        if failed and generation == self._generation:
            self._resend()
        if self._queued:
            self._flush_soon()

    def _apply_results(self, batch: list[_Entry], results: list[WriteResult]) -> bool:
        """Apply the results of a batch; return whether writes must be resent because earlier ones were not stored."""
        resend = False
        for entry, result in zip(batch, results, strict=True):
            if isinstance(result, OutOfOrderSequence) and self._has_earlier_pending(entry):
                resend = True
            else:
                self._finish_write(entry, result)
        return resend

    def _has_earlier_pending(self, entry: _Entry) -> bool:
        """Whether earlier writes of the same queue are still pending. If not, they are lost, and so is this one."""
        key = entry.write.key
        return any(other.number < entry.number and other.write.key == key for other in self._pending.values())

    def _resend(self) -> None:
        self._generation += 1
        if self._is_closing:
            self._fail_pending()
        self._queued = deque(self._pending.values())
        if not self._is_closing and self._pause_task is None:
            self._pause_task = asyncio.ensure_future(self._pause())

    async def _pause(self) -> None:
        await self._backoff.pause()
        self._pause_task = None
        self._flush()

    def _finish_write(self, entry: _Entry, error: BaseException | None) -> None:
        if self._pending.pop(entry.number, None) is None:
            return
        self._bytes -= len(entry.write.deltas)
        if error is not None and not isinstance(error, MillstreamError):
            error = CoordinatorUnavailable(str(error))
        entry.pending.finish(error)


async def _all_finished(entries: Sequence[_Entry]) -> None:
    for entry in entries:
        with suppress(MillstreamError):
            await entry.pending


LOAD_S: Final = 30.0

CONCURRENT_LOADS_MAX: Final = 16

CLOSE_S: Final = 5.0


class RoutedStateStore:
    """Finds the node that stores a queue's state, and sends it requests."""

    def __init__(self, local: StateCoordinator, peers: Peers, random: Random, *, me: NodeId) -> None:
        self._local = local
        self._peers = peers
        self._random = random
        self._me = me
        self._lanes: dict[PartitionIndex, StateLane] = {}
        self._sending: set[asyncio.Task[list[WriteResult]]] = set()
        """Batches on their way to other nodes."""
        # A node may start with thousands of queues. Those that wait for another node are not counted.
        self._load_slots = asyncio.Semaphore(CONCURRENT_LOADS_MAX)

    async def close(self) -> None:
        """Wait a bounded time until all writes are durable."""
        await asyncio.gather(*(lane.close(patience_s=CLOSE_S) for lane in self._lanes.values()))
        await cancel_and_wait(*self._sending)

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue's state, retrying for a while."""
        backoff = Backoff(self._random)
        deadline = asyncio.get_running_loop().time() + LOAD_S
        while True:
            try:
                await self._local.ensure()
                await self._wait_settled(key, deadline)
                async with self._load_slots:
                    return await self._load(key, leader_epoch)
            except FencedLeaderEpoch:
                raise
            except TRANSIENT_ERRORS:
                if asyncio.get_running_loop().time() >= deadline:
                    raise
            await backoff.pause()

    async def frames(self, key: QueueKey, offset: int, since_ms: int) -> Sequence[bytes]:
        node = self._leader(self._local.partition_of(key))
        if node == self._me:
            return await self._local.frames(key, offset, since_ms)
        request = ReadFrames(key, offset, since_ms)
        return (await ask_peer(self._peers, node, request, about="the events of a queue")).frames

    def write(self, write: QueueWrite) -> PendingWrite:
        """Write in the order of the calls."""
        return self._lane_for(write.key).write(write)

    def has_room(self, key: QueueKey) -> bool:
        return self._lane_for(key).has_room

    async def _load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        node = self._leader(self._local.partition_of(key))
        if node == self._me:
            return await self._local.load(key, leader_epoch)
        response = await ask_peer(self._peers, node, LoadQueue(key, leader_epoch), about="the state of a queue")
        return StoredQueue(response.snapshot, response.sequence)

    async def _wait_settled(self, key: QueueKey, deadline: float) -> None:
        """Wait for earlier writes of this node: they are numbered, so the state is read after all of them."""
        try:
            async with asyncio.timeout_at(deadline):
                await self._lane_for(key).wait_settled(key)
        except TimeoutError:
            raise CoordinatorUnavailable("earlier writes of the queue are still in flight") from None

    def _lane_for(self, key: QueueKey) -> StateLane:
        index = self._local.partition_of(key)
        lane = self._lanes.get(index)
        if lane is None:
            lane = self._lanes[index] = StateLane(partial(self._send, index), Backoff(self._random))
        return lane

    def _send(self, index: PartitionIndex, writes: Sequence[QueueWrite], finish: Finish) -> None:
        try:
            node = self._leader(index)
            if node == self._me:
                self._local.write(index, writes, lambda later: finish(later.error or later.result()))
                return
        except MillstreamError as error:
            finish(error)
            return
        sending = asyncio.get_running_loop().create_task(self._send_to(node, index, writes))
        self._sending.add(sending)
        sending.add_done_callback(partial(self._on_sent, finish))

    def _on_sent(self, finish: Finish, sending: asyncio.Task[list[WriteResult]]) -> None:
        self._sending.discard(sending)
        if not sending.cancelled():
            finish(sending.exception() or sending.result())

    async def _send_to(self, node: NodeId, index: PartitionIndex, writes: Sequence[QueueWrite]) -> list[WriteResult]:
        response = await ask_peer(self._peers, node, WriteQueues(index, writes), about="the states of queues")
        if len(response.errors) != len(writes):
            raise ProtocolViolation(f"{len(writes)} writes got {len(response.errors)} responses")
        return [
            error_from_code(code, message, about="a write of a queue") if code else None
            for code, message in response.errors
        ]

    def _leader(self, index: PartitionIndex) -> NodeId:
        node = self._local.leader_of(index)
        if node is None:
            raise CoordinatorUnavailable(f"partition {index} of the subscriptions' state has no leader")
        return node
