"""`make bench-queues`: subscriptions and RabbitMQ, NATS JetStream and Redis Streams, interleaved in the same run.

    python -m benchmarks.queues [--quick] [--only PART] [--subjects NAMES] [--rounds N] [--seconds S] [--out FILE]
                                [--flush always|os]

Messages are published, delivered to workers and accepted; publishers pause while the backlog is too large, so the load
is continuous. In each round of a line every server is measured once, each round starts with another server, and the
tables show medians. docs/benchmarks.md describes the method. FILE gets the tables as Markdown; the numbers are written
next to it as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from benchmarks import machine, queue_backlog, queue_report
from benchmarks.cases import ALWAYS, OS
from benchmarks.queue_report import QueueResults
from benchmarks.queue_subjects import NAMES, QueueCase, QueueFailed, QueueSubject, started
from rich.console import Console

OUT: Final = Path("build/bench/queues.md")
ROUNDS: Final = 3
SECONDS: Final = 2.0
LATENCY_TIMES: Final = 2
BACKLOG: Final = 20_000
"""The backlog at which publishers pause."""
THROUGHPUT: Final = tuple(QueueCase(size, workers) for size in (100, 1024) for workers in (1, 10, 100))
LATENCY: Final = tuple(QueueCase(1024, 10, rate) for rate in (100, 1_000, 5_000))
PARTS: Final = ("throughput", "latency", "backlog")
_WARM: Final = QueueCase(1024, 10)
_WIDTH: Final = 180


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, print and save the results; 1 when something could not be measured."""
    given = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if given.show is not None:
        found = QueueResults(**json.loads(given.show.read_text(encoding="utf-8")))
        return finish(console, found, given.out)
    found = QueueResults(machine.facts(), time=time.strftime("%Y-%m-%d %H:%M"))
    machine.touch_memory()
    with ExitStack() as stack:
        subjects, missing = started(given.subjects, stack, given.flush)
        for name, reason in missing.items():
            console.print(f"{name}: not measured: {reason}")
        found.missing = missing
        found.subjects = {
            subject.name: [subject.version, subject.durability, subject.settings()] for subject in subjects
        }
        for subject in subjects:
            measure(console, found, _WARM, subject, 1.0, keep=False)
        for case in chosen(given):
            for turn in range(given.rounds):
                first = turn % max(1, len(subjects))
                for subject in subjects[first:] + subjects[:first]:
                    measure(console, found, case, subject, given.seconds * (LATENCY_TIMES if case.rate_per_s else 1))
            console.print(queue_report.summary(found, case.name), markup=False, highlight=False, soft_wrap=True)
    if "backlog" in given.only:
        found.backlog = queue_backlog.measure()
    return finish(console, found, given.out)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.queues", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="once each, for a second")
    parser.add_argument("--only", action="append", default=[], help=f"{', '.join(PARTS)}; may be repeated")
    parser.add_argument("--subjects", default=",".join(NAMES), help=", ".join(NAMES))
    parser.add_argument("--rounds", type=int, help=f"how often each server is measured (default: {ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"for how long messages are published (default: {SECONDS:g})")
    parser.add_argument("--flush", choices=(ALWAYS, OS), default=ALWAYS, help="os: messages are in the page cache only")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the tables go (default: {OUT})")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, but show what a run wrote as JSON")
    given = parser.parse_args(arguments)
    given.only = given.only or list(PARTS)
    given.rounds = given.rounds or (1 if given.quick else ROUNDS)
    given.seconds = given.seconds or (1.0 if given.quick else SECONDS)
    given.subjects = [name.strip() for name in given.subjects.split(",")]
    if unknown := [name for name in given.subjects if name not in NAMES]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(NAMES)}")
    return given


def chosen(given: argparse.Namespace) -> list[QueueCase]:
    cases = THROUGHPUT if "throughput" in given.only else ()
    return [*cases, *(LATENCY if "latency" in given.only else ())]


def measure(
    console: Console, found: QueueResults, case: QueueCase, subject: QueueSubject, seconds: float, *, keep: bool = True
) -> None:
    """Measure one line of one server once; failures are printed and saved, and the run continues."""
    try:
        numbers = subject.measure(case, seconds, BACKLOG)
    except (QueueFailed, OSError) as error:
        failure = f"{subject.name}, {case.name}: {error}"
        console.print(failure, style="red", markup=False)
        found.failures.append(failure)
        return
    if keep:
        found.add(case.name, subject.name, numbers)


def finish(console: Console, found: QueueResults, out: Path) -> int:
    """Print and save the tables."""
    tables = queue_report.tables(found)
    for table in tables:
        console.print(table.rich())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    out.with_suffix(".json").write_text(json.dumps(found.as_json(), indent=1) + "\n", encoding="utf-8")
    return 1 if found.failures else 0


if __name__ == "__main__":
    sys.exit(main())
