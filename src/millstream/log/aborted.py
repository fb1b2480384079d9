"""The aborted transactions of a partition: what a reader of committed records is told to leave out.

Kept in the order of their markers, as arrays of numbers (32 bytes for each), from the start of the log on.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator
from typing import NamedTuple

from millstream.model.errors import CorruptState

_NUMBERS = 4
_NUMBER_BYTES = 8


class AbortedTransaction(NamedTuple):
    """One of them: its first record, its marker, and where the first transaction began that was open after it."""

    producer_id: int
    first_offset: int
    marker_offset: int
    stable_offset: int


class AbortedTransactions:
    """Every aborted transaction of a log."""

    __slots__ = ("_firsts", "_markers", "_producers", "_stables")

    def __init__(self) -> None:
        self._producers = array("q")
        self._firsts = array("q")
        self._markers = array("q")
        self._stables = array("q")

    def __len__(self) -> int:
        return len(self._markers)

    def __iter__(self) -> Iterator[AbortedTransaction]:
        return (self._at(at) for at in range(len(self)))

    def _at(self, at: int) -> AbortedTransaction:
        return AbortedTransaction(self._producers[at], self._firsts[at], self._markers[at], self._stables[at])

    def add(self, aborted: AbortedTransaction) -> None:
        """Note one whose marker lies behind all that are known."""
        for column, value in zip(self._columns(), aborted, strict=True):
            column.append(value)

    def overlapping(self, first: int, next_offset: int) -> list[AbortedTransaction]:
        """Those with something between two offsets; a marker belongs to its transaction."""
        found: list[AbortedTransaction] = []
        for at in range(bisect_left(self._markers, first), len(self)):
            if self._firsts[at] < next_offset:
                found.append(self._at(at))
            if self._stables[at] >= next_offset:
                # Whatever was ended later had not begun before.
                break
        return found

    def cut_before(self, offset: int) -> None:
        """The log begins at an offset now."""
        count = bisect_left(self._markers, offset)
        if count:
            for column in self._columns():
                del column[:count]

    def cut_after(self, offset: int) -> None:
        """Everything from an offset on was cut off."""
        count = bisect_left(self._markers, offset)
        for column in self._columns():
            del column[count:]

    def discard(self, markers: Collection[int]) -> None:
        """Forget those with their markers at these offsets: nothing is left of them."""
        gone = frozenset(markers)
        kept = [aborted for aborted in self if aborted.marker_offset not in gone]
        self.clear()
        for aborted in kept:
            self.add(aborted)

    def clear(self) -> None:
        """Forget all."""
        for column in self._columns():
            del column[:]

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

    def _columns(self) -> tuple[array[int], array[int], array[int], array[int]]:
        return self._producers, self._firsts, self._markers, self._stables
