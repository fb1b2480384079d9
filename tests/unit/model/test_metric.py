from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.metric import Histogram, Sample, counter, gauge


def test_a_histogram_counts_values_up_to_each_bound() -> None:
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 3.0):
        histogram.observe(value)
    assert histogram.distribution() == ((1.0, 2.0), (2, 3), 4, 6.0)


def test_bounds_must_increase() -> None:
    with pytest.raises(ValueError, match="must grow"):
        Histogram((2.0, 1.0))


@given(st.lists(st.floats(0, 100, allow_nan=False)))
def test_buckets_are_cumulative_and_complete(values: list[float]) -> None:
    histogram = Histogram((0.1, 1.0, 10.0))
    for value in values:
        histogram.observe(value)
    distribution = histogram.distribution()
    assert distribution.cumulative == tuple(sum(value <= bound for value in values) for bound in distribution.bounds)
    assert distribution.observations == len(values)


def test_single_numbers_need_one_line() -> None:
    assert counter("a_total", "A.", 1).samples == (Sample(1),)
    assert gauge("b", "B.", 2).kind == "gauge"
