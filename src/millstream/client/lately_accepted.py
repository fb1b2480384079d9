"""Which messages were accepted a moment ago, so that one that was on its way here meanwhile is not taken for new."""

from __future__ import annotations

from collections import deque
from collections.abc import Collection
from typing import Final

_RANGES_MAX: Final = 1000

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


class LatelyAccepted:
    """Ranges of messages, the last thousand of them."""

    def __init__(self) -> None:
        self._ranges: deque[_Range] = deque(maxlen=_RANGES_MAX)

    def add(self, time: float, where: Where, first: int, last: int) -> None:
        """Consecutive messages are known to be accepted since now."""
        if self._ranges:
            newest = self._ranges[-1]
            if newest.last + 1 == first and newest.where == where:
                newest.last, newest.time = last, time
                return
        self._ranges.append(_Range(time, where, first, last))

    def since(self, time: float, where: Where, offsets: Collection[int]) -> set[int]:
        """Which of the messages may have been accepted since then."""
        found: set[int] = set()
        for one in reversed(self._ranges):
            if one.time < time:
                break
            if one.where == where:
                found |= {offset for offset in offsets if one.first <= offset <= one.last}
        return found
