"""The parts of a queue: frames, snapshots, the index of due times, the order of keys."""

from __future__ import annotations

from contextlib import suppress
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from millstream.broker.subscriptions.fold import Fold, InternTable
from millstream.broker.subscriptions.frame import (
    Frame,
    FrameHeader,
    LedgerNames,
    is_for_ledger,
    may_concern,
    read_frame,
    read_header,
    write_frame,
)
from millstream.broker.subscriptions.lease import Delta, DeltaKind
from millstream.broker.subscriptions.queue import Queue
from millstream.broker.subscriptions.snapshot import is_snapshot, read_snapshot, write_snapshot
from millstream.broker.subscriptions.supply import NEVER_MS, NO_KEY, DueIndex, KeyOrder
from millstream.core.errors import CorruptState
from millstream.core.ids import PartitionIndex
from millstream.core.subscription import QueueKey, SubscriptionSettings

KEY = QueueKey(UUID(int=1), UUID(int=2), PartitionIndex(3))
HEADER = FrameHeader(KEY, 4, 1, 6)

patient = settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])

numbers = st.integers(-(2**63), 2**63 - 1)
deltas = st.builds(
    Delta,
    st.sampled_from(DeltaKind),
    numbers,
    numbers,
    st.integers(0, 255),
    numbers,
    st.sampled_from(["", "share/a", "http/ü"]),
    numbers,
    st.text(max_size=5),
    st.binary(max_size=9),
)


def leased_queue() -> Queue:
    queue = Queue(KEY, SubscriptionSettings(), leader_epoch=1)
    queue.begin(10, now_ms=1)
    queue.add_scanned(10, 20, now_ms=1)
    queue.acquire("a", now_ms=1, max_records=3)
    return queue


@patient
@given(st.lists(deltas, max_size=10), st.sampled_from([1, 5]))
def test_a_frame_round_trips(some_deltas: list[Delta], times: int) -> None:
    given_deltas = some_deltas * times
    frame = write_frame(HEADER, given_deltas)
    assert read_frame(frame) == Frame(HEADER, given_deltas, [])
    assert read_frame(frame).names is None
    names = LedgerNames("billing", "orders")
    for_ledger = write_frame(HEADER, given_deltas, names)
    read = read_frame(for_ledger)
    assert (read.header, read.deltas, read.names) == (HEADER._replace(has_ledger=True), given_deltas, names)
    assert is_for_ledger(for_ledger)
    assert not is_for_ledger(frame)
    assert read_header(frame) == HEADER
    assert not is_snapshot(frame)


@patient
@given(st.lists(deltas, max_size=10), st.sampled_from([1, 5]), st.data())
def test_a_frame_refers_only_to_the_messages_of_its_deltas(
    some_deltas: list[Delta], times: int, data: st.DataObject
) -> None:
    bounds = [bound for delta in some_deltas for bound in (delta.first, delta.last)]
    offset = data.draw(st.one_of(numbers, *map(st.just, bounds)))
    concerns = any(delta.kind == DeltaKind.SOUGHT or delta.first <= offset <= delta.last for delta in some_deltas)
    assert may_concern(write_frame(HEADER, some_deltas * times), offset) == concerns


@patient
@given(st.lists(deltas, min_size=1, max_size=6), st.sampled_from([1, 5]), st.data())
def test_a_damaged_frame_is_reported(some_deltas: list[Delta], times: int, data: st.DataObject) -> None:
    frame = bytearray(write_frame(HEADER, some_deltas * times))
    cut = data.draw(st.integers(0, len(frame) - 1))
    with pytest.raises(CorruptState):
        read_frame(bytes(frame[:cut]))
    frame[data.draw(st.integers(0, len(frame) - 1))] ^= data.draw(st.integers(1, 255))
    with suppress(CorruptState):
        read_frame(bytes(frame))


def test_frames_are_applied_once_and_in_order() -> None:
    frame = leased_queue().drain()
    assert frame is not None
    fold = Fold(KEY)
    assert fold.replay(frame).sequence == 1
    fold.replay(frame)
    assert fold.counts[1] == 3
    with pytest.raises(CorruptState, match="missing"):
        fold.replay(write_frame(HEADER._replace(sequence=3), []))
    with pytest.raises(CorruptState, match="belong"):
        fold.replay(write_frame(HEADER._replace(key=QueueKey(UUID(int=5), UUID(int=2), PartitionIndex(3))), []))


@pytest.mark.parametrize("kind", [kind for kind in DeltaKind if kind not in (DeltaKind.START, DeltaKind.SOUGHT)])
def test_deltas_about_missing_messages_are_refused(kind: DeltaKind) -> None:
    if kind in (DeltaKind.RETENTION_CUT, DeltaKind.PLANNED, DeltaKind.LETTER_CLOSED):
        return
    fold = leased_queue().fold
    with pytest.raises(CorruptState):
        fold.apply(Delta(kind, 18, 40, 1, 0, "a", 1, "", b"1"))
    with pytest.raises(CorruptState):
        fold.apply(Delta(kind, 2, 12, 1, 0, "a", 1))


def test_a_snapshot_round_trips_and_damage_is_reported() -> None:
    fold = leased_queue().fold
    snapshot = write_snapshot(fold)
    assert is_snapshot(snapshot)
    assert write_snapshot(read_snapshot(snapshot)) == snapshot
    assert read_snapshot(snapshot).counts == fold.counts
    for place in range(len(snapshot)):
        damaged = bytearray(snapshot)
        damaged[place] ^= 0x55
        with suppress(CorruptState):
            read_snapshot(bytes(damaged))
    with pytest.raises(CorruptState):
        read_snapshot(snapshot[:-3])


@patient
@given(st.lists(st.tuples(st.integers(0, 500), st.integers(1, 600_000)), max_size=30), st.data())
def test_nothing_becomes_due_too_late(dues: list[tuple[int, int]], data: st.DataObject) -> None:
    waiting = dict(dues)
    index = DueIndex(lambda first, last: [(o, o, due) for o, due in waiting.items() if first <= o <= last])
    for offset, due_ms in waiting.items():
        index.add(offset, offset, due_ms)
    now_ms = 0
    while waiting:
        assert index.next_ms <= min(waiting.values())
        now_ms = max(now_ms, data.draw(st.sampled_from([index.next_ms, now_ms + 1, now_ms + 5000])))
        offsets = {offset for first, last in index.pop(now_ms) for offset in range(first, last + 1)}
        due = {offset for offset, due_ms in waiting.items() if due_ms <= now_ms}
        assert due <= offsets
        for offset in due:
            del waiting[offset]
    index.pop(now_ms + 10**7)
    assert index.next_ms == NEVER_MS


def test_messages_waiting_for_a_key_come_in_order() -> None:
    order = KeyOrder(0)
    assert order.try_enter(5, 0)
    assert order.try_enter(5, 0)
    assert order.try_enter(NO_KEY, 1)
    assert not any(order.try_enter(5, offset) for offset in range(2, 500))
    assert not order.leave(5, 3)
    head = 0
    for offset in range(2, 500):
        assert order.leave(5, head)
        assert order.next_waiting(5) == offset
        order.set_head(5, offset)
        head = offset
    assert order.leave(5, head)
    assert order.next_waiting(5) is None
    assert order.in_use == 0


def test_text_ids_are_kept_while_referenced() -> None:
    texts = InternTable()
    first, second = texts.add_references("a", 2), texts.add_references("b", 1)
    texts.remove_references(first, 1)
    assert (texts.references("a"), texts.texts_in_use()) == (1, ["a", "b"])
    texts.remove_references(first, 1)
    assert (texts.references("a"), texts.number("a")) == (0, None)
    assert texts.add_references("c", 1) == first
    assert texts.texts[second] == "b"
