"""The state machine of one partition of `__subscriptions`: the states of its queues, and who may write them."""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar, Final, NamedTuple
from uuid import UUID

import msgspec

from millstream.broker.coordination.runtime import Coordinator, Runtime, StateTopic, StateTopics
from millstream.broker.coordination.shard import RETRY_FIRST_S, Release, find_time, read_back
from millstream.broker.coordination.state_machine import LateRecords, Outcome, StateRecord
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.state_store import MakeImage, QueueImage, QueueWrite, StoredQueue
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import (
    CoordinatorUnavailable,
    CorruptState,
    FencedLeaderEpoch,
    MillstreamError,
    OutOfOrderSequence,
    PolicyViolation,
    RequestTimedOut,
)
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.core.topic import SUBSCRIPTIONS, TopicPartition
from millstream.protocol.private.message import Request

_logger = logging.getLogger(__name__)


class LoadQueueResponse(msgspec.Struct, frozen=True, array_like=True):
    """The state; `error` is Kafka's code, 0 for success."""

    error: int
    message: str | None
    snapshot: bytes | None = None
    sequence: int = -1


class LoadQueue(Request[LoadQueueResponse], frozen=True, array_like=True):
    """Asks for a queue's state on behalf of its leader."""

    KEY: ClassVar = 32020
    key: QueueKey
    leader_epoch: Epoch


class ReadFramesResponse(msgspec.Struct, frozen=True, array_like=True):
    """The frames, in the order in which they were written."""

    error: int
    message: str | None
    frames: Sequence[bytes] = ()


class ReadFrames(Request[ReadFramesResponse], frozen=True, array_like=True):
    """Asks for the frames about one message that were written since a time."""

    KEY: ClassVar = 32022
    key: QueueKey
    offset: int
    since_ms: int


class WriteQueuesResponse(msgspec.Struct, frozen=True, array_like=True):
    """The results once the writes are durable: one error for all, or one per write."""

    error: int
    message: str | None
    errors: Sequence[tuple[int, str | None]] = ()


class WriteQueues(Request[WriteQueuesResponse], frozen=True, array_like=True):
    """Writes to one partition of the state topic, in order."""

    KEY: ClassVar = 32021
    state_partition: PartitionIndex
    writes: Sequence[QueueWrite]


SNAPSHOT: Final = 0

DELTAS: Final = 1

OVERFLOW: Final = 2
"""Events for the ledger were deleted before they had landed; see `LedgerRetention`."""

REPEATED: Final = 3
"""Deltas that are in the log already, before a snapshot that does not have them."""

_KEY: Final = struct.Struct(">B16s16si")

_HEAD: Final = struct.Struct(">iq")

KEYS_CACHED: Final = 1024
"""How many queues' keys are kept decoded, since every write has one."""


class QueueRecord(NamedTuple):
    """A snapshot or deltas of a queue, and the write they came with."""

    kind: int
    key: QueueKey
    leader_epoch: Epoch
    sequence: int
    content: bytes | None
    """None if the queue was deleted."""


def write_record(record: QueueRecord) -> StateRecord:
    subscription_id, topic_id, partition = record.key
    key = _KEY.pack(record.kind, subscription_id.bytes, topic_id.bytes, partition)
    if record.content is None:
        return StateRecord(key, None)
    return StateRecord(key, _HEAD.pack(record.leader_epoch, record.sequence) + record.content)


@lru_cache(maxsize=KEYS_CACHED)
def _read_key(key: bytes) -> tuple[int, QueueKey]:
    kind, subscription, topic, partition = _KEY.unpack(key)
    if kind not in (SNAPSHOT, DELTAS, OVERFLOW, REPEATED):
        raise CorruptState(f"unknown record kind {kind}; a newer version may have written it")
    return kind, QueueKey(UUID(bytes=subscription), UUID(bytes=topic), PartitionIndex(partition))


def read_record(record: StateRecord) -> QueueRecord:
    """Decode a record, or raise `CorruptState`."""
    try:
        kind, key = _read_key(record.key)
        if record.value is None:
            return QueueRecord(kind, key, Epoch(-1), -1, None)
        epoch, sequence = _HEAD.unpack_from(record.value)
    except struct.error as error:
        raise CorruptState(f"the record of a queue cannot be decoded: {error}") from error
    return QueueRecord(kind, key, Epoch(epoch), sequence, record.value[_HEAD.size :])


class Overflow(NamedTuple):
    """Offsets of `__subscriptions` that were deleted before the ledger had landed them."""

    start: int
    end: int
    time_ms: int

    def write(self) -> StateRecord:
        """Encode the record of this overflow."""
        key = _KEY.pack(OVERFLOW, bytes(16), bytes(16), 0)
        return StateRecord(key, _HEAD.pack(-1, NO_SEQUENCE) + _OVERFLOW.pack(*self))

    @classmethod
    def read(cls, content: bytes) -> Overflow:
        """Decode the content of such a record, or raise `CorruptState`."""
        try:
            return cls(*_OVERFLOW.unpack(content))
        except struct.error as error:
            raise CorruptState(f"an overflow of the ledger cannot be decoded: {error}") from error


_OVERFLOW: Final = struct.Struct(">qqq")


NO_SEQUENCE = -1

WriteResult = MillstreamError | None


@dataclass(slots=True)
class _QueueState:
    leader_epoch: Epoch
    sequence: int
    image: QueueImage
    has_state: bool = False
    changes: list[StateRecord] | None = None
    """Records applied since a snapshot was started."""


class LoadedState(NamedTuple):
    """A queue's state for its leader."""

    snapshot: Callable[[], bytes] | None
    """Encodes the snapshot; None for a queue that was never written."""
    sequence: int
    is_large: bool


class _LateSnapshot:
    """The snapshot of a large queue, encoded in a thread while writes continue."""

    def __init__(self, all_kept: Mapping[QueueKey, _QueueState], key: QueueKey) -> None:
        self._queues = all_kept
        self._key = key
        self._snapshot: StateRecord | None = None
        self._changes: list[StateRecord] = []

    async def make(self) -> None:
        queue = self._queues.get(self._key)
        if queue is None:
            return
        leader_epoch, sequence = queue.leader_epoch, queue.sequence
        queue.changes = self._changes
        try:
            content = await asyncio.to_thread(queue.image.capture())
        except BaseException:
            queue.changes = None
            raise
        self._snapshot = write_record(QueueRecord(SNAPSHOT, self._key, leader_epoch, sequence, content))

    def records(self) -> list[StateRecord]:
        queue = self._queues.get(self._key)
        if queue is None or queue.changes is not self._changes or self._snapshot is None:
            # The queue was deleted; its replacement, if any, is in the log.
            return []
        queue.changes = None
        kind = bytes([REPEATED])
        return [self._snapshot, *(record._replace(key=kind + record.key[1:]) for record in self._changes)]


class _FrameSearch:
    """Collects the frames of a queue about one message, for traces."""

    def __init__(self, key: QueueKey, offset: int) -> None:
        # Imported on first use, together with the queues.
        from millstream.broker.subscriptions.frame import may_concern

        self._may_concern = may_concern
        self._key = _KEY.pack(DELTAS, key.subscription_id.bytes, key.topic_id.bytes, key.partition)
        self._offset = offset
        self.bytes = 0
        self.frames: list[bytes] = []

    def replay(self, record: StateRecord) -> None:
        if record.key != self._key or record.value is None or len(record.value) <= _HEAD.size:
            return
        frame = bytes(record.value[_HEAD.size :])
        if self._may_concern(frame, self._offset):
            self.bytes += len(frame)
            if self.bytes <= FRAMES_BYTES_MAX:
                self.frames.append(frame)


class StateShard:
    """The queues of one partition."""

    def __init__(self, make_image: MakeImage) -> None:
        self._make_image = make_image
        self._queues: dict[QueueKey, _QueueState] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterable[QueueKey]:
        return iter(self._queues)

    @property
    def has_ledger(self) -> bool:
        return any(queue.image.has_ledger for queue in self._queues.values())

    def written(self) -> list[QueueKey]:
        return [key for key, queue in self._queues.items() if queue.has_state]

    def changed(self, is_selected: Callable[[QueueKey, int], bool]) -> list[tuple[QueueKey, LoadedState]]:
        """Return the states of selected queues, given the number of their last write, without fencing.

        States that cannot be read are left out.
        """
        return [
            (key, LoadedState(queue.image.capture(), queue.sequence, queue.image.is_large))
            for key, queue in self._queues.items()
            if queue.has_state and is_selected(key, queue.sequence) and not queue.image.is_broken
        ]

    def images(self, is_selected: Callable[[QueueKey], bool]) -> list[tuple[QueueKey, QueueImage]]:
        """Return the images of selected queues, without those that cannot be read."""
        return [
            (key, queue.image)
            for key, queue in self._queues.items()
            if queue.has_state and is_selected(key) and not queue.image.is_broken
        ]

    def load(self, key: QueueKey, leader_epoch: Epoch) -> Outcome[LoadedState]:
        """Read a queue for its leader; earlier leaders can no longer write once this is durable."""
        queue = self._queues.get(key)
        if queue is not None and queue.leader_epoch > leader_epoch:
            raise _fenced_error(key, queue, leader_epoch)
        records: Sequence[StateRecord] = ()
        if queue is None or queue.leader_epoch < leader_epoch:
            sequence = NO_SEQUENCE if queue is None else queue.sequence
            records = [write_record(QueueRecord(DELTAS, key, leader_epoch, sequence, b""))]
        if queue is None:
            return records, LoadedState(None, NO_SEQUENCE, is_large=False)
        snapshot = queue.image.capture() if queue.has_state else None
        return records, LoadedState(snapshot, queue.sequence, queue.image.is_large)

    def write(self, writes: Iterable[QueueWrite]) -> Outcome[list[WriteResult]]:
        """Apply writes of several queues; return the result of each."""
        records: list[StateRecord] = []
        results: list[WriteResult] = []
        ends: dict[QueueKey, int] = {}
        for write in writes:
            try:
                is_new = self._check_write(write, ends)
            except MillstreamError as error:
                results.append(error)
                continue
            results.append(None)
            if is_new:
                ends[write.key] = write.sequence
                records.append(
                    write_record(QueueRecord(DELTAS, write.key, write.leader_epoch, write.sequence, write.deltas))
                )
        return records, results

    def forget(self, is_gone: Callable[[QueueKey], bool]) -> Outcome[int]:
        """Delete queues; return how many."""
        deleted = [key for key in self._queues if is_gone(key)]
        return [write_record(QueueRecord(SNAPSHOT, key, Epoch(-1), NO_SEQUENCE, None)) for key in deleted], len(deleted)

    # The state machine

    def replay(self, record: StateRecord) -> None:
        read = read_record(record)
        if read.kind == OVERFLOW:
            return
        if read.content is None:
            self._queues.pop(read.key, None)
            return
        queue = self._queues.get(read.key)
        if read.kind == SNAPSHOT:
            # A snapshot replaces everything before it.
            image = self._make_image(read.key, read.content or None)
            self._queues[read.key] = _QueueState(read.leader_epoch, read.sequence, image, bool(read.content))
            return
        if queue is None:
            image = self._make_image(read.key, None)
            queue = self._queues[read.key] = _QueueState(read.leader_epoch, read.sequence, image)
        if queue.changes is not None:
            queue.changes.append(record)
        if read.content:
            queue.image.replay(read.content)
            queue.has_state = True
        queue.leader_epoch, queue.sequence = read.leader_epoch, read.sequence

    def loaded(self) -> None:
        """Do nothing: queue states have no timers."""

    def unload(self) -> None:
        """Do nothing: queue states park no requests."""

    def durable_keys(self) -> list[Hashable]:
        return list(self._queues)

    def durable_record(self, key: Hashable) -> StateRecord | LateRecords | None:
        if not isinstance(key, QueueKey) or (queue := self._queues.get(key)) is None:
            return None
        if queue.image.is_large:
            return _LateSnapshot(self._queues, key)
        content = queue.image.capture()() if queue.has_state else b""
        return write_record(QueueRecord(SNAPSHOT, key, queue.leader_epoch, queue.sequence, content))

    def _check_write(self, write: QueueWrite, ends: dict[QueueKey, int]) -> bool:
        """Whether a write is new; raise if it is not allowed."""
        queue = self._queues.get(write.key)
        if queue is None or queue.leader_epoch != write.leader_epoch:
            raise _fenced_error(write.key, queue, write.leader_epoch)
        end = ends.get(write.key, queue.sequence)
        if write.sequence > end + 1:
            raise OutOfOrderSequence(f"write {write.sequence} of a queue came after {end}; the ones between are lost")
        return write.sequence == end + 1


def _fenced_error(key: QueueKey, queue: _QueueState | None, leader_epoch: Epoch) -> FencedLeaderEpoch:
    known = "was not loaded" if queue is None else f"is written under leader epoch {queue.leader_epoch}"
    return FencedLeaderEpoch(f"the queue of partition {key.partition} {known}, not under {leader_epoch}")


_TOPIC_SETTINGS = {
    # Deltas build on each other, so none may be deleted before a snapshot replaces it.
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "segment.bytes": str(64 * 1024 * 1024),
    "max.message.bytes": str(64 * 1024 * 1024),
}

PARTITION_CACHE_MAX: Final = 100_000
"""The number of queues whose state partition is cached, since every write looks it up."""

SEARCH_S: Final = 10.0

SEARCHED_BETWEEN_YIELDS: Final = 20
"""How many records are searched between two turns of the loop: a frame of a thousand rows takes up to 0.1 ms."""

FRAMES_BYTES_MAX: Final = 16 * 1024 * 1024
"""The size of the frames about one message: a frame may be about many."""


class LedgerRetention:
    """Keeps superseded deltas in the log until the ledger has landed them, within a number of bytes.

    Beyond that the oldest ones are deleted, whole segments at a time, and a record in the log says which.
    """

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self.landed: Callable[[TopicPartition], int] = lambda _partition: 0
        """Returns the first offset of a partition that is not landed."""
        self.overflows = 0
        """How many offsets were deleted before they had landed, since this node started."""

    def keep_from(
        self, state: StateShard, partition: Partition, rewritten: Offset
    ) -> tuple[Offset, Sequence[StateRecord]]:
        """Return the offset from which a partition is kept, and a record about the overflow."""
        if not state.has_ledger:
            return rewritten, ()
        log = partition.log
        needed = max(partition.log_start, min(rewritten, self.landed(log.partition)))
        fitting = needed
        kept_bytes = 0
        for segment in reversed(log.segments):
            kept_bytes += segment.size
            if kept_bytes > self._bytes_max and segment.next_offset <= rewritten:
                fitting = max(needed, segment.next_offset)
                break
        if fitting <= needed:
            return Offset(needed), ()
        self.overflows += fitting - needed
        _logger.error(
            "events of the ledger are deleted before they have landed; is its pipeline running? "
            "(millstream pipeline list)",
            extra={"partition": str(log.partition), "start": needed, "end": fitting},
        )
        return Offset(fitting), [Overflow(needed, fitting, self._clock.now_ms()).write()]


class StateCoordinator(Coordinator[StateShard]):
    """Stores the states of queues in the log."""

    def __init__(
        self,
        topics: StateTopics,
        config: Config,
        clock: Clock,
        make_image: MakeImage,
        *,
        retry_first_s: float = RETRY_FIRST_S,
    ) -> None:
        topic = StateTopic(name=SUBSCRIPTIONS, partitions=config.subscriptions_partitions, overrides=_TOPIC_SETTINGS)
        self.retention = LedgerRetention(clock, config.ledger_bytes_max)
        self._runtime = Runtime(
            topics,
            topic,
            lambda _timers: StateShard(make_image),
            clock=clock,
            retry_first_s=retry_first_s,
            retention=self.retention,
        )
        # One message is searched for at a time, since that takes many turns of the loop.
        self._searching = asyncio.Semaphore(1)
        # The number of partitions never changes.
        self._partition_cache: dict[QueueKey, PartitionIndex] = {}

    def partition_of(self, key: QueueKey) -> PartitionIndex:
        partition = self._partition_cache.get(key)
        if partition is None:
            partition = self._runtime.partition_of(f"{key.subscription_id}/{key.topic_id}/{key.partition}")
            if len(self._partition_cache) >= PARTITION_CACHE_MAX:
                self._partition_cache.clear()
            self._partition_cache[key] = partition
        return partition

    def leader_of(self, index: PartitionIndex) -> NodeId | None:
        """Return the node that leads a partition of the topic; None without a leader."""
        return self._runtime.leader_at(index)

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue's state for its leader."""
        shard = self._runtime.shard_at(self.partition_of(key))
        loaded = await shard.run(lambda state: state.load(key, leader_epoch), pure=True)
        if loaded.snapshot is None:
            return StoredQueue(None, loaded.sequence)
        snapshot = await asyncio.to_thread(loaded.snapshot) if loaded.is_large else loaded.snapshot()
        return StoredQueue(snapshot, loaded.sequence)

    async def frames(self, key: QueueKey, offset: int, since_ms: int) -> list[bytes]:
        """Return the frames about a message, of those that are still in the log and were written since a time."""
        log = self._runtime.shard_at(self.partition_of(key)).partition
        search = _FrameSearch(key, offset)
        try:
            async with asyncio.timeout(SEARCH_S), self._searching:
                start = find_time(log, since_ms)
                await read_back("a trace", log, search, start, between_yields=SEARCHED_BETWEEN_YIELDS)
        except TimeoutError:
            raise RequestTimedOut("searching the events of a queue took too long") from None
        if search.bytes > FRAMES_BYTES_MAX:
            raise PolicyViolation(f"the events about offset {offset} exceed {FRAMES_BYTES_MAX} bytes")
        return search.frames

    def write(self, index: PartitionIndex, writes: Sequence[QueueWrite], release: Release[list[WriteResult]]) -> None:
        """Write to one partition; `release` gets the results in the moment when the writes are durable."""
        if any(self.partition_of(write.key) != index for write in writes):
            raise CoordinatorUnavailable(f"a write was sent to partition {index}, which does not store its queue")
        self._runtime.shard_at(index).call(lambda state: state.write(writes), release, pure=True)

    async def forget(self, is_gone: Callable[[QueueKey], bool]) -> int:
        """Delete the states of deleted queues that this node stores; return how many."""
        deleted_count = 0
        for shard in self._runtime.shards:
            if shard.state is not None:
                deleted_count += await shard.run(lambda state: state.forget(is_gone), pure=True)
        return deleted_count

    def changed(self, is_selected: Callable[[QueueKey, int], bool]) -> Iterator[tuple[QueueKey, LoadedState]]:
        """Yield the states of selected queues on this node, given the number of their last write."""
        for shard in self._runtime.shards:
            if shard.state is not None:
                yield from shard.state.changed(is_selected)

    def images(self, is_selected: Callable[[QueueKey], bool]) -> Iterator[tuple[QueueKey, QueueImage]]:
        """Yield the images of selected queues on this node."""
        for shard in self._runtime.shards:
            if shard.state is not None:
                yield from shard.state.images(is_selected)

    def written(self) -> list[QueueKey]:
        """Return the queues with a state on this node."""
        return [key for shard in self._runtime.shards if shard.state is not None for key in shard.state.written()]

    @property
    def queues(self) -> int:
        return sum(len(shard.state) for shard in self._runtime.shards if shard.state is not None)
