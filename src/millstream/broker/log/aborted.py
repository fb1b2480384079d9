"""The aborted transactions of a partition: what a reader of committed records is told to leave out.

Kept in the order of their markers, as arrays of numbers, from the start of the log on: 32 bytes for each, an eighth
more while they grow, and no object. In the log an aborted transaction takes several times as much, a batch and a marker
at least, so what is kept here is bounded by what retention lets a partition keep there.

What a reader needs is found by bisection at both ends. Between them there are more than it needs only where another
transaction was open for long; there, whole blocks are passed over by the lowest offset in them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from itertools import compress
from typing import Final, NamedTuple

from millstream.core.errors import CorruptState

_NUMBERS = 4
_NUMBER_BYTES = 8
_BLOCK: Final = 512


class AbortedTransaction(NamedTuple):
    """One of them: its first record, its marker, and where the first transaction began that was open after it."""

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
        """Never falls from one to the next, as the start of the oldest open transaction never does."""
        self._lowest = array("q")
        """The lowest first offset of each block."""

    def __len__(self) -> int:
        return len(self._markers)

    def __iter__(self) -> Iterator[AbortedTransaction]:
        return (self._at(at) for at in range(len(self)))

    def _at(self, at: int) -> AbortedTransaction:
        return AbortedTransaction(self._producers[at], self._firsts[at], self._markers[at], self._stables[at])

    def add(self, aborted: AbortedTransaction) -> None:
        """Note one whose marker lies behind all that are known."""
        self._lower_stables(aborted.stable_offset)
        if len(self) % _BLOCK == 0:
            self._lowest.append(aborted.first_offset)
        elif aborted.first_offset < self._lowest[-1]:
            self._lowest[-1] = aborted.first_offset
        for column, value in zip(self._columns(), aborted, strict=True):
            column.append(value)

    def overlapping(self, first: int, next_offset: int) -> list[AbortedTransaction]:
        """Those with something between two offsets; a marker belongs to its transaction."""
        at = bisect_left(self._markers, first)
        # Whatever was ended after the first one of these had not begun before `next_offset`.
        end = min(len(self), bisect_left(self._stables, next_offset) + 1)
        found: list[AbortedTransaction] = []
        while at < end:
            block = at // _BLOCK
            block_end = min(end, (block + 1) * _BLOCK)
            if self._lowest[block] < next_offset:
                found += [self._at(one) for one in range(at, block_end) if self._firsts[one] < next_offset]
            at = block_end
        return found

    def cut_before(self, offset: int) -> None:
        """The log begins at an offset now."""
        count = bisect_left(self._markers, offset)
        if count:
            for column in self._columns():
                del column[:count]
            self._find_lowest()

    def cut_after(self, offset: int) -> None:
        """Everything from an offset on was cut off."""
        count = bisect_left(self._markers, offset)
        for column in self._columns():
            del column[count:]
        self._find_lowest()

    def discard(self, markers: Collection[int]) -> None:
        """Forget those with their markers at these offsets: nothing is left of them."""
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
        """Forget all."""
        for column in self._columns():
            del column[:]
        del self._lowest[:]

    def pack(self) -> list[bytes]:
        """Everything, for the state of the log: each column as its numbers."""
        return [column.tobytes() for column in self._columns()]

    def unpack(self, packed: list[bytes]) -> None:
        """Take over what `pack` gave."""
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
        """See that nothing before is above; only a marker that the disk has lost can be why it is."""
        at = len(self._stables) - 1
        while at >= 0 and self._stables[at] > stable:
            self._stables[at] = stable
            at -= 1
