"""Which messages were accepted while requests for messages were under way.

An answer that was on its way meanwhile may lease such a message again, as after a node's restart. A range is kept for
as long as a request is open that was sent before it was accepted. If too many would have to be kept, all are forgotten,
and every message that was asked for before then counts as perhaps accepted.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Collection
from typing import Final

RANGES_MAX: Final = 1000

Where = tuple[bytes, int]
"""The id of a topic, since another one may have its name by now, and the partition."""


class _Range:
    """Consecutive messages, and when the last of them was known to be accepted."""

    __slots__ = ("first", "last", "time", "where")

    def __init__(self, time: float, where: Where, first: int, last: int) -> None:
        self.time = time
        self.where = where
        self.first = first
        self.last = last


class AcceptedRanges:
    """Ranges of messages, in the order in which they were accepted."""

    def __init__(self, oldest_open: Callable[[], float]) -> None:
        self._oldest_open = oldest_open
        """When the oldest request was sent that has no answer yet; infinity if there is none."""
        self._ranges: deque[_Range] = deque()
        self._forgotten = -math.inf
        """Of what was asked for before, it is not known any more what was accepted since."""

    def __len__(self) -> int:
        return len(self._ranges)

    def add(self, time: float, where: Where, first: int, last: int) -> None:
        """Consecutive messages are known to be accepted since now."""
        ranges = self._ranges
        if ranges:
            newest = ranges[-1]
            if newest.last + 1 == first and newest.where == where:
                newest.last, newest.time = last, time
                return
        if len(ranges) >= RANGES_MAX:
            self._forget()
        ranges.append(_Range(time, where, first, last))

    def since(self, time: float, where: Where, offsets: Collection[int]) -> set[int]:
        """Which of the messages that were asked for then may have been accepted since."""
        if time <= self._forgotten:
            return set(offsets)
        found: set[int] = set()
        for one in reversed(self._ranges):
            if one.time < time:
                break
            if one.where == where:
                found |= {offset for offset in offsets if one.first <= offset <= one.last}
        return found

    def _forget(self) -> None:
        """Make room: drop what no open request needs, or everything."""
        ranges, oldest = self._ranges, self._oldest_open()
        while ranges and ranges[0].time < oldest:
            ranges.popleft()
        if len(ranges) >= RANGES_MAX:
            self._forgotten = ranges[-1].time
            ranges.clear()
