"""The messages from the first unfinished one to where the queue has looked: one entry for each offset."""

from __future__ import annotations

from typing import Final

from millstream.broker.subscriptions.columns import Columns

_TRIM_MIN: Final = 4096


class Window(Columns):
    """Dense columns over the offsets [start, end). Everything before is done, or set aside."""

    __slots__ = ("base", "start")

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        # The offset of index 0. It lags behind the start, so that the columns are not moved with every message.
        self.base = start
        self.start = start

    @property
    def end(self) -> int:
        """The offset that is looked at next."""
        return self.base + len(self.states)

    @property
    def span(self) -> int:
        """How many offsets it covers."""
        return self.base + len(self.states) - self.start

    def offset_at(self, index: int) -> int:
        """The offset of an entry."""
        return self.base + index

    def note_finished(self, _count: int) -> None:
        """Messages have been marked as done: let the start move over them if it is theirs."""
        index = self.first_unfinished(self.start - self.base)
        self.start = self.base + index
        if index > _TRIM_MIN and index > len(self.states) >> 1:
            self.drop_first(index)
            self.base += index
