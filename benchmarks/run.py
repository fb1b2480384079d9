"""`make bench`: Millstream, the limit server, Apache Kafka and other peers, interleaved in the same run.

    python -m benchmarks.run [--quick | --full] [--only LINES] [--subjects NAMES] [--rounds N] [--seconds S]
                             [--out FOLDER] [--show FILE]

The limit server moves the same bytes over the same event loop with the same flush policy and does nothing else, so the
ratio shows how much of the machine's capacity remains after a broker's work. In each round of a line every server is
measured once, each round starts with another server, and the tables show medians. docs/benchmarks.md describes the
method. Tables are printed; FOLDER gets them as Markdown, the numbers as JSON, and plots.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks import cases, librdkafka, machine, plots, reader, report
from benchmarks.cases import LATENCY, Case
from benchmarks.peers import nats, rabbitmq, redis
from benchmarks.peers.bare import BareMillstream
from benchmarks.results import Results
from benchmarks.subject import BARE, DISCARD, KAFKA, LIMIT, MILLSTREAM, PeerUnavailable, Subject
from benchmarks.subjects import ApacheKafka, Discard, Limit, Millstream
from rich.console import Console

SUBJECTS: dict[str, Callable[[], Subject]] = {
    LIMIT: Limit,
    MILLSTREAM: Millstream,
    KAFKA: ApacheKafka,
    DISCARD: Discard,
    BARE: BareMillstream,
    nats.NAME: nats.Nats,
    rabbitmq.NAME: rabbitmq.RabbitMq,
    redis.NAME: redis.Redis,
}
OUT = Path("build/bench")
ROUNDS, SECONDS = 3, 0.7
QUICK_ROUNDS, QUICK_SECONDS = 1, 0.5
LATENCY_TIMES = 5
"""How much longer lines with a fixed rate take: percentiles need more messages than rates."""
_WIDTH = 200


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure the chosen lines, print and save the results; return 1 if something could not be measured."""
    options = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_WIDTH)
    if options.show is not None:
        return show_again(console, options.show, options.out)
    began = time.monotonic()
    facts = machine.facts()
    with console.status("touching memory"):
        machine.touch_memory()
        reader.touch_memory()
    results = Results()
    with ExitStack() as stack:
        subjects = start(console, options.subjects, stack, facts)
        try:
            measure(console, results, chosen(options), subjects, options.rounds, options.seconds)
        except KeyboardInterrupt:
            results.failures.append("stopped before the end")
    facts["minutes"] = round((time.monotonic() - began) / 60, 1)
    facts["rounds and seconds"] = f"{options.rounds} of {options.seconds:g} s"
    write(options.out, results, facts)
    show(console, results, facts)
    console.print(f"Written to {options.out}")
    return 1 if results.failures else 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.run", description=(__doc__ or "").splitlines()[0])
    extent = parser.add_mutually_exclusive_group()
    extent.add_argument("--quick", action="store_true", help="a few lines, measured once, to detect large regressions")
    extent.add_argument("--full", action="store_true", help="every combination of the factors: takes hours")
    kinds = ", ".join(cases.KINDS)
    parser.add_argument("--only", action="append", default=[], help=f"{kinds}, or a part of a name; may be repeated")
    parser.add_argument("--subjects", default=",".join(SUBJECTS), help=", ".join(SUBJECTS))
    parser.add_argument("--rounds", type=int, help=f"how often each server is measured (default: {ROUNDS})")
    parser.add_argument("--seconds", type=float, help=f"how long each time, about (default: {SECONDS:g})")
    parser.add_argument("--out", type=Path, default=OUT, help=f"where the results go (default: {OUT})")
    parser.add_argument("--show", type=Path, metavar="FILE", help="measure nothing, but show what a run wrote")
    options = parser.parse_args(arguments)
    options.rounds = options.rounds or (QUICK_ROUNDS if options.quick else ROUNDS)
    options.seconds = options.seconds or (QUICK_SECONDS if options.quick else SECONDS)
    options.subjects = [name.strip() for name in options.subjects.split(",")]
    if unknown := [name for name in options.subjects if name not in SUBJECTS]:
        parser.error(f"{', '.join(unknown)}: not one of {', '.join(SUBJECTS)}")
    return options


def chosen(options: argparse.Namespace) -> list[Case]:
    extent = cases.quick() if options.quick else cases.everything() if options.full else cases.default()
    return cases.chosen(extent, options.only)


def start(console: Console, names: Sequence[str], stack: ExitStack, facts: dict[str, Any]) -> list[Subject]:
    """Start every available server; record why the others are unavailable."""
    started = []
    versions: dict[str, str] = {"librdkafka": librdkafka.version()}
    for name in names:
        with console.status(f"starting {name}"):
            try:
                started.append(stack.enter_context(SUBJECTS[name]()))
                versions[name] = started[-1].version
            except PeerUnavailable as reason:
                versions[name] = f"not measured: {reason}"
                console.print(f"{name}: not measured: {reason}")
    facts["versions"] = {name: version for name, version in versions.items() if version}
    return started


def measure(
    console: Console,
    results: Results,
    chosen: Sequence[Case],
    subjects: Sequence[Subject],
    rounds: int,
    seconds: float,
) -> None:
    """Measure every line, all servers in turn."""
    with console.status("") as status:
        for number, case in enumerate(chosen, 1):
            for turn, subject in turns(case, subjects, rounds):
                status.update(f"line {number} of {len(chosen)}, {case.name}: round {turn} of {rounds}, {subject.name}")
                _measure_once(console, results, case, subject, seconds)
            console.print(
                f"[{number}/{len(chosen)}] {report.summary(results, case)}",
                markup=False,
                highlight=False,
                soft_wrap=True,
            )


def turns(case: Case, subjects: Sequence[Subject], rounds: int) -> Iterator[tuple[int, Subject]]:
    """Yield every server in every round, each round starting with another server."""
    offered = [subject for subject in subjects if subject.offers(case)]
    for turn in range(rounds if offered else 0):
        first = turn % len(offered)
        for subject in offered[first:] + offered[:first]:
            yield turn + 1, subject


def _measure_once(console: Console, results: Results, case: Case, subject: Subject, seconds: float) -> None:
    """Measure one line once; failures are printed and saved, and the run continues."""
    seconds *= LATENCY_TIMES if case.kind == LATENCY else 1
    try:
        results.add(case, subject.name, subject.durability(case), subject.measure(case, seconds))
    except Exception as error:
        failure = f"{subject.name}, {case.name}: {type(error).__name__}: {error}"
        results.failures.append(failure)
        console.print(failure, style="red", markup=False)


def write(folder: Path, results: Results, facts: dict[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    document = {"machine": facts, "failures": results.failures, "lines": results.as_json()}
    (folder / "bench.json").write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    pages = [report.facts_table(facts), *report.tables(results)]
    (folder / "bench.md").write_text("\n".join(page.markdown() for page in pages if page.rows), encoding="utf-8")
    plots.draw(results, folder)


def show_again(console: Console, file: Path, folder: Path) -> int:
    """Recreate the tables and plots of an earlier run."""
    document = json.loads(file.read_text(encoding="utf-8"))
    results = Results.from_json(document["lines"])
    results.failures = document["failures"]
    write(folder, results, document["machine"])
    show(console, results, document["machine"])
    return 0


def show(console: Console, results: Results, facts: dict[str, Any]) -> None:
    """Print the tables."""
    for page in (report.facts_table(facts), *report.tables(results)):
        if page.rows:
            console.print(page.rich())
    for failure in results.failures:
        console.print(f"failed: {failure}", style="red", markup=False)


def _stop(_number: int, _frame: FrameType | None) -> None:
    """Stop the servers and remove their data, as after Ctrl-C."""
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, _stop)
    sys.exit(main())
