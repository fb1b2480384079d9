"""Offsets that transactions commit: pending until the transaction ends.

Between the time at which the coordinator of a transaction says that it is open and the time at which an offset is
appended, the transaction may have ended. The caller therefore takes a `Guard` first, which every marker of the producer
breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from millstream.broker.coordination.state_machine import Outcome, StateRecord
from millstream.broker.groups.records import CommittedOffset, OffsetKey, offset_record, read_offset
from millstream.broker.groups.requests import FetchedOffset, FetchedOffsets
from millstream.core.clock import Clock
from millstream.core.errors import FencedProducer, InvalidTransactionState
from millstream.core.ids import NO_EPOCH, ProducerId
from millstream.protocol.messages.primitives import Reader, Writer
from millstream.protocol.records.control import Marker

EPOCH_HEADER: Final = "producer-epoch"
_PENDING_KEY: Final = 7300
_MARKER_KEY: Final = 7301
_MARKER_VERSION: Final = 0


@dataclass(frozen=True, slots=True)
class PendingKey:
    """Identifies an offset that a transaction has committed."""

    producer_id: ProducerId
    offset: OffsetKey


@dataclass(frozen=True, slots=True)
class MarkerKey:
    """Identifies the last marker of a producer."""

    producer_id: ProducerId


class PendingOffset(NamedTuple):
    """An offset and the epoch of the producer that committed it."""

    epoch: int
    committed: CommittedOffset


class LastMarker(NamedTuple):
    epoch: int
    coordinator_epoch: int
    time_ms: int


class PendingProducer(NamedTuple):
    """A producer with an undecided transaction that has committed offsets."""

    producer_id: ProducerId
    epoch: int
    coordinator_epoch: int
    last_ms: int


def pending_record(key: PendingKey, pending: PendingOffset) -> StateRecord:
    plain = offset_record(key.offset, pending.committed)
    epoch = (EPOCH_HEADER, pending.epoch.to_bytes(2, "big", signed=True))
    return StateRecord(_pending_key(key), plain.value, (*plain.headers, epoch))


def pending_tombstone(key: PendingKey) -> StateRecord:
    return StateRecord(_pending_key(key), None)


def marker_record(producer_id: ProducerId, marker: LastMarker) -> StateRecord:
    writer = Writer(flexible=False)
    writer.int16(_MARKER_VERSION)
    writer.int16(marker.epoch)
    writer.int32(marker.coordinator_epoch)
    writer.int64(marker.time_ms)
    return StateRecord(_marker_key(producer_id), bytes(writer.buffer))


def read_pending_key(key: bytes) -> PendingKey | MarkerKey | None:
    """Parse the key of a record; return None for other kinds."""
    reader = Reader(key, flexible=False)
    kind = reader.int16()
    if kind == _PENDING_KEY:
        producer_id = ProducerId(reader.int64())
        return PendingKey(producer_id, OffsetKey(reader.string(), reader.string(), reader.int32()))
    return MarkerKey(ProducerId(reader.int64())) if kind == _MARKER_KEY else None


class PendingOffsets:
    """Pending offsets, by producer and by group, topic and partition."""

    def __init__(self) -> None:
        self._by_producer: dict[ProducerId, dict[OffsetKey, PendingOffset]] = {}
        self._producers_of: dict[OffsetKey, set[ProducerId]] = {}
        self._markers: dict[ProducerId, LastMarker] = {}

    def __len__(self) -> int:
        return sum(map(len, self._by_producer.values()))

    def is_pending(self, key: OffsetKey) -> bool:
        return key in self._producers_of

    def with_stability(self, group_id: str, fetched: FetchedOffsets) -> FetchedOffsets:
        """Mark the offsets that a transaction is about to change."""
        if not self._producers_of:
            return fetched
        return {
            topic: {
                partition: replace(offset, is_stable=not self.is_pending(OffsetKey(group_id, topic, partition)))
                for partition, offset in offsets.items()
            }
            for topic, offsets in fetched.items()
        }

    def with_uncommitted(self, group_id: str, fetched: FetchedOffsets) -> FetchedOffsets:
        """Add partitions whose first offset a transaction is about to commit.

        Without them, a client that asks for all offsets of a group would take such a partition for one that was never
        read.
        """
        pending = [key.offset for key in self.of_group(group_id)] if self._producers_of else []
        completed = {topic: dict(offsets) for topic, offsets in fetched.items()}
        for key in pending:
            completed.setdefault(key.topic, {}).setdefault(key.partition, FetchedOffset(is_stable=False))
        return completed

    def of_group(self, group_id: str) -> list[PendingKey]:
        """Return the offsets that transactions have committed for a group."""
        return [
            PendingKey(producer_id, key)
            for producer_id, offsets in self._by_producer.items()
            for key in offsets
            if key.group_id == group_id
        ]

    def producers(self) -> list[PendingProducer]:
        return [
            PendingProducer(
                producer_id,
                max(pending.epoch for pending in offsets.values()),
                self._markers[producer_id].coordinator_epoch if producer_id in self._markers else NO_EPOCH,
                max(pending.committed.commit_ms for pending in offsets.values()),
            )
            for producer_id, offsets in self._by_producer.items()
        ]

    def check_epoch(self, producer_id: ProducerId, epoch: int) -> None:
        """Raise if a producer of this epoch has been fenced."""
        last = self._markers.get(producer_id)
        if last is not None and epoch < last.epoch:
            raise FencedProducer(f"producer {producer_id} is at epoch {last.epoch}, not {epoch}")

    def records_for_marker(self, marker: Marker, *, now_ms: int) -> list[StateRecord]:
        """Return the records of a marker; none if it is a repetition. Raise if it is too late."""
        last = self._markers.get(marker.producer_id)
        marker = marker.admitted(NO_EPOCH if last is None else last.coordinator_epoch)
        self.check_epoch(marker.producer_id, marker.producer_epoch)
        offsets = self._by_producer.get(marker.producer_id, {})
        newest = max((pending.epoch for pending in offsets.values()), default=-1)
        if newest > marker.producer_epoch or (marker.bumps_epoch and newest == marker.producer_epoch):
            raise FencedProducer(f"producer {marker.producer_id} has begun a transaction after this marker")
        latest = LastMarker(marker.producer_epoch, marker.coordinator_epoch, now_ms)
        if not offsets and last is not None and last[:2] == latest[:2]:
            return []
        # Also when it changes no offset: an older coordinator's copy may still be on its way.
        records = [marker_record(marker.producer_id, latest)]
        for key, pending in offsets.items():
            if marker.commit:
                records.append(offset_record(key, replace(pending.committed, is_transactional=True)))
            records.append(pending_tombstone(PendingKey(marker.producer_id, key)))
        return records

    def expired_markers(self, *, before_ms: int) -> Iterator[StateRecord]:
        """Yield tombstones for the last markers of producers that have been silent since a time."""
        for producer_id, marker in self._markers.items():
            if marker.time_ms <= before_ms:
                yield StateRecord(_marker_key(producer_id), None)

    def replay(self, key: PendingKey | MarkerKey, record: StateRecord) -> None:
        if isinstance(key, MarkerKey):
            if record.value is None:
                self._markers.pop(key.producer_id, None)
            else:
                self._markers[key.producer_id] = _read_marker(record.value)
        elif record.value is None:
            self._remove(key)
        else:
            pending = PendingOffset(_epoch_of(record), read_offset(record))
            self._by_producer.setdefault(key.producer_id, {})[key.offset] = pending
            self._producers_of.setdefault(key.offset, set()).add(key.producer_id)

    def durable_keys(self) -> Iterable[Hashable]:
        for producer_id, offsets in self._by_producer.items():
            for key in offsets:
                yield PendingKey(producer_id, key)
        for producer_id in self._markers:
            yield MarkerKey(producer_id)

    def durable_record(self, key: PendingKey | MarkerKey) -> StateRecord | None:
        if isinstance(key, MarkerKey):
            marker = self._markers.get(key.producer_id)
            return None if marker is None else marker_record(key.producer_id, marker)
        pending = self._by_producer.get(key.producer_id, {}).get(key.offset)
        return None if pending is None else pending_record(key, pending)

    def _remove(self, key: PendingKey) -> None:
        offsets = self._by_producer.get(key.producer_id, {})
        if offsets.pop(key.offset, None) is None:
            return
        if not offsets:
            del self._by_producer[key.producer_id]
        producers = self._producers_of[key.offset]
        producers.discard(key.producer_id)
        if not producers:
            del self._producers_of[key.offset]


def _read_marker(value: bytes) -> LastMarker:
    reader = Reader(value, flexible=False)
    reader.int16()
    return LastMarker(reader.int16(), reader.int32(), reader.int64())


def _epoch_of(record: StateRecord) -> int:
    for name, content in record.headers:
        if name == EPOCH_HEADER and content is not None:
            return int.from_bytes(content, "big", signed=True)
    return -1


def _pending_key(key: PendingKey) -> bytes:
    writer = Writer(flexible=False)
    writer.int16(_PENDING_KEY)
    writer.int64(key.producer_id)
    writer.string(key.offset.group_id)
    writer.string(key.offset.topic)
    writer.int32(key.offset.partition)
    return bytes(writer.buffer)


def _marker_key(producer_id: ProducerId) -> bytes:
    writer = Writer(flexible=False)
    writer.int16(_MARKER_KEY)
    writer.int64(producer_id)
    return bytes(writer.buffer)


AsRecord = Callable[[OffsetKey, CommittedOffset], StateRecord]


@dataclass(slots=True, eq=False)
class Guard:
    """Valid as long as no marker of its producer arrives."""

    producer_id: ProducerId
    holds: bool = True


class Producer(NamedTuple):
    """The producer of a transaction, and the guard that was taken before its coordinator was asked."""

    producer_id: ProducerId
    epoch: int
    guard: Guard


class TransactionalOffsets:
    """The open transactions that concern the groups of one shard."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.pending = PendingOffsets()
        self._guards: dict[ProducerId, set[Guard]] = {}

    def acquire_guard(self, producer_id: ProducerId) -> Outcome[Guard]:
        """Acquire a guard, which must be released."""
        guard = Guard(producer_id)
        self._guards.setdefault(producer_id, set()).add(guard)
        return [], guard

    def release(self, guard: Guard) -> Outcome[None]:
        guards = self._guards.get(guard.producer_id)
        if guards is not None:
            guards.discard(guard)
            if not guards:
                del self._guards[guard.producer_id]
        return [], None

    def recorder(self, producer: Producer) -> AsRecord:
        """Return the function that builds records for offsets of this producer; raise if its transaction may have
        ended.
        """
        guards = self._guards.get(producer.producer_id, ())
        if not producer.guard.holds or producer.guard not in guards:
            raise InvalidTransactionState(f"the transaction of producer {producer.producer_id} has ended meanwhile")
        self.pending.check_epoch(producer.producer_id, producer.epoch)

        def as_record(key: OffsetKey, committed: CommittedOffset) -> StateRecord:
            return pending_record(PendingKey(producer.producer_id, key), PendingOffset(producer.epoch, committed))

        return as_record

    def end(self, marker: Marker) -> Outcome[None]:
        """Apply the end of a transaction: committed or aborted."""
        records = self.pending.records_for_marker(marker, now_ms=self._clock.now_ms())
        for guard in self._guards.pop(marker.producer_id, ()):
            guard.holds = False
        return records, None

    def expired_markers(self, retention_ms: int) -> Iterator[StateRecord]:
        """Yield tombstones for the last markers of producers that have been silent for a retention time."""
        return self.pending.expired_markers(before_ms=self._clock.now_ms() - retention_ms)
