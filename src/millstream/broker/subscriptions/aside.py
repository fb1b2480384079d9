"""Unfinished messages that the window has left behind, so that one that waits for long does not hold its start back."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from typing import Final

import numpy as np

from millstream.broker.subscriptions.columns import DONE, Columns
from millstream.broker.subscriptions.window import Window
from millstream.core.errors import CorruptState

_COMPACT_MIN: Final = 1024


class Stragglers(Columns):
    """Sparse columns in the order of offsets."""

    __slots__ = ("finished_count", "front", "keys", "offsets")

    def __init__(self) -> None:
        super().__init__()
        self.offsets = array("q")
        # The key's hash, 0 without one: the window's keys can be read again from the log, these would be far behind.
        self.keys = array("q")
        self.front = 0
        self.finished_count = 0

    @property
    def unfinished(self) -> int:
        """How many messages wait here."""
        return len(self.states) - self.finished_count

    @property
    def oldest(self) -> int | None:
        """The first offset that waits here."""
        return self.offsets[self.front] if self.front < len(self.offsets) else None

    def offset_at(self, index: int) -> int:
        """The offset of an entry."""
        return self.offsets[index]

    def take_from(self, window: Window, first: int, last: int, keys: bytes) -> None:
        """Take over a range of the window; `keys` has their hashes, or is empty."""
        start = first - window.base
        self.copy_from(window, start, start + last - first + 1)
        self.offsets.extend(range(first, last + 1))
        self.keys.frombytes(keys or bytes(8 * (last - first + 1)))

    def revive(self, offset: int, key: int) -> None:
        """Have a message that is done, and may be forgotten, available here."""
        index = bisect_left(self.offsets, offset)
        if index < len(self.offsets) and self.offsets[index] == offset:
            if self.states[index] != DONE:
                raise CorruptState(f"message {offset} cannot be revived before it is done")
            self.clear(index)
            self.keys[index] = key
            self.finished_count -= 1
        else:
            self.insert(index)
            self.offsets.insert(index, offset)
            self.keys.insert(index, key)
        self.front = min(self.front, index)

    def indices(self, first: int, last: int) -> tuple[int, int]:
        """The entries, done or not, of a range of offsets."""
        start = bisect_left(self.offsets, first, self.front)
        return start, bisect_left(self.offsets, last + 1, start)

    def key_of(self, offset: int) -> int:
        """The hash of a message's key."""
        return self.keys[bisect_left(self.offsets, offset, self.front)]

    def note_finished(self, count: int) -> None:
        """So many more messages have been marked as done."""
        self.finished_count += count
        self.front = self.first_unfinished(self.front)
        if self.finished_count > _COMPACT_MIN and self.finished_count > len(self.states) >> 1:
            self._compact()

    def _compact(self) -> None:
        kept = np.frombuffer(self.states, np.uint8) != DONE
        self.offsets = array("q", np.frombuffer(self.offsets, np.int64)[kept].tobytes())
        self.keys = array("q", np.frombuffer(self.keys, np.int64)[kept].tobytes())
        self.keep(kept)
        self.front = self.finished_count = 0

    def find_run(self, start: int, end: int, state: int, count_max: int) -> tuple[int, int] | None:
        """The first messages in a state that stand side by side in the same attempt, without a gap in their offsets."""
        found = super().find_run(start, end, state, count_max)
        return None if found is None else (found[0], self._contiguous_end(*found))

    def uniform_runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut a range into runs that are the same in everything that counts for an event, without a gap."""
        runs = []
        for first, last in super().uniform_runs(start, end):
            begin = first
            while begin < last:
                stop = self._contiguous_end(begin, last)
                runs.append((begin, stop))
                begin = stop
        return runs

    def _contiguous_end(self, start: int, end: int) -> int:
        """Where the offsets that follow each other from `start` on end."""
        if self.offsets[end - 1] - self.offsets[start] == end - 1 - start:
            return end
        offset = self.offsets[start]
        stop = start + 1
        while self.offsets[stop] == offset + stop - start:
            stop += 1
        return stop
