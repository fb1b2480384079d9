"""Dividing a landing batch into tasks: nothing twice, nothing omitted, no task too large."""

from __future__ import annotations

import itertools

from hypothesis import given
from hypothesis import strategies as st

from millstream.pipelines.jobs.land.sources import (
    FILE_BYTES,
    TASK_BYTES_MIN,
    PartitionPlan,
    Source,
    plans,
    tasks,
    topic_ranges,
)
from millstream.pipelines.source.ranges import Range


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(1, 2_000_000)), max_size=12),
    st.floats(1, 100_000),
    st.integers(1, 16),
)
def test_every_offset_is_in_one_task(parts: list[tuple[int, int]], size: float, parallelism: int) -> None:
    ranges = [Range(f"t{at // 3}", at, start, start + length) for at, (start, length) in enumerate(parts)]
    sizes = {offset_range.topic: size for offset_range in ranges}
    shared = tasks(ranges, sizes, parallelism=parallelism)
    flat = [offset_range for task in shared for offset_range in task]
    for offset_range in ranges:
        pieces = sorted((piece.start, piece.end) for piece in flat if piece.partition == offset_range.partition)
        assert pieces[0][0] == offset_range.start
        assert pieces[-1][1] == offset_range.end
        assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))
    assert all(len(piece) > 0 for piece in flat)
    total = sum(map(len, flat)) * size
    for task in shared:
        assert sum(map(len, task)) * size <= FILE_BYTES * 1.01 + size * len(shared)
    if total >= 2 * TASK_BYTES_MIN * parallelism and size < 1000:
        assert len(shared) >= parallelism


def test_many_small_topics_share_tasks() -> None:
    ranges = [Range(f"t{number:03}", 0, 0, 10_000) for number in range(100)]
    shared = tasks(ranges, {offset_range.topic: 100.0 for offset_range in ranges}, parallelism=4)
    assert len(shared) == 4
    assert sum(len(task) for task in shared) <= 103


def source(first: dict[int, int], end: dict[int, int]) -> Source:
    return Source(topic="orders", topic_id="one", first=first, end=end)


def test_a_table_continues_at_its_position() -> None:
    partition_plans = plans(source({0: 0, 1: 40}, {0: 100, 1: 50}), {0: 30, 1: 20}, from_latest=False)
    assert partition_plans == {0: PartitionPlan(30, 30, 100), 1: PartitionPlan(20, 40, 50)}
    assert partition_plans[0].lost == 0
    assert partition_plans[1].lost == 20
    assert topic_ranges("orders", partition_plans) == [Range("orders", 0, 30, 100), Range("orders", 1, 40, 50)]


def test_a_new_table_starts_at_the_given_position() -> None:
    new = source({0: 5, 1: 0}, {0: 100, 1: 50})
    assert plans(new, {}, from_latest=False) == {
        0: PartitionPlan(None, 5, 100),
        1: PartitionPlan(None, 0, 50),
    }
    assert plans(new, {}, from_latest=True) == {
        0: PartitionPlan(None, 100, 100),
        1: PartitionPlan(None, 50, 50),
    }
    assert plans(new, {0: 80}, from_latest=True) == {
        0: PartitionPlan(80, 80, 100),
        1: PartitionPlan(None, 0, 50),
    }


def test_everything_may_be_deleted_by_retention() -> None:
    partition_plans = plans(source({0: 100}, {0: 100}), {0: 30}, from_latest=False)
    assert partition_plans == {0: PartitionPlan(30, 100, 100)}
    assert partition_plans[0].lost == 70
    assert topic_ranges("orders", partition_plans) == []
