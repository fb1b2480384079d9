"""The producers of a partition and their transactions: which are open, how others ended, which are about to begin.

A transaction begins with the first transactional batch of its producer and ends with the producer's next marker. Until
the marker is acknowledged its outcome is not certain, because the log may still be truncated before it. The last
markers are therefore remembered with what they changed, and a truncation reverts them.

Nothing here reads or writes the log; `Producers` reports what was written.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from itertools import compress
from typing import Final, NamedTuple

from millstream.core.errors import CorruptState

PackedBatch = tuple[int, int, int, int, int]


class ProducedBatch(NamedTuple):
    """A batch that a producer wrote."""

    base_sequence: int
    last_sequence: int
    base_offset: int
    next_offset: int
    append_time_ms: int


@dataclass(slots=True, eq=False)
class Producer:
    """A producer id, its last batches, and its transaction."""

    producer_id: int
    epoch: int
    last_ms: int = 0
    batches: list[ProducedBatch] = field(default_factory=list)
    open_from: int = -1
    """The first offset of its open transaction, or -1."""
    coordinator_epoch: int = -1
    """The epoch of the coordinator that wrote its last marker, or -1."""
    marker_offset: int = -1
    """The offset of its last marker, or -1."""


_NUMBERS = 4

_NUMBER_BYTES = 8

_BLOCK: Final = 512


class AbortedTransaction(NamedTuple):
    """An aborted transaction: its first record, its marker, and the start of the oldest one open after it."""

    producer_id: int
    first_offset: int
    marker_offset: int
    stable_offset: int


class AbortedTransactions:
    """Every aborted transaction of a log."""

    __slots__ = ("_firsts", "_lowest", "_markers", "_producers", "_stables")

    def __init__(self) -> None:
        self._producers = array("q")
        self._firsts = array("q")
        self._markers = array("q")
        self._stables = array("q")
        """Never decreases, because the start of the oldest open transaction never does."""
        self._lowest = array("q")
        """The lowest first offset of each block."""

    def __len__(self) -> int:
        return len(self._markers)

    def __iter__(self) -> Iterator[AbortedTransaction]:
        return (self._transaction_at(at) for at in range(len(self)))

    def _transaction_at(self, at: int) -> AbortedTransaction:
        return AbortedTransaction(self._producers[at], self._firsts[at], self._markers[at], self._stables[at])

    def add(self, aborted: AbortedTransaction) -> None:
        """Add one whose marker comes after all known ones."""
        self._lower_stables(aborted.stable_offset)
        if len(self) % _BLOCK == 0:
            self._lowest.append(aborted.first_offset)
        elif aborted.first_offset < self._lowest[-1]:
            self._lowest[-1] = aborted.first_offset
        for column, value in zip(self._columns(), aborted, strict=True):
            column.append(value)

    def overlapping(self, first: int, next_offset: int) -> list[AbortedTransaction]:
        """Return those with records between two offsets; a marker belongs to its transaction."""
        at = bisect_left(self._markers, first)
        # Transactions that ended after the first of these had not begun before `next_offset`.
        end = min(len(self), bisect_left(self._stables, next_offset) + 1)
        transactions: list[AbortedTransaction] = []
        while at < end:
            block = at // _BLOCK
            block_end = min(end, (block + 1) * _BLOCK)
            if self._lowest[block] < next_offset:
                transactions += [
                    self._transaction_at(index) for index in range(at, block_end) if self._firsts[index] < next_offset
                ]
            at = block_end
        return transactions

    def cut_before(self, offset: int) -> None:
        """Follow a new start of the log."""
        count = bisect_left(self._markers, offset)
        if count:
            for column in self._columns():
                del column[:count]
            self._find_lowest()

    def cut_after(self, offset: int) -> None:
        """Follow a truncation at an offset."""
        count = bisect_left(self._markers, offset)
        for column in self._columns():
            del column[count:]
        self._find_lowest()

    def discard(self, markers: Collection[int]) -> None:
        """Forget those with their markers at these offsets, because no record of them is left."""
        kept = bytearray(b"\x01") * len(self)
        for marker in markers:
            at = bisect_left(self._markers, marker)
            if at < len(self) and self._markers[at] == marker:
                kept[at] = False
        if not all(kept):
            for column in self._columns():
                column[:] = array("q", compress(column, kept))
            self._find_lowest()

    def clear(self) -> None:
        for column in self._columns():
            del column[:]
        del self._lowest[:]

    def pack(self) -> list[bytes]:
        """Return everything for the log's state, one column each."""
        return [column.tobytes() for column in self._columns()]

    def unpack(self, packed: list[bytes]) -> None:
        if len(packed) != _NUMBERS or len({len(part) for part in packed}) != 1 or len(packed[0]) % _NUMBER_BYTES:
            raise CorruptState("the aborted transactions of a log cannot be read")
        self.clear()
        for column, part in zip(self._columns(), packed, strict=True):
            column.frombytes(part)
        self._find_lowest()

    def _columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        return self._producers, self._firsts, self._markers, self._stables

    def _find_lowest(self) -> None:
        firsts = self._firsts
        self._lowest = array("q", (min(firsts[at : at + _BLOCK]) for at in range(0, len(firsts), _BLOCK)))

    def _lower_stables(self, stable: int) -> None:
        """Keep the column ascending; only a marker that the disk lost can break this."""
        at = len(self._stables) - 1
        while at >= 0 and self._stables[at] > stable:
            self._stables[at] = stable
            at -= 1


NO_TRANSACTION = -1

GUARDS_MAX = 10_000
"""The maximum number of transactions about to begin; beyond it, the oldest request must be repeated."""


@dataclass(slots=True, eq=False)
class Guard:
    """A request to the coordinator about whether a transaction may begin here.

    It is void once a marker or a batch of the transaction is written. A response from before a marker therefore cannot
    admit a batch after it, whose transaction would never end.
    """

    epoch: int
    lowest_sequence: int
    """The lowest sequence number among these requests; the batch with this number begins the transaction."""
    started_ms: int
    bumps_epoch: bool = field(kw_only=True)

    def merge_request(self, epoch: int, sequence: int, *, bumps_epoch: bool) -> None:
        """Allow another batch to begin the same transaction."""
        if epoch > self.epoch:
            self.epoch, self.lowest_sequence = epoch, sequence
        elif epoch == self.epoch:
            self.lowest_sequence = min(self.lowest_sequence, sequence)
        self.bumps_epoch = self.bumps_epoch or bumps_epoch


class ProducerSnapshot(NamedTuple):
    """A producer as it was before a marker changed it."""

    epoch: int
    coordinator_epoch: int
    open_from: int
    marker_offset: int
    last_ms: int
    batches: list[PackedBatch]


class UnsettledMarker(NamedTuple):
    """A marker that may still be truncated. `first_offset` is -1 if it ended nothing."""

    producer_id: int
    first_offset: int
    marker_offset: int
    before: ProducerSnapshot | None


class PackedTransactions(NamedTuple):
    """All transactions, as the state of a log keeps them."""

    producers: list[tuple[int, int, int, int]]
    """For each producer that ever had one: id, coordinator epoch, start of the open one, last marker."""
    aborted: list[bytes]
    unsettled: list[UnsettledMarker]
    unsettled_from: int


class OpenTransaction(NamedTuple):
    """A transaction that is open on a partition."""

    producer_id: int
    producer_epoch: int
    first_offset: int
    coordinator_epoch: int
    last_ms: int


class Transactions:
    """The transactions of one log."""

    __slots__ = ("_unsettled", "aborted", "guards", "open", "unsettled_from")

    def __init__(self) -> None:
        self.open: dict[int, Producer] = {}
        """The producers with an open transaction, by their id, in the order in which they began."""
        self.aborted = AbortedTransactions()
        self.guards: dict[int, Guard] = {}
        self._unsettled: deque[UnsettledMarker] = deque()
        self.unsettled_from = 0
        """From this offset on every marker is remembered with what it changed."""

    @property
    def has_unsettled(self) -> bool:
        """Whether the outcome of a transaction is unknown or not final."""
        return bool(self.open or self._unsettled)

    def stable_offset(self, acknowledged: int) -> int:
        """Return up to where the outcome of every transaction is final, given the acknowledged offset."""
        self.settle(acknowledged)
        stable = acknowledged
        for producer in self.open.values():
            stable = min(stable, producer.open_from)
            break
        for unsettled in self._unsettled:
            if unsettled.first_offset != NO_TRANSACTION:
                stable = min(stable, unsettled.first_offset)
        return stable

    def first_open(self) -> int | None:
        """Return the first offset of the oldest open transaction."""
        return next((producer.open_from for producer in self.open.values()), None)

    def settle(self, acknowledged: int) -> None:
        """Forget how to revert markers below an offset: they can no longer be truncated."""
        unsettled = self._unsettled
        while unsettled and unsettled[0].marker_offset < acknowledged:
            self.unsettled_from = unsettled.popleft().marker_offset + 1

    # -- appended batches -----------------------------------------------------------------------------------

    def track_batch(self, producer: Producer, offset: int) -> None:
        """Record a transactional batch at an offset; it begins a transaction if none is open."""
        if producer.open_from == NO_TRANSACTION:
            producer.open_from = offset
            self.open[producer.producer_id] = producer
            self.guards.pop(producer.producer_id, None)

    def ended(self, producer: Producer, before: ProducerSnapshot | None, offset: int, *, commit: bool) -> None:
        """Record a marker of a producer at an offset."""
        first = producer.open_from
        self._unsettled.append(UnsettledMarker(producer.producer_id, first, offset, before))
        self.guards.pop(producer.producer_id, None)
        if first == NO_TRANSACTION:
            return
        producer.open_from = NO_TRANSACTION
        del self.open[producer.producer_id]
        if not commit:
            oldest = self.first_open()
            stable = offset + 1 if oldest is None else oldest
            self.aborted.add(AbortedTransaction(producer.producer_id, first, offset, stable))

    # -- truncation ------------------------------------------------------------------------------------------

    def cut_before(self, offset: int) -> None:
        """Follow a new start of the log."""
        self.aborted.cut_before(offset)
        self.settle(offset)

    def revert_markers(self, first: int, next_offset: int) -> list[UnsettledMarker]:
        """Forget the markers of a range of offsets; return their changes, the last one first."""
        gone = [unsettled for unsettled in self._unsettled if first <= unsettled.marker_offset < next_offset]
        if gone:
            self._unsettled = deque(
                transaction for transaction in self._unsettled if not first <= transaction.marker_offset < next_offset
            )
            self.aborted.discard([unsettled.marker_offset for unsettled in gone])
        return gone[::-1]

    def reopen(self, producers: list[Producer]) -> None:
        """Replace the set of open transactions."""
        producers.sort(key=lambda producer: producer.open_from)
        self.open = {producer.producer_id: producer for producer in producers}

    def clear(self) -> None:
        self.open.clear()
        self.aborted.clear()
        self.guards.clear()
        self._unsettled.clear()
        self.unsettled_from = 0

    # -- the state ------------------------------------------------------------------------------------------

    def pack_unsettled(self) -> list[UnsettledMarker]:
        """Return the markers that may still be truncated."""
        return list(self._unsettled)

    def unpack_unsettled(self, unsettled: list[UnsettledMarker]) -> None:
        self._unsettled = deque(unsettled)
