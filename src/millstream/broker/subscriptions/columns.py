"""The states of a queue's messages in columns: 22 bytes per message, and no object for any of them.

Most operations are small (set a few entries, find the next byte of a kind), so the columns are plain byte arrays and
arrays of numbers, which the standard library searches in compiled code without numpy's overhead per call. Operations on
many entries borrow the columns as numpy arrays.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from millstream.core.errors import CorruptState

AVAILABLE: Final = 0
"""Waiting for a worker."""

LEASED: Final = 1
"""Held by a worker until its lease ends."""

PARKED: Final = 2
"""Waiting for a time: the message is delayed, or it failed and will be retried."""

BLOCKED: Final = 3
"""Waiting for an earlier message with the same key. Only the leader knows this state; it is stored as available."""

REJECTING: Final = 4
"""Rejected, and not yet written to the dead letter topic."""

DONE: Final = 5
"""Finished: accepted, dead-lettered, dropped, filtered out, or not a message at all."""

STATES: Final = 6

_RUN_STEP: Final = 32

_LEASED_BYTE: Final = bytes([LEASED])


def run_end(column: bytearray, start: int, end: int) -> int:
    """Return the end of the run of equal bytes that starts at `start`, at most `end`."""
    if start + 1 >= end or column[start + 1] != column[start]:
        return start + 1
    value = column[start : start + 1]
    step = _RUN_STEP
    while start < end:
        chunk = column[start : min(end, start + step)]
        rest = len(chunk.lstrip(value))
        if rest:
            return start + len(chunk) - rest
        start += len(chunk)
        step *= 8
    return end


class Columns:
    """Columns by index; `Window` and `Stragglers` map indexes to offsets."""

    __slots__ = ("attempts", "dues", "first_delivered", "holders", "states")

    def __init__(self) -> None:
        self.states = bytearray()
        self.attempts = bytearray()
        # The end of the lease or of the wait, or the time of rejection.
        self.dues = array("q")
        # The number of the worker that holds the lease, or of the reason for the rejection.
        self.holders = array("I")
        # The time of the first delivery.
        self.first_delivered = array("q")

    def __len__(self) -> int:
        return len(self.states)

    def grow(self, count: int) -> None:
        """Append messages, all of them available."""
        if count == 1:
            self.states.append(0)
            self.attempts.append(0)
            self.dues.append(0)
            self.holders.append(0)
            self.first_delivered.append(0)
            return
        self.states += bytes(count)
        self.attempts += bytes(count)
        self.dues.frombytes(bytes(count * 8))
        self.holders.frombytes(bytes(count * 4))
        self.first_delivered.frombytes(bytes(count * 8))

    def copy_from(self, other: Columns, start: int, end: int) -> None:
        """Append messages of other columns."""
        self.states += other.states[start:end]
        self.attempts += other.attempts[start:end]
        self.dues += other.dues[start:end]
        self.holders += other.holders[start:end]
        self.first_delivered += other.first_delivered[start:end]

    def drop_first(self, count: int) -> None:
        del self.states[:count]
        del self.attempts[:count]
        del self.dues[:count]
        del self.holders[:count]
        del self.first_delivered[:count]

    def drop_from(self, index: int) -> None:
        """Remove the last messages, from an index on."""
        del self.states[index:]
        del self.attempts[index:]
        del self.dues[index:]
        del self.holders[index:]
        del self.first_delivered[index:]

    def keep(self, is_kept: npt.NDArray[np.bool_]) -> None:
        self.states = bytearray(np.frombuffer(self.states, np.uint8)[is_kept].tobytes())
        self.attempts = bytearray(np.frombuffer(self.attempts, np.uint8)[is_kept].tobytes())
        self.dues = array("q", np.frombuffer(self.dues, np.int64)[is_kept].tobytes())
        self.holders = array("I", np.frombuffer(self.holders, np.uint32)[is_kept].tobytes())
        self.first_delivered = array("q", np.frombuffer(self.first_delivered, np.int64)[is_kept].tobytes())

    def insert(self, index: int) -> None:
        """Insert an available message that was never delivered."""
        self.states.insert(index, AVAILABLE)
        self.attempts.insert(index, 0)
        self.dues.insert(index, 0)
        self.holders.insert(index, 0)
        self.first_delivered.insert(index, 0)

    # -- changes ---------------------------------------------------------------------------------------------

    def set_state(self, start: int, end: int, state: int) -> None:
        if end - start == 1:
            self.states[start] = state
        else:
            self.states[start:end] = bytes((state,)) * (end - start)

    def clear(self, index: int) -> None:
        """Make a message available as if it had never been delivered."""
        self.states[index] = AVAILABLE
        self.attempts[index] = 0
        self.dues[index] = self.holders[index] = self.first_delivered[index] = 0

    def set_due(self, start: int, end: int, due_ms: int) -> None:
        if end - start == 1:
            self.dues[start] = due_ms
        else:
            self.dues[start:end] = array("q", (due_ms,)) * (end - start)

    def set_holder(self, start: int, end: int, holder: int) -> None:
        """Set the worker or the rejection reason of messages."""
        if end - start == 1:
            self.holders[start] = holder
        else:
            self.holders[start:end] = array("I", (holder,)) * (end - start)

    def lease(self, start: int, end: int, attempt: int, due_ms: int, worker: int, now_ms: int) -> None:
        count = end - start
        if count == 1:
            self.states[start] = LEASED
            self.attempts[start] = attempt
            self.dues[start] = due_ms
            self.holders[start] = worker
            if attempt == 1:
                self.first_delivered[start] = now_ms
            return
        self.states[start:end] = _LEASED_BYTE * count
        self.attempts[start:end] = bytes((attempt,)) * count
        self.dues[start:end] = array("q", (due_ms,)) * count
        self.holders[start:end] = array("I", (worker,)) * count
        if attempt == 1:
            self.first_delivered[start:end] = array("q", (now_ms,)) * count

    # -- queries --------------------------------------------------------------------------------------------

    def first_unfinished(self, start: int) -> int:
        """Return the first index from `start` on that is not done."""
        states = self.states
        if start < len(states) and states[start] == DONE:
            return run_end(states, start, len(states))
        return start

    def is_leased_to(self, start: int, end: int, worker: int) -> bool:
        """Whether one worker holds all of these messages."""
        if end - start == 1:
            return self.states[start] == LEASED and self.holders[start] == worker
        count = end - start
        return self.states.count(LEASED, start, end) == count and self.holders[start:end] == (
            array("I", (worker,)) * count
        )

    def find_run(self, start: int, end: int, state: int, count_max: int) -> tuple[int, int] | None:
        """Find the first adjacent messages that are in a state and in the same attempt."""
        start = self.states.find(state, start, end)
        if start < 0:
            return None
        if count_max == 1:
            return start, start + 1
        end = run_end(self.states, start, min(end, start + count_max))
        return start, run_end(self.attempts, start, end)

    def attempt_runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split a range into runs of the same attempt."""
        if end - start == 1 or self.attempts.count(self.attempts[start], start, end) == end - start:
            return [(start, end)]
        return _split_runs(start, _value_changes(np.frombuffer(self.attempts, np.uint8)[start:end]), end)

    def uniform_runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split a range into runs that are equal in state, attempt, due time and holder."""
        if end - start == 1:
            return [(start, end)]
        changes = _value_changes(np.frombuffer(self.states, np.uint8)[start:end])
        changes |= _value_changes(np.frombuffer(self.attempts, np.uint8)[start:end])
        changes |= _value_changes(np.frombuffer(self.dues, np.int64)[start:end])
        changes |= _value_changes(np.frombuffer(self.holders, np.uint32)[start:end])
        return _split_runs(start, changes, end)


def _value_changes(column: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    return np.asarray(column[1:] != column[:-1])


def _split_runs(start: int, changes: npt.NDArray[np.bool_], end: int) -> list[tuple[int, int]]:
    bounds = [start, *(np.flatnonzero(changes) + (start + 1)).tolist(), end]
    return list(pairwise(bounds))


_TRIM_MIN: Final = 4096


class Window(Columns):
    """Dense columns over the offsets [start, end). Every earlier message is done or a straggler."""

    __slots__ = ("base", "start")

    def __init__(self, start: int = 0) -> None:
        super().__init__()
        # The offset of index 0. It trails the start, so that the columns are not moved for every message.
        self.base = start
        self.start = start

    @property
    def end(self) -> int:
        """The offset to scan next."""
        return self.base + len(self.states)

    @property
    def span(self) -> int:
        """The number of offsets covered."""
        return self.base + len(self.states) - self.start

    def offset_at(self, index: int) -> int:
        return self.base + index

    def record_finished(self, _count: int) -> None:
        """Advance the start past messages that have become done."""
        index = self.first_unfinished(self.start - self.base)
        self.start = self.base + index
        if index > _TRIM_MIN and index > len(self.states) >> 1:
            self.drop_first(index)
            self.base += index


_COMPACT_MIN: Final = 1024


class Stragglers(Columns):
    """Unfinished messages behind the window, in the order of their offsets.

    They are kept separately, because one that waits for a long time would otherwise stop the window from advancing.
    """

    __slots__ = ("finished_count", "front", "keys", "offsets")

    def __init__(self) -> None:
        super().__init__()
        self.offsets = array("q")
        # The hash of the key, 0 without a key. The window's keys can be read from the log again; these lie far behind
        # it.
        self.keys = array("q")
        self.front = 0
        self.finished_count = 0

    @property
    def unfinished(self) -> int:
        return len(self.states) - self.finished_count

    @property
    def oldest(self) -> int | None:
        """The first unfinished offset."""
        return self.offsets[self.front] if self.front < len(self.offsets) else None

    def offset_at(self, index: int) -> int:
        return self.offsets[index]

    def take_from(self, window: Window, first: int, last: int, keys: bytes) -> None:
        """Move a range here from the window; `keys` holds the hashes of their keys, or is empty."""
        start = first - window.base
        self.copy_from(window, start, start + last - first + 1)
        self.offsets.extend(range(first, last + 1))
        self.keys.frombytes(keys or bytes(8 * (last - first + 1)))

    def revive(self, offset: int, key: int) -> None:
        """Make a finished message, which may have been forgotten, available again."""
        index = bisect_left(self.offsets, offset)
        if index < len(self.offsets) and self.offsets[index] == offset:
            if self.states[index] != DONE:
                raise CorruptState(f"message {offset} cannot be redelivered before it is done")
            self.clear(index)
            self.keys[index] = key
            self.finished_count -= 1
        else:
            self.insert(index)
            self.offsets.insert(index, offset)
            self.keys.insert(index, key)
        self.front = min(self.front, index)

    def indices(self, first: int, last: int) -> tuple[int, int]:
        """Return the range of entries, done or not, for a range of offsets."""
        offsets = self.offsets
        start = bisect_left(offsets, first, self.front)
        return start, bisect_left(offsets, last + 1, start, min(len(offsets), start + last - first + 1))

    def key_of(self, offset: int) -> int:
        """Return the hash of a message's key."""
        return self.keys[bisect_left(self.offsets, offset, self.front)]

    def record_finished(self, count: int) -> None:
        """Count messages that have become done, and compact the columns when most entries are."""
        self.finished_count += count
        self.front = self.first_unfinished(self.front)
        if self.finished_count > _COMPACT_MIN and self.finished_count > len(self.states) >> 1:
            self._compact()

    def _compact(self) -> None:
        self.keep_marked(np.frombuffer(self.states, np.uint8) != DONE)

    def keep_marked(self, is_kept: npt.NDArray[np.bool_]) -> None:
        """Remove every message that is not marked, finished or not."""
        self.offsets = array("q", np.frombuffer(self.offsets, np.int64)[is_kept].tobytes())
        self.keys = array("q", np.frombuffer(self.keys, np.int64)[is_kept].tobytes())
        self.keep(is_kept)
        self.finished_count = self.states.count(DONE)
        self.front = self.first_unfinished(0)

    def find_run(self, start: int, end: int, state: int, count_max: int) -> tuple[int, int] | None:
        """Find the first consecutive messages that are in a state and in the same attempt."""
        run = super().find_run(start, end, state, count_max)
        return None if run is None else (run[0], self._contiguous_end(*run))

    def uniform_runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Split a range into runs of consecutive offsets that are equal in state, attempt, due time and holder."""
        runs = []
        for first, last in super().uniform_runs(start, end):
            begin = first
            while begin < last:
                stop = self._contiguous_end(begin, last)
                runs.append((begin, stop))
                begin = stop
        return runs

    def _contiguous_end(self, start: int, end: int) -> int:
        """Return the end of the consecutive offsets that begin at `start`."""
        if self.offsets[end - 1] - self.offsets[start] == end - 1 - start:
            return end
        offset = self.offsets[start]
        stop = start + 1
        while self.offsets[stop] == offset + stop - start:
            stop += 1
        return stop
