"""The tables of the queue benchmark."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from statistics import median
from typing import Any, Final

from benchmarks.queue_subjects import CLASSIC, NATS, OWN, QUORUM, REDIS, SDK, SHARE
from benchmarks.report import Table
from benchmarks.subject import Numbers
from benchmarks.verdict import LEVEL_MIN

Rounds = dict[str, list[Numbers]]
"""The results of each round, by server."""

MEMORY_BYTES_MAX: Final = 100_000_000
COST_TIMES_MAX: Final = 1.15
"""The variation between two identical runs."""


@dataclass(slots=True)
class QueueResults:
    machine: dict[str, Any]
    lines: dict[str, Rounds] = field(default_factory=dict)
    backlog: dict[str, float] = field(default_factory=dict)
    subjects: dict[str, list[str]] = field(default_factory=dict)
    """Version, durability and settings of each."""
    missing: dict[str, str] = field(default_factory=dict)
    failures: list[str] = field(default_factory=list)
    time: str = ""

    def add(self, line: str, subject: str, numbers: Numbers) -> None:
        self.lines.setdefault(line, {}).setdefault(subject, []).append(numbers)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def median(self, line: str, subject: str, what: str) -> float | None:
        rounds = self.lines[line].get(subject, [])
        return median(measured[what] for measured in rounds) if rounds else None


def summary(results: QueueResults, line: str) -> str:
    is_timed = line.endswith("/s")
    cells = []
    for subject in results.subjects:
        value = results.median(line, subject, "p99 ms" if is_timed else "messages/s")
        if value is not None:
            cells.append(f"{subject} {value:,.1f} ms" if is_timed else f"{subject} {value:,.0f}/s")
    return f"{line}: {', '.join(cells)}"


def tables(results: QueueResults) -> list[Table]:
    """Return all tables that have rows."""
    rates = [line for line in results.lines if not line.endswith("/s")]
    timed = [line for line in results.lines if line.endswith("/s")]
    made = [
        _machine(results),
        _subjects(results),
        _lines(results, "Published, delivered and accepted: messages/s", rates, ("messages/s",), 0),
        _lines(results, "CPU seconds per million messages: server / client", rates, _CPU),
        _lines(
            results,
            "From the scheduled time of a message to its receipt by a worker: p50 / p99 in ms",
            timed,
            ("p50 ms", "p99 ms"),
        ),
        _lines(results, "CPU seconds per million messages at a rate: server / client", timed, _CPU),
        _backlog(results),
        _verdict(results),
    ]
    return [table for table in made if table.rows]


_CPU: Final = ("server CPU s/M", "client CPU s/M")


def _machine(results: QueueResults) -> Table:
    facts = results.machine | {"measured": results.time} if results.time else results.machine
    return Table("Queues: the machine", ["", ""], 2, [[name, str(value)] for name, value in facts.items()])


def _subjects(results: QueueResults) -> Table:
    rows = [[name, *described] for name, described in results.subjects.items()]
    rows += [[name, "", "", f"not measured: {reason}"] for name, reason in results.missing.items()]
    return Table("Queues: servers and durability", ["", "version", "durable", "client"], 4, rows)


def _lines(results: QueueResults, title: str, lines: list[str], what: tuple[str, ...], digits: int = 1) -> Table:
    table = Table(title, ["line", *results.subjects])
    for line in lines:
        cells = []
        for subject in results.subjects:
            values = [results.median(line, subject, column) for column in what]
            cells.append(" / ".join(f"{value:,.{digits}f}" for value in values if value is not None))
        table.rows.append([line, *cells])
    return table


def _backlog(results: QueueResults) -> Table:
    rows = [[name, f"{value:,.1f}"] for name, value in results.backlog.items()]
    return Table("A backlog", ["", ""], 1, rows)


def _verdict(results: QueueResults) -> Table:
    table = Table("Queues: targets", ["metric", "target", "verdict", "measured"], 4)
    for ours in (SHARE, OWN, SDK):
        for peer in (QUORUM, CLASSIC, REDIS):
            _compare(table, results, ours, peer, 1.0)
        _compare(table, results, ours, NATS, LEVEL_MIN)
    for name, value in results.backlog.items():
        if name.endswith("MB"):
            reached = value < MEMORY_BYTES_MAX / 1e6
            table.rows.append([name, "below 100 MB", _word(reached), f"{value:,.1f}"])
        elif name.startswith("cost ratio"):
            table.rows.append([name, f"at most {COST_TIMES_MAX}", _word(value <= COST_TIMES_MAX), f"{value:,.2f}"])
    return table


def _compare(table: Table, results: QueueResults, ours: str, peer: str, least: float) -> None:
    for what, is_better_high in (("messages/s", True), ("p50 ms", False), ("p99 ms", False)):
        ratios = {}
        for line in results.lines:
            if line.endswith("/s") == is_better_high:
                continue
            pairs = zip(results.lines[line].get(ours, []), results.lines[line].get(peer, []), strict=False)
            quotients = [
                a[what] / b[what] if is_better_high else b[what] / a[what] for a, b in pairs if a[what] and b[what]
            ]
            if quotients:
                ratios[line] = median(quotients)
        if not ratios:
            continue
        worst = min(ratios, key=ratios.__getitem__)
        reached = sum(ratio >= least for ratio in ratios.values())
        table.rows.append(
            [
                f"{what}, {ours} / {peer}" if is_better_high else f"{what}, {peer} / {ours}",
                f"at least {least:.0%}",
                _word(reached == len(ratios)),
                f"{reached} of {len(ratios)} lines; lowest {ratios[worst]:.0%} ({worst})",
            ]
        )


def _word(reached: bool) -> str:
    return "reached" if reached else "not reached"
