"""`make bench-cluster`: three nodes on one machine against one and against Apache Kafka, failover, many partitions.

    python -m benchmarks.cluster [--quick] [--only throughput,failover,partitions] [--json FILE]

Everything runs on this machine and shares its cores: three nodes, etcd, PostgreSQL and the client. So the ratio shows
what replication costs without additional cores, not how fast three machines are.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import cluster_failover, cluster_partitions, cluster_throughput, machine
from benchmarks.cluster_throughput import ONE, THREE
from benchmarks.latency import ACKNOWLEDGED, END_TO_END
from benchmarks.percentiles import percentile
from benchmarks.report import Table
from benchmarks.results import Line, Results
from benchmarks.subject import PRODUCED, Numbers
from benchmarks.verdict import Target
from rich.console import Console

PARTS = ("throughput", "failover", "partitions")
SHARE_MIN = 0.30
FAILOVER_S_MAX = 5.0
IDLE_PERCENT_MAX = 2.0
"""CPU of one core that a node may use at rest."""


def main() -> int:
    """Measure, print and save the results; 1 when a target was not reached."""
    arguments = _arguments()
    parts = arguments.only.split(",")
    facts = machine.facts()
    print_line(", ".join(f"{name}: {value}" for name, value in facts.items()))
    results, failovers, many = Results(), [], {}
    if "throughput" in parts:
        results = cluster_throughput.run(arguments.rounds, arguments.seconds)
    if "failover" in parts:
        failovers = cluster_failover.run(arguments.kills, print_line)
    if "partitions" in parts:
        many = cluster_partitions.run(arguments.partitions, arguments.idle, print_line)
    verdict = targets(results, failovers, many)
    console = Console()
    for table in (
        _throughput(results),
        _latency(results),
        _failover(failovers),
        _partitions(many, arguments.partitions),
        _verdict(verdict),
    ):
        if table.rows:
            console.print(table.rich())
    arguments.json.parent.mkdir(parents=True, exist_ok=True)
    arguments.json.write_text(json.dumps(_as_json(facts, results, failovers, many, verdict), indent=1) + "\n")
    return 1 if any(target.reached is False for target in verdict) else 0


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.cluster", description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="one short round, 3 kills, 1,000 partitions")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, of throughput,failover,partitions")
    parser.add_argument("--rounds", type=int, default=3, help="the number of rounds of each line")
    parser.add_argument("--seconds", type=float, default=5.0, help="the duration of a measurement")
    parser.add_argument("--kills", type=int, default=50, help="the number of leaders to kill")
    parser.add_argument("--partitions", type=int, default=10_000, help="the number of partitions of the large cluster")
    parser.add_argument("--idle", type=float, default=60.0, help="how many seconds to measure at rest")
    parser.add_argument("--json", type=Path, default=Path("build/bench/cluster.json"), help="the file for all results")
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.rounds, arguments.seconds, arguments.kills = 1, 2.0, 3
        arguments.partitions, arguments.idle = 1000, 10.0
    return arguments


def targets(results: Results, failovers: Sequence[float], many: Numbers) -> list[Target]:
    """Return the targets, and whether they were met."""
    shares = [found_share for line in results.lines(PRODUCED) if (found_share := _share(line)) is not None]
    worst = results.extreme(_share, PRODUCED, least=True)
    share = Target("replication 3, acks=all", f"at least {SHARE_MIN:.0%} of one node", None, "")
    if worst is not None:
        good = sum(share >= SHARE_MIN for share in shares)
        summary = f"{good} of {len(shares)} lines; lowest {worst[0]:.0%}"
        share = Target(share.metric, share.target, good == len(shares), summary, worst[1].case.name)
    slow = Target("failover, p99", f"below {FAILOVER_S_MAX:g} s", None, "")
    if failovers:
        p99 = percentile(failovers, 99)
        slow = Target(slow.metric, slow.target, p99 < FAILOVER_S_MAX, f"{p99:.2f} s over {len(failovers)} kills")
    rest = Target("CPU of a node at rest", f"below {IDLE_PERCENT_MAX:g} % of a core", None, "")
    used = [value for name, value in many.items() if name.endswith("CPU %")]
    if used:
        rest = Target(rest.metric, rest.target, max(used) < IDLE_PERCENT_MAX, f"highest {max(used):.2f} %")
    return [share, slow, rest]


def _share(line: Line) -> float | None:
    """Return the throughput of three nodes relative to one."""
    return line.ratio("MB/s", THREE, ONE)


def _throughput(results: Results) -> Table:
    names = results.subjects(PRODUCED)
    columns = ["line", *names, "three / one", *(f"CPU s/GB: {name}" for name in names)]
    table = Table("Maximum produce rate, MB/s, acks=all", columns)
    for line in results.lines(PRODUCED):
        cpu = [sum(line.value(name, f"{kind} CPU s/GB") or 0 for kind in ("user", "system")) for name in names]
        rates = [f"{line.value(name, 'MB/s') or 0:.1f}" for name in names]
        share = f"{_share(line) or 0:.0%}"
        table.rows.append([line.case.name, *rates, share, *(f"{value:.2f}" for value in cpu)])
    return table


def _latency(results: Results) -> Table:
    table = Table("At a fixed rate, acks=all", ["line", "", "p50 ms", "p99 ms", "CPU ms per message"])
    for line in results.lines(ACKNOWLEDGED, END_TO_END):
        for name in results.subjects(ACKNOWLEDGED):
            took = [f"{line.value(name, number) or 0:.2f}" for number in ("p50 ms", "p99 ms")]
            cpu = sum(line.value(name, f"{kind} CPU s/M messages") or 0 for kind in ("user", "system")) / 1000
            table.rows.append([f"{line.case.name}, {line.direction}", name, *took, f"{cpu:.2f}"])
    return table


def _failover(failovers: Sequence[float]) -> Table:
    table = Table(
        "From kill -9 of a leader to the next acknowledged produce, in s", ["kills", "p50", "p99", "max"], words=0
    )
    if failovers:
        shares = [f"{percentile(failovers, share):.2f}" for share in (50, 99, 100)]
        table.rows.append([str(len(failovers)), *shares])
    return table


def _partitions(many: Numbers, partitions: int) -> Table:
    table = Table(f"{partitions:,} partitions on three nodes, replication 3", ["metric", "measured"])
    table.rows.extend([name, f"{value:,.2f}"] for name, value in many.items())
    return table


def _verdict(verdict: Sequence[Target]) -> Table:
    table = Table("Targets", ["metric", "target", "verdict", "measured", "where"], words=5)
    table.rows.extend([target.metric, target.target, target.mark, target.measured, target.where] for target in verdict)
    return table


def _as_json(
    facts: dict[str, Any], results: Results, failovers: Sequence[float], many: Numbers, verdict: Sequence[Target]
) -> dict[str, Any]:
    return {
        "machine": facts,
        "throughput": results.as_json(),
        "failover s": list(failovers),
        "partitions": many,
        "targets": [
            {"metric": target.metric, "target": target.target, "reached": target.reached, "measured": target.measured}
            for target in verdict
        ],
    }


def print_line(line: str) -> None:
    print(time.strftime("%H:%M:%S ") + line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
