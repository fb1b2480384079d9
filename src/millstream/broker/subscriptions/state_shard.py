"""The state machine of one partition of `__subscriptions`: the images of its queues, each with who may write it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple
from uuid import UUID

from millstream.broker.coordination.state_machine import LateRecords, Outcome, StateRecord
from millstream.broker.subscriptions.state_store import MakeImage, QueueImage, QueueWrite
from millstream.core.errors import CorruptState, FencedLeaderEpoch, MillstreamError, OutOfOrderSequence
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.subscription import QueueKey

SNAPSHOT: Final = 0

DELTAS: Final = 1


_KEY: Final = struct.Struct(">B16s16si")

_HEAD: Final = struct.Struct(">iq")


class QueueRecord(NamedTuple):
    """A snapshot or some deltas of a queue, with the write that they came by."""

    kind: int
    key: QueueKey
    leader_epoch: Epoch
    sequence: int
    content: bytes | None
    """None when the queue is gone."""


def write_record(record: QueueRecord) -> StateRecord:
    """Lay a record out."""
    subscription_id, topic_id, partition = record.key
    key = _KEY.pack(record.kind, subscription_id.bytes, topic_id.bytes, partition)
    if record.content is None:
        return StateRecord(key, None)
    return StateRecord(key, _HEAD.pack(record.leader_epoch, record.sequence) + record.content)


def read_record(record: StateRecord) -> QueueRecord:
    """Read a record; raise `CorruptState` for what is none."""
    try:
        kind, subscription, topic, partition = _KEY.unpack(record.key)
        key = QueueKey(UUID(bytes=subscription), UUID(bytes=topic), PartitionIndex(partition))
        if kind not in (SNAPSHOT, DELTAS):
            raise CorruptState(f"a record of kind {kind} is not known; a newer Millstream may have written it")
        if record.value is None:
            return QueueRecord(kind, key, Epoch(-1), -1, None)
        epoch, sequence = _HEAD.unpack_from(record.value)
    except struct.error as error:
        raise CorruptState(f"a record of a queue cannot be read: {error}") from error
    return QueueRecord(kind, key, Epoch(epoch), sequence, record.value[_HEAD.size :])


NO_SEQUENCE = -1


WriteResult = MillstreamError | None


@dataclass(slots=True)
class _QueueState:
    leader_epoch: Epoch
    sequence: int
    image: QueueImage
    has_state: bool = False
    changes: list[StateRecord] | None = None
    """What was taken in since a snapshot was begun."""


class Loaded(NamedTuple):
    """A queue as its leader finds it."""

    snapshot: Callable[[], bytes] | None
    """What makes the snapshot; None for a queue that was never written."""
    sequence: int
    is_large: bool


class _LateSnapshot:
    """The snapshot of a large queue, made beside the loop while the queue goes on."""

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
            # It has gone, and whatever has come in its place is in the log.
            return []
        queue.changes = None
        return [self._snapshot, *self._changes]


class StateShard:
    """The queues of one partition."""

    def __init__(self, make_image: MakeImage) -> None:
        self._make_image = make_image
        self._queues: dict[QueueKey, _QueueState] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def __iter__(self) -> Iterable[QueueKey]:
        return iter(self._queues)

    def written(self) -> list[QueueKey]:
        """The queues that have begun."""
        return [key for key, queue in self._queues.items() if queue.has_state]

    def load(self, key: QueueKey, leader_epoch: Epoch) -> Outcome[Loaded]:
        """Read a queue for its leader; leaders before it can write no more once this is answered."""
        queue = self._queues.get(key)
        if queue is not None and queue.leader_epoch > leader_epoch:
            raise _fenced(key, queue, leader_epoch)
        records: Sequence[StateRecord] = ()
        if queue is None or queue.leader_epoch < leader_epoch:
            sequence = NO_SEQUENCE if queue is None else queue.sequence
            records = [write_record(QueueRecord(DELTAS, key, leader_epoch, sequence, b""))]
        if queue is None:
            return records, Loaded(None, NO_SEQUENCE, is_large=False)
        snapshot = queue.image.capture() if queue.has_state else None
        return records, Loaded(snapshot, queue.sequence, queue.image.is_large)

    def write(self, writes: Iterable[QueueWrite]) -> Outcome[list[WriteResult]]:
        """Take in the writes of several queues; each is told whether it was."""
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
        """Drop the queues that are gone; say how many."""
        deleted = [key for key in self._queues if is_gone(key)]
        return [write_record(QueueRecord(SNAPSHOT, key, Epoch(-1), NO_SEQUENCE, None)) for key in deleted], len(deleted)

    # The state machine

    def replay(self, record: StateRecord) -> None:
        """Take one record in."""
        read = read_record(record)
        if read.content is None:
            self._queues.pop(read.key, None)
            return
        queue = self._queues.get(read.key)
        if read.kind == SNAPSHOT:
            # A snapshot stands for everything before it.
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
        """Nothing is due by itself."""

    def unload(self) -> None:
        """Nobody is parked."""

    def durable_keys(self) -> list[Hashable]:
        """Every queue."""
        return list(self._queues)

    def durable_record(self, key: Hashable) -> StateRecord | LateRecords | None:
        """The snapshot of a queue."""
        if not isinstance(key, QueueKey) or (queue := self._queues.get(key)) is None:
            return None
        if queue.image.is_large:
            return _LateSnapshot(self._queues, key)
        content = queue.image.capture()() if queue.has_state else b""
        return write_record(QueueRecord(SNAPSHOT, key, queue.leader_epoch, queue.sequence, content))

    def _check_write(self, write: QueueWrite, ends: dict[QueueKey, int]) -> bool:
        """Whether a write is new; raise when it may not be."""
        queue = self._queues.get(write.key)
        if queue is None or queue.leader_epoch != write.leader_epoch:
            raise _fenced(write.key, queue, write.leader_epoch)
        end = ends.get(write.key, queue.sequence)
        if write.sequence > end + 1:
            raise OutOfOrderSequence(f"write {write.sequence} of a queue came after {end}; the ones between are lost")
        return write.sequence == end + 1


def _fenced(key: QueueKey, queue: _QueueState | None, leader_epoch: Epoch) -> FencedLeaderEpoch:
    known = "was not loaded" if queue is None else f"is written under leader epoch {queue.leader_epoch}"
    return FencedLeaderEpoch(f"the queue of partition {key.partition} {known}, not under {leader_epoch}")
