"""The idempotent producers that a partition remembers, so that a retried batch is stored once.

It remembers the epoch and the last five batches of each producer id (a producer has at most five requests in flight). A
batch that is among them is a duplicate and gets the same offsets; one that follows the last is new; anything else is
out of order. Any first sequence of an unknown producer is accepted, because retention may have removed what came
before. Sequences wrap at 2**31.

A transactional batch is accepted while its producer has a transaction open here, or with the guard under which the
coordinator was asked; see `transactions`. A producer with an open transaction is never forgotten.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Iterator

from millstream.broker.log.transactions import (
    GUARDS_MAX,
    NO_TRANSACTION,
    Guard,
    OpenTransaction,
    PackedTransactions,
    ProducedBatch,
    Producer,
    ProducerSnapshot,
    Transactions,
    UnsettledMarker,
)
from millstream.core.errors import CorruptBatch, FencedProducer, InvalidTransactionState, OutOfOrderSequence
from millstream.core.ids import NO_EPOCH
from millstream.protocol.records.batch import CONTROL_FLAG, SEQUENCE_MASK, TRANSACTIONAL_FLAG, BatchHeader, Buffer
from millstream.protocol.records.control import Marker, read_marker

_logger = logging.getLogger(__name__)

BATCHES_REMEMBERED = 5
PRODUCERS_MAX = 10_000
"""The maximum number of producers: beyond it, the one that was silent for longest is forgotten, unless it has an open
transaction."""

_NOT_PLAIN = TRANSACTIONAL_FLAG | CONTROL_FLAG
_EVERYTHING = 2**63 - 1

PackedProducer = tuple[int, int, int, list[tuple[int, ...]]]
"""A producer as it is stored: id, epoch, time of its last batch, and its batches."""


class Producers:
    """Every producer id that the partition remembers, in the order of their last writes."""

    __slots__ = ("_by_id", "_expiry_ms", "_producers_max", "transactions")

    def __init__(self, *, expiry_ms: int, producers_max: int = PRODUCERS_MAX) -> None:
        self._by_id: OrderedDict[int, Producer] = OrderedDict()
        self._expiry_ms = expiry_ms
        self._producers_max = producers_max
        self.transactions = Transactions()

    @property
    def expiry_ms(self) -> int:
        """How long a silent producer is remembered."""
        return self._expiry_ms

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Producer]:
        return iter(self._by_id.values())

    def get(self, producer_id: int) -> Producer | None:
        return self._by_id.get(producer_id)

    def check(self, header: BatchHeader, now_ms: int) -> ProducedBatch | None:
        """Return the first copy of a duplicate, None for a batch that comes next, or raise `ProducerRejected`."""
        known = self._by_id.get(header.producer_id)
        if known is None or (now_ms - known.last_ms > self._expiry_ms and known.open_from < 0):
            return None
        if header.producer_epoch == known.epoch:
            return self._check_sequence(known, header)
        if header.producer_epoch < known.epoch:
            raise FencedProducer(
                f"producer {header.producer_id} has epoch {header.producer_epoch}, "
                f"but epoch {known.epoch} has written to this partition"
            )
        if header.base_sequence != 0:
            raise OutOfOrderSequence(
                f"producer {header.producer_id} begins epoch {header.producer_epoch} with sequence "
                f"{header.base_sequence} instead of 0"
            )
        return None

    def check_client_batch_order(self, header: BatchHeader, now_ms: int, guard: Guard | None) -> ProducedBatch | None:
        """Check a client's batch that may begin or continue a transaction; otherwise like `check`."""
        known = self.transactions.open.get(header.producer_id)
        if header.is_transactional and (known is None or known.epoch != header.producer_epoch):
            duplicate = self._find_duplicate(header)
            if duplicate is not None:
                return duplicate
            self._check_guard(header, guard)
        first = self.check(header, now_ms)
        if first is None and known is not None and not header.is_transactional:
            raise InvalidTransactionState(
                f"producer {header.producer_id} has a transaction open and sent a batch that is not part of it"
            )
        return first

    def _find_duplicate(self, header: BatchHeader) -> ProducedBatch | None:
        known = self._by_id.get(header.producer_id)
        if known is None or known.epoch != header.producer_epoch:
            return None
        numbers = (header.base_sequence, header.last_sequence)
        return next((batch for batch in known.batches if batch[:2] == numbers), None)

    def _check_guard(self, header: BatchHeader, guard: Guard | None) -> None:
        """Raise unless the coordinator was asked about this batch and no marker was written since."""
        self.check_epoch(header.producer_id, header.producer_epoch)
        held = self.transactions.guards.get(header.producer_id)
        if held is None or held is not guard:
            raise InvalidTransactionState(
                f"producer {header.producer_id} sent a batch of a transaction that is not open on this partition"
            )
        known = self._by_id.get(header.producer_id)
        is_new = known is None or not known.batches
        if (held.bumps_epoch and is_new and header.base_sequence != 0) or header.base_sequence > held.lowest_sequence:
            raise OutOfOrderSequence(
                f"producer {header.producer_id} sent sequence {header.base_sequence} to begin a transaction, but "
                f"{0 if held.bumps_epoch and is_new else held.lowest_sequence} comes next"
            )

    def check_epoch(self, producer_id: int, epoch: int) -> None:
        """Raise `FencedProducer` for an outdated epoch."""
        known = self._by_id.get(producer_id)
        if known is not None and epoch < known.epoch:
            raise FencedProducer(
                f"producer {producer_id} has epoch {epoch}, but epoch {known.epoch} has written to this partition"
            )

    def start_guard(
        self, producer_id: int, epoch: int, sequence: int, now_ms: int, *, bumps_epoch: bool
    ) -> Guard | None:
        """Return a guard under which to ask the coordinator; None if the transaction is open here already."""
        self.check_epoch(producer_id, epoch)
        if self.has_open(producer_id, epoch):
            return None
        guards = self.transactions.guards
        guard = guards.get(producer_id)
        if guard is not None:
            guard.merge_request(epoch, sequence, bumps_epoch=bumps_epoch)
            return guard
        while len(guards) >= GUARDS_MAX:
            del guards[next(iter(guards))]
        guard = guards[producer_id] = Guard(epoch, sequence, now_ms, bumps_epoch=bumps_epoch)
        return guard

    def has_open(self, producer_id: int, epoch: int) -> bool:
        known = self.transactions.open.get(producer_id)
        return known is not None and known.epoch == epoch

    def open_transactions(self) -> list[OpenTransaction]:
        return [
            OpenTransaction(
                transaction.producer_id,
                transaction.epoch,
                transaction.open_from,
                transaction.coordinator_epoch,
                transaction.last_ms,
            )
            for transaction in self.transactions.open.values()
        ]

    def check_marker(self, marker: Marker) -> Marker | None:
        """Return the marker to write; None if it is stored already; raise if it is outdated."""
        known = self._by_id.get(marker.producer_id)
        if known is None:
            return marker.admitted(NO_EPOCH)
        self.check_epoch(marker.producer_id, marker.producer_epoch)
        is_open = known.open_from != NO_TRANSACTION
        if marker.bumps_epoch and is_open and marker.producer_epoch == known.epoch:
            raise FencedProducer(
                f"the marker of epoch {marker.producer_epoch} of producer {marker.producer_id} is too late: "
                "the next transaction is open"
            )
        admitted = marker.admitted(known.coordinator_epoch)
        is_new = (admitted.producer_epoch, admitted.coordinator_epoch) != (known.epoch, known.coordinator_epoch)
        return admitted if is_open or is_new else None

    def _check_sequence(self, known: Producer, header: BatchHeader) -> ProducedBatch | None:
        sequence = header.base_sequence
        batches = known.batches
        if not batches or sequence == (batches[-1].last_sequence + 1) & SEQUENCE_MASK:
            return None
        last_sequence = header.last_sequence
        for batch in batches:
            if batch.base_sequence == sequence and batch.last_sequence == last_sequence:
                return batch
        raise OutOfOrderSequence(
            f"producer {header.producer_id} sent sequence {sequence}, but "
            f"{(batches[-1].last_sequence + 1) & SEQUENCE_MASK} comes next; a batch before it is missing"
        )

    def take(
        self, header: BatchHeader, batches: Buffer, base_offset: int, now_ms: int, append_time_ms: int = -1
    ) -> None:
        """Remember any batch of a producer that was written at an offset; the header says where the batch is."""
        if not header.attributes & _NOT_PLAIN:
            self.record(header, base_offset, now_ms, append_time_ms)
        elif not header.attributes & CONTROL_FLAG:
            self.record(header, base_offset, now_ms, append_time_ms)
            self.transactions.track_batch(self._by_id[header.producer_id], base_offset)
        else:
            self._record_control(header, batches, base_offset, now_ms)

    def _record_control(self, header: BatchHeader, batches: Buffer, base_offset: int, now_ms: int) -> None:
        try:
            marker = read_marker(batches, header)
        except CorruptBatch as error:
            # Its checksum is valid, so it was written this way; it has no effect.
            _logger.warning("a control batch is ignored", extra={"offset": base_offset, "error": str(error)})
            return
        if marker is not None:
            self._end_transaction(marker, base_offset, now_ms)

    def record(self, header: BatchHeader, base_offset: int, now_ms: int, append_time_ms: int = -1) -> None:
        """Remember a batch that was written at an offset."""
        known = self._by_id.get(header.producer_id)
        if known is None:
            known = self._add(header.producer_id, header.producer_epoch)
        elif now_ms - known.last_ms > self._expiry_ms or known.epoch != header.producer_epoch:
            known.batches.clear()
            known.epoch = header.producer_epoch
        known.last_ms = now_ms
        self._by_id.move_to_end(header.producer_id)
        if header.base_sequence < 0:
            return
        next_offset = base_offset + header.last_offset_delta + 1
        known.batches.append(
            ProducedBatch(header.base_sequence, header.last_sequence, base_offset, next_offset, append_time_ms)
        )
        if len(known.batches) > BATCHES_REMEMBERED:
            del known.batches[0]

    def _end_transaction(self, marker: Marker, offset: int, now_ms: int) -> None:
        known = self._by_id.get(marker.producer_id)
        before = None if known is None else _snapshot(known)
        if known is None:
            known = self._add(marker.producer_id, marker.producer_epoch)
        elif known.epoch != marker.producer_epoch:
            known.batches.clear()
            known.epoch = marker.producer_epoch
        self.transactions.ended(known, before, offset, commit=marker.commit)
        known.coordinator_epoch = marker.coordinator_epoch
        known.marker_offset = offset
        known.last_ms = now_ms
        self._by_id.move_to_end(marker.producer_id)

    def _add(self, producer_id: int, epoch: int) -> Producer:
        while len(self._by_id) >= self._producers_max:
            oldest = next((known for known in self._by_id.values() if known.open_from == NO_TRANSACTION), None)
            if oldest is None:
                break
            del self._by_id[oldest.producer_id]
        known = self._by_id[producer_id] = Producer(producer_id, epoch)
        return known

    def expire(self, now_ms: int) -> None:
        """Forget the producers that have been silent for too long."""
        expired = []
        for known in self._by_id.values():
            if now_ms - known.last_ms <= self._expiry_ms:
                break
            if known.open_from == NO_TRANSACTION:
                expired.append(known.producer_id)
        for producer_id in expired:
            del self._by_id[producer_id]
        guards = self.transactions.guards
        for producer_id, guard in list(guards.items()):
            if now_ms - guard.started_ms > self._expiry_ms:
                del guards[producer_id]

    # -- truncation and loss --------------------------------------------------------------------------------

    def truncate(self, end: int) -> bool:
        """Follow a truncation at an offset; return False if the state before it is not known."""
        if end < self.transactions.unsettled_from:
            return False
        self.drop_range(end, _EVERYTHING)
        self.transactions.guards.clear()
        opened = [known for known in self._by_id.values() if known.open_from != NO_TRANSACTION]
        for known in opened:
            if known.open_from >= end:
                known.open_from = NO_TRANSACTION
        self.transactions.reopen([known for known in opened if known.open_from != NO_TRANSACTION])
        return True

    def drop_range(self, first: int, next_offset: int) -> None:
        """Forget the batches and markers of offsets that are no longer in the log."""
        for unsettled in self.transactions.revert_markers(first, next_offset):
            self._restore_producer(unsettled)
        for producer_id, known in list(self._by_id.items()):
            kept = [batch for batch in known.batches if batch.next_offset <= first or batch.base_offset >= next_offset]
            if len(kept) == len(known.batches):
                continue
            known.batches = kept
            if not kept and known.marker_offset < 0 and not 0 <= known.open_from < first:
                del self._by_id[producer_id]
                self.transactions.open.pop(producer_id, None)

    def _restore_producer(self, unsettled: UnsettledMarker) -> None:
        """Restore a producer as it was before a marker, unless a later one is still there."""
        known = self._by_id.pop(unsettled.producer_id, None)
        if known is not None and known.marker_offset != unsettled.marker_offset:
            self._by_id[unsettled.producer_id] = known
            return
        self.transactions.open.pop(unsettled.producer_id, None)
        before = unsettled.before
        if before is None:
            return
        known = self._add(unsettled.producer_id, before.epoch)
        known.coordinator_epoch, known.open_from = before.coordinator_epoch, before.open_from
        known.marker_offset, known.last_ms = before.marker_offset, before.last_ms
        known.batches = [ProducedBatch(*batch) for batch in before.batches]
        if known.open_from != NO_TRANSACTION:
            self.transactions.reopen([*self.transactions.open.values(), known])

    def clear(self) -> None:
        self._by_id.clear()
        self.transactions.clear()

    # -- the state ------------------------------------------------------------------------------------------

    def pack(self) -> list[PackedProducer]:
        """Return everything that is remembered, for the log's state."""
        return [
            (known.producer_id, known.epoch, known.last_ms, [tuple(batch) for batch in known.batches])
            for known in self._by_id.values()
        ]

    def unpack(self, packed: list[PackedProducer]) -> None:
        for producer_id, epoch, last_ms, batches in packed:
            # Not more than before; `unpack_transactions` adds which of them have an open transaction.
            known = self._by_id[producer_id] = Producer(producer_id, epoch)
            known.last_ms = last_ms
            known.batches = [ProducedBatch(*batch) for batch in batches[-BATCHES_REMEMBERED:]]

    def pack_transactions(self) -> PackedTransactions:
        """Return everything about transactions, for the log's state; `pack` holds the producers themselves."""
        transactions = self.transactions
        return PackedTransactions(
            [
                (known.producer_id, known.coordinator_epoch, known.open_from, known.marker_offset)
                for known in self._by_id.values()
                if known.marker_offset >= 0 or known.open_from != NO_TRANSACTION
            ],
            transactions.aborted.pack(),
            transactions.pack_unsettled(),
            transactions.unsettled_from,
        )

    def unpack_transactions(self, packed: PackedTransactions) -> None:
        """Restore the transactions that `pack_transactions` returned, after `unpack`."""
        transactions = self.transactions
        for producer_id, coordinator_epoch, open_from, marker_offset in packed.producers:
            known = self._by_id.get(producer_id)
            if known is not None:
                known.coordinator_epoch, known.open_from = coordinator_epoch, open_from
                known.marker_offset = marker_offset
        transactions.reopen([known for known in self._by_id.values() if known.open_from != NO_TRANSACTION])
        transactions.aborted.unpack(packed.aborted)
        transactions.unpack_unsettled(packed.unsettled)
        transactions.unsettled_from = packed.unsettled_from


def _snapshot(known: Producer) -> ProducerSnapshot:
    return ProducerSnapshot(
        known.epoch,
        known.coordinator_epoch,
        known.open_from,
        known.marker_offset,
        known.last_ms,
        [(*batch,) for batch in known.batches],
    )
