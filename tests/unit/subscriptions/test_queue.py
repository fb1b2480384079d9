"""The queue state machine, rule by rule, and at a size at which its columns are trimmed, compacted and truncated."""

from __future__ import annotations

import random
from uuid import UUID

import numpy as np
import pytest

from millstream.broker.subscriptions.columns import AVAILABLE, DONE, LEASED, PARKED
from millstream.broker.subscriptions.frame import FrameHeader, read_frame, write_frame
from millstream.broker.subscriptions.lease import LETTER_BYTES, Delta, DeltaKind, Lease, Revival, Settlement
from millstream.broker.subscriptions.queue import CLOCK_STEP_MS, REASON_LENGTH_MAX, REASONS_MAX, Queue
from millstream.broker.subscriptions.snapshot import FoldImage, read_snapshot, write_snapshot
from millstream.core.errors import CoordinatorUnavailable, CorruptState, InvalidRecordState
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.subscription import AT_MOST_ONCE, QueueKey, SubscriptionSettings, Verb

KEY = QueueKey(UUID(int=1), UUID(int=2), PartitionIndex(3))
NOW_MS = 1_000_000
LEASE_MS = 30_000


def make_queue(count: int = 0, *, start: int = 0, window_max: int = 100_000, **changes: object) -> Queue:
    queue = Queue(KEY, SubscriptionSettings(**changes), leader_epoch=1, window_max=window_max, dense_max=50)  # type: ignore[arg-type]
    queue.begin(start, now_ms=NOW_MS)
    keys = np.arange(1, count + 1, dtype=np.int64) if changes.get("ordered") else None
    queue.add_scanned(start, start + count, now_ms=NOW_MS, keys=keys)
    return queue


def settle(first: int, last: int, verb: Verb, delay_ms: int | None = None, reason: str = "") -> Settlement:
    return Settlement(Offset(first), Offset(last), verb, delay_ms, reason)


def offsets(leases: list[Lease]) -> list[int]:
    return [offset for lease in leases for offset in range(lease.first, lease.last + 1)]


def again(queue: Queue) -> Queue:
    """The queue of the next leader, if everything has become durable."""
    image = FoldImage(KEY)
    image.replay(write_snapshot(queue.fold))
    return Queue(KEY, queue.settings, leader_epoch=2, snapshot=image.snapshot())


def test_the_oldest_messages_come_first_in_ranges_of_equal_attempts() -> None:
    queue = make_queue(20, start=100)
    assert queue.acquire("a", now_ms=NOW_MS, max_records=4) == [Lease(Offset(100), Offset(103), 1, NOW_MS + LEASE_MS)]
    queue.settle("a", [settle(101, 102, Verb.RELEASE)], now_ms=NOW_MS)
    leases = queue.acquire("b", now_ms=NOW_MS, max_records=4)
    assert [(lease.first, lease.last, lease.attempt) for lease in leases] == [(101, 102, 2), (104, 105, 1)]
    assert queue.redelivered == 2


def test_the_batch_at_the_limit_is_completed() -> None:
    queue = make_queue(30)
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=3, batch_ends=[10, 20, 30])) == list(range(10))
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=10, batch_ends=[10, 20, 30])) == list(range(10, 20))
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=3, until=25, batch_ends=[30])) == list(range(20, 25))


def test_an_ordered_queue_delivers_one_message_per_key_even_if_settled_at_once() -> None:
    queue = make_queue(ordered=True, delivery=AT_MOST_ONCE)
    queue.add_scanned(0, 4, now_ms=NOW_MS, keys=np.array([1, 1, 1, 0], np.int64))
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=2, batch_ends=[4])) == [0, 3]
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=2, batch_ends=[4])) == [1]


def test_the_limits_of_a_worker_and_of_the_partition() -> None:
    queue = make_queue(100, in_flight_max=10, leases_max=15)
    assert len(offsets(queue.acquire("a", now_ms=NOW_MS, max_records=50))) == 10
    assert queue.acquire("a", now_ms=NOW_MS, max_records=50) == []
    assert len(offsets(queue.acquire("b", now_ms=NOW_MS, max_records=50))) == 5
    assert queue.in_flight("a") == 10


def test_only_the_holder_settles_and_only_during_its_lease() -> None:
    queue = make_queue(10)
    queue.acquire("a", now_ms=NOW_MS, max_records=10)
    results = queue.settle(
        "b", [settle(0, 0, Verb.ACCEPT), settle(5, 20, Verb.ACCEPT), settle(3, 2, Verb.ACCEPT)], now_ms=NOW_MS
    )
    assert all(isinstance(result, InvalidRecordState) for result in results)
    assert queue.settle("a", [settle(0, 4, Verb.ACCEPT), settle(4, 5, Verb.ACCEPT)], now_ms=NOW_MS)[1] is not None
    assert queue.settle("a", [settle(5, 5, Verb.ACCEPT)], now_ms=NOW_MS + LEASE_MS) != [None]
    assert queue.counts.available == 5
    assert queue.counter(DeltaKind.EXPIRED) == 5


@pytest.mark.parametrize("verb", Verb)
def test_an_old_lease_of_a_worker_does_not_settle_its_newer_one(verb: Verb) -> None:
    queue = make_queue(3)
    queue.acquire("a", now_ms=NOW_MS, max_records=2)
    later = NOW_MS + LEASE_MS
    assert [lease[:3] for lease in queue.acquire("a", now_ms=later, max_records=3)] == [(0, 1, 2), (2, 2, 1)]
    before = write_snapshot(queue.fold)
    for first, last, attempt in ((0, 1, 1), (1, 2, 2), (0, 0, 999)):
        (refused,) = queue.settle("a", [settle(first, last, verb)._replace(attempt=attempt)], now_ms=later)
        assert isinstance(refused, InvalidRecordState)
    assert write_snapshot(queue.fold) == before
    assert queue.settle("a", [settle(0, 1, verb)._replace(attempt=2)], now_ms=later) == [None]


def test_an_extended_lease_lasts_longer() -> None:
    queue = make_queue(2)
    queue.acquire("a", now_ms=NOW_MS, max_records=2)
    later = NOW_MS + LEASE_MS - 1
    assert queue.settle("a", [settle(0, 0, Verb.EXTEND)], now_ms=later) == [None]
    assert queue.settle("a", [settle(1, 1, Verb.ACCEPT)], now_ms=later + 2) != [None]
    assert queue.settle("a", [settle(0, 0, Verb.ACCEPT)], now_ms=later + LEASE_MS - 1) == [None]


def test_a_slightly_extended_lease_does_not_expire_with_the_old_one() -> None:
    queue = make_queue(3, lease_ms=500)
    for _ in range(2):
        # The second time the queue knows the time, and tracks the lease among those that expire soon.
        queue.acquire("a", now_ms=NOW_MS, max_records=1)
        queue.tick(NOW_MS)
    queue.settle("a", [settle(1, 1, Verb.EXTEND, 503)], now_ms=NOW_MS)
    queue.tick(NOW_MS + 500)
    assert (queue.counts.leased, queue.counts.available) == (1, 2)
    assert queue.settle("a", [settle(1, 1, Verb.ACCEPT)], now_ms=NOW_MS + 502) == [None]


def test_a_worker_cannot_settle_messages_of_another() -> None:
    queue = make_queue(4)
    queue.acquire("a", now_ms=NOW_MS, max_records=2)
    queue.acquire("b", now_ms=NOW_MS, max_records=2)
    for first, last in ((0, 0), (0, 1), (1, 2)):
        assert queue.settle("b", [settle(first, last, Verb.ACCEPT)], now_ms=NOW_MS) != [None]
    assert queue.counts.leased == 4


def test_attempts_and_leases_survive_a_restart() -> None:
    queue = make_queue(4, backoff_min_ms=50)
    queue.acquire("a", now_ms=NOW_MS, max_records=3)
    queue.settle("a", [settle(0, 0, Verb.RELEASE), settle(1, 1, Verb.RELEASE, 0)], now_ms=NOW_MS)
    queue = again(queue)
    assert queue.settle("a", [settle(2, 2, Verb.ACCEPT)], now_ms=NOW_MS) == [None]
    assert [lease[:3] for lease in queue.acquire("b", now_ms=NOW_MS, max_records=9)] == [(1, 1, 2), (3, 3, 1)]
    assert [lease[:3] for lease in queue.acquire("b", now_ms=NOW_MS + 50, max_records=9)] == [(0, 0, 2)]


def test_parked_and_available_messages_are_found_after_a_restart() -> None:
    queue = make_queue(100, window_max=100)
    queue.acquire("slow", now_ms=NOW_MS, max_records=1)
    queue.acquire("a", now_ms=NOW_MS, max_records=99)
    queue.settle("a", [settle(1, 99, Verb.ACCEPT)], now_ms=NOW_MS)
    queue.tick(NOW_MS)
    queue.release_worker("slow", now_ms=NOW_MS)
    assert (queue.counts.stragglers, queue.counts.available) == (1, 1)
    assert [lease[:3] for lease in again(queue).acquire("b", now_ms=NOW_MS, max_records=9)] == [(0, 0, 2)]


def test_backoff_doubles_and_a_delay_overrides_it() -> None:
    queue = make_queue(1, backoff_min_ms=100, backoff_max_ms=250, attempts=0)
    now_ms = NOW_MS
    for wait_ms in (100, 200, 250, 250):
        queue.acquire("a", now_ms=now_ms, max_records=1)
        queue.settle("a", [settle(0, 0, Verb.RELEASE)], now_ms=now_ms)
        assert queue.acquire("a", now_ms=now_ms + wait_ms * 4 // 5 - 1, max_records=1) == []
        now_ms += wait_ms
    queue.acquire("a", now_ms=now_ms, max_records=1)
    queue.settle("a", [settle(0, 0, Verb.RELEASE, 0)], now_ms=now_ms)
    assert queue.acquire("a", now_ms=now_ms, max_records=1)[0].attempt == 6


@pytest.mark.parametrize("how", ["released", "expired", "gone"])
def test_the_last_failed_attempt_makes_a_dead_letter(how: str) -> None:
    queue = make_queue(3, attempts=2, dead_letter_topic="dead")
    now_ms = NOW_MS
    for _ in range(2):
        queue.acquire("a", now_ms=now_ms, max_records=1)
        if how == "released":
            queue.settle("a", [settle(0, 0, Verb.RELEASE, reason="no")], now_ms=now_ms)
        elif how == "gone":
            queue.release_worker("a", now_ms=now_ms)
        else:
            now_ms += LEASE_MS
            queue.tick(now_ms)
    (rejected,) = queue.rejecting(10)
    reasons = {"released": "no", "expired": "all attempts have failed", "gone": "the worker is gone"}
    assert (rejected.offset, rejected.attempts, rejected.reason) == (0, 2, reasons[how])
    assert (rejected.first_ms, rejected.time_ms) == (NOW_MS, now_ms)
    assert offsets(queue.acquire("b", now_ms=now_ms, max_records=9)) == [1, 2]


def test_a_dead_letter_is_planned_produced_and_forgotten_across_a_crash() -> None:
    queue = make_queue(2, dead_letter_topic="dead")
    queue.acquire("a", now_ms=NOW_MS, max_records=1)
    queue.settle("a", [settle(0, 0, Verb.REJECT, reason="x" * 1000)], now_ms=NOW_MS)
    assert queue.plan(0, b"producer 7", now_ms=NOW_MS)
    assert not queue.plan(1, b"no", now_ms=NOW_MS)
    queue = again(queue)
    (rejected,) = queue.rejecting(10)
    assert (rejected.plan, rejected.reason) == (b"producer 7", "x" * REASON_LENGTH_MAX)
    assert queue.dead_lettered(0, b"dead-0 at 5", now_ms=NOW_MS)
    assert not queue.dead_lettered(0, b"dead-0 at 5", now_ms=NOW_MS)
    assert queue.fold.plans == {}
    frame = queue.drain()
    assert frame is not None
    (delta,) = read_frame(frame).deltas
    assert (delta.kind, delta.extra) == (DeltaKind.DEAD_LETTERED, b"dead-0 at 5")


def dead_letters(queue: Queue, *numbers: int) -> list[Revival]:
    """Dead-letter some messages, and return how they are revived by their letters."""
    for offset in numbers:
        assert queue.dead_lettered(offset, b"there", now_ms=NOW_MS)
    return [Revival(Offset(offset), KEYS[offset], offset.to_bytes(LETTER_BYTES)) for offset in numbers]


KEYS = [7, 8, 7, 8, 7]


@pytest.mark.parametrize("crashes", [False, True])
def test_revived_messages_restart_in_order_once_per_letter(crashes: bool) -> None:
    queue = make_queue(5, dead_letter_topic="dead", attempts=1)
    queue.acquire("a", now_ms=NOW_MS, max_records=5)
    queue.settle("a", [settle(0, 4, Verb.RELEASE)], now_ms=NOW_MS)
    letters = dead_letters(queue, 3, 0, 1, 2, 4)
    assert (queue.oldest, queue.fold.unfinished) == (5, 0)
    assert queue.revive(letters[:2], now_ms=NOW_MS) == 2
    queue = again(queue) if crashes else queue
    assert queue.revive(letters[:2], now_ms=NOW_MS) == 0
    assert queue.revive(letters, now_ms=NOW_MS) == 3
    leases = queue.acquire("b", now_ms=NOW_MS, max_records=9)
    assert offsets(leases) == [0, 1, 2, 3, 4]
    assert {lease.attempt for lease in leases} == {1}
    queue.settle("b", [settle(0, 4, Verb.ACCEPT)], now_ms=NOW_MS)
    # The letters were not closed before the process that redrove them died; then they are.
    queue = again(queue) if crashes else queue
    assert queue.revive(letters, now_ms=NOW_MS) == 0
    queue.close_letters(letters, now_ms=NOW_MS)
    assert queue.fold.revived == {}


@pytest.mark.parametrize("crashes", [False, True])
def test_a_message_is_not_revived_while_its_letter_is_being_written(crashes: bool) -> None:
    queue = make_queue(2, dead_letter_topic="dead")
    queue.acquire("a", now_ms=NOW_MS, max_records=2)
    queue.settle("a", [settle(0, 1, Verb.REJECT)], now_ms=NOW_MS)
    first, second = (Revival(Offset(0), KEYS[0], letter.to_bytes(LETTER_BYTES)) for letter in (1, 2))
    (other,) = dead_letters(queue, 1)
    queue = again(queue) if crashes else queue
    with pytest.raises(CoordinatorUnavailable, match="message 0 is still being written"):
        queue.revive([other, first], now_ms=NOW_MS)
    assert queue.counts.available == 0, "all of them are asked for again"
    dead_letters(queue, 0)
    assert queue.revive([other, first], now_ms=NOW_MS) == 2
    # It is dead-lettered again: the first letter has had its effect, the second has not.
    queue.acquire("a", now_ms=NOW_MS, max_records=2)
    queue.settle("a", [settle(0, 0, Verb.REJECT)], now_ms=NOW_MS)
    queue = again(queue) if crashes else queue
    assert queue.revive([first], now_ms=NOW_MS) == 0
    with pytest.raises(CoordinatorUnavailable):
        queue.revive([second], now_ms=NOW_MS)
    dead_letters(queue, 0)
    assert queue.revive([second], now_ms=NOW_MS) == 1


def test_a_letter_of_an_undelivered_message_changes_nothing() -> None:
    queue = make_queue(1, dead_letter_topic="dead")
    queue.acquire("a", now_ms=NOW_MS, max_records=1)
    queue.settle("a", [settle(0, 0, Verb.REJECT)], now_ms=NOW_MS)
    (letter,) = dead_letters(queue, 0)
    older = letter._replace(letter=b"o" * LETTER_BYTES)
    assert queue.revive([letter], now_ms=NOW_MS) == 1
    assert queue.revive([older], now_ms=NOW_MS) == 0, "it is available"
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=1)) == [0]
    assert queue.revive([older], now_ms=NOW_MS) == 0, "it is leased"
    queue.settle("a", [settle(0, 0, Verb.RELEASE, delay_ms=1000)], now_ms=NOW_MS)
    assert queue.revive([older], now_ms=NOW_MS) == 0, "it waits for a retry"
    queue.seek(0, now_ms=NOW_MS)
    assert queue.revive([letter], now_ms=NOW_MS) == 0, "it is looked at again"
    queue.add_scanned(0, 1, now_ms=NOW_MS)
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=1)) == [0]


def test_a_revived_message_precedes_later_ones_of_its_key() -> None:
    queue = make_queue(ordered=True, dead_letter_topic="dead")
    queue.add_scanned(0, 5, now_ms=NOW_MS, keys=np.array(KEYS, np.int64))
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=2)) == [0, 1]
    queue.settle("a", [settle(0, 1, Verb.REJECT)], now_ms=NOW_MS)
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=1)) == [2]
    queue.revive(dead_letters(queue, 0, 1), now_ms=NOW_MS)
    # Key 7 is in use, and 3 waits for a worker, but 1 comes first.
    assert offsets(queue.acquire("b", now_ms=NOW_MS, max_records=9)) == [1]
    queue.settle("a", [settle(2, 2, Verb.ACCEPT)], now_ms=NOW_MS)
    assert offsets(queue.acquire("b", now_ms=NOW_MS, max_records=9)) == [0]
    queue.settle("b", [settle(0, 1, Verb.ACCEPT)], now_ms=NOW_MS)
    assert offsets(queue.acquire("b", now_ms=NOW_MS, max_records=9)) == [3, 4]


def test_without_a_dead_letter_topic_failures_are_dropped_and_counted() -> None:
    queue = make_queue(1)
    queue.acquire("a", now_ms=NOW_MS, max_records=1)
    queue.settle("a", [settle(0, 0, Verb.REJECT, reason="no")], now_ms=NOW_MS)
    assert queue.counter(DeltaKind.DROPPED) == 1
    assert queue.fold.unfinished == 0


def test_the_length_of_reasons_is_bounded() -> None:
    queue = make_queue(REASONS_MAX + 5, dead_letter_topic="dead")
    queue.acquire("a", now_ms=NOW_MS, max_records=REASONS_MAX + 5)
    verbs = [settle(offset, offset, Verb.REJECT, reason=f"reason {offset}") for offset in range(REASONS_MAX + 5)]
    assert queue.settle("a", verbs, now_ms=NOW_MS) == [None] * len(verbs)
    assert len(queue.fold.reasons) == REASONS_MAX + 1
    assert queue.rejecting(REASONS_MAX + 5)[-1].reason == ""


def test_at_most_once_messages_are_settled_on_delivery() -> None:
    queue = make_queue(3, delivery=AT_MOST_ONCE)
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=2)) == [0, 1]
    assert queue.oldest == 2
    results = queue.settle("a", [settle(0, 1, Verb.ACCEPT), settle(0, 0, Verb.RELEASE)], now_ms=NOW_MS)
    assert results[0] is None
    assert isinstance(results[1], InvalidRecordState)


def test_a_key_waits_for_its_first_message_and_other_keys_do_not() -> None:
    queue = make_queue(ordered=True, backoff_min_ms=50, dead_letter_topic="dead")
    queue.add_scanned(0, 6, now_ms=NOW_MS, keys=np.array([7, 7, 8, 0, 7, 0], np.int64))
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=9)) == [0, 2, 3, 5]
    queue.settle("a", [settle(0, 0, Verb.RELEASE), settle(2, 3, Verb.ACCEPT)], now_ms=NOW_MS)
    assert queue.acquire("a", now_ms=NOW_MS, max_records=9) == []
    assert queue.counts.blocked == 2
    assert offsets(queue.acquire("a", now_ms=NOW_MS + 50, max_records=9)) == [0]
    queue.settle("a", [settle(0, 0, Verb.REJECT)], now_ms=NOW_MS + 50)
    assert offsets(queue.acquire("b", now_ms=NOW_MS + 50, max_records=9)) == [1]
    queue.settle("b", [settle(1, 1, Verb.ACCEPT)], now_ms=NOW_MS + 50)
    assert queue.next_available == 4


def test_after_a_restart_held_keys_are_restored_before_any_delivery() -> None:
    keys = np.array([7, 8, 7, 8], np.int64)
    queue = make_queue(ordered=True)
    queue.add_scanned(0, 4, now_ms=NOW_MS, keys=keys)
    queue.acquire("a", now_ms=NOW_MS, max_records=1)
    queue = again(queue)
    assert (queue.is_ready, queue.next_scan_offset, queue.room, queue.next_available) == (False, 0, 1, None)
    assert queue.acquire("b", now_ms=NOW_MS, max_records=9) == []
    queue.add_scanned(0, 1, now_ms=NOW_MS, keys=keys[:1])
    assert (queue.is_ready, queue.next_scan_offset, queue.next_available) == (True, 1, None)
    queue.add_scanned(0, 2, now_ms=NOW_MS, keys=keys[:2])
    assert offsets(queue.acquire("b", now_ms=NOW_MS, max_records=9)) == [1]
    assert queue.settle("a", [settle(0, 0, Verb.ACCEPT)], now_ms=NOW_MS) == [None]
    queue.add_scanned(2, 4, now_ms=NOW_MS, keys=keys[2:])
    assert offsets(queue.acquire("b", now_ms=NOW_MS, max_records=9)) == [2]


def test_after_a_restart_messages_are_delivered_before_the_whole_window_is_scanned() -> None:
    count = 50_000
    keys = np.arange(1, count + 1, dtype=np.int64)
    queue = make_queue(ordered=True)
    queue.add_scanned(0, count, now_ms=NOW_MS, keys=keys)
    queue.acquire("a", now_ms=NOW_MS, max_records=5)
    queue.acquire("b", now_ms=NOW_MS, max_records=10_000)
    queue.settle("b", [settle(5, 9_000, Verb.RELEASE)], now_ms=NOW_MS)
    queue = again(queue)
    assert (queue.is_ready, queue.next_scan_offset, queue.room) == (False, 0, 5)
    queue.add_scanned(0, 5, now_ms=NOW_MS, keys=keys[:5])
    assert (queue.is_ready, queue.next_scan_offset, queue.room) == (False, 9_001, 1_004)
    queue.add_scanned(9_001, 10_005, now_ms=NOW_MS, keys=keys[9_001:10_005])
    assert (queue.is_ready, queue.next_scan_offset, queue.next_available) == (True, 5, None)
    queue.add_scanned(5, 10, now_ms=NOW_MS, keys=keys[5:10])
    # Messages not scanned yet can be settled, and count for their key.
    assert queue.settle("b", [settle(9_001, 9_002, Verb.ACCEPT)], now_ms=NOW_MS) == [None]
    assert offsets(queue.acquire("c", now_ms=NOW_MS, max_records=99)) == [*range(5, 10)]
    assert queue.next_scan_offset == 10


def test_scans_may_overlap_or_leave_a_gap() -> None:
    queue = make_queue(5)
    queue.add_scanned(3, 8, now_ms=NOW_MS, matches=np.array([0, 0, 1, 0, 1], np.bool_))
    queue.add_scanned(10, 12, now_ms=NOW_MS, absent=[(11, 11)])
    assert offsets(queue.acquire("a", now_ms=NOW_MS, max_records=99)) == [0, 1, 2, 3, 4, 5, 7, 10]
    assert (queue.counter(DeltaKind.FILTERED), queue.counter(DeltaKind.ABSENT)) == (1, 3)


def test_delayed_messages_block_nothing_and_the_window_moves_past_them() -> None:
    queue = make_queue(window_max=200)
    due_ms = NOW_MS + 3_600_000
    for first in range(0, 1000, 50):
        queue.add_scanned(first, first + 50, now_ms=NOW_MS, delayed=[(first, due_ms), (first + 1, due_ms)])
        assert len(offsets(queue.acquire("a", now_ms=NOW_MS, max_records=99))) == 48
        queue.settle("a", [settle(first + 2, first + 49, Verb.ACCEPT)], now_ms=NOW_MS)
    assert queue.counts.stragglers > 30
    assert queue.fold.window.span <= 100
    assert queue.next_due_ms is not None
    assert queue.next_due_ms <= due_ms
    expected = sorted([*range(0, 1000, 50), *range(1, 1000, 50)])
    assert offsets(again(queue).acquire("b", now_ms=due_ms, max_records=99)) == expected
    assert offsets(queue.acquire("b", now_ms=due_ms, max_records=99)) == expected


def test_a_full_window_advances_once_its_first_messages_are_done() -> None:
    queue = make_queue(100, window_max=100)
    assert queue.room == 0
    queue.acquire("slow", now_ms=NOW_MS, max_records=1)
    queue.acquire("a", now_ms=NOW_MS, max_records=99)
    queue.settle("a", [settle(1, 99, Verb.ACCEPT)], now_ms=NOW_MS)
    queue.tick(NOW_MS)
    assert queue.room == 100
    assert queue.settle("slow", [settle(0, 0, Verb.ACCEPT)], now_ms=NOW_MS) == [None]
    assert queue.fold.unfinished == 0


def test_a_seek_drops_leases_and_redelivers() -> None:
    queue = make_queue(10)
    queue.acquire("a", now_ms=NOW_MS, max_records=5)
    queue.settle("a", [settle(0, 1, Verb.ACCEPT)], now_ms=NOW_MS)
    queue.seek(0, now_ms=NOW_MS)
    assert queue.settle("a", [settle(2, 2, Verb.ACCEPT)], now_ms=NOW_MS) != [None]
    assert (queue.next_scan_offset, queue.next_due_ms) == (0, None)
    queue.add_scanned(0, 10, now_ms=NOW_MS)
    assert queue.acquire("b", now_ms=NOW_MS, max_records=99) == [Lease(Offset(0), Offset(9), 1, NOW_MS + LEASE_MS)]


def test_a_truncation_beyond_the_scanned_range_moves_the_queue() -> None:
    queue = make_queue(10)
    queue.acquire("a", now_ms=NOW_MS, max_records=5)
    queue.drop_before(3, now_ms=NOW_MS)
    assert (queue.oldest, queue.in_flight("a")) == (3, 2)
    queue.drop_before(20, now_ms=NOW_MS)
    assert (queue.oldest, queue.next_scan_offset, queue.counter(DeltaKind.RETENTION_CUT)) == (20, 20, 20)
    queue.drop_before(5, now_ms=NOW_MS)
    assert queue.oldest == 20


def test_reconstructible_changes_are_not_urgent() -> None:
    queue = make_queue(5)
    queue.drain()
    assert queue.drain() is None
    queue.add_scanned(5, 9, now_ms=NOW_MS, matches=np.array([1, 0, 1, 0], np.bool_))
    assert (queue.has_leases, queue.is_urgent) == (False, False)
    (lease,) = queue.acquire("a", now_ms=NOW_MS, max_records=1)
    assert (queue.has_leases, queue.is_urgent) == (True, False)
    queue.settle("a", [Settlement(lease.first, lease.last, Verb.ACCEPT)], now_ms=NOW_MS)
    assert queue.is_urgent
    assert queue.drain() is not None
    assert (queue.drain(), queue.has_leases, queue.is_urgent) == (None, False, False)


def test_a_lease_that_must_survive_is_urgent() -> None:
    queue = make_queue(5, delivery="exactly-once")
    queue.drain()
    queue.acquire("a", now_ms=NOW_MS, max_records=1)
    assert (queue.has_leases, queue.is_urgent) == (False, True)


def test_a_snapshot_of_another_queue_is_refused() -> None:
    other = QueueKey(UUID(int=9), UUID(int=2), PartitionIndex(3))
    with pytest.raises(CorruptState):
        Queue(other, SubscriptionSettings(), leader_epoch=1, snapshot=write_snapshot(make_queue(3).fold))


def accepted(queue: Queue, count: int) -> list[bytes]:
    """Accept messages one by one; return a frame for each."""
    frames = []
    for offset in range(count):
        queue.acquire("a", now_ms=NOW_MS, max_records=1)
        queue.settle("a", [settle(offset, offset, Verb.ACCEPT)], now_ms=NOW_MS)
        frame = queue.drain()
        assert frame is not None
        frames.append(frame)
    return frames


def test_an_image_keeps_frames_it_cannot_apply_and_is_not_read_without_them(caplog: pytest.LogCaptureFixture) -> None:
    queue, image = make_queue(40), FoldImage(KEY)
    frames = accepted(queue, 40)
    for frame in [*frames[:2], *frames[3:]]:
        image.replay(frame)
    assert image.is_broken
    assert len(caplog.records) == 1
    again = FoldImage(KEY)
    again.replay(image.snapshot())
    assert (again.is_broken, again.snapshot()) == (True, image.snapshot())
    assert all(frame in image.snapshot() for frame in frames[3:])
    # Otherwise a queue would be opened without the durable content of the last frames.
    with pytest.raises(CorruptState, match=r"frame 3 of queue .* is missing; .* unfinished message before that was 2"):
        Queue(KEY, queue.settings, leader_epoch=2, snapshot=image.snapshot())
    image.replay(write_snapshot(queue.fold))
    assert (image.is_broken, image.snapshot()) == (False, write_snapshot(queue.fold))


def test_frames_that_a_newer_version_can_apply_are_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, image = make_queue(5), FoldImage(KEY)
    frames = accepted(queue, 5)
    with monkeypatch.context() as older:
        older.setattr("millstream.broker.subscriptions.frame.FORMAT", 1)
        for frame in frames:
            image.replay(frame)
        stored = image.snapshot()
    again = FoldImage(KEY)
    again.replay(stored)
    assert again.snapshot() == write_snapshot(read_snapshot(stored)) == write_snapshot(queue.fold)


def test_an_image_keeps_a_bounded_number_of_unknown_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    queue, image = make_queue(40), FoldImage(KEY)
    frames = accepted(queue, 40)
    monkeypatch.setattr("millstream.broker.subscriptions.snapshot.BROKEN_BYTES_MAX", 5 * len(frames[1]))
    for frame in frames[1:]:
        image.replay(frame)
    stored = image.snapshot()
    # The last one shows that some are missing.
    assert [frame in stored for frame in frames[1:]] == [True] * 4 + [False] * 34 + [True]


def test_an_image_that_cannot_read_a_snapshot_remembers_that_there_was_one() -> None:
    queue, image = make_queue(5), FoldImage(KEY)
    image.replay(write_snapshot(queue.fold)[:-3])
    assert image.is_broken
    with pytest.raises(CorruptState):
        read_snapshot(image.snapshot())


def test_a_frame_that_fails_midway_is_not_applied_again() -> None:
    queue, image = make_queue(5), FoldImage(KEY)
    first = queue.drain()
    assert first is not None
    image.replay(first)
    header = FrameHeader(KEY, 1, 2, 0)
    scanned, absent = Delta(DeltaKind.SCANNED, 5, 9, 0, 0, "", NOW_MS), Delta(DeltaKind.ACCEPTED, 50, 51, 1, 0, "", 1)
    image.replay(write_frame(header, [scanned, absent]))
    assert image.is_broken
    for _ in range(2):
        with pytest.raises(CorruptState, match="as a whole"):
            read_snapshot(image.snapshot())
        assert (image.fold.window.end, image.fold.counters[DeltaKind.SCANNED]) == (10, 10)


@pytest.mark.parametrize("seed", range(3))
def test_a_large_queue_agrees_with_arrays(seed: int) -> None:
    rng = random.Random(seed)
    queue = make_queue(attempts=0, in_flight_max=1_000_000, leases_max=1_000_000)
    image = FoldImage(KEY)
    states = np.zeros(60_000, np.uint8)
    attempts = np.zeros(60_000, np.uint8)
    held: list[Lease] = []
    for _ in range(400):
        look = min(rng.randrange(1, 900), 60_000 - queue.next_scan_offset, queue.room)
        matches = np.array([rng.random() < 0.9 for _ in range(look)], np.bool_)
        first = queue.next_scan_offset
        queue.add_scanned(first, first + look, now_ms=NOW_MS, matches=matches if rng.random() < 0.5 else None)
        states[first : first + look] = [queue.fold.state_of(offset) for offset in range(first, first + look)]
        for lease in queue.acquire("a", now_ms=NOW_MS, max_records=rng.randrange(1, 700)):
            assert (states[lease.first : lease.last + 1] == AVAILABLE).all()
            states[lease.first : lease.last + 1] = LEASED
            attempts[lease.first : lease.last + 1] += 1
            assert (attempts[lease.first : lease.last + 1] == lease.attempt).all()
            held.append(lease)
        rng.shuffle(held)
        for _ in range(min(len(held), rng.randrange(1, 60))):
            lease = held.pop()
            end = rng.randint(lease.first, lease.last)
            if end < lease.last:
                held.append(lease._replace(first=Offset(end + 1)))
            verb, delay_ms, state = rng.choice(
                [(Verb.ACCEPT, None, DONE)] * 4 + [(Verb.RELEASE, None, AVAILABLE), (Verb.RELEASE, 9_999, PARKED)]
            )
            assert queue.settle("a", [settle(lease.first, end, verb, delay_ms)], now_ms=NOW_MS) == [None]
            states[lease.first : end + 1] = state
        frame = queue.drain()
        if frame is not None:
            image.replay(frame)
    end = queue.next_scan_offset
    assert [queue.fold.state_of(offset) for offset in range(end)] == states[:end].tolist()
    assert image.snapshot() == write_snapshot(queue.fold)
    assert queue.counts.parked == np.count_nonzero(states == PARKED)
    queue.release_worker("a", now_ms=NOW_MS)
    assert queue.counts.leased == 0
    offsets_left = np.flatnonzero((states[:end] == AVAILABLE) | (states[:end] == LEASED)).tolist()
    assert offsets(queue.acquire("b", now_ms=NOW_MS, max_records=100_000)) == offsets_left
    assert queue.fold.window.start > 0 or queue.counts.stragglers


def test_the_memory_per_message_is_small() -> None:
    queue = make_queue(100_000, in_flight_max=1_000_000, window_max=200_000)
    queue.acquire("a", now_ms=NOW_MS, max_records=10_000)
    window = queue.fold.window
    columns = (window.states, window.attempts, window.dues, window.holders, window.first_delivered)
    assert sum(column.__sizeof__() for column in columns) < 30 * 100_000


def test_setting_the_clock_back_prolongs_nothing() -> None:
    fast_ms, hour_ms = NOW_MS + 3_600_000, 3_600_000
    queue = make_queue(10, backoff_min_ms=5000, attempts=0)
    queue.add_scanned(10, 11, now_ms=fast_ms, delayed=[(10, fast_ms + 60_000)])
    queue.tick(fast_ms)
    queue.acquire("a", now_ms=fast_ms, max_records=2)
    queue.settle("a", [settle(1, 1, Verb.RELEASE)], now_ms=fast_ms)
    queue.tick(fast_ms - hour_ms)
    # Leases and retry delays keep their duration; a scheduled message waits for its time.
    assert offsets(queue.acquire("b", now_ms=NOW_MS + 3999, max_records=20)) == list(range(2, 10))
    assert offsets(queue.acquire("b", now_ms=NOW_MS + 5000, max_records=20)) == [1]
    moved = again(queue)
    for holder in (queue, moved):
        holder.tick(NOW_MS + LEASE_MS - 1)
        assert holder.in_flight("a") == 1
        holder.tick(NOW_MS + LEASE_MS)
        assert holder.in_flight("a") == 0
    assert 10 not in offsets(queue.acquire("c", now_ms=fast_ms + 59_999, max_records=20))
    assert 10 in offsets(queue.acquire("d", now_ms=fast_ms + 60_000, max_records=20))


def test_setting_the_clock_back_a_little_changes_nothing() -> None:
    queue = make_queue(1)
    queue.acquire("a", now_ms=NOW_MS, max_records=1)
    queue.drain()
    queue.tick(NOW_MS - CLOCK_STEP_MS)
    assert queue.drain() is None
