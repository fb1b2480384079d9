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
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if options.show is not None:
        results = QueueResults(**json.loads(options.show.read_text(encoding="utf-8")))
        return finish(console, results, options.out)
    results = QueueResults(machine.facts(), time=time.strftime("%Y-%m-%d %H:%M"))
    machine.touch_memory()
    with ExitStack() as stack:
        subjects, missing = started(options.subjects, stack, options.flush)
        for name, reason in missing.items():
            console.print(f"{name}: not measured: {reason}")
        results.missing = missing
        results.subjects = {
            subject.name: [subject.version, subject.durability, subject.settings()] for subject in subjects
        }
        for subject in subjects:
            measure(console, results, _WARM, subject, 1.0, keep=False)
        for case in chosen(options):
            for turn in range(options.rounds):
                first = turn % max(1, len(subjects))
                for subject in subjects[first:] + subjects[:first]:
                    measure(
                        console, results, case, subject, options.seconds * (LATENCY_TIMES if case.rate_per_s else 1)
                    )
            console.print(queue_report.summary(results, case.name), markup=False, highlight=False, soft_wrap=True)
    if "backlog" in options.only:
        results.backlog = queue_backlog.measure()
    return finish(console, results, options.out)


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
    options = parser.parse_args(arguments)
    options.only = options.only or list(PARTS)
    options.rounds = options.rounds or (1 if options.quick else ROUNDS)
    options.seconds = options.seconds or (1.0 if options.quick else SECONDS)
    options.subjects = [name.strip() for name in options.subjects.split(",")]
    if unknown := [name for name in options.subjects if name not in NAMES]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(NAMES)}")
    return options


def chosen(options: argparse.Namespace) -> list[QueueCase]:
    cases = THROUGHPUT if "throughput" in options.only else ()
    return [*cases, *(LATENCY if "latency" in options.only else ())]


def measure(
    console: Console,
    results: QueueResults,
    case: QueueCase,
    subject: QueueSubject,
    seconds: float,
    *,
    keep: bool = True,
) -> None:
    """Measure one line of one server once; failures are printed and saved, and the run continues."""
    try:
        numbers = subject.measure(case, seconds, BACKLOG)
    except (QueueFailed, OSError) as error:
        failure = f"{subject.name}, {case.name}: {error}"
        console.print(failure, style="red", markup=False)
        results.failures.append(failure)
        return
    if keep:
        results.add(case.name, subject.name, numbers)


def finish(console: Console, results: QueueResults, out: Path) -> int:
    """Print and save the tables."""
    tables = queue_report.tables(results)
    for table in tables:
        console.print(table.rich())
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text("\n".join(table.markdown() for table in tables), encoding="utf-8")
    out.with_suffix(".json").write_text(json.dumps(results.as_json(), indent=1) + "\n", encoding="utf-8")
    return 1 if results.failures else 0


if __name__ == "__main__":
    sys.exit(main())
