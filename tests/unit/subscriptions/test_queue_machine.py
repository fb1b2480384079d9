"""Random histories of a queue against a plain model: workers, failures, delays, keys, seeks, truncations, crashes.

The model has one object per message and no optimisations. After every step the queue must agree with it message by
message, and the drained deltas must fold to the same bytes. A crash returns to a durable frame, and the model with it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from millstream.broker.subscriptions.columns import AVAILABLE, BLOCKED, DONE, LEASED, PARKED, REJECTING
from millstream.broker.subscriptions.lease import LETTER_BYTES, DeltaKind, Lease, Revival, Settlement
from millstream.broker.subscriptions.queue import Queue
from millstream.broker.subscriptions.snapshot import FoldImage, write_snapshot
from millstream.core.errors import CoordinatorUnavailable, InvalidRecordState, PolicyViolation
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.subscription import (
    AT_LEAST_ONCE,
    AT_MOST_ONCE,
    EXACTLY_ONCE,
    NO_DEAD_LETTERS,
    QueueKey,
    SubscriptionSettings,
    Verb,
)

KEY = QueueKey(UUID(int=1), UUID(int=2), PartitionIndex(3))
WORKERS = ("share/a", "share/b", "http/c")
HUGE = 10_000


class Stored(NamedTuple):
    """A message as stored in the log."""

    present: bool
    matches: bool
    key: int
    due_ms: int


@dataclass
class Message:
    """The expected state of a message."""

    stored: Stored
    state: int = AVAILABLE
    attempts: int = 0
    due_ms: int = 0
    worker: str = ""
    reason: str = ""
    plan: bytes = b""
    first_ms: int = 0


@dataclass
class Model:
    settings: SubscriptionSettings
    next_scan_offset: int = 0
    messages: dict[int, Message] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    counters: dict[DeltaKind, int] = field(default_factory=dict)
    letters: dict[int, int] = field(default_factory=dict)
    """By which letter a message is known in the dead letter topic."""
    revived: dict[int, int] = field(default_factory=dict)
    """By which letter it was revived, while that is open."""

    def in_state(self, state: int) -> list[int]:
        return [offset for offset, message in self.messages.items() if message.state == state]

    def end(self, offset: int, how: str) -> None:
        assert offset not in self.ends, f"{offset} ended as {self.ends[offset]} and then as {how}"
        self.ends[offset] = how
        self.messages[offset].state = DONE

    def count(self, kind: DeltaKind) -> None:
        self.counters[kind] = self.counters.get(kind, 0) + 1

    def look(self, log: list[Stored], until: int, now_ms: int) -> None:
        for offset in range(self.next_scan_offset, until):
            stored = log[offset]
            message = self.messages[offset] = Message(stored)
            if not stored.present:
                self.end(offset, "absent")
            elif not stored.matches:
                self.end(offset, "filtered")
            elif stored.due_ms > now_ms:
                message.state, message.due_ms = PARKED, stored.due_ms
        self.next_scan_offset = max(until, self.next_scan_offset)

    def tick(self, now_ms: int) -> None:
        for offset, message in self.messages.items():
            if message.state == LEASED and message.due_ms <= now_ms:
                self.count(DeltaKind.EXPIRED)
                self.fail(offset, now_ms + self.settings.backoff_ms(message.attempts, now_ms), now_ms, "")
            elif message.state == PARKED and message.due_ms <= now_ms:
                message.state = AVAILABLE

    def fail(self, offset: int, due_ms: int, now_ms: int, reason: str) -> None:
        message = self.messages[offset]
        if 0 < self.settings.attempts <= message.attempts:
            self.reject(offset, reason or "all attempts have failed")
        elif due_ms > now_ms:
            message.state, message.due_ms = PARKED, due_ms
        else:
            message.state = AVAILABLE

    def reject(self, offset: int, reason: str) -> None:
        if self.settings.has_dead_letters:
            self.messages[offset].state, self.messages[offset].reason = REJECTING, reason
        else:
            self.end(offset, "dropped")

    def lease(self, offset: int, worker: str, now_ms: int) -> None:
        message = self.messages[offset]
        assert message.state == AVAILABLE
        assert offset not in self.ends
        message.attempts += 1
        if message.attempts == 1:
            message.first_ms = now_ms
        if self.settings.delivery == AT_MOST_ONCE:
            self.end(offset, "accepted")
            return
        message.state, message.worker, message.due_ms = LEASED, worker, now_ms + self.settings.lease_ms

    def settle(self, offset: int, settle: Settlement, now_ms: int) -> None:
        message = self.messages[offset]
        if settle.verb == Verb.ACCEPT:
            self.count(DeltaKind.ACCEPTED)
            self.end(offset, "accepted")
        elif settle.verb == Verb.RELEASE:
            backoff_ms = self.settings.backoff_ms(message.attempts, now_ms)
            self.fail(offset, now_ms + (backoff_ms if settle.delay_ms is None else settle.delay_ms), now_ms, "")
        elif settle.verb == Verb.REJECT:
            self.reject(offset, settle.reason)
        elif settle.verb == Verb.RETURN:
            delay_ms = settle.delay_ms or 0
            message.attempts = max(message.attempts - 1, int(self.settings.ordered and delay_ms > 0))
            message.state, message.due_ms = (PARKED, now_ms + delay_ms) if delay_ms else (AVAILABLE, message.due_ms)
        else:
            message.due_ms = now_ms + (self.settings.lease_ms if settle.delay_ms is None else settle.delay_ms)

    def is_held(self, settle: Settlement, worker: str) -> bool:
        held = [self.messages.get(offset) for offset in range(settle.first, settle.last + 1)]
        return bool(held) and all(
            message is not None
            and (message.state, message.worker) == (LEASED, worker)
            and settle.attempt in (None, message.attempts)
            for message in held
        )

    def revive(self, offset: int, letter: int) -> bool:
        message = self.messages.get(offset)
        if message is None or message.state != DONE or self.revived.get(offset) == letter:
            return False
        del self.ends[offset]
        self.messages[offset] = Message(message.stored._replace(due_ms=0))
        self.revived[offset] = letter
        return True

    def cut(self, log_start: int) -> None:
        for offset, message in self.messages.items():
            if offset < log_start and message.state != DONE:
                self.end(offset, "cut")
        self.letters = {offset: letter for offset, letter in self.letters.items() if offset >= log_start}
        self.next_scan_offset = max(self.next_scan_offset, log_start)

    def holds_key(self, offset: int) -> bool:
        message = self.messages[offset]
        return message.state == LEASED or (message.state == PARKED and message.attempts > 0)


def settle_all(lease: Lease) -> Settlement:
    return Settlement(lease.first, lease.last, Verb.ACCEPT)


stored_messages = st.lists(
    st.tuples(
        st.sampled_from([True] * 6 + [False]),
        st.sampled_from([True] * 4 + [False]),
        st.integers(0, 4),
        st.sampled_from([0] * 5 + [50, 400, 5000, 300_000]),
    ),
    min_size=1,
    max_size=12,
)


seldom = st.sampled_from([False] * 7 + [True])


class QueueHistory(RuleBasedStateMachine):
    """One queue whose leader crashes now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.now_ms = 1_000_000
        self.log: list[Stored] = []
        self.log_start = 0
        self.steps = 0
        self.leases: list[tuple[str, Lease]] = []

    @initialize(
        ordered=st.booleans(),
        delivery=st.sampled_from([AT_LEAST_ONCE, EXACTLY_ONCE, EXACTLY_ONCE, AT_MOST_ONCE]),
        attempts=st.integers(0, 3),
        dead_letter_topic=st.sampled_from([NO_DEAD_LETTERS, "dead"]),
        backoff_min_ms=st.sampled_from([0, 70]),
        in_flight_max=st.sampled_from([3, 10_000]),
        sizes=st.sampled_from([(16, 6, 4), (40, 40, 8), (1000, 1000, 300)]),
        drain_every=st.integers(1, 4),
    )
    def begin(
        self,
        ordered: bool,
        delivery: str,
        attempts: int,
        dead_letter_topic: str,
        backoff_min_ms: int,
        in_flight_max: int,
        sizes: tuple[int, int, int],
        drain_every: int,
    ) -> None:
        self.settings = SubscriptionSettings(
            ordered=ordered,
            delivery=delivery,
            attempts=attempts,
            dead_letter_topic=dead_letter_topic,
            backoff_min_ms=backoff_min_ms,
            backoff_max_ms=200,
            in_flight_max=in_flight_max,
            lease_ms=300,
        )
        self.sizes = sizes
        self.drain_every = drain_every
        self.epoch = 0
        self.model = Model(self.settings)
        self.queue = self.new_queue(None)
        self.queue.begin(0, now_ms=self.now_ms)
        self.image = FoldImage(KEY)
        self.points: list[tuple[bytes, Model]] = []
        self.drain()
        self.log = [Stored(True, True, offset % 4, 0) for offset in range(12)]
        self.feed(0, 12)

    def new_queue(self, snapshot: bytes | None) -> Queue:
        window_max, parked_max, dense_max = self.sizes
        self.epoch += 1
        return Queue(
            KEY,
            self.settings,
            leader_epoch=self.epoch,
            snapshot=snapshot,
            window_max=window_max,
            parked_max=parked_max,
            dense_max=dense_max,
        )

    # -- events ----------------------------------------------------------------------------------------------

    @rule(messages=stored_messages, back=st.integers(0, 2))
    def look(self, messages: list[tuple[bool, bool, int, int]], back: int) -> None:
        first = self.queue.next_scan_offset
        count = min(len(messages), self.queue.room)
        for present, matches, key, delay_ms in messages[: max(0, first + count - len(self.log))]:
            self.log.append(Stored(present, matches, key, self.now_ms + delay_ms if delay_ms else 0))
        self.feed(max(self.log_start, first - back), first + count)

    def feed(self, first: int, until: int) -> None:
        seen = range(first, until)
        self.queue.add_scanned(
            first,
            until,
            now_ms=self.now_ms,
            absent=[(offset, offset) for offset in seen if not self.log[offset].present],
            matches=np.array([self.log[offset].matches for offset in seen], np.bool_),
            keys=np.array([self.log[offset].key for offset in seen], np.int64) if self.settings.ordered else None,
            delayed=[(offset, self.log[offset].due_ms) for offset in seen if self.log[offset].due_ms],
        )
        self.model.look(self.log, until, self.now_ms)

    @rule(worker=st.sampled_from(WORKERS), count=st.sampled_from([1, 2, 5, HUGE]), ends=st.booleans(), data=st.data())
    def acquire(self, worker: str, count: int, ends: bool, data: st.DataObject) -> None:
        until = data.draw(st.integers(0, len(self.log))) if data.draw(seldom) else None
        batch_ends = list(range(3, len(self.log) + 4, 3)) if ends else None
        self.model.tick(self.now_ms)
        model, limit = self.model, len(self.log) if until is None else until
        room = min(count, self.settings.in_flight_max - self.held_by(worker))
        leases = self.queue.acquire(worker, now_ms=self.now_ms, max_records=count, until=until, batch_ends=batch_ends)
        offsets = [offset for lease in leases for offset in range(lease.first, lease.last + 1)]
        assert offsets == sorted(set(offsets))
        assert not offsets or offsets[-1] < limit
        if not self.queue.is_ready:
            assert offsets == []
        elif self.settings.ordered:
            self.check_ordered(offsets, room, limit)
        else:
            available = [offset for offset in sorted(model.in_state(AVAILABLE)) if offset < limit]
            expected = available[: max(room, 0)]
            if ends and expected and len(expected) >= count:
                end = (expected[-1] // 3) * 3 + 2
                expected = [offset for offset in available if offset <= end]
            assert offsets == expected
        for lease in leases:
            assert lease.deadline_ms == self.now_ms + self.settings.lease_ms
            for offset in range(lease.first, lease.last + 1):
                model.lease(offset, worker, self.now_ms)
                assert model.messages[offset].attempts == lease.attempt
        self.leases = (self.leases + [(worker, lease) for lease in leases])[-20:]

    def held_by(self, worker: str) -> int:
        return sum(message.worker == worker for message in self.model.messages.values() if message.state == LEASED)

    def check_ordered(self, offsets: list[int], room: int, limit: int) -> None:
        """Check that at most one message of a key is leased, in order, and that no key waits needlessly."""
        model = self.model
        held = {model.messages[offset].stored.key for offset in model.messages if model.holds_key(offset)} - {0}
        keys = [model.messages[offset].stored.key for offset in offsets if model.messages[offset].stored.key]
        assert len(keys) == len(set(keys))
        assert not held & set(keys)
        for offset in offsets:
            stored = model.messages[offset].stored
            for earlier in range(offset) if stored.key and not stored.due_ms else ():
                message = model.messages.get(earlier)
                if message is not None and message.stored.key == stored.key and not message.stored.due_ms:
                    assert message.state in (DONE, REJECTING)
        if room == HUGE:
            # After a restart the queue knows only the keys that it has scanned again.
            known = [offset for offset in model.in_state(AVAILABLE) if offset < self.queue.next_scan_offset]
            available = [offset for offset in known if offset < limit]
            free = {offset for offset in available if not model.messages[offset].stored.key}
            assert free <= set(offsets)
            if limit == len(self.log):
                assert {model.messages[offset].stored.key for offset in available} - {0} - held == set(keys)
        else:
            assert len(offsets) <= max(room, 0)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def accept(self, data: st.DataObject) -> None:
        self.settle(data, [Verb.ACCEPT])

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), verbs=st.lists(st.sampled_from([Verb.RELEASE, Verb.RELEASE, *Verb]), min_size=1, max_size=4))
    def settle_some(self, data: st.DataObject, verbs: list[Verb]) -> None:
        self.settle(data, verbs)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), verb=st.sampled_from([Verb.EXTEND, Verb.REJECT]))
    def extend_or_reject(self, data: st.DataObject, verb: Verb) -> None:
        self.settle(data, [verb])

    def settle(self, data: st.DataObject, verbs: list[Verb]) -> None:
        live = [(worker, lease) for worker, lease in self.leases if self.model.is_held(settle_all(lease), worker)]
        worker, lease = data.draw(st.sampled_from(live or self.leases))
        if data.draw(seldom):
            worker = data.draw(st.sampled_from(WORKERS))
        theirs = [message for holder, message in live if holder == worker]
        settles = []
        for verb in verbs:
            if data.draw(seldom):
                _, lease = data.draw(st.sampled_from(self.leases))
            elif theirs:
                lease = data.draw(st.sampled_from(theirs))
            first = data.draw(st.integers(lease.first, lease.last))
            last = data.draw(st.integers(first, lease.last))
            delays = [None, 1, 90, 303, 3000] if verb == Verb.EXTEND else [None, 0, 90, 3000, 200_000]
            delay_ms = data.draw(st.sampled_from(delays))
            attempt = data.draw(st.sampled_from([None, lease.attempt, lease.attempt]))
            reason = "bad" if verb == Verb.REJECT else ""
            settles.append(Settlement(Offset(first), Offset(last), verb, delay_ms, reason, attempt))
        self.model.tick(self.now_ms)
        results = self.queue.settle(worker, settles, now_ms=self.now_ms)
        for settle, result in zip(settles, results, strict=True):
            is_held = self.model.is_held(settle, worker)
            taken = is_held or (settle.verb == Verb.ACCEPT and self.settings.delivery == AT_MOST_ONCE)
            assert (result is None) == taken
            assert result is None or isinstance(result, InvalidRecordState)
            for offset in range(settle.first, settle.last + 1) if is_held else ():
                self.model.settle(offset, settle, self.now_ms)

    @rule(step_ms=st.sampled_from([1, 1, 20, 20, 40, 300, 2500, 400_000]), tick=st.booleans())
    def wait(self, step_ms: int, tick: bool) -> None:
        self.now_ms += step_ms
        if tick:
            self.queue.tick(self.now_ms)
            self.model.tick(self.now_ms)

    @rule()
    def wait_for_next(self) -> None:
        """Check that the time at which the queue wants to be woken is never too late."""
        due = [message.due_ms for message in self.model.messages.values() if message.state in (LEASED, PARKED)]
        next_ms = self.queue.next_due_ms
        assert not due or (next_ms is not None and next_ms <= min(due))
        self.now_ms = max(self.now_ms, next_ms or 0)
        self.queue.tick(self.now_ms)
        self.model.tick(self.now_ms)

    @rule(worker=st.sampled_from(WORKERS))
    def release_worker(self, worker: str) -> None:
        self.model.tick(self.now_ms)
        self.queue.release_worker(worker, now_ms=self.now_ms)
        for offset, message in self.model.messages.items():
            if message.state == LEASED and message.worker == worker:
                due_ms = self.now_ms + self.settings.backoff_ms(message.attempts, self.now_ms)
                self.model.fail(offset, due_ms, self.now_ms, "the worker is gone")

    @rule(data=st.data(), what=st.sampled_from([None] * 8 + ["cut", "seek"]))
    def lose(self, data: st.DataObject, what: str | None) -> None:
        if what == "seek":
            offset = data.draw(st.integers(self.log_start, len(self.log)))
            self.queue.seek(offset, now_ms=self.now_ms)
            self.model.messages.clear()
            self.model.ends.clear()
            self.model.revived.clear()
            for letter in self.model.letters:
                if letter < offset:
                    # Skipped messages are finished, so their letters can be redriven.
                    self.model.messages[letter] = Message(self.log[letter], state=DONE)
                    self.model.ends[letter] = "skipped"
            self.model.next_scan_offset = offset
            self.leases.clear()
        elif what == "cut":
            self.log_start = data.draw(st.integers(self.log_start, len(self.log)))
            self.queue.drop_before(self.log_start, now_ms=self.now_ms)
            self.model.cut(self.log_start)

    @precondition(lambda self: self.model.in_state(REJECTING))
    @rule(count=st.integers(1, 4), step=st.sampled_from(["plan", "produce", "drop"]))
    def dead_letter(self, count: int, step: str) -> None:
        model = self.model
        rejected = self.queue.rejecting(count)
        assert [message.offset for message in rejected] == sorted(model.in_state(REJECTING))[:count]
        for message in rejected:
            known = model.messages[message.offset]
            assert (message.attempts, message.reason, message.plan) == (known.attempts, known.reason, known.plan)
            assert message.first_ms == known.first_ms
            if step == "plan":
                known.plan = b"plan of %d" % message.offset
                assert self.queue.plan(message.offset, known.plan, now_ms=self.now_ms)
            elif step == "produce":
                assert self.queue.dead_lettered(message.offset, b"there", now_ms=self.now_ms)
                model.end(message.offset, "dead-lettered")
                model.letters[message.offset] = self.steps
            else:
                assert self.queue.drop(message.offset, "too large", now_ms=self.now_ms)
                model.end(message.offset, "dropped")
            if step != "plan":
                assert not self.queue.dead_lettered(message.offset, b"", now_ms=self.now_ms)

    @precondition(lambda self: self.model.letters)
    @rule(data=st.data(), is_closed=st.booleans())
    def revive(self, data: st.DataObject, is_closed: bool) -> None:
        """Redrive letters, some of them twice, as after a lost response."""
        model, (_, parked_max, _) = self.model, self.sizes
        offsets = data.draw(st.lists(st.sampled_from(sorted(model.letters)), min_size=1, max_size=4, unique=True))
        offsets = [offset for offset in offsets if offset >= self.log_start]
        revivals = [
            Revival(Offset(offset), self.log[offset].key, model.letters[offset].to_bytes(LETTER_BYTES))
            for offset in offsets
        ]
        dying = set(model.in_state(REJECTING))
        if any(offset in dying and model.revived.get(offset) != model.letters[offset] for offset in offsets):
            with pytest.raises(CoordinatorUnavailable):
                self.queue.revive(revivals, now_ms=self.now_ms)
            return
        revivable = [offset for offset in offsets if deepcopy(model).revive(offset, model.letters[offset])]
        stragglers = sum(offset < self.queue.fold.window.start for offset in revivable)
        if self.queue.counts.stragglers + stragglers > parked_max:
            with pytest.raises(PolicyViolation):
                self.queue.revive(revivals, now_ms=self.now_ms)
            return
        assert self.queue.revive(revivals, now_ms=self.now_ms) == len(revivable)
        assert self.queue.revive(revivals, now_ms=self.now_ms) == 0
        for offset in revivable:
            model.revive(offset, model.letters[offset])
        if is_closed:
            self.queue.close_letters(revivals, now_ms=self.now_ms)
            for offset in offsets:
                del model.letters[offset]
                model.revived.pop(offset, None)

    @precondition(lambda self: self.steps % 3 == 0)
    @rule(data=st.data())
    def crash(self, data: st.DataObject) -> None:
        """Crash the leader; another continues from the durable state."""
        # Usually everything was durable; sometimes the last few frames were not.
        place = max(0, len(self.points) - 1 - data.draw(st.sampled_from([0, 0, 0, 1, 3])))
        snapshot, model = self.points[place]
        del self.points[place + 1 :]
        self.model = deepcopy(model)
        self.image = FoldImage(KEY)
        self.image.replay(snapshot)
        self.queue = self.new_queue(snapshot)
        self.queue.drop_before(self.log_start, now_ms=self.now_ms)
        self.model.cut(self.log_start)

    # -- invariants ------------------------------------------------------------------------------------------

    def drain(self) -> None:
        frame = self.queue.drain()
        if frame is not None:
            self.image.replay(frame)
            self.image.replay(frame)
        snapshot = self.image.snapshot()
        assert snapshot == write_snapshot(self.queue.fold)
        self.points.append((snapshot, deepcopy(self.model)))
        del self.points[:-6]

    @invariant()
    def queue_is_as_the_model(self) -> None:
        self.steps += 1
        if self.steps % self.drain_every == 0:
            self.drain()
        fold, model = self.queue.fold, self.model
        assert fold.window.end == model.next_scan_offset
        for offset, message in model.messages.items():
            place = fold.place(offset)
            if place is None:
                assert message.state == DONE, offset
                continue
            columns, index = place
            state = columns.states[index]
            assert (AVAILABLE if state == BLOCKED else state) == message.state, offset
            if message.state != DONE:
                assert columns.attempts[index] == message.attempts
            if message.state in (LEASED, PARKED):
                assert columns.dues[index] == message.due_ms
            if message.state == LEASED:
                assert fold.workers.texts[columns.holders[index]] == message.worker

    @invariant()
    def counts_are_true(self) -> None:
        counts, model = self.queue.counts, self.model
        assert counts.available + counts.blocked == len(model.in_state(AVAILABLE))
        assert self.settings.ordered or not counts.blocked
        assert counts.leased == len(model.in_state(LEASED))
        assert counts.parked == len(model.in_state(PARKED))
        assert counts.rejecting == len(model.in_state(REJECTING))
        assert all(self.queue.in_flight(worker) == self.held_by(worker) for worker in WORKERS)
        unfinished = [offset for offset, message in model.messages.items() if message.state != DONE]
        assert self.queue.oldest == min(unfinished, default=model.next_scan_offset)
        for kind, count in model.counters.items():
            assert self.settings.delivery == AT_MOST_ONCE or self.queue.counter(kind) == count
        if self.settings.ordered or not self.queue.is_ready:
            return
        assert self.queue.next_available == min(model.in_state(AVAILABLE), default=None)

    def teardown(self) -> None:
        """Check that nothing is lost: with cooperative workers every message is settled."""
        if not hasattr(self, "queue"):
            return
        for _ in range(len(self.log) * 4 + 20):
            if self.queue.next_scan_offset >= len(self.log) and not self.queue.fold.unfinished:
                break
            self.now_ms += 300_000
            if self.queue.room and self.queue.next_scan_offset < len(self.log):
                first = max(self.queue.next_scan_offset, self.log_start)
                self.feed(first, min(first + self.queue.room, len(self.log)))
            self.acquire_all()
        assert self.queue.fold.unfinished == 0
        assert self.queue.next_scan_offset >= len(self.log)
        self.queue_is_as_the_model()
        self.drain()

    def acquire_all(self) -> None:
        self.model.tick(self.now_ms)
        leases = self.queue.acquire("share/last", now_ms=self.now_ms, max_records=HUGE)
        for lease in leases:
            for offset in range(lease.first, lease.last + 1):
                self.model.lease(offset, "share/last", self.now_ms)
        settles = [settle_all(lease) for lease in leases]
        assert self.queue.settle("share/last", settles, now_ms=self.now_ms) == [None] * len(settles)
        if self.settings.delivery != AT_MOST_ONCE:
            for settle in settles:
                for offset in range(settle.first, settle.last + 1):
                    self.model.settle(offset, settle, self.now_ms)
        for message in self.queue.rejecting(HUGE):
            assert self.queue.dead_lettered(message.offset, b"there", now_ms=self.now_ms)
            self.model.end(message.offset, "dead-lettered")


TestQueueHistory = QueueHistory.TestCase
TestQueueHistory.settings = settings(
    max_examples=40, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
