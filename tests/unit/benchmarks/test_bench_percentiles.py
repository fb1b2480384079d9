"""Percentiles, and the schedule that latencies are measured from."""

from __future__ import annotations

import math

import numpy as np
import pytest
from benchmarks.latency import percentiles_of
from benchmarks.percentiles import Schedule, percentile
from hypothesis import given
from hypothesis import strategies as st


def test_a_percentile_is_one_of_the_values() -> None:
    hundred = list(range(1, 101))
    assert [percentile(hundred, percent) for percent in (0, 1, 50, 99, 99.9, 100)] == [1, 1, 50, 99, 100, 100]
    assert percentile([7.0], 50) == percentile([7.0], 99.9) == 7.0
    assert percentile(list(range(1, 1001)), 99.9) == 999


def test_an_empty_sample_has_no_percentile() -> None:
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


@given(st.lists(st.floats(0, 1e9), min_size=1, max_size=200), st.sampled_from((50, 90, 99, 99.9)))
def test_at_most_the_stated_share_exceeds_a_percentile(values: list[float], percent: float) -> None:
    found_value = percentile(values, percent)
    assert found_value in values
    assert sum(value <= found_value for value in values) >= len(values) * percent / 100 - 1e-6
    assert sum(value < found_value for value in values) < max(len(values) * percent / 100, 1) + 1e-6


@given(st.integers(1, 200_000), st.integers(1, 500), st.integers(0, 2**40))
def test_a_schedule_is_consistent(rate: int, count: int, start: int) -> None:
    schedule = Schedule(start, rate, count)
    due = schedule.due_ns()
    assert list(due[:3]) == [schedule.due_at(index) for index in range(min(count, 3))]
    assert schedule.due_by(start - 1) == 0
    assert schedule.due_by(start) >= 1
    assert schedule.due_by(int(due[-1]) + 1) == count
    # A message is never sent before its scheduled time.
    for index in (0, count // 2, count - 1):
        assert schedule.due_by(int(due[index]) - 1) <= index + (rate > 10**9)


def test_a_stall_delays_every_message_scheduled_during_it() -> None:
    """At 1,000/s, one response to all after a second makes half of the messages wait for more than half a second."""
    schedule = Schedule(0, 1000, 1000)
    latencies = schedule.latencies_ms(np.full(1000, 1_000_000_000, np.int64))
    assert latencies[0] == 1000
    assert latencies[-1] == 1
    assert percentiles_of(latencies)["p50 ms"] == 500


def test_a_message_without_a_response_has_infinite_latency() -> None:
    latencies = Schedule(5, 1000, 2).latencies_ms(np.array([5 + 2_000_000, 0], np.int64))
    assert latencies[0] == 2
    assert math.isinf(percentiles_of(latencies)["p99.9 ms"])
