"""What a partition remembers of its idempotent producers, so that a retried batch is stored once.

Of each producer id: its epoch and its last five batches (a producer has at most five requests in flight). A batch
that is among them is a duplicate and is answered with its first offsets; one that follows the last is new; anything
else is out of order. Of an unknown producer any first sequence is taken, since retention may have dropped what
came before. Sequences wrap at 2**31.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from millstream.model.errors import FencedProducer, OutOfOrderSequence
from millstream.records.batch import BatchHeader

BATCHES_REMEMBERED = 5
PRODUCERS_MAX = 10_000
"""Beyond this many the one that was silent for longest is forgotten."""

_SEQUENCE_MASK = 0x7FFFFFFF

PackedProducer = tuple[int, int, int, list[tuple[int, ...]]]
"""A producer as it is stored: id, epoch, time of its last batch, and its batches."""


class ProducedBatch(NamedTuple):
    """One batch that a producer wrote."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int
    append_time_ms: int


class Producer:
    """One producer id, as the partition knows it."""

    __slots__ = ("batches", "epoch", "last_ms", "producer_id")

    def __init__(self, producer_id: int, epoch: int) -> None:
        self.producer_id = producer_id
        self.epoch = epoch
        self.last_ms = 0
        self.batches: list[ProducedBatch] = []


class Producers:
    """Every producer id that the partition remembers, the one that wrote last at the end."""

    __slots__ = ("_by_id", "_expiry_ms", "_producers_max")

    def __init__(self, *, expiry_ms: int, producers_max: int = PRODUCERS_MAX) -> None:
        self._by_id: OrderedDict[int, Producer] = OrderedDict()
        self._expiry_ms = expiry_ms
        self._producers_max = producers_max

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Producer]:
        return iter(self._by_id.values())

    def get(self, producer_id: int) -> Producer | None:
        """The producer of an id, if it is remembered."""
        return self._by_id.get(producer_id)

    def check(self, header: BatchHeader, now_ms: int) -> ProducedBatch | None:
        """Return the first writing of a duplicate, None for a batch that comes next, or raise `ProducerRejected`."""
        known = self._by_id.get(header.producer_id)
        if known is None or now_ms - known.last_ms > self._expiry_ms:
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

    def _check_sequence(self, known: Producer, header: BatchHeader) -> ProducedBatch | None:
        sequence = header.base_sequence
        batches = known.batches
        if not batches or sequence == (batches[-1].last_sequence + 1) & _SEQUENCE_MASK:
            return None
        last_sequence = header.last_sequence
        for batch in batches:
            if batch.base_sequence == sequence and batch.last_sequence == last_sequence:
                return batch
        raise OutOfOrderSequence(
            f"producer {header.producer_id} sent sequence {sequence}, but "
            f"{(batches[-1].last_sequence + 1) & _SEQUENCE_MASK} comes next; a batch before it is missing"
        )

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

    def _add(self, producer_id: int, epoch: int) -> Producer:
        while len(self._by_id) >= self._producers_max:
            self._by_id.popitem(last=False)
        known = self._by_id[producer_id] = Producer(producer_id, epoch)
        return known

    def expire(self, now_ms: int) -> None:
        """Forget the producers that have been silent for too long."""
        while self._by_id:
            oldest = next(iter(self._by_id.values()))
            if now_ms - oldest.last_ms <= self._expiry_ms:
                return
            del self._by_id[oldest.producer_id]

    def drop_range(self, first: int, next_offset: int) -> None:
        """Forget the batches of a range of offsets that is no longer in the log."""
        for producer_id, known in list(self._by_id.items()):
            kept = [batch for batch in known.batches if batch.next_offset <= first or batch.base_offset >= next_offset]
            if len(kept) == len(known.batches):
                continue
            known.batches = kept
            if not kept:
                del self._by_id[producer_id]

    def pack(self) -> list[PackedProducer]:
        """Everything remembered, for the state file."""
        return [
            (known.producer_id, known.epoch, known.last_ms, [tuple(batch) for batch in known.batches])
            for known in self._by_id.values()
        ]

    def unpack(self, packed: list[PackedProducer]) -> None:
        """Take over what `pack` gave."""
        for producer_id, epoch, last_ms, batches in packed:
            known = self._add(producer_id, epoch)
            known.last_ms = last_ms
            known.batches = [ProducedBatch(*batch) for batch in batches[-BATCHES_REMEMBERED:]]
