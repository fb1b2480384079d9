"""Decide which worker holds which message of one subscription on one partition. Pure: no clock, no I/O.

Every change is a delta that is applied to the `Fold` and kept until `drain`, so that the stored deltas reproduce the
state. State that may be lost with the process is rebuilt from the fold: what is available next (`Supply`), what is due
when (`DueIndex`), and whose turn it is per key (`KeyOrder`).

`now_ms` is the wall clock. Whatever is due by then happens first, so an expired lease is never settled. When the wall
clock is set back, leases and retry delays are shortened accordingly.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.broker.subscriptions.batch_scan import ScanResult
from millstream.broker.subscriptions.columns import (
    AVAILABLE,
    BLOCKED,
    DONE,
    LEASED,
    PARKED,
    REJECTING,
    Stragglers,
    Window,
)
from millstream.broker.subscriptions.fold import Fold, encode_revivals
from millstream.broker.subscriptions.frame import FrameHeader, LedgerNames, LedgerWindow, encode_window, write_frame
from millstream.broker.subscriptions.lease import Delta, DeltaKind, Lease, RejectedMessage, Revival, Settlement
from millstream.broker.subscriptions.snapshot import read_snapshot
from millstream.broker.subscriptions.supply import NEVER_MS, DueIndex, KeyOrder, Supply
from millstream.core.errors import CoordinatorUnavailable, CorruptState, InvalidRecordState, PolicyViolation
from millstream.core.ids import Offset
from millstream.core.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, QueueKey, SubscriptionSettings, Verb

CLOCK_STEP_MS: Final = 1000
"""Smaller steps back of the clock are ignored: everything ends late by at most this."""


def shift_deadlines(fold: Fold, by_ms: int, now_ms: int) -> Iterator[Delta]:
    """Yield deltas that end leases and retry delays earlier; messages published with a delay keep their time."""
    for run in fold.waiting_runs(0, fold.window.end):
        due_ms = run.due_ms - by_ms
        if run.state == LEASED:
            worker = fold.workers.texts[run.holder]
            yield Delta(DeltaKind.EXTENDED, run.first, run.last, run.attempt, due_ms, worker, now_ms)
        elif run.attempt:
            yield Delta(DeltaKind.PARKED, run.first, run.last, run.attempt, due_ms, "", now_ms)


WINDOW_MAX: Final = 1_000_000

PARKED_MAX: Final = 1_000_000

DENSE_MAX: Final = 65_536
"""A larger window leaves behind messages that hold its start back."""

ATTEMPTS_COUNTED_MAX: Final = 255

REASON_LENGTH_MAX: Final = 500

REASONS_MAX: Final = 1024
"""The number of different rejection reasons kept at a time; further ones are dropped."""

_PENDING_MAX: Final = 1000

_STRAGGLER_STEP: Final = 4096

_NO_LIMIT: Final = 2**63 - 1

_ACCEPT: Final = Verb.ACCEPT

_ATTEMPTS_EXHAUSTED: Final = "all attempts have failed"

_ACQUIRED: Final = DeltaKind.ACQUIRED

_ACCEPTED: Final = DeltaKind.ACCEPTED

_MERGEABLE: Final = (DeltaKind.SCANNED, DeltaKind.ACQUIRED, DeltaKind.ACCEPTED, DeltaKind.LETTER_CLOSED)

_DEFERRABLE: Final = (
    DeltaKind.SCANNED,
    DeltaKind.FILTERED,
    DeltaKind.ABSENT,
    DeltaKind.PARKED,
    DeltaKind.DUE,
    DeltaKind.LEFT_BEHIND,
    DeltaKind.LETTER_CLOSED,
)
"""Deltas that a scan would find again after a crash, or that do not matter then; they wait for the next write."""

_IS_MERGEABLE: Final = tuple(kind in _MERGEABLE for kind in range(max(DeltaKind) + 1))

_IS_DEFERRABLE: Final = tuple(kind in _DEFERRABLE for kind in range(max(DeltaKind) + 1))
"""Both indexed by number, since every event looks them up."""


class Counts(NamedTuple):
    """The number of scanned, unfinished messages by state."""

    available: int
    leased: int
    parked: int
    blocked: int
    rejecting: int
    stragglers: int
    """How many of them the window has left behind."""


def counts_of(fold: Fold) -> Counts:
    return Counts(
        available=fold.counts[AVAILABLE],
        leased=fold.counts[LEASED],
        parked=fold.counts[PARKED],
        blocked=fold.counts[BLOCKED],
        rejecting=fold.counts[REJECTING],
        stragglers=fold.stragglers.unfinished,
    )


class Queue:
    """The state machine that the leader of a partition runs for one subscription."""

    def __init__(
        self,
        key: QueueKey,
        settings: SubscriptionSettings,
        *,
        leader_epoch: int,
        snapshot: bytes | None = None,
        window_max: int = WINDOW_MAX,
        parked_max: int = PARKED_MAX,
        dense_max: int = DENSE_MAX,
    ) -> None:
        """Restore from a snapshot; without one, `begin` sets the start."""
        self.settings = settings
        """May be replaced, except for `ordered`: a queue that changes it is restored from a snapshot."""
        self.filter_version = 0
        """Written into every frame, to record which filter decided."""
        self.ledger: LedgerNames | None = None
        """Written into every frame if its events are for the ledger."""
        self._leader_epoch = leader_epoch
        self._window_max = window_max
        self._parked_max = parked_max
        self._dense_max = dense_max
        self._fold = Fold(key) if snapshot is None else read_snapshot(snapshot)
        if self._fold.key != key:
            raise CorruptState(f"the snapshot of queue {self._fold.key} does not belong to {key}")
        self._pending: list[Delta] = []
        self._is_urgent = False
        self.has_leases = False
        """Whether leases wait to be stored that may be lost in a crash, and so can wait for something urgent."""
        self._order = KeyOrder(0) if settings.ordered else None
        self._rebuild()

    def _rebuild(self) -> None:
        """Rebuild the state that is not stored; also called when an empty window moves elsewhere."""
        fold, start = self._fold, self._fold.window.start
        self._stragglers_checked_at = 0
        self._ticked_ms = 0
        self._dues = DueIndex(self._due_runs)
        waiting = fold.waiting_runs(0, fold.window.end)
        for run in waiting:
            self._dues.add(run.first, run.last, run.due_ms)
        holding = [(run.first, run.last) for run in waiting if run.attempt and run.first >= start]
        self._order = None if self._order is None else KeyOrder(start, holding)
        self._supply = Supply(fold, self._order)
        if self._order is None:
            self._supply.add_returned(0, start - 1)
        elif not holding:
            self._supply.admit_key_holders(self._order)

    # -- properties ------------------------------------------------------------------------------------------

    @property
    def fold(self) -> Fold:
        return self._fold

    @property
    def is_started(self) -> bool:
        return self._fold.is_started

    @property
    def next_scan_offset(self) -> Offset:
        window, order = self._fold.window, self._order
        if order is None:
            # Asked for several times with every message, so without a call of `end`.
            return Offset(window.base + len(window.states))
        return Offset(max(order.next_scan_offset, window.start))

    @property
    def room(self) -> int:
        """The number of offsets that may be scanned; 0 while too many messages wait."""
        if self._order is not None and self._order.has_unread_holders:
            return self._order.scan_offsets_max
        window = self._fold.window
        return max(0, self._window_max - window.span) + window.end - self.next_scan_offset

    @property
    def is_ready(self) -> bool:
        """Whether messages can be leased; after a restart an ordered queue first learns which messages hold a key."""
        return self._order is None or self._order.is_ready

    @property
    def next_due_ms(self) -> int | None:
        """When to call `tick`: never too late, sometimes too early."""
        return None if self._dues.next_ms == NEVER_MS else self._dues.next_ms

    @property
    def oldest(self) -> Offset:
        """The first unfinished message, or the next offset to scan."""
        return self._fold.oldest

    @property
    def counts(self) -> Counts:
        return counts_of(self._fold)

    @property
    def available_count(self) -> int:
        """The number of messages that can be leased, which is asked for with every message."""
        return self._fold.counts[AVAILABLE]

    @property
    def rejecting_count(self) -> int:
        """The number of messages on their way to the dead letter topic."""
        return self._fold.counts[REJECTING]

    def counter(self, kind: DeltaKind) -> int:
        return self._fold.counters[kind]

    @property
    def redelivered(self) -> int:
        """The number of deliveries after the first of a message."""
        return self._fold.redelivered

    def in_flight(self, worker: str) -> int:
        return self._fold.workers.references(worker)

    # -- scanning --------------------------------------------------------------------------------------------

    def begin(self, offset: int, *, now_ms: int) -> None:
        self._record(Delta(DeltaKind.START, offset, offset, 0, 0, "", now_ms))
        self._rebuild()

    def add_scanned(
        self,
        first: int,
        next_offset: int,
        *,
        now_ms: int,
        absent: Sequence[tuple[int, int]] = (),
        matches: npt.NDArray[np.bool_] | None = None,
        keys: npt.NDArray[np.int64] | None = None,
        delayed: Sequence[tuple[int, int]] = (),
        published: bytes = b"",
    ) -> None:
        """Add the messages scanned from `next_scan_offset` on; they may overlap known offsets, a gap before them is
        absent. `published` holds the times of their batches, for the ledger.
        """
        window = self._fold.window
        if self._order is None and matches is None and not absent and not delayed and first == window.end < next_offset:
            self._record(Delta(DeltaKind.SCANNED, first, next_offset - 1, 0, 0, "", now_ms, "", published))
            self._leave_behind_if_due(now_ms)
            return
        scan = ScanResult(
            first=first, next_offset=next_offset, absent=absent, matches=matches, keys=keys, delayed=delayed
        )
        if self._order is not None:
            self._add_keys(self._order, scan)
        if next_offset <= window.end:
            return
        for delta in scan.starting_at(window.end).deltas(now_ms):
            if published and delta.kind == DeltaKind.SCANNED:
                delta = delta._replace(extra=published)
            self._record(delta)
            if delta.kind == DeltaKind.PARKED:
                self._dues.add(delta.first, delta.last, delta.due_ms)
        self._leave_behind_if_due(now_ms)

    def _add_keys(self, order: KeyOrder, scan: ScanResult) -> None:
        order.trim(self._fold.window.base)
        was_scattered = order.has_unread_holders
        if was_scattered:
            order.learn_holders(scan.first, array("q", scan.key_bytes()))
        if scan.next_offset > order.next_offset and not (was_scattered and scan.first > order.next_offset):
            order.learn(scan.starting_at(order.next_offset).key_bytes())
        if not (order.is_ready or order.has_unread_holders):
            self._supply.admit_key_holders(order)

    @property
    def _straggler_step(self) -> int:
        return min(_STRAGGLER_STEP, self._dense_max)

    def _leave_behind_if_due(self, now_ms: int) -> None:
        window = self._fold.window
        if window.span > self._dense_max and window.end - self._stragglers_checked_at >= self._straggler_step:
            self._leave_behind(now_ms)

    def _leave_behind(self, now_ms: int) -> None:
        """Advance the start of the window, unless its messages are about to be leased or fill the window anyway."""
        window, stragglers = self._fold.window, self._fold.stragglers
        self._stragglers_checked_at = window.end
        while window.span > self._dense_max and self.is_ready:
            start = window.start - window.base
            end = min(start + self._straggler_step, len(window))
            end = end if self._order is None else max(start, min(end, self._order.next_offset - window.base))
            available = window.states.find(AVAILABLE, start, end)
            end = end if available < 0 else available
            unfinished = end - start - window.states.count(DONE, start, end)
            is_dense = unfinished * 4 > end - start and window.span * 2 < self._window_max
            if start == end or is_dense or unfinished > self._parked_max - stragglers.unfinished:
                return
            for first, last in self._unfinished_ranges(start, end):
                keys = b"" if self._order is None else self._order.keys(first, last).tobytes()
                self._record(Delta(DeltaKind.LEFT_BEHIND, first, last, 0, 0, "", now_ms, "", keys))

    def _unfinished_ranges(self, start: int, end: int) -> list[tuple[int, int]]:
        window = self._fold.window
        done = np.frombuffer(window.states, np.uint8)[start:end] == DONE
        edges = np.flatnonzero(np.diff(np.concatenate(([True], done, [True])))) + (window.base + start)
        return [(first, after - 1) for first, after in edges.reshape(-1, 2).tolist()]

    # -- leasing --------------------------------------------------------------------------------------------

    @property
    def next_available(self) -> Offset | None:
        """The oldest message that `acquire` would lease, apart from the worker's limits."""
        if not self.is_ready or not self._fold.counts[AVAILABLE]:
            return None
        offset = self._supply.peek(_NO_LIMIT)
        return None if offset is None else Offset(offset)

    def acquire(
        self,
        worker: str,
        *,
        now_ms: int,
        max_records: int,
        until: int | None = None,
        batch_ends: Sequence[int] | None = None,
    ) -> list[Lease]:
        """Lease the oldest available messages before `until` to a worker.

        With `batch_ends` (exclusive), the batch in which the limit falls is leased to its end, as it is sent whole. An
        ordered queue does not do so: a message must not be delivered together with an earlier one of its key.
        """
        if self._dues.next_ms <= now_ms:
            self.tick(now_ms)
        fold = self._fold
        if not fold.counts[AVAILABLE] or not self.is_ready:
            return []
        settings = self.settings
        room = min(
            max_records,
            settings.in_flight_max - fold.workers.references(worker),
            settings.leases_max - fold.counts[LEASED],
        )
        if room <= 0:
            return []
        end = _NO_LIMIT if until is None else until
        deadline_ms = now_ms + settings.lease_ms
        leases: list[Lease] = []
        taken = self._lease(worker, room, end, deadline_ms, now_ms, leases)
        if batch_ends and self._order is None and taken >= max_records:
            first = leases[-1].last + 1
            place = bisect_left(batch_ends, first)
            if place < len(batch_ends) and batch_ends[place] > first:
                more, until = batch_ends[place] - first, min(end, batch_ends[place])
                self._lease(worker, more, until, deadline_ms, now_ms, leases)
        return leases

    def _lease(self, worker: str, count: int, until: int, due_ms: int, now_ms: int, leases: list[Lease]) -> int:
        runs = self._supply.take(count, until)
        kind = _ACCEPTED if self.settings.delivery == AT_MOST_ONCE else _ACQUIRED
        taken = 0
        for first, last, attempts in runs:
            attempt = min(attempts + 1, ATTEMPTS_COUNTED_MAX)
            delta = Delta(kind, first, last, attempt, due_ms, worker, now_ms)
            if kind == _ACQUIRED:
                self._record(delta)
                self._dues.add(first, last, due_ms)
            else:
                self._finish(delta)
            leases.append(Lease(Offset(first), Offset(last), attempt, due_ms))
            taken += last - first + 1
        return taken

    # -- settling --------------------------------------------------------------------------------------------

    def settle(self, worker: str, verbs: Sequence[Settlement], *, now_ms: int) -> list[InvalidRecordState | None]:
        """Settle messages of a worker; return None or the error for each settlement."""
        if self._dues.next_ms <= now_ms:
            self.tick(now_ms)
        return [self._settle(worker, verb, now_ms) for verb in verbs]

    def _settle(self, worker: str, settle: Settlement, now_ms: int) -> InvalidRecordState | None:
        number = self._fold.workers.number(worker)
        runs = [] if number is None else self._held_runs(number, settle.first, settle.last)
        if not runs or (settle.attempt is not None and any(run[2] != settle.attempt for run in runs)):
            if settle.verb == Verb.ACCEPT and self.settings.delivery == AT_MOST_ONCE:
                return None
            return settle.not_held_by(worker)
        verb = settle.verb
        for first, last, attempt in runs:
            if verb == _ACCEPT:
                self._finish(Delta(_ACCEPTED, first, last, attempt, 0, worker, now_ms))
            elif verb == Verb.RELEASE:
                delay_ms = self.settings.backoff_ms(attempt, now_ms) if settle.delay_ms is None else settle.delay_ms
                due_ms = now_ms + delay_ms
                self._fail(Delta(DeltaKind.RELEASED, first, last, attempt, due_ms, worker, now_ms, settle.reason))
            elif verb == Verb.REJECT:
                self._reject(first, last, attempt, worker, now_ms, settle.reason)
            elif verb == Verb.RETURN:
                due_ms = now_ms + (settle.delay_ms or 0)
                # A message that waits in its first attempt holds its key, also after a restart.
                attempts_used = max(1, attempt - 1) if self._order is not None and due_ms > now_ms else attempt - 1
                self._requeue(
                    Delta(DeltaKind.RELEASED, first, last, attempts_used, due_ms, worker, now_ms, settle.reason)
                )
            else:
                self._extend(first, last, attempt, worker, now_ms, settle.delay_ms)
        return None

    def holds(self, worker: str, settlement: Settlement) -> bool:
        """Whether a worker may settle a range now."""
        if settlement.verb == Verb.ACCEPT and self.settings.delivery == AT_MOST_ONCE:
            return True
        number = self._fold.workers.number(worker)
        runs = [] if number is None else self._held_runs(number, settlement.first, settlement.last)
        return bool(runs) and (settlement.attempt is None or all(run[2] == settlement.attempt for run in runs))

    def _held_runs(self, number: int, first: int, last: int) -> list[tuple[int, int, int]]:
        """Return runs of the same attempt; empty unless the worker holds all messages."""
        window = self._fold.window
        if last < first or last >= window.end:
            return []
        if first >= window.start:
            start, end = first - window.base, last + 1 - window.base
            if not window.is_leased_to(start, end, number):
                return []
            attempt = window.attempts[start]
            if end - start == 1 or window.attempts.count(attempt, start, end) == end - start:
                return [(first, last, attempt)]
        runs: list[tuple[int, int, int]] = []
        count = 0
        for columns, start, end in self._fold.parts(first, last):
            if not columns.is_leased_to(start, end, number):
                return []
            count += end - start
            for run_start, run_end in columns.attempt_runs(start, end):
                begin = columns.offset_at(run_start)
                runs.append((begin, begin + run_end - run_start - 1, columns.attempts[run_start]))
        return runs if count == last - first + 1 else []

    def _extend(self, first: int, last: int, attempt: int, worker: str, now_ms: int, lease_ms: int | None) -> None:
        due_ms = now_ms + max(1, self.settings.lease_ms if lease_ms is None else lease_ms)
        self._record(Delta(DeltaKind.EXTENDED, first, last, attempt, due_ms, worker, now_ms))
        self._dues.add(first, last, due_ms)

    def release_worker(self, worker: str, *, now_ms: int) -> None:
        """Release the messages of a worker that is gone; the deliveries count."""
        self.tick(now_ms)
        for run in self._fold.leased_to(worker):
            due_ms = now_ms + self.settings.backoff_ms(run.attempt, now_ms)
            self._fail(
                Delta(
                    DeltaKind.RELEASED,
                    run.first,
                    run.last,
                    run.attempt,
                    due_ms,
                    worker,
                    now_ms,
                    "the worker is gone",
                )
            )

    def _fail(self, delta: Delta) -> None:
        """Handle a failed delivery: retry now or later, or reject the message after the last attempt."""
        if 0 < self.settings.attempts <= delta.attempt:
            self._record(delta._replace(due_ms=delta.time_ms))
            reason = delta.reason or _ATTEMPTS_EXHAUSTED
            self._reject(delta.first, delta.last, delta.attempt, delta.worker, delta.time_ms, reason)
            return
        self._requeue(delta)

    def _requeue(self, delta: Delta) -> None:
        """Make messages available again, now or at a time."""
        self._record(delta)
        if delta.due_ms > delta.time_ms:
            self._dues.add(delta.first, delta.last, delta.due_ms)
        elif self.is_ready:
            self._supply.add_returned(delta.first, delta.last)

    def _reject(self, first: int, last: int, attempt: int, worker: str, now_ms: int, reason: str) -> None:
        reason = reason[:REASON_LENGTH_MAX]
        kind = DeltaKind.DROPPED
        if self.settings.has_dead_letters:
            kind = DeltaKind.REJECTING
            reasons = self._fold.reasons
            if len(reasons) >= REASONS_MAX and reasons.number(reason) is None:
                reason = ""
        self._finish(Delta(kind, first, last, attempt, 0, worker, now_ms, reason))

    def _finish(self, delta: Delta) -> None:
        """Finish messages and pass their keys to the next in line."""
        order = self._order
        if order is None or not order.is_ready:
            self._record(delta)
            return
        offsets = range(delta.first, delta.last + 1)
        keys = [self._supply.key_of(order, offset) for offset in offsets]
        self._record(delta)
        for offset, key in zip(offsets, keys, strict=True):
            self._release_key(order, key, offset)

    def _release_key(self, order: KeyOrder, key: int, offset: int) -> None:
        if not order.leave(key, offset):
            return
        while (waiting := order.next_waiting(key)) is not None:
            place = self._fold.place(waiting)
            if place is not None and place[0].states[place[1]] == BLOCKED:
                place[0].states[place[1]] = AVAILABLE
                self._fold.counts[BLOCKED] -= 1
                self._fold.counts[AVAILABLE] += 1
                order.set_head(key, waiting)
                self._supply.add_returned(waiting, waiting)
                return

    # -- time ------------------------------------------------------------------------------------------------

    def skip_tick(self, now_ms: int) -> bool:
        """Record the time as `tick` does, if that would change nothing; return False if it has to be called."""
        if (
            self._dues.next_ms <= now_ms
            or now_ms < self._ticked_ms - CLOCK_STEP_MS
            or self._fold.window.span >= self._window_max
        ):
            return False
        self._ticked_ms = now_ms
        return True

    def tick(self, now_ms: int) -> None:
        """Apply everything that is due: expired leases, ended waits, and room in a full window."""
        if self._fold.window.span >= self._window_max:
            self._leave_behind(now_ms)
        if now_ms < self._ticked_ms - CLOCK_STEP_MS:
            for delta in shift_deadlines(self._fold, self._ticked_ms - now_ms, now_ms):
                self._record(delta)
                self._dues.add(delta.first, delta.last, delta.due_ms)
        self._ticked_ms = now_ms
        if self._dues.next_ms > now_ms:
            return
        for first, last in self._dues.pop(now_ms):
            for run in self._fold.waiting_runs(first, last):
                if run.due_ms > now_ms:
                    continue
                if run.state == LEASED:
                    worker = self._fold.workers.texts[run.holder]
                    due_ms = now_ms + self.settings.backoff_ms(run.attempt, now_ms)
                    self._fail(Delta(DeltaKind.EXPIRED, run.first, run.last, run.attempt, due_ms, worker, now_ms))
                else:
                    self._record(Delta(DeltaKind.DUE, run.first, run.last, run.attempt, 0, "", now_ms))
                    self._make_available(run.first, run.last, run.attempt)

    def _make_available(self, first: int, last: int, attempt: int) -> None:
        order = self._order
        if order is None or (attempt and order.is_ready):
            self._supply.add_returned(first, last)
        elif order.is_ready:
            for offset in range(first, min(last + 1, self._supply.fresh)):
                self._supply.admit(order, offset, self._supply.key_of(order, offset))

    def _due_runs(self, first: int, last: int) -> list[tuple[int, int, int]]:
        return [(run.first, run.last, run.due_ms) for run in self._fold.waiting_runs(first, last)]

    # -- seeking, retention ----------------------------------------------------------------------------------

    def seek(self, offset: int, *, now_ms: int) -> None:
        """Continue at another offset; leases end, and messages may be delivered again."""
        self._record(Delta(DeltaKind.SOUGHT, offset, self._fold.window.end, 0, 0, "", now_ms))
        self._rebuild()

    def drop_before(self, log_start: int, *, now_ms: int) -> None:
        """Drop messages that the log no longer holds; their leases end."""
        oldest = self._fold.oldest
        if log_start <= oldest:
            return
        is_past_window = log_start > self._fold.window.end
        self._record(Delta(DeltaKind.RETENTION_CUT, oldest, log_start - 1, 0, 0, "", now_ms))
        if is_past_window:
            self._rebuild()
        elif self._order is not None and self._order.is_ready:
            for key, head in self._order.keys_before(log_start):
                self._release_key(self._order, key, head)

    # -- dead letters ----------------------------------------------------------------------------------------

    def rejecting(self, count_max: int) -> list[RejectedMessage]:
        """Return the oldest messages to be written to the dead letter topic."""
        messages: list[RejectedMessage] = []
        if not self._fold.counts[REJECTING]:
            return messages
        for columns in (self._fold.stragglers, self._fold.window):
            place = columns.states.find(REJECTING)
            while place >= 0 and len(messages) < count_max:
                messages.append(self._rejected_at(columns, place))
                place = columns.states.find(REJECTING, place + 1)
        return messages

    def planned(self) -> list[RejectedMessage]:
        """Return those for which a letter is planned."""
        places = [place for offset, plan in self._fold.plans.items() if plan and (place := self._fold.place(offset))]
        return [self._rejected_at(*place) for place in places if place[0].states[place[1]] == REJECTING]

    def _rejected_at(self, columns: Window | Stragglers, place: int) -> RejectedMessage:
        offset = Offset(columns.offset_at(place))
        reason = self._fold.reasons.texts[columns.holders[place]]
        times = columns.first_delivered[place], columns.dues[place]
        return RejectedMessage(offset, columns.attempts[place], reason, *times, self._fold.plans.get(offset, b""))

    def plan(self, offset: int, plan: bytes, *, now_ms: int) -> bool:
        """Store the plan of a letter, or discard it; return False if the message is not rejected."""
        return self._update_rejecting(DeltaKind.PLANNED, offset, now_ms, "", plan)

    def dead_lettered(self, offset: int, where: bytes, *, now_ms: int) -> bool:
        """Record that a letter was written; return False if the message is not rejected."""
        return self._update_rejecting(DeltaKind.DEAD_LETTERED, offset, now_ms, "", where)

    def drop(self, offset: int, reason: str, *, now_ms: int) -> bool:
        """Discard a message that cannot be written to the dead letter topic."""
        return self._update_rejecting(DeltaKind.DROPPED, offset, now_ms, reason, b"")

    def revive(self, revivals: Sequence[Revival], *, now_ms: int) -> int:
        """Make dead letters available as new messages; return how many.

        Unfinished messages are left alone, and so are messages revived by the same letter before, so that a caller that
        received no response can repeat the request. A message whose letter may not be written yet would be finished
        again by that write, so it is refused.
        """
        fold = self._fold
        unwritten = [revival.offset for revival in revivals if self._is_unrevived(revival, REJECTING)]
        if unwritten:
            raise CoordinatorUnavailable(
                f"message {min(unwritten)} is still being written to the dead letter topic; try again in a moment"
            )
        pending = sorted(
            {revival.offset: revival for revival in revivals if self._is_unrevived(revival, DONE)}.values()
        )
        room = self._parked_max - fold.stragglers.unfinished
        if sum(message.offset < fold.window.start for message in pending) > room:
            raise PolicyViolation(
                f"a queue holds at most {self._parked_max} old messages, and {fold.stragglers.unfinished} are waiting; "
                "redrive the others when some of these are done"
            )
        for run in _group_consecutive(pending):
            first, last = run[0].offset, run[-1].offset
            self._record(Delta(DeltaKind.REVIVED, first, last, 0, 0, "", now_ms, "", encode_revivals(run)))
            if self._order is None:
                self._supply.add_returned(first, last)
            elif self._order.is_ready:
                for message in run:
                    self._supply.revive(self._order, message.offset, message.key)
        return len(pending)

    def _is_unrevived(self, revival: Revival, state: int) -> bool:
        """Whether a message is in a state and was not revived by this letter before."""
        fold = self._fold
        is_in_state = revival.offset < fold.window.end and fold.state_of(revival.offset) == state
        return is_in_state and fold.revived.get(revival.offset) != revival.letter

    def close_letters(self, revivals: Iterable[Revival], *, now_ms: int) -> None:
        """Forget the letters by which messages were revived, since they are closed."""
        for revival in revivals:
            if self._fold.revived.get(revival.offset) == revival.letter:
                self._record(Delta(DeltaKind.LETTER_CLOSED, revival.offset, revival.offset, 0, 0, "", now_ms))

    def _update_rejecting(self, kind: DeltaKind, offset: int, now_ms: int, reason: str, extra: bytes) -> bool:
        place = self._fold.place(offset)
        if place is None or place[0].states[place[1]] != REJECTING:
            return False
        attempt = place[0].attempts[place[1]]
        self._record(Delta(kind, offset, offset, attempt, 0, "", now_ms, reason, extra))
        return True

    # -- the ledger ------------------------------------------------------------------------------------------

    def mark_window(self, reason: str, *, now_ms: int) -> None:
        """Record for the ledger the position of the scan, the unfinished messages, and the reason for this record."""
        fold, settings = self._fold, self.settings
        extra = encode_window(
            LedgerWindow(
                ranges=np.array(fold.unfinished_ranges(), np.int64).tobytes(),
                delivery=settings.delivery,
                isolation=settings.isolation,
                dead_letter_topic=settings.dead_letter_topic if settings.has_dead_letters else "",
                filter=settings.filter,
            )
        )
        end = fold.window.end
        self._record(Delta(DeltaKind.WINDOW, end, end, 0, 0, "", now_ms, reason, extra))

    # -- pending deltas --------------------------------------------------------------------------------------

    @property
    def is_urgent(self) -> bool:
        """Whether pending deltas would be lost in a crash, or have become many."""
        return self._is_urgent or self.has_many_pending

    @property
    def has_many_pending(self) -> bool:
        """Whether pending deltas have become so many that they should be stored now."""
        return len(self._pending) > _PENDING_MAX

    def drain(self) -> bytes | None:
        """Return the frame of all deltas since the last one, to be stored whole and in order."""
        if not self._pending:
            return None
        deltas, self._pending = self._pending, []
        self._is_urgent = self.has_leases = False
        self._fold.sequence += 1
        self._fold.has_ledger = self.ledger is not None
        header = FrameHeader(self._fold.key, self._leader_epoch, self._fold.sequence, self.filter_version)
        return write_frame(header, deltas, self.ledger)

    def _record(self, delta: Delta) -> None:
        """Apply a delta, and keep it to be stored."""
        self._fold.apply(delta)
        pending = self._pending
        kind = delta.kind
        if kind == _ACQUIRED and self.settings.delivery == AT_LEAST_ONCE:
            self.has_leases = True
        elif not _IS_DEFERRABLE[kind]:
            self._is_urgent = True
        if pending and _IS_MERGEABLE[kind]:
            before = pending[-1]
            if before.kind == kind and before.last + 1 == delta.first and before[3:7] == delta[3:7]:
                extra = before.extra + delta.extra
                pending[-1] = Delta(kind, before.first, *delta[2:8], extra)
                return
        pending.append(delta)


def _group_consecutive(revivals: Sequence[Revival]) -> list[list[Revival]]:
    runs: list[list[Revival]] = []
    for revival in revivals:
        if runs and runs[-1][-1].offset + 1 == revival.offset:
            runs[-1].append(revival)
        else:
            runs.append([revival])
    return runs
