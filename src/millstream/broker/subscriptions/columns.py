"""The state of messages in columns: 22 bytes a message, and no object for any of them.

The columns are plain byte arrays and arrays of numbers, since what is done most is small: setting a few entries,
and looking for the next byte of a kind, which the standard library does in compiled code without numpy's overhead
for each call. What looks at many entries at once borrows them as numpy arrays.
"""

from __future__ import annotations

from array import array
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

AVAILABLE: Final = 0

"""Waits for a worker."""

LEASED: Final = 1

"""With a worker, until its lease ends."""

PARKED: Final = 2

"""Waits for a time: it is delayed, or it failed and will be tried again."""

BLOCKED: Final = 3

"""Waits for an earlier message of its key. Only the leader of a queue knows this state; stored, it is available."""

REJECTING: Final = 4

"""On its way to the dead letter topic."""

DONE: Final = 5

"""Nothing more happens to it: accepted, dead-lettered, dropped, filtered out, or no message at all."""


STATES: Final = 6


_RUN_STEP: Final = 32

_LEASED_BYTE: Final = bytes([LEASED])


def run_end(column: bytearray, start: int, end: int) -> int:
    """Where the run of equal bytes that begins at `start` ends, `end` at the latest."""
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
    """The columns, by index; what offset an index stands for is up to `Window` and `Aside`."""

    __slots__ = ("attempts", "dues", "first_delivered", "holders", "states")

    def __init__(self) -> None:
        self.states = bytearray()
        self.attempts = bytearray()
        # When the lease ends, the wait is over, or the message was rejected.
        self.dues = array("q")
        # The number of the worker that has the lease, or of the reason for which the message was rejected.
        self.holders = array("I")
        # When the message was delivered for the first time.
        self.first_delivered = array("q")

    def __len__(self) -> int:
        return len(self.states)

    def grow(self, count: int) -> None:
        """Add messages at the end, all of them available."""
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
        """Add messages of other columns at the end."""
        self.states += other.states[start:end]
        self.attempts += other.attempts[start:end]
        self.dues += other.dues[start:end]
        self.holders += other.holders[start:end]
        self.first_delivered += other.first_delivered[start:end]

    def drop_first(self, count: int) -> None:
        """Forget the first messages."""
        del self.states[:count]
        del self.attempts[:count]
        del self.dues[:count]
        del self.holders[:count]
        del self.first_delivered[:count]

    def keep(self, kept: npt.NDArray[np.bool_]) -> None:
        """Forget every message that is not marked."""
        self.states = bytearray(np.frombuffer(self.states, np.uint8)[kept].tobytes())
        self.attempts = bytearray(np.frombuffer(self.attempts, np.uint8)[kept].tobytes())
        self.dues = array("q", np.frombuffer(self.dues, np.int64)[kept].tobytes())
        self.holders = array("I", np.frombuffer(self.holders, np.uint32)[kept].tobytes())
        self.first_delivered = array("q", np.frombuffer(self.first_delivered, np.int64)[kept].tobytes())

    def insert(self, index: int) -> None:
        """Make room for a message that is available, and was never delivered."""
        self.states.insert(index, AVAILABLE)
        self.attempts.insert(index, 0)
        self.dues.insert(index, 0)
        self.holders.insert(index, 0)
        self.first_delivered.insert(index, 0)

    # -- changing them ---------------------------------------------------------------------------------------

    def set_state(self, start: int, end: int, state: int) -> None:
        """Set the state of messages."""
        if end - start == 1:
            self.states[start] = state
        else:
            self.states[start:end] = bytes((state,)) * (end - start)

    def clear(self, index: int) -> None:
        """Have a message available as if it had never been delivered."""
        self.states[index] = AVAILABLE
        self.attempts[index] = 0
        self.dues[index] = self.holders[index] = self.first_delivered[index] = 0

    def set_due(self, start: int, end: int, due_ms: int) -> None:
        """Set the time of messages."""
        if end - start == 1:
            self.dues[start] = due_ms
        else:
            self.dues[start:end] = array("q", (due_ms,)) * (end - start)

    def set_holder(self, start: int, end: int, holder: int) -> None:
        """Set the worker or the reason of messages."""
        if end - start == 1:
            self.holders[start] = holder
        else:
            self.holders[start:end] = array("I", (holder,)) * (end - start)

    def lease(self, start: int, end: int, attempt: int, due_ms: int, worker: int, now_ms: int) -> None:
        """Lease messages to a worker."""
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

    # -- looking at them -------------------------------------------------------------------------------------

    def first_unfinished(self, start: int) -> int:
        """The first index from `start` on that is not done."""
        states = self.states
        if start < len(states) and states[start] == DONE:
            return run_end(states, start, len(states))
        return start

    def is_leased_to(self, start: int, end: int, worker: int) -> bool:
        """Whether one worker holds all of these."""
        if end - start == 1:
            return self.states[start] == LEASED and self.holders[start] == worker
        count = end - start
        return self.states.count(LEASED, start, end) == count and self.holders[start:end] == (
            array("I", (worker,)) * count
        )

    def find_run(self, start: int, end: int, state: int, count_max: int) -> tuple[int, int] | None:
        """The first messages in a state that stand side by side in the same attempt."""
        start = self.states.find(state, start, end)
        if start < 0:
            return None
        if count_max == 1:
            return start, start + 1
        end = run_end(self.states, start, min(end, start + count_max))
        return start, run_end(self.attempts, start, end)

    def attempt_runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut a range into runs of the same attempt."""
        if end - start == 1 or self.attempts.count(self.attempts[start], start, end) == end - start:
            return [(start, end)]
        return _split(start, _changes(np.frombuffer(self.attempts, np.uint8)[start:end]), end)

    def uniform_runs(self, start: int, end: int) -> list[tuple[int, int]]:
        """Cut a range into runs that are the same in everything that counts for an event."""
        if end - start == 1:
            return [(start, end)]
        changes = _changes(np.frombuffer(self.states, np.uint8)[start:end])
        changes |= _changes(np.frombuffer(self.attempts, np.uint8)[start:end])
        changes |= _changes(np.frombuffer(self.dues, np.int64)[start:end])
        changes |= _changes(np.frombuffer(self.holders, np.uint32)[start:end])
        return _split(start, changes, end)


def _changes(column: npt.NDArray[np.generic]) -> npt.NDArray[np.bool_]:
    return np.asarray(column[1:] != column[:-1])


def _split(start: int, changes: npt.NDArray[np.bool_], end: int) -> list[tuple[int, int]]:
    bounds = [start, *(np.flatnonzero(changes) + (start + 1)).tolist(), end]
    return list(pairwise(bounds))
