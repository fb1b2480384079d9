"""The durable state of a queue: what its deltas add up to. Whoever has the same deltas has the same state.

The leader of a queue decides, and changes its state by nothing but deltas too; so what it has and what is read back
after a crash cannot differ. What only the leader needs (who waits for what, what is due when) is in `queue`.
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
from millstream.broker.subscriptions.delta import Delta, DeltaKind
from millstream.broker.subscriptions.frame import FrameHeader, read_frame
from millstream.broker.subscriptions.lease import LETTER_BYTES, Revival
from millstream.core.errors import CorruptState
from millstream.core.ids import Offset
from millstream.core.subscription import QueueKey


class InternTable:
    """A number for each text, for as long as somebody refers to it."""

    __slots__ = ("_free", "_numbers", "_references", "texts")

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._numbers: dict[str, int] = {}
        self._references: list[int] = []
        self._free: list[int] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def number(self, text: str) -> int | None:
        """The number of a text that is referred to."""
        return self._numbers.get(text)

    def references(self, text: str) -> int:
        """How many messages refer to a text."""
        number = self._numbers.get(text)
        return 0 if number is None else self._references[number]

    def add_references(self, text: str, count: int) -> int:
        """The number of a text that so many more messages refer to."""
        number = self._numbers.get(text)
        if number is None:
            number = self._add(text)
        self._references[number] += count
        return number

    def remove_references(self, number: int, count: int) -> None:
        """So many messages no longer refer to it."""
        left = self._references[number] - count
        self._references[number] = left
        if left == 0:
            del self._numbers[self.texts[number]]
            self.texts[number] = ""
            self._free.append(number)

    def texts_in_use(self) -> list[str]:
        """Every text that is referred to, in the order of the alphabet."""
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

"""So many revived messages are remembered whose letters are not known to be closed."""


_REVIVED: Final = struct.Struct(f">q{LETTER_BYTES}s")


Part = tuple[Window | Stragglers, int, int]

"""Columns, and a range of indices in them."""


class WaitingRun(NamedTuple):
    """Consecutive messages that wait for the same time in the same way."""

    state: int
    first: int
    last: int
    attempt: int
    due_ms: int
    holder: int


class Fold:
    """Window, messages set aside, and counts of one queue."""

    __slots__ = (
        "counters",
        "counts",
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
        # The letter by which each message was revived last, until that letter is closed.
        self.revived: dict[int, bytes] = {}
        # Unfinished messages by state; what is done is not counted.
        self.counts = [0] * STATES
        # Messages by what has happened to them since the queue began.
        self.counters = [0] * (max(DeltaKind) + 1)
        self.redelivered = 0
        self.sequence = 0

    @property
    def oldest(self) -> Offset:
        """The first message that is not done; where the queue will look next if there is none."""
        stragglers = self.stragglers.oldest
        return Offset(self.window.start if stragglers is None else stragglers)

    @property
    def unfinished(self) -> int:
        """How many messages have been looked at and are not done."""
        return sum(self.counts) - self.counts[DONE]

    def replay(self, frame: bytes) -> FrameHeader:
        """Take a stored frame in. One that is known already is passed over, so a write can be repeated."""
        header, deltas = read_frame(frame)
        if header.key != self.key:
            raise CorruptState(f"a frame of queue {header.key} does not belong to {self.key}")
        if header.sequence <= self.sequence:
            return header
        if header.sequence != self.sequence + 1:
            raise CorruptState(f"frame {self.sequence + 1} of queue {self.key} is missing, {header.sequence} is there")
        for delta in deltas:
            self.apply(delta)
        self.sequence = header.sequence
        return header

    def apply(self, delta: Delta) -> None:
        """Let one event happen."""
        _APPLY_BY_NUMBER[delta.kind](self, delta)

    def parts(self, first: int, last: int) -> list[Part]:
        """Where the messages of a range are, the oldest first; offsets that are done may be missing."""
        window = self.window
        start = window.start
        if first >= start:
            return [(window, first - window.base, min(last + 1, window.end) - window.base)] if first <= last else []
        found: list[Part] = []
        start_index, stop = self.stragglers.indices(first, min(last, start - 1))
        if start_index < stop:
            found.append((self.stragglers, start_index, stop))
        if last >= start and window.end > start:
            found.append((window, start - window.base, min(last + 1, window.end) - window.base))
        return found

    def place(self, offset: int) -> tuple[Window | Stragglers, int] | None:
        """Where one message is, or None if it is done and forgotten, or not looked at."""
        if offset >= self.window.start:
            return (self.window, offset - self.window.base) if offset < self.window.end else None
        start, end = self.stragglers.indices(offset, offset)
        return (self.stragglers, start) if start < end else None

    def state_of(self, offset: int) -> int:
        """The state of one message that has been looked at."""
        place = self.place(offset)
        return DONE if place is None else place[0].states[place[1]]

    def waiting_runs(self, first: int, last: int) -> list[WaitingRun]:
        """The messages of a range that wait for a time: leased or parked."""
        found = []
        for columns, start, end in self.parts(first, last):
            for state in (LEASED, PARKED):
                place = columns.states.find(state, start, end)
                while place >= 0:
                    stop = run_end(columns.states, place, end)
                    found += [_waiting(columns, state, *run) for run in columns.uniform_runs(place, stop)]
                    place = columns.states.find(state, stop, end)
        return found

    def leased_to(self, worker: str) -> list[WaitingRun]:
        """Every message that a worker holds."""
        number = self.workers.number(worker)
        found: list[WaitingRun] = []
        if number is None:
            return found
        for columns in (self.stragglers, self.window):
            texts_in_use = np.frombuffer(columns.states, np.uint8) == LEASED
            texts_in_use &= np.frombuffer(columns.holders, np.uint32) == number
            places = np.flatnonzero(texts_in_use)
            del texts_in_use
            if len(places):
                for start, end in _consecutive_ranges(places):
                    found += [_waiting(columns, LEASED, *run) for run in columns.uniform_runs(start, end)]
        return found

    # -- one event each --------------------------------------------------------------------------------------

    def _require_parts(self, delta: Delta) -> list[Part]:
        """Where all messages of a delta are."""
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
            raise CorruptState(f"queue {self.key} was looked at from {delta.first} on, not from {window.end}")
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
        self.window.note_finished(filtered)

    def _apply_parked(self, delta: Delta) -> None:
        for columns, start, end in self._require_parts(delta):
            self._move(columns, start, end, PARKED)
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
        """The messages wait again, for a worker or for a time."""
        parked = delta.due_ms > delta.time_ms
        for columns, start, end in self._require_parts(delta):
            self._move(columns, start, end, PARKED if parked else AVAILABLE)
            if delta.kind == DeltaKind.RELEASED and delta.attempt < columns.attempts[start]:
                # It was returned: a delivery that nobody has looked at does not count.
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
            self._move(columns, start, end, REJECTING)
            columns.set_due(start, end, delta.time_ms)
            columns.set_holder(start, end, self.reasons.add_references(delta.reason, end - start))
        self.counters[DeltaKind.REJECTING] += count

    def _apply_planned(self, delta: Delta) -> None:
        self.plans[delta.first] = delta.extra

    def _finish(self, delta: Delta) -> None:
        """Nothing more will happen to the messages."""
        for columns, start, end in self._require_parts(delta):
            self._end(columns, start, end)
        self.counters[delta.kind] += delta.last - delta.first + 1

    def _apply_failed(self, delta: Delta) -> None:
        """The messages have ended as dead letters, or without a trace."""
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
            left = 0
            for start_index, stop in columns.uniform_runs(start, end):
                if columns.states[start_index] != DONE:
                    self._leave_state(columns, start_index, stop - start_index)
                    columns.set_state(start_index, stop, DONE)
                    left += stop - start_index
            columns.note_finished(left)
        self._drop_plans(delta.first, delta.last)
        for offset in [offset for offset in self.revived if offset <= delta.last]:
            del self.revived[offset]
        self.counters[DeltaKind.RETENTION_CUT] += before - self.unfinished

    def _apply_left_behind(self, delta: Delta) -> None:
        window = self.window
        start = delta.first - window.base
        if delta.first < window.start or delta.last >= window.end:
            raise CorruptState(f"queue {self.key} has no messages {delta.first} to {delta.last} to set aside")
        self.stragglers.take_from(window, delta.first, delta.last, delta.extra)
        window.set_state(start, start + delta.last - delta.first + 1, DONE)
        window.note_finished(delta.last - delta.first + 1)
        self.counters[DeltaKind.LEFT_BEHIND] += delta.last - delta.first + 1

    def _apply_revived(self, delta: Delta) -> None:
        count = delta.last - delta.first + 1
        if len(delta.extra) != count * _REVIVED.size:
            raise CorruptState(f"{delta.kind.name} of queue {self.key} has keys for other offsets")
        for offset, (key, letter) in enumerate(_REVIVED.iter_unpack(delta.extra), delta.first):
            if offset >= self.window.start:
                columns, index = self.window, offset - self.window.base
                if offset >= self.window.end or columns.states[index] != DONE:
                    raise CorruptState(f"{delta.kind.name} {offset}: queue {self.key} is not done with it")
                columns.clear(index)
            else:
                self.stragglers.revive(offset, key)
            self.revived.pop(offset, None)
            self.revived[offset] = letter
        while len(self.revived) > REVIVED_MAX:
            del self.revived[next(iter(self.revived))]
        self.counts[AVAILABLE] += count
        self.counters[delta.kind] += count

    def _apply_letter_closed(self, delta: Delta) -> None:
        for offset in range(delta.first, delta.last + 1):
            self.revived.pop(offset, None)
        self.counters[delta.kind] += delta.last - delta.first + 1

    # -- their steps -----------------------------------------------------------------------------------------

    def _move(self, columns: Window | Stragglers, start: int, end: int, state: int) -> None:
        """Let messages that are in the same state and with the same holder go to another state."""
        self._leave_state(columns, start, end - start)
        columns.set_state(start, end, state)
        self.counts[state] += end - start

    def _end(self, columns: Window | Stragglers, start: int, end: int) -> None:
        self._leave_state(columns, start, end - start)
        columns.set_state(start, end, DONE)
        columns.note_finished(end - start)

    def _leave_state(self, columns: Window | Stragglers, start: int, count: int) -> None:
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
    """Keys and letters of messages, as a delta has them."""
    return b"".join(_REVIVED.pack(one.key, one.letter) for one in revivals)


def _waiting(columns: Window | Stragglers, state: int, start: int, end: int) -> WaitingRun:
    first = columns.offset_at(start)
    last = first + end - start - 1
    return WaitingRun(state, first, last, columns.attempts[start], columns.dues[start], columns.holders[start])


def _consecutive_ranges(places: npt.NDArray[np.intp]) -> list[tuple[int, int]]:
    """Cut ascending places into ranges."""
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
}

_APPLY_BY_NUMBER: Final = tuple(_APPLY[DeltaKind(max(kind, 1))] for kind in range(max(DeltaKind) + 1))

"""The same by number, as this is asked for with every event."""
