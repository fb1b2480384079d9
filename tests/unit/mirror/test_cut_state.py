"""The state of a queue is cut where the records of its copy are cut, and producer ids of clusters do not collide."""

from __future__ import annotations

import uuid
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.kafka.apis.subscription_apis import SubscriptionList
from millstream.broker.subscriptions.columns import AVAILABLE, DONE, LEASED
from millstream.broker.subscriptions.fold import Fold
from millstream.broker.subscriptions.lease import Delta, DeltaKind
from millstream.broker.subscriptions.snapshot import cut_snapshot, read_snapshot, write_snapshot
from millstream.core.errors import InvalidMirror, InvalidSetting, NotLeader
from millstream.core.ids import PartitionIndex, first_producer_id
from millstream.core.mirror import check_mirror
from millstream.core.subscription import QueueKey
from millstream.core.topic import TopicPartition
from millstream_testing.clock import ManualClock

KEY = QueueKey(uuid.UUID(int=1), uuid.UUID(int=2), PartitionIndex(0))
SCANNED = 40


def happened(kind: DeltaKind, first: int, last: int, *, attempt: int = 0, worker: str = "") -> Delta:
    return Delta(kind, first, last, attempt, 1000 if attempt else 0, worker, 1)


def scanned(done: set[int], leased: set[int]) -> Fold:
    """A queue that has scanned 40 messages, some of them accepted and some leased."""
    fold = Fold(KEY)
    fold.apply(happened(DeltaKind.START, 0, 0))
    fold.apply(happened(DeltaKind.SCANNED, 0, SCANNED - 1))
    for offset in sorted(done | leased):
        fold.apply(happened(DeltaKind.ACQUIRED, offset, offset, attempt=1, worker=f"w{offset % 3}"))
    for offset in sorted(done):
        fold.apply(happened(DeltaKind.ACCEPTED, offset, offset))
    return fold


@given(
    done=st.sets(st.integers(0, SCANNED - 1)),
    leased=st.sets(st.integers(0, SCANNED - 1)),
    end=st.integers(0, SCANNED + 5),
)
def test_a_cut_queue_keeps_everything_below_the_cut_and_nothing_above(
    done: set[int], leased: set[int], end: int
) -> None:
    leased -= done
    cut, is_cut = cut_snapshot(write_snapshot(scanned(done, leased)), end)
    fold = read_snapshot(cut)
    assert is_cut == (end < SCANNED)
    assert fold.window.end == min(end, SCANNED)
    for offset in range(min(end, SCANNED)):
        expected = DONE if offset in done else LEASED if offset in leased else AVAILABLE
        assert fold.state_of(offset) == expected
    assert fold.unfinished == len([offset for offset in range(min(end, SCANNED)) if offset not in done])
    assert set(fold.workers.texts_in_use()) == {f"w{offset % 3}" for offset in leased if offset < end}
    # It continues as if the rest had never been scanned.
    fold.apply(happened(DeltaKind.SCANNED, fold.window.end, fold.window.end + 1))
    assert fold.state_of(fold.window.end - 1) == AVAILABLE


def test_delays_in_the_queue_of_a_copy_pass_with_time() -> None:
    fold, clock = scanned({0, 1}, {2}), ManualClock()
    for offset, delay_ms in ((3, 1000), (4, 1000), (5, 5000)):
        fold.apply(Delta(DeltaKind.PARKED, offset, offset, 0, clock.now_ms() + delay_ms, "", clock.now_ms()))
    api: Any = SubscriptionList
    listing = object.__new__(api)
    listing._service = SimpleNamespace(clock=clock, topics=SimpleNamespace(partition=Mock(side_effect=NotLeader(""))))

    def counts() -> tuple[int, int, int]:
        row = listing._copied_queue(TopicPartition("orders", PartitionIndex(0)), fold, SCANNED + 10)
        return row["parked"], row["available"], row["backlog"]

    assert counts() == (3, 44, 48)
    clock.advance_ms(1000)
    assert counts() == (1, 46, 48)
    clock.advance_ms(4000)
    assert counts() == (0, 47, 48)


@given(name=st.text(min_size=1), other=st.text(min_size=1))
def test_clusters_have_ranges_of_producer_ids_above_those_of_kafka(name: str, other: str) -> None:
    first, second = first_producer_id(name), first_producer_id(other)
    assert first >= 2**32
    assert first + 2**32 <= 2**63
    assert first == second or abs(first - second) >= 2**32


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("paris", {}),
        ("paris", {"from": "no-port"}),
        ("paris", {"from": "a:1", "topics": "("}),
        ("pa ris", {"from": "a:1"}),
        ("paris", {"from": "a:1", "user": "u"}),
        ("paris", {"from": "a:1", "colour": "red"}),
        ("paris", {"from": "a:1", "rename": "a b"}),
    ],
)
def test_an_invalid_mirror_is_refused(name: str, settings: dict[str, str]) -> None:
    with pytest.raises((InvalidMirror, InvalidSetting)):
        check_mirror(name, settings)
