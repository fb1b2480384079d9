"""The results as tables for the terminal and as Markdown."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cases import FLUSHES, Case
from benchmarks.latency import ACKNOWLEDGED, END_TO_END, PERCENTS
from benchmarks.requests import IN_FLIGHT, ONE_BY_ONE
from benchmarks.results import Line, Results
from benchmarks.subject import CONSUMED, KAFKA, LIMIT, MILLSTREAM, PRODUCED
from benchmarks.subjects import STARTED
from benchmarks.verdict import targets
from rich import box
from rich.table import Table as RichTable

Cell = Callable[[Line, str], str]
NOTHING = ""


@dataclass(slots=True)
class Table:
    """A table of text; the first columns are words, the others numbers."""

    title: str
    header: list[str]
    words: int = 1
    rows: list[list[str]] = field(default_factory=list)

    def rich(self) -> RichTable:
        table = RichTable(title=self.title, title_justify="left", box=box.SIMPLE_HEAD)
        for place, name in enumerate(self.header):
            table.add_column(name, justify="left" if place < self.words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self) -> str:
        rule = ["---" if place < self.words else "---:" for place in range(len(self.header))]
        lines = [f"| {' | '.join(row)} |" for row in (self.header, rule, *self.rows)]
        return "\n".join((f"### {self.title}", "", *lines, ""))


def tables(results: Results) -> Iterator[Table]:
    """Yield all results, then the targets."""
    yield _durability(results)
    for direction in (PRODUCED, CONSUMED):
        subjects = results.subjects(direction)
        title = f"Maximum {direction} rate: MB/s (million messages/s)"
        yield _by_line(results, title, subjects, _rate, "MB/s", direction)
    for direction in (PRODUCED, CONSUMED):
        subjects = results.subjects(direction)
        title = f"{direction.capitalize()}: the server's CPU seconds per GB, user + system"
        yield _by_line(results, title, subjects, _cpu("GB"), None, direction)
        title = f"{direction.capitalize()}: the server's CPU seconds per million messages, user + system"
        yield _by_line(results, title, subjects, _cpu("M messages"), None, direction)
        title = f"{direction.capitalize()}: the client's CPU seconds per GB"
        yield _by_line(results, title, subjects, _plain("client CPU s/GB", 2), None, direction)
    for direction, meaning in ((ACKNOWLEDGED, "until it is acknowledged"), (END_TO_END, "until a consumer has it")):
        title = f"From the scheduled time of a message {meaning}: p50 / p99 / p99.9 in ms"
        yield _by_line(results, title, results.subjects(direction), _percentiles, None, direction)
    yield _by_line(results, "One message per request, one at a time: p50 / p99 in ms", *_requests(results, ONE_BY_ONE))
    yield _by_line(results, "One message per request, 100 in flight: requests/s", *_requests(results, IN_FLIGHT))
    yield _memory(results)
    yield _verdict(results)


MAIN = {
    PRODUCED: "MB/s",
    CONSUMED: "MB/s",
    ACKNOWLEDGED: "p99 ms",
    END_TO_END: "p99 ms",
    ONE_BY_ONE: "p50 ms",
    IN_FLIGHT: "requests/s",
    STARTED: "first response s",
}
"""The most relevant number of each direction."""


def summary(results: Results, case: Case) -> str:
    """Summarize one line in a few words, printed when it was measured."""
    parts = []
    for line in results.lines():
        if line.case == case:
            main = MAIN[line.direction]
            digits = 0 if main in ("MB/s", "requests/s") else 2
            cells = [f"{name} {number(line.value(name, main), digits)}" for name in line.rounds]
            parts.append(f"{line.direction} {main}: {', '.join(cells)}")
    return f"{case.name}: {'; '.join(parts) or 'not measured'}"


def _by_line(
    results: Results, title: str, subjects: list[str], cell: Cell, compared: str | None, direction: str
) -> Table:
    """Return a table with a row for each line and a column for each server."""
    table = Table(title, ["line", *subjects])
    if compared is not None:
        table.header += ["% of limit", "% of Kafka"]
    for line in results.lines(direction):
        cells = [cell(line, name) if name in line.rounds else NOTHING for name in subjects]
        if compared is not None:
            cells += [_share(line.ratio(compared, MILLSTREAM, other)) for other in (LIMIT, KAFKA)]
        table.rows.append([line.case.name, *cells])
    return table


def _durability(results: Results) -> Table:
    """Return the durability of an acknowledgement, by server and flush setting."""
    table = Table("Durability: what an acknowledgement means", ["server", *FLUSHES], words=4)
    for name in results.subjects():
        durabilities = {
            line.case.flush: line.durability.get(name, NOTHING) for line in results.lines() if name in line.rounds
        }
        table.rows.append([name, *(durabilities.get(flush, "not measured") for flush in FLUSHES)])
    return table


def _requests(results: Results, direction: str) -> tuple[list[str], Cell, str | None, str]:
    subjects = results.subjects(direction)
    if direction == ONE_BY_ONE:
        return subjects, _alone, None, direction
    return subjects, _in_flight, "requests/s", direction


def number(value: float | None, digits: int) -> str:
    if value is None:
        return NOTHING
    return f"{value:,.{digits}f}" if value != float("inf") else "never"


def _share(value: float | None) -> str:
    return NOTHING if value is None else f"{value:.0%}"


def _plain(name: str, digits: int) -> Cell:
    return lambda line, subject: number(line.value(subject, name), digits)


def _rate(line: Line, subject: str) -> str:
    rate = line.value(subject, "messages/s")
    return f"{number(line.value(subject, 'MB/s'), 0)} ({number(rate and rate / 1e6, 2)})"


def _cpu(unit: str) -> Cell:
    def cell(line: Line, subject: str) -> str:
        user, system = (line.value(subject, f"{kind} CPU s/{unit}") for kind in ("user", "system"))
        return f"{number(user, 2)} + {number(system, 2)}" if user is not None else NOTHING

    return cell


def _percentiles(line: Line, subject: str) -> str:
    return " / ".join(number(line.value(subject, f"p{percent:g} ms"), 2) for percent in PERCENTS)


def _alone(line: Line, subject: str) -> str:
    return f"{number(line.value(subject, 'p50 ms'), 2)} / {number(line.value(subject, 'p99 ms'), 2)}"


def _in_flight(line: Line, subject: str) -> str:
    cpu = line.value(subject, "CPU µs/request")
    return f"{number(line.value(subject, 'requests/s'), 0)}" + (f" ({cpu:.0f} µs CPU)" if cpu is not None else "")


def _memory(results: Results) -> Table:
    """Return the memory and startup time of each server."""
    header = ["server", "start s", "first response after s", "at rest MB", "peak under load MB", "of which children MB"]
    table = Table("Start, and memory of the whole process tree (resident)", header)
    for name in results.subjects():
        started = next(results.lines(STARTED), None)
        cells = [
            number(started.value(name, what) if started else None, digits)
            for what, digits in (("start s", 2), ("first response s", 2), ("memory at rest MB", 0))
        ]
        table.rows.append([name, *cells, *_peak(results, name)])
    return table


def _peak(results: Results, name: str) -> tuple[str, str]:
    peak = results.extreme(lambda line: line.peak(name, "memory MB"), least=False)
    children = peak[1].peak(name, "children's memory MB") if peak else None
    return number(peak[0] if peak else None, 0), number(children, 0)


def _verdict(results: Results) -> Table:
    table = Table("Targets", ["metric", "target", "verdict", "measured", "furthest from the target"], words=5)
    for target in targets(results):
        table.rows.append([target.metric, target.target, target.mark, target.measured, target.where])
    return table


def facts_table(facts: Mapping[str, Any]) -> Table:
    """Return the facts about the machine."""
    table = Table("Measured on", ["property", "value"], words=2)
    for name, value in facts.items():
        parts = [f"{one} {two}" for one, two in value.items()] if isinstance(value, dict) else [str(value)]
        table.rows.append([name, ", ".join(parts)])
    return table
