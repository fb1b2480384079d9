"""Metrics of the parts of the broker: plain numbers, read on request.

A part keeps plain ints (and a `Histogram` where a distribution matters) and hands them out with

    def metrics(self) -> Iterable[Metric]: ...

Nothing is registered anywhere and nothing is exported from here: the node's status collects the metrics of all parts,
the HTTP gateway turns them into Prometheus text. Samples may be a generator, so that a metric with one sample per
partition costs only as much as the reader consumes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, Protocol

Kind = Literal["counter", "gauge", "histogram"]

LATENCY_BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Upper bounds of the buckets that latencies are sorted into, in seconds."""


class Distribution(NamedTuple):
    """The value of one sample of a histogram: how many observations were at most each bound, their number and sum."""

    bounds: tuple[float, ...]
    cumulative: tuple[int, ...]
    observations: int
    total: float


class Sample(NamedTuple):
    """A sample of a metric. The labels say what it counts, for example `(("topic", "orders"),)`."""

    value: float | Distribution
    labels: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, slots=True)
class Metric:
    """A metric and its samples.

    Names follow Prometheus: `millstream_` first, the unit last, and `_total` at the end of every counter.
    """

    name: str
    kind: Kind
    help: str
    samples: Iterable[Sample]


class MetricSource(Protocol):
    """A part of the broker that reports metrics."""

    def metrics(self) -> Iterable[Metric]:
        """Return the current values; called on the event loop, so it must be quick and must not wait."""


class Histogram:
    """Counts observations by size. One `observe` costs a binary search and a few additions."""

    __slots__ = ("_bounds", "_counts", "observations", "total")

    def __init__(self, bounds: tuple[float, ...] = LATENCY_BOUNDS_S) -> None:
        if list(bounds) != sorted(set(bounds)):
            raise ValueError(f"the bounds of a histogram must grow, these do not: {bounds}")
        self._bounds = bounds
        # One more than the bounds: the last bucket counts values above all of them.
        self._counts = [0] * (len(bounds) + 1)
        self.observations = 0
        self.total = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self._counts[bisect_left(self._bounds, value)] += count
        self.observations += count
        self.total += value * count

    def distribution(self) -> Distribution:
        """Return the counts so far as cumulative buckets."""
        cumulative = []
        running = 0
        for count in self._counts[:-1]:
            running += count
            cumulative.append(running)
        return Distribution(self._bounds, tuple(cumulative), self.observations, self.total)


def counter(name: str, help_text: str, value: float) -> Metric:
    """Build a metric with one sample that only grows."""
    return Metric(name, "counter", help_text, (Sample(value),))


def gauge(name: str, help_text: str, value: float) -> Metric:
    """Build a metric with one sample that rises and falls."""
    return Metric(name, "gauge", help_text, (Sample(value),))
