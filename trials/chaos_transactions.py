"""`make chaos-transactions`: kill programs and brokers at least 100 times, and check for exactly-once results.

    python -m trials.chaos_transactions [--kills N] [--seed S] [--minutes M] [--nodes 1] [--groups NAMES]

The trial and its checks are `src/millstream_testing/transaction_trial.py`. With `--nodes 1` there is no cluster and no
failover. The exit code is 1, and the seed is printed, when there is a finding or when something hangs; then the trial
also prints what is waiting.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from conformance.client import Unavailable
from conformance.java_client import transaction_program
from trials.command_line import print_line, seed_of, trial_folder, trial_parser

from millstream.cli.exit_code import CommandFailed
from millstream_testing.cluster_faults import KINDS
from millstream_testing.cluster_network import NamespaceNetwork, RelayNetwork, can_create_namespaces
from millstream_testing.server import ServerFailed
from millstream_testing.transaction_trial import JAVA, SETTINGS, Plan, Round, TransactionTrial
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialCluster, TrialSingleNode

JAVA_CLIENT = "4.4.0"
SINGLE_NODE_KINDS = ("kill", "stop", "pause")
"""The kinds of faults that apply to a single node."""


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    arguments = _arguments()
    plan = Plan(kills=arguments.kills, minutes_max=arguments.minutes, heal_s_max=arguments.patience)
    plan.seed = seed_of(arguments)
    if arguments.kinds:
        plan.node_kinds = {kind: KINDS[kind][1] for kind in arguments.kinds.split(",")}
    if arguments.java:
        add_java(plan, arguments.java)
    if arguments.groups:
        plan.groups = tuple(group for group in plan.groups if group in arguments.groups.split(","))
    if arguments.nodes == 1:
        plan.node_kinds = {kind: weight for kind, weight in plan.node_kinds.items() if kind in SINGLE_NODE_KINDS}
    with trial_folder(arguments) as folder:
        return trial(plan, arguments.nodes, folder, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = trial_parser("chaos_transactions", __doc__)
    parser.add_argument("--kills", type=int, default=100, help="how many processes to kill (default: 100)")
    parser.add_argument("--minutes", type=float, default=30.0, help="stop after this long (default: 30)")
    parser.add_argument("--nodes", type=int, default=3, help="the number of nodes (default: 3); 1 is a single node")
    parser.add_argument("--patience", type=float, default=90.0, help="seconds to catch up after a round (default: 90)")
    parser.add_argument(
        "--java",
        default=JAVA_CLIENT,
        help=f"the version of Apache Kafka's client, '' for none (default: {JAVA_CLIENT})",
    )
    parser.add_argument(
        "--groups", default="", help="only these groups of programs, some of classic,consumer,aiokafka,java"
    )
    kinds = ",".join(kind for kind in KINDS if kind != "disk")
    parser.add_argument("--kinds", default="", help=f"the kinds of node faults, some of {kinds}")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def add_java(plan: Plan, version: str) -> None:
    """Add programs with Apache Kafka's own client, which uses the newer transaction protocol."""
    try:
        plan.java = tuple(transaction_program(version))
    except Unavailable as error:
        print_line(f"no programs with Apache Kafka's client: {error}")
    else:
        plan.groups = (*plan.groups, JAVA)


def cluster_of(plan: Plan, nodes: int, folder: Path) -> TrialCluster:
    if nodes == 1:
        return TrialSingleNode(folder, settings=SETTINGS)
    settings = SETTINGS | {"lease-ms": plan.lease_ms, "replica-lag-ms": plan.replica_lag_ms}
    network = NamespaceNetwork(nodes) if can_create_namespaces() else RelayNetwork(nodes)
    return TrialCluster(folder, network, nodes=nodes, settings=settings)


def trial(plan: Plan, nodes: int, folder: Path, report: Path | None) -> int:
    """Run in a folder and print the outcome."""
    running = TransactionTrial(folder, cluster_of(plan, nodes, folder), plan, print_line)
    print_line(f"{plan.kills} kills of {nodes} nodes and {plan.workers * len(plan.groups)} programs, seed {plan.seed}")
    began = time.monotonic()
    with running:
        try:
            outcome = running.run()
        except (TrialFailed, ServerFailed, CommandFailed) as error:
            running.save_history(folder / "history.jsonl")
            print_line(f"{running.describe_waiting()}\nthe trial failed: {error}\nseed {plan.seed}")
            return 1
        running.save_history(folder / "history.jsonl")
    for line in summarize(outcome.rounds):
        print_line(line)
    took_s = time.monotonic() - began
    print_line(f"{outcome.kills} kills in {len(outcome.rounds)} rounds and {took_s:.0f} s, {running.restarts} restarts")
    print_line(outcome.findings())
    if report is not None:
        summary = {"seed": plan.seed, "nodes": nodes, "kills": outcome.kills, "seconds": took_s, "ok": outcome.ok}
        details = {
            "findings": outcome.findings().splitlines(),
            "rounds": [str(chaos_round) for chaos_round in outcome.rounds],
        }
        report.write_text(json.dumps({**summary, **details}, indent=1) + "\n")
    if not outcome.ok:
        print_line(f"seed {plan.seed}")
    return 0 if outcome.ok else 1


def summarize(rounds: Sequence[Round]) -> list[str]:
    """Return how often each kind of fault happened, and how long programs took to catch up afterwards."""
    counts = Counter(kind for chaos_round in rounds for kind in chaos_round.kinds)
    lines = [f"{'kind of fault':20} count  caught up: median  longest"]
    for kind in sorted(counts):
        waits = [chaos_round.healed_s for chaos_round in rounds if kind in chaos_round.kinds]
        lines.append(f"{kind:20} {counts[kind]:5} {statistics.median(waits):16.1f} s {max(waits):6.1f} s")
    return lines


if __name__ == "__main__":
    sys.exit(main())
