"""The ranges of offsets that the disk lost. They are reported, never served; the records after them are served."""

from __future__ import annotations

from bisect import bisect_right, insort
from collections.abc import Callable, Iterable, Iterator

import msgspec

from millstream.core.ids import OffsetRange


class LostRange(msgspec.Struct, frozen=True, array_like=True, order=True):
    """Offsets from `start` up to `end`, and the bytes of the segment file where they should be."""

    start: int
    end: int
    segment: int
    start_position: int
    end_position: int
    unread: bool = False
    """Whether it was lost before it was read, so that its producers are unknown."""

    @property
    def offsets(self) -> OffsetRange:
        return OffsetRange(self.start, self.end)


class Damage:
    """Every lost range of a log, in order and without overlap."""

    __slots__ = ("_lost", "beyond_repair", "has_replicas", "on_change")

    def __init__(self, lost: Iterable[LostRange] = ()) -> None:
        self._lost = sorted(lost)
        self.on_change: Callable[[], None] = _ignore_change
        """Called when a range was lost, or is repaired."""
        self.has_replicas = False
        """Whether other nodes host the partition, so that lost ranges are fetched from them."""
        self.beyond_repair: set[OffsetRange] = set()
        """Ranges that no other replica has, by their offsets."""

    def __len__(self) -> int:
        return len(self._lost)

    def __iter__(self) -> Iterator[LostRange]:
        return iter(self._lost)

    def add(self, lost: LostRange) -> None:
        """Add a range; it replaces the ranges that it overlaps."""
        self._lost = [known for known in self._lost if known.end <= lost.start or known.start >= lost.end]
        insort(self._lost, lost)

    @property
    def repairable(self) -> list[LostRange]:
        """The ranges that another replica may still have."""
        if not self.has_replicas:
            return []
        return [lost for lost in self._lost if lost.offsets not in self.beyond_repair]

    def replace(self, lost: LostRange, left: Iterable[LostRange]) -> None:
        """Remove a range, and all others of its segment except `left`."""
        kept = [
            lost_range
            for lost_range in self._lost
            if lost_range != lost and (lost_range.segment != lost.segment or lost_range.segment < 0)
        ]
        self._lost = sorted([*kept, *left])

    def at(self, offset: int) -> LostRange | None:
        index = bisect_right(self._lost, offset, key=_start_offset) - 1
        if index < 0 or self._lost[index].end <= offset:
            return None
        return self._lost[index]

    def next_after(self, offset: int) -> int | None:
        """Return the start of the first range beyond an offset."""
        index = bisect_right(self._lost, offset, key=_start_offset)
        return self._lost[index].start if index < len(self._lost) else None

    def cut_before(self, start_offset: int) -> None:
        """Discard damage that is entirely before a new start of the log."""
        self._lost = [lost for lost in self._lost if lost.end > start_offset]

    def clear(self) -> None:
        self._lost = []

    def cut_after(self, end_offset: int, segment: int, size: int) -> None:
        """Forget damage beyond a new end of the log, at a position in a segment."""
        self._lost = [
            LostRange(
                lost.start,
                min(lost.end, end_offset),
                lost.segment,
                lost.start_position,
                min(lost.end_position, size) if lost.segment == segment else lost.end_position,
                lost.unread,
            )
            for lost in self._lost
            if lost.start < end_offset
        ]

    def holes_of(self, segment: int) -> dict[int, tuple[int, int]]:
        """Return the damaged bytes of a segment: start to end and to the offset that continues there."""
        return {lost.start_position: (lost.end_position, lost.end) for lost in self._lost if lost.segment == segment}

    def ranges(self) -> tuple[OffsetRange, ...]:
        return tuple(lost.offsets for lost in self._lost)


def _start_offset(lost: LostRange) -> int:
    return lost.start


def _ignore_change() -> None:
    pass
