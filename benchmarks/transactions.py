"""`make bench-transactions`: what transactions cost producers, and consumers of committed messages.

    python -m benchmarks.transactions [--quick] [--rounds N] [--seconds S] [--no-kafka] [--json FILE]

Each round measures every line of every server once; lines that are compared follow each other, in a different order in
each round. Ratios are computed within a round, and the result is their median. All servers let the operating system
decide when to write pages to disk, as Kafka does by default.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from typing import Any, Final

from benchmarks import machine, reader, transaction_load
from benchmarks.reader import COMMITTED, UNCOMMITTED
from benchmarks.report import Table
from benchmarks.subject import KAFKA, MILLSTREAM, Numbers, PeerUnavailable, Target
from benchmarks.subjects import ApacheKafka, Broker, Millstream, TlsListener
from benchmarks.transaction_load import ABORTED_EACH, CASE, MESSAGES_MIXED, OF_ONE_TRANSACTION
from benchmarks.verdict import LEVEL_MIN
from benchmarks.verdict import Target as Goal
from rich.console import Console

from millstream_testing.server import Server

PLAIN, EACH_100_MS, EACH_SECOND = "idempotent", "transactions of 100 ms", "transactions of 1 s"
COMMITS_S: Final[dict[str, float | None]] = {PLAIN: None, EACH_100_MS: 0.1, EACH_SECOND: 1.0}
PRODUCE: Final = tuple(COMMITS_S)
CONSUME: Final = (UNCOMMITTED, COMMITTED)
PRODUCE_SHARE_MIN, CONSUME_SHARE_MIN = 0.80, 0.95
CONSUME_TIMES: Final = 3
"""How much more often reading is measured than writing, since it takes only a fraction of a second."""

Rounds = dict[str, list[Numbers]]
"""The results of each round, by line."""


class OsFlushMillstream(Millstream):
    """Millstream with Kafka's default durability, also for the state of coordinators."""

    def server(self, data: Path, tls: TlsListener | None = None) -> Server:
        """Return a server that lets the operating system write pages."""
        return Server(data, settings={"default-flush": "os", **self.listener_settings(data, tls)})


def main() -> int:
    """Measure, print and save the results; 1 when a target was not reached."""
    arguments = _arguments()
    facts = machine.facts()
    print_line(", ".join(f"{name}: {value}" for name, value in facts.items()))
    machine.touch_memory()
    reader.touch_memory()
    results: dict[str, Rounds] = {}
    with ExitStack() as stack:
        brokers: list[Broker] = [stack.enter_context(OsFlushMillstream())]
        if not arguments.no_kafka:
            try:
                brokers.append(stack.enter_context(ApacheKafka()))
            except PeerUnavailable as reason:
                print_line(f"without Apache Kafka: {reason}")
        results = run(brokers, arguments.rounds, arguments.seconds)
    goals = targets(results)
    console = Console()
    for table in (*_tables(results), _verdict(goals)):
        console.print(table.rich())
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(_as_json(facts, results, goals), indent=1) + "\n")
    arguments.json.with_suffix(".md").write_text(
        "\n".join(table.markdown() for table in (*_tables(results), _verdict(goals)))
    )
    return 1 if any(goal.reached is False for goal in goals) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.transactions", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="two short rounds")
    parser.add_argument("--rounds", type=int, default=10, help="the number of rounds of each line")
    parser.add_argument("--seconds", type=float, default=4.0, help="how long a line of producing is measured")
    parser.add_argument("--no-kafka", action="store_true", help="measure Millstream only")
    parser.add_argument(
        "--json", type=Path, default=Path("build/bench/transactions.json"), help="the file for all results"
    )
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds = 2, 2.0
    return arguments


def run(brokers: Sequence[Broker], rounds: int, seconds: float) -> dict[str, Rounds]:
    """Measure every line of every server so many times."""
    results: dict[str, Rounds] = {broker.name: {line: [] for line in (*PRODUCE, *CONSUME)} for broker in brokers}
    for turn in range(rounds):
        for line, broker in _order(PRODUCE, brokers, turn):
            with broker.topic(CASE) as target:
                numbers = transaction_load.produce(target, seconds, COMMITS_S[line])
            results[broker.name][line].append(numbers)
        print_line(f"producing, round {turn + 1} of {rounds}")
    with ExitStack() as stack:
        filled = {broker.name: _filled(stack.enter_context(broker.topic(CASE))) for broker in brokers}
        for turn in range(CONSUME_TIMES * rounds):
            for line, broker in _order(CONSUME, brokers, turn):
                target, committed = filled[broker.name]
                results[broker.name][line].append(transaction_load.consume(target, line, committed))
        print_line(f"consuming, {CONSUME_TIMES * rounds} rounds")
    return results


def _filled(target: Target) -> tuple[Target, int]:
    return target, transaction_load.fill(target)


def _order(lines: Sequence[str], brokers: Sequence[Broker], turn: int) -> Iterator[tuple[str, Broker]]:
    """Yield every line of every server once, in an order that changes from round to round."""
    for broker in brokers if turn % 2 == 0 else reversed(brokers):
        yield from ((line, broker) for line in (lines if turn // 2 % 2 == 0 else reversed(lines)))


# -- what it means --------------------------------------------------------------------------------------------------


def rate(numbers: Numbers) -> float:
    return numbers["MB/s"]


def cpu(numbers: Numbers) -> float:
    """Return the server's CPU seconds per gigabyte."""
    return numbers["user CPU s/GB"] + numbers["system CPU s/GB"]


def ratio(of: Sequence[Numbers], to: Sequence[Numbers], pick: Callable[[Numbers], float]) -> float | None:
    """The median of the ratios of rounds; None when one of them has not been measured."""
    pairs = [pick(after) / pick(other) for after, other in zip(of, to, strict=False) if pick(other)]
    return median(pairs) if pairs else None


def targets(results: dict[str, Rounds]) -> list[Goal]:
    """Return the targets, and whether they were met."""
    ours = results[MILLSTREAM]
    goals = [
        _share(
            "producing in transactions of 1 s",
            ours[EACH_SECOND],
            ours[PLAIN],
            PRODUCE_SHARE_MIN,
            "without transactions",
        ),
        _share(
            "reading committed messages", ours[COMMITTED], ours[UNCOMMITTED], CONSUME_SHARE_MIN, f"of {UNCOMMITTED}"
        ),
    ]
    theirs = results.get(KAFKA, {})
    for line in (EACH_100_MS, EACH_SECOND, COMMITTED):
        share = ratio(ours[line], theirs.get(line, ()), rate)
        reached = None if share is None else share >= LEVEL_MIN
        goals.append(Goal(f"{line} against Apache Kafka", "level or better", reached, _times(share)))
    return goals


def _share(metric: str, of: Sequence[Numbers], to: Sequence[Numbers], least: float, baseline: str) -> Goal:
    share, cost = ratio(of, to, rate), ratio(of, to, cpu)
    reached = None if share is None else share >= least
    return Goal(metric, f"at least {least:.0%} of the rate {baseline}", reached, f"{_times(share)}, CPU {_times(cost)}")


def _times(value: float | None) -> str:
    return "" if value is None else f"{value:.2f} times"


def _tables(results: dict[str, Rounds]) -> Iterator[Table]:
    mixed = f"Consume {MESSAGES_MIXED // OF_ONE_TRANSACTION} transactions, every {ABORTED_EACH}th aborted"
    for title, lines in (("Produce", PRODUCE), (mixed, CONSUME)):
        table = Table(f"{title}: medians, and ratios to the first line", ["server", "line", *COLUMNS], words=2)
        for name, rounds in results.items():
            table.rows.extend([name, line, *_numbers(rounds[line], rounds[lines[0]])] for line in lines)
        yield table


COLUMNS: Final = ("MB/s", "ratio", "best MB/s", "CPU s/GB", "ratio")


def _numbers(of: Sequence[Numbers], to: Sequence[Numbers]) -> list[str]:
    rates = list(map(rate, of))
    return [
        f"{median(rates):.0f}",
        f"{ratio(of, to, rate):.2f}",
        f"{max(rates):.0f}",
        f"{median(map(cpu, of)):.2f}",
        f"{ratio(of, to, cpu):.2f}",
    ]


def _verdict(goals: Sequence[Goal]) -> Table:
    table = Table("Targets", ["metric", "target", "verdict", "measured"], words=4)
    table.rows.extend([goal.metric, goal.target, goal.mark, goal.measured] for goal in goals)
    return table


def _as_json(facts: dict[str, Any], results: dict[str, Rounds], goals: Sequence[Goal]) -> dict[str, Any]:
    goal_rows = [
        {"metric": goal.metric, "target": goal.target, "reached": goal.reached, "measured": goal.measured}
        for goal in goals
    ]
    return {"machine": facts, "rounds": results, "targets": goal_rows}


def print_line(line: str) -> None:
    print(time.strftime("%H:%M:%S ") + line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
