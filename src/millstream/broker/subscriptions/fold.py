"""The durable state of a queue: the fold of its deltas.

The leader changes its state only by deltas, too, so what it holds and what is restored after a crash cannot differ.
State that only the leader needs (waiting workers, due times) is in `queue`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.broker.subscriptions.columns import (
    AVAILABLE,
    DONE,
    LEASED,
    PARKED,
    REJECTING,
    STATES,
    Stragglers,
    Window,
    run_end,
)
from millstream.broker.subscriptions.frame import FrameHeader, read_frame
from millstream.broker.subscriptions.lease import LETTER_BYTES, Delta, DeltaKind, Revival
from millstream.core.errors import CorruptState
from millstream.core.ids import Offset
from millstream.core.subscription import QueueKey


class InternTable:
    """Assigns a number to each text while it is referenced."""

    __slots__ = ("_free", "_numbers", "_references", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._references: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, text: str) -> int | None:
        """Return the number of a referenced text."""
        return self._numbers.get(text)

    def references(self, text: str) -> int:
        number = self._numbers.get(text)
        return 0 if number is None else self._references[number]

    def add_references(self, text: str, count: int) -> int:
        """Return the number of a text, adding references to it."""
        number = self._numbers.get(text)
        if number is None:
            number = self._add(text)
        self._references[number] += count
        return number

    def remove_references(self, number: int, count: int) -> None:
        """Remove references, and free the number when none is left."""
        remaining = self._references[number] - count
        self._references[number] = remaining
        if remaining == 0:
            del self._numbers[self.texts[number]]
            self.texts[number] = ""
            self._free.append(number)

    def texts_in_use(self) -> list[str]:
        return sorted(self._numbers)

    def _add(self, text: str) -> int:
        if self._free:
            number = self._free.pop()
            self.texts[number] = text
        else:
            number = len(self.texts)
            self.texts.append(text)
            self._references.append(0)
        self._numbers[text] = number
        return number


REVIVED_MAX: Final = 100_000
"""The number of revived messages that are remembered until their letters are closed."""

INCOMPLETE: Final = -1
"""The sequence of a state to which a part of a frame was applied: no frame continues it, that one included."""

_REVIVED: Final = struct.Struct(f">q{LETTER_BYTES}s")

Part = tuple[Window | Stragglers, int, int]
"""Columns, and a range of indexes in them."""


class WaitingRun(NamedTuple):
    """Consecutive messages that wait for the same time in the same way."""

    state: int
    first: int
    last: int
    attempt: int
    due_ms: int
    holder: int


class Fold:
    """The window, the stragglers and the counters of one queue."""

    __slots__ = (
        "counters",
        "counts",
        "has_ledger",
        "is_started",
        "key",
        "plans",
        "reasons",
        "redelivered",
        "revived",
        "sequence",
        "stragglers",
        "window",
        "workers",
    )

    def __init__(self, key: QueueKey) -> None:
        self.key = key
        self.is_started = False
        self.window = Window()
        self.stragglers = Stragglers()
        self.workers = InternTable()
        self.reasons = InternTable()
        self.plans: dict[int, bytes] = {}
        # The letter by which each message was last revived, until that letter is closed.
        self.revived: dict[int, bytes] = {}
        # Unfinished messages by state; finished ones are not counted.
        self.counts = [0] * STATES
        # The number of messages per kind of event since the queue started.
        self.counters = [0] * (max(DeltaKind) + 1)
        self.redelivered = 0
        self.sequence = 0
        # Whether the last frame was one for the ledger.
        self.has_ledger = False

    @property
    def oldest(self) -> Offset:
        """The first unfinished message, or the next offset to scan if there is none."""
        stragglers = self.stragglers.oldest
        return Offset(self.window.start if stragglers is None else stragglers)

    @property
    def unfinished(self) -> int:
        """The number of scanned messages that are not done."""
        return sum(self.counts) - self.counts[DONE]

    def replay(self, frame: bytes) -> FrameHeader:
        """Apply a stored frame, ignoring one that was applied before, so that a write can be repeated."""
        header, deltas, _names = read_frame(frame)
        if header.key != self.key:
            raise CorruptState(f"a frame of queue {header.key} does not belong to {self.key}")
        if header.sequence <= self.sequence:
            return header
        if self.sequence == INCOMPLETE:
            raise CorruptState(f"a frame of queue {self.key} could not be applied as a whole, so no other one can")
        if header.sequence != self.sequence + 1:
            raise CorruptState(f"frame {self.sequence + 1} of queue {self.key} is missing; found {header.sequence}")
        self.sequence = INCOMPLETE
        for delta in deltas:
            self.apply(delta)
        self.sequence = header.sequence
        self.has_ledger = header.has_ledger
        return header

    def unfinished_ranges(self) -> list[tuple[int, int]]:
        """Return the scanned messages that are not done, as ascending ranges [start, end)."""
        ranges: list[tuple[int, int]] = []
        unfinished = np.flatnonzero(np.frombuffer(self.stragglers.states, np.uint8) != DONE)
        if len(unfinished):
            ranges += _consecutive_ranges(np.frombuffer(self.stragglers.offsets, np.int64)[unfinished])
        unfinished = np.flatnonzero(np.frombuffer(self.window.states, np.uint8) != DONE)
        if len(unfinished):
            ranges += _consecutive_ranges(unfinished + self.window.base)
        return ranges

    def apply(self, delta: Delta) -> None:
        _APPLY_BY_NUMBER[delta.kind](self, delta)

    def parts(self, first: int, last: int) -> list[Part]:
        """Locate the messages of a range, the oldest first; finished offsets may be missing."""
        window = self.window
        start = window.start
        if first >= start:
            return [(window, first - window.base, min(last + 1, window.end) - window.base)] if first <= last else []
        parts: list[Part] = []
        start_index, stop = self.stragglers.indices(first, min(last, start - 1))
        if start_index < stop:
            parts.append((self.stragglers, start_index, stop))
        if last >= start and window.end > start:
            parts.append((window, start - window.base, min(last + 1, window.end) - window.base))
        return parts

    def place(self, offset: int) -> tuple[Window | Stragglers, int] | None:
        """Locate one message; None if it is forgotten or not scanned yet."""
        if offset >= self.window.start:
            return (self.window, offset - self.window.base) if offset < self.window.end else None
        start, end = self.stragglers.indices(offset, offset)
        return (self.stragglers, start) if start < end else None

    def state_of(self, offset: int) -> int:
        place = self.place(offset)
        return DONE if place is None else place[0].states[place[1]]

    def waiting_runs(self, first: int, last: int) -> list[WaitingRun]:
        """Return the leased and parked messages of a range."""
        runs = []
        for columns, start, end in self.parts(first, last):
            for state in (LEASED, PARKED):
                place = columns.states.find(state, start, end)
                while place >= 0:
                    stop = run_end(columns.states, place, end)
                    runs += [_waiting_run(columns, state, *run) for run in columns.uniform_runs(place, stop)]
                    place = columns.states.find(state, stop, end)
        return runs

    def count_due(self, now_ms: int) -> int:
        """Count the parked messages whose time has come; only the leader's queue makes them available."""
        if not self.counts[PARKED]:
            return 0
        return sum(
            int(np.count_nonzero(np.frombuffer(columns.dues, np.int64)[states == PARKED] <= now_ms))
            for columns in (self.stragglers, self.window)
            for states in (np.frombuffer(columns.states, np.uint8),)
        )

    def leased_to(self, worker: str) -> list[WaitingRun]:
        number = self.workers.number(worker)
        return [] if number is None else self._leased_runs(number)

    def leased_runs(self) -> list[WaitingRun]:
        """Return every message that some worker holds, the oldest first."""
        return self._leased_runs(None) if self.counts[LEASED] else []

    def _leased_runs(self, holder: int | None) -> list[WaitingRun]:
        runs: list[WaitingRun] = []
        for columns in (self.stragglers, self.window):
            held = np.frombuffer(columns.states, np.uint8) == LEASED
            if holder is not None:
                held &= np.frombuffer(columns.holders, np.uint32) == holder
            places = np.flatnonzero(held)
            del held
            if len(places):
                for start, end in _consecutive_ranges(places):
                    runs += [_waiting_run(columns, LEASED, *run) for run in columns.uniform_runs(start, end)]
        return runs

    def cut_after(self, end: int) -> bool:
        """Forget every message from an offset on, as if it had never been scanned; return whether there was one.

        The counters of events stay: they are about the past.
        """
        if self.window.end <= end and (not len(self.stragglers) or self.stragglers.offsets[-1] < end):
            return False
        for columns, start, stop in self.parts(end, max(self.window.end, end + 1) - 1):
            for first, last in columns.uniform_runs(start, stop):
                if columns.states[first] != DONE:
                    self._uncount_state(columns, first, last - first)
        kept = [offset < end for offset in self.stragglers.offsets]
        if not all(kept):
            self.stragglers.keep_marked(np.array(kept, np.bool_))
        if self.window.start >= end:
            self.window = Window(end)
        else:
            self.window.drop_from(end - self.window.base)
        for table in (self.plans, self.revived):
            for offset in [offset for offset in table if offset >= end]:
                del table[offset]
        return True

    # -- one event each --------------------------------------------------------------------------------------

    def _require_parts(self, delta: Delta) -> list[Part]:
        """Locate all messages of a delta, which must exist."""
        window = self.window
        first, last = delta.first, delta.last
        base = window.base
        if window.start <= first <= last < base + len(window.states):
            return [(window, first - base, last - base + 1)]
        parts = self.parts(first, last)
        if sum(end - start for _, start, end in parts) != delta.last - delta.first + 1:
            raise CorruptState(
                f"{delta.kind.name} {delta.first} to {delta.last}: queue {self.key} has no such messages"
            )
        return parts

    def _apply_start(self, delta: Delta) -> None:
        self.is_started = True
        self.window = Window(delta.first)

    def _apply_scanned(self, delta: Delta) -> None:
        window = self.window
        if delta.first != window.base + len(window.states) or delta.last < delta.first:
            raise CorruptState(f"queue {self.key} was scanned from {delta.first} on, not from {window.end}")
        count = delta.last - delta.first + 1
        window.grow(count)
        self.counts[AVAILABLE] += count
        self.counters[delta.kind] += count

    def _apply_filtered(self, delta: Delta) -> None:
        if not delta.extra:
            self._finish(delta)
            return
        count = delta.last - delta.first + 1
        start = delta.first - self.window.base
        bits = np.frombuffer(delta.extra, np.uint8)
        if len(bits) != (count + 7) // 8 or start < 0 or delta.last >= self.window.end:
            raise CorruptState(f"{delta.kind.name} of queue {self.key} has bits for other offsets")
        filtered_out = np.unpackbits(bits, count=count, bitorder="little").astype(np.bool_)
        np.frombuffer(self.window.states, np.uint8)[start : start + count][filtered_out] = DONE
        filtered = int(np.count_nonzero(filtered_out))
        self.counts[AVAILABLE] -= filtered
        self.counters[delta.kind] += filtered
        self.window.record_finished(filtered)

    def _apply_parked(self, delta: Delta) -> None:
        for columns, start, end in self._require_parts(delta):
            self._set_state(columns, start, end, PARKED)
            columns.set_due(start, end, delta.due_ms)
        self.counters[DeltaKind.PARKED] += delta.last - delta.first + 1

    def _apply_acquired(self, delta: Delta) -> None:
        kind, first, last, attempt, due_ms, worker, time_ms, _, _ = delta
        count = last - first + 1
        number = self.workers.add_references(worker, count)
        for columns, start, end in self._require_parts(delta):
            columns.lease(start, end, attempt, due_ms, number, time_ms)
        counts = self.counts
        counts[AVAILABLE] -= count
        counts[LEASED] += count
        self.counters[kind] += count
        if attempt > 1:
            self.redelivered += count

    def _apply_returned(self, delta: Delta) -> None:
        """Make messages available again, or park them until a time."""
        parked = delta.due_ms > delta.time_ms
        for columns, start, end in self._require_parts(delta):
            self._set_state(columns, start, end, PARKED if parked else AVAILABLE)
            if delta.kind == DeltaKind.RELEASED and delta.attempt < columns.attempts[start]:
                # The message was returned unseen, so the delivery does not count.
                columns.attempts[start:end] = bytes((delta.attempt,)) * (end - start)
            if parked:
                columns.set_due(start, end, delta.due_ms)
        self.counters[delta.kind] += delta.last - delta.first + 1

    def _apply_extended(self, delta: Delta) -> None:
        for columns, start, end in self._require_parts(delta):
            columns.set_due(start, end, delta.due_ms)
        self.counters[DeltaKind.EXTENDED] += delta.last - delta.first + 1

    def _apply_rejecting(self, delta: Delta) -> None:
        count = delta.last - delta.first + 1
        for columns, start, end in self._require_parts(delta):
            self._set_state(columns, start, end, REJECTING)
            columns.set_due(start, end, delta.time_ms)
            columns.set_holder(start, end, self.reasons.add_references(delta.reason, end - start))
        self.counters[DeltaKind.REJECTING] += count

    def _apply_planned(self, delta: Delta) -> None:
        self.plans[delta.first] = delta.extra

    def _finish(self, delta: Delta) -> None:
        for columns, start, end in self._require_parts(delta):
            self._set_done(columns, start, end)
        self.counters[delta.kind] += delta.last - delta.first + 1

    def _apply_failed(self, delta: Delta) -> None:
        """Mark messages as dead-lettered or dropped, and discard their plans."""
        self._finish(delta)
        if self.plans:
            self._drop_plans(delta.first, delta.last)

    def _apply_sought(self, delta: Delta) -> None:
        self._clear(delta.first)
        self.counters[DeltaKind.SOUGHT] += 1

    def _apply_retention_cut(self, delta: Delta) -> None:
        if delta.last >= self.window.end:
            cut = self.unfinished + delta.last + 1 - self.window.end
            self._clear(delta.last + 1)
            self.counters[DeltaKind.RETENTION_CUT] += cut
            return
        before = self.unfinished
        for columns, start, end in self.parts(delta.first, delta.last):
            dropped = 0
            for start_index, stop in columns.uniform_runs(start, end):
                if columns.states[start_index] != DONE:
                    self._uncount_state(columns, start_index, stop - start_index)
                    columns.set_state(start_index, stop, DONE)
                    dropped += stop - start_index
            columns.record_finished(dropped)
        self._drop_plans(delta.first, delta.last)
        for offset in [offset for offset in self.revived if offset <= delta.last]:
            del self.revived[offset]
        self.counters[DeltaKind.RETENTION_CUT] += before - self.unfinished

    def _apply_left_behind(self, delta: Delta) -> None:
        window = self.window
        start = delta.first - window.base
        if delta.first < window.start or delta.last >= window.end:
            raise CorruptState(f"queue {self.key} has no messages {delta.first} to {delta.last} to leave behind")
        self.stragglers.take_from(window, delta.first, delta.last, delta.extra)
        window.set_state(start, start + delta.last - delta.first + 1, DONE)
        window.record_finished(delta.last - delta.first + 1)
        self.counters[DeltaKind.LEFT_BEHIND] += delta.last - delta.first + 1

    def _apply_revived(self, delta: Delta) -> None:
        count = delta.last - delta.first + 1
        if len(delta.extra) != count * _REVIVED.size:
            raise CorruptState(f"{delta.kind.name} of queue {self.key} has keys for other offsets")
        for offset, (key, letter) in enumerate(_REVIVED.iter_unpack(delta.extra), delta.first):
            if offset >= self.window.start:
                columns, index = self.window, offset - self.window.base
                if offset >= self.window.end or columns.states[index] != DONE:
                    raise CorruptState(f"{delta.kind.name} {offset}: the message is not done in queue {self.key}")
                columns.clear(index)
            else:
                self.stragglers.revive(offset, key)
            self.revived.pop(offset, None)
            self.revived[offset] = letter
        while len(self.revived) > REVIVED_MAX:
            del self.revived[next(iter(self.revived))]
        self.counts[AVAILABLE] += count
        self.counters[delta.kind] += count

    def _apply_window(self, delta: Delta) -> None:
        if delta.first != self.window.end:
            raise CorruptState(f"{delta.kind.name} of queue {self.key} is at {delta.first}, not at {self.window.end}")
        self.counters[delta.kind] += 1

    def _apply_letter_closed(self, delta: Delta) -> None:
        for offset in range(delta.first, delta.last + 1):
            self.revived.pop(offset, None)
        self.counters[delta.kind] += delta.last - delta.first + 1

    # -- their steps -----------------------------------------------------------------------------------------

    def _set_state(self, columns: Window | Stragglers, start: int, end: int, state: int) -> None:
        """Move messages with equal state and holder to another state."""
        self._uncount_state(columns, start, end - start)
        columns.set_state(start, end, state)
        self.counts[state] += end - start

    def _set_done(self, columns: Window | Stragglers, start: int, end: int) -> None:
        self._uncount_state(columns, start, end - start)
        columns.set_state(start, end, DONE)
        columns.record_finished(end - start)

    def _uncount_state(self, columns: Window | Stragglers, start: int, count: int) -> None:
        state = columns.states[start]
        self.counts[state] -= count
        if state == LEASED:
            self.workers.remove_references(columns.holders[start], count)
        elif state == REJECTING:
            self.reasons.remove_references(columns.holders[start], count)

    def _clear(self, start: int) -> None:
        self.window = Window(start)
        self.stragglers = Stragglers()
        self.workers = InternTable()
        self.reasons = InternTable()
        self.plans = {}
        self.revived = {}
        self.counts = [0] * STATES

    def _drop_plans(self, first: int, last: int) -> None:
        if first == last:
            self.plans.pop(first, None)
            return
        for offset in [offset for offset in self.plans if first <= offset <= last]:
            del self.plans[offset]


def encode_revivals(revivals: Iterable[Revival]) -> bytes:
    """Encode the keys and letters of revived messages for a delta."""
    return b"".join(_REVIVED.pack(revival.key, revival.letter) for revival in revivals)


def _waiting_run(columns: Window | Stragglers, state: int, start: int, end: int) -> WaitingRun:
    first = columns.offset_at(start)
    last = first + end - start - 1
    return WaitingRun(state, first, last, columns.attempts[start], columns.dues[start], columns.holders[start])


def _consecutive_ranges(places: npt.NDArray[np.int64]) -> list[tuple[int, int]]:
    """Group ascending indexes into ranges."""
    cuts = np.flatnonzero(np.diff(places) != 1)
    starts = places[np.concatenate(([0], cuts + 1))]
    ends = places[np.concatenate((cuts, [len(places) - 1]))] + 1
    return list(zip(starts.tolist(), ends.tolist(), strict=True))


_APPLY: Final[dict[DeltaKind, Callable[[Fold, Delta], None]]] = {
    DeltaKind.START: Fold._apply_start,
    DeltaKind.SCANNED: Fold._apply_scanned,
    DeltaKind.FILTERED: Fold._apply_filtered,
    DeltaKind.ABSENT: Fold._apply_filtered,
    DeltaKind.PARKED: Fold._apply_parked,
    DeltaKind.DUE: Fold._apply_returned,
    DeltaKind.ACQUIRED: Fold._apply_acquired,
    DeltaKind.ACCEPTED: Fold._finish,
    DeltaKind.RELEASED: Fold._apply_returned,
    DeltaKind.EXPIRED: Fold._apply_returned,
    DeltaKind.EXTENDED: Fold._apply_extended,
    DeltaKind.REJECTING: Fold._apply_rejecting,
    DeltaKind.PLANNED: Fold._apply_planned,
    DeltaKind.DEAD_LETTERED: Fold._apply_failed,
    DeltaKind.DROPPED: Fold._apply_failed,
    DeltaKind.SOUGHT: Fold._apply_sought,
    DeltaKind.RETENTION_CUT: Fold._apply_retention_cut,
    DeltaKind.LEFT_BEHIND: Fold._apply_left_behind,
    DeltaKind.REVIVED: Fold._apply_revived,
    DeltaKind.LETTER_CLOSED: Fold._apply_letter_closed,
    DeltaKind.WINDOW: Fold._apply_window,
}

_APPLY_BY_NUMBER: Final = tuple(_APPLY[DeltaKind(max(kind, 1))] for kind in range(max(DeltaKind) + 1))
"""The functions of `_APPLY` by the number of the kind, since every event is looked up."""
