"""What transactions do to the offsets of groups: commit them provisionally, and end.

Between the moment when the coordinator of a transaction says that it is open and the moment when an offset is appended,
the transaction may have ended. So whoever asks takes a `Guard` first, which every marker of the producer breaks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from millstream.broker.coordination.state import Outcome, StateRecord
from millstream.broker.groups.pending_offsets import Pending, PendingKey, PendingOffsets, pending_record
from millstream.broker.groups.records import CommittedOffset, OffsetKey
from millstream.core.clock import Clock
from millstream.core.errors import InvalidTransactionState
from millstream.core.ids import ProducerId
from millstream.core.marker import Marker

AsRecord = Callable[[OffsetKey, CommittedOffset], StateRecord]


class Guard:
    """Holds as long as no marker of its producer has come."""

    __slots__ = ("holds", "producer_id")

    def __init__(self, producer_id: ProducerId) -> None:
        self.producer_id = producer_id
        self.holds = True


class Producer(NamedTuple):
    """The producer of a transaction, and the guard that was taken before its coordinator was asked."""

    producer_id: ProducerId
    epoch: int
    guard: Guard


class TransactionalOffsets:
    """The transactions of producers, as far as one shard's groups are concerned."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.pending = PendingOffsets()
        self._guards: dict[ProducerId, set[Guard]] = {}

    def acquire_guard(self, producer_id: ProducerId) -> Outcome[Guard]:
        """Take a guard; `release` has to follow."""
        guard = Guard(producer_id)
        self._guards.setdefault(producer_id, set()).add(guard)
        return [], guard

    def release(self, guard: Guard) -> Outcome[None]:
        """Give a guard back."""
        guards = self._guards.get(guard.producer_id)
        if guards is not None:
            guards.discard(guard)
            if not guards:
                del self._guards[guard.producer_id]
        return [], None

    def recorder(self, producer: Producer) -> AsRecord:
        """How offsets of this producer are written down; raises when its transaction may have ended."""
        guards = self._guards.get(producer.producer_id, ())
        if not producer.guard.holds or producer.guard not in guards:
            raise InvalidTransactionState(f"the transaction of producer {producer.producer_id} has ended meanwhile")
        self.pending.check_epoch(producer.producer_id, producer.epoch)

        def as_record(key: OffsetKey, committed: CommittedOffset) -> StateRecord:
            return pending_record(PendingKey(producer.producer_id, key), Pending(producer.epoch, committed))

        return as_record

    def end(self, marker: Marker) -> Outcome[None]:
        """A transaction is committed or aborted."""
        records = self.pending.records_for_marker(marker, now_ms=self._clock.now_ms())
        for guard in self._guards.pop(marker.producer_id, ()):
            guard.holds = False
        return records, None

    def expired_markers(self, retention_ms: int) -> Iterator[StateRecord]:
        """What takes away the memory of producers that have not been heard of for so long."""
        return self.pending.expired_markers(before_ms=self._clock.now_ms() - retention_ms)
