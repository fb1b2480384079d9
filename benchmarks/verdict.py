"""The targets, and whether they were met: one row for each, with the line that is furthest from it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from benchmarks.cases import KIB, LATENCY, SIZES, size_text
from benchmarks.latency import ACKNOWLEDGED, END_TO_END
from benchmarks.requests import IN_FLIGHT, ONE_BY_ONE
from benchmarks.results import Line, Results
from benchmarks.subject import BARE, CONSUMED, DISCARD, KAFKA, LIMIT, MILLSTREAM, PRODUCED

OF_LIMIT_MIN = 0.85
LEVEL_MIN = 0.95
"""The ratio that counts as equal: smaller differences occur between two runs of the same server."""
PRODUCE_USER_S_MAX, CONSUME_USER_S_MAX = 0.7, 0.4
MEMORY_MB_MAX = 200


@dataclass(frozen=True, slots=True)
class Target:
    """One target. `reached` is None if the relevant lines were not measured."""

    metric: str
    target: str
    reached: bool | None
    measured: str
    where: str = ""

    @property
    def mark(self) -> str:
        """The result in a word."""
        return {True: "reached", False: "not reached", None: "not measured"}[self.reached]


Pick = Callable[[Line], float | None]


def targets(results: Results) -> list[Target]:
    """Return every target, in their fixed order."""
    return [
        *_of_limit(results),
        *_against_kafka(results),
        *_against_others(results),
        *(_user_cpu(results, PRODUCED, PRODUCE_USER_S_MAX, size) for size in SIZES),
        *(_user_cpu(results, CONSUMED, CONSUME_USER_S_MAX, size) for size in SIZES),
        _memory(results),
    ]


def _of_limit(results: Results) -> Iterator[Target]:
    for direction in (PRODUCED, CONSUMED):

        def share(line: Line) -> float | None:
            return line.ratio("MB/s", MILLSTREAM, LIMIT) if line.case.size_bytes == KIB else None

        yield _least(f"{direction} at 1 KiB, relative to the limit", OF_LIMIT_MIN, results, share, direction)


def _against_kafka(results: Results) -> Iterator[Target]:
    for direction, number in ((PRODUCED, "MB/s"), (CONSUMED, "MB/s"), (IN_FLIGHT, "requests/s")):
        yield _least(f"{direction}, relative to Apache Kafka", LEVEL_MIN, results, _times(number, KAFKA), direction)
    yield _least(f"p50 {ONE_BY_ONE}, Apache Kafka / Millstream", LEVEL_MIN, results, _shorter("p50 ms"), ONE_BY_ONE)
    rates = sorted({line.case.rate_per_s for line in results.lines() if line.case.kind == LATENCY})
    for rate in rates:
        for direction in (ACKNOWLEDGED, END_TO_END):

            def shorter(line: Line, rate: int = rate) -> float | None:
                return _shorter("p99 ms")(line) if line.case.rate_per_s == rate else None

            metric = f"p99 {direction} at {rate:,}/s, Apache Kafka / Millstream"
            yield _least(metric, LEVEL_MIN, results, shorter, direction)


def _against_others(results: Results) -> Iterator[Target]:
    """Compare with other peers; they use a bare client, so at the highest rate Millstream does as well."""
    for name in results.subjects(PRODUCED, CONSUMED, IN_FLIGHT):
        if name in (MILLSTREAM, LIMIT, DISCARD, KAFKA, BARE):
            continue
        for direction in (PRODUCED, CONSUMED):
            yield _least(f"{direction}, relative to {name}", 1.0, results, _times("MB/s", name, BARE), direction)
        yield _least(f"{IN_FLIGHT}, relative to {name}", 1.0, results, _times("requests/s", name), IN_FLIGHT)


def _times(number: str, other: str, mine: str = MILLSTREAM) -> Pick:
    return lambda line: line.ratio(number, mine, other)


def _shorter(number: str) -> Pick:
    return lambda line: line.ratio(number, KAFKA, MILLSTREAM)


def _least(metric: str, minimum: float, results: Results, pick: Pick, *directions: str) -> Target:
    """Return a target that every line has to reach, with the line that is furthest from it."""
    values = [value for line in results.lines(*directions) if (value := pick(line)) is not None]
    worst = results.extreme(pick, *directions, least=True)
    if worst is None:
        return Target(metric, f"at least {minimum:.0%}", None, "")
    good = sum(value >= minimum for value in values)
    measured = f"{good} of {len(values)} lines; lowest {worst[0]:.0%}"
    return Target(metric, f"at least {minimum:.0%}", good == len(values), measured, worst[1].case.name)


def _user_cpu(results: Results, direction: str, limit: float, size_bytes: int) -> Target:
    def cpu(line: Line) -> float | None:
        # The target is for plain text; the cost of TLS is compared with Apache Kafka's.
        is_meant = line.case.size_bytes == size_bytes and not line.case.tls
        return line.value(MILLSTREAM, "user CPU s/GB") if is_meant else None

    metric = f"{direction} at {size_text(size_bytes)}, user CPU per GB"
    values = [value for line in results.lines(direction) if (value := cpu(line)) is not None]
    worst = results.extreme(cpu, direction, least=False)
    if worst is None:
        return Target(metric, f"below {limit} s", None, "")
    good = sum(value < limit for value in values)
    measured = f"{good} of {len(values)} lines; highest {worst[0]:.2f} s"
    return Target(metric, f"below {limit} s", good == len(values), measured, worst[1].case.name)


def _memory(results: Results) -> Target:
    metric, target = "memory under load", f"below {MEMORY_MB_MAX} MB"
    worst = results.extreme(lambda line: line.peak(MILLSTREAM, "memory MB"), least=False)
    if worst is None:
        return Target(metric, target, None, "")
    children = worst[1].peak(MILLSTREAM, "children's memory MB") or 0
    measured = f"highest {worst[0]:.0f} MB, of which {children:.0f} MB in the HTTP child"
    return Target(metric, target, worst[0] < MEMORY_MB_MAX, measured, worst[1].case.name)
