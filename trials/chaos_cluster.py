"""`make chaos-cluster`: inject at least 200 faults into a loaded cluster, and check every acknowledged message.

    python -m trials.chaos_cluster [--faults N] [--seed S] [--minutes M] [--kinds kill,pause] [--keep FOLDER]

The trial and its checks are `src/millstream_testing/cluster_trial.py`. As root on Linux the nodes run in network
namespaces and on their own file systems; otherwise links are relays, and no disk is filled. The exit code is 1, and the
seed is printed, when a message was lost, duplicated, out of order or skipped, when replicas differ, or when the cluster
did not recover.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trials.command_line import print_line, seed_of, trial_folder, trial_parser

from millstream.cli.exit_code import CommandFailed
from millstream_testing.cluster_faults import KINDS
from millstream_testing.cluster_network import NamespaceNetwork, Network, RelayNetwork, can_create_namespaces
from millstream_testing.cluster_trial import ClusterTrial, InjectedFault, Outcome, Plan
from millstream_testing.server import ServerFailed
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import can_mount


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    arguments = _arguments()
    plan = Plan(faults=arguments.faults, minutes_max=arguments.minutes)
    plan.seed = seed_of(arguments)
    if arguments.kinds:
        plan.kinds = {kind: KINDS[kind][1] for kind in arguments.kinds.split(",")}
    network = _network(plan, arguments.network)
    print_line(f"at most {plan.faults} faults on {plan.nodes} nodes joined by {network.kind}, seed {plan.seed}")
    if "disk" in plan.kinds and not can_mount():
        print_line("skipped: full disks, because mounting a file system requires root")
    with trial_folder(arguments) as folder:
        return trial(plan, network, folder, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = trial_parser("chaos_cluster", __doc__)
    parser.add_argument("--faults", type=int, default=200, help="the number of faults (default: 200)")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop injecting faults after this long")
    parser.add_argument("--kinds", default="", help=f"only these kinds of faults, some of {','.join(KINDS)}")
    parser.add_argument("--network", choices=("namespaces", "relays"), help="default: namespaces where allowed")
    parser.add_argument("--json", type=Path, help="write the results to this file")
    return parser.parse_args()


def _network(plan: Plan, requested: str | None) -> Network:
    if requested == "relays" or (requested is None and not can_create_namespaces()):
        return RelayNetwork(plan.nodes)
    return NamespaceNetwork(plan.nodes)


def trial(plan: Plan, network: Network, folder: Path, report: Path | None) -> int:
    """Run in a folder and print the outcome."""
    running = ClusterTrial(folder, network, plan, print_line)
    try:
        with running:
            outcome = running.run()
            if not outcome.ok:
                running.load.save_history(folder / "history.jsonl")
    except (TrialFailed, ServerFailed, CommandFailed) as error:
        print_line(f"{running.cluster.logs()}\nthe trial failed: {error}\nseed {plan.seed}")
        return 1
    for line in summarize(outcome.injected):
        print_line(line)
    print_line(f"{outcome.faults} faults\n{outcome.findings()}")
    if report is not None:
        report.write_text(json.dumps(as_json(plan, network, outcome), indent=1) + "\n")
    if not outcome.ok:
        print_line(f"{running.cluster.logs()}\nseed {plan.seed}")
    return 0 if outcome.ok else 1


def summarize(injected: Sequence[InjectedFault]) -> list[str]:
    """Return lines with how long producers waited, by kind of fault."""
    lines = [f"{'kind of fault':32} count  next produce: median  longest  longest wait  recovery: longest"]
    for kinds in sorted({fault.kinds for fault in injected}):
        of_kind = [fault for fault in injected if fault.kinds == kinds]
        waits, recovery = [fault.next_produce_s for fault in of_kind], max(fault.recovery_s for fault in of_kind)
        longest = max(fault.longest_wait_s for fault in of_kind)
        numbers = f"{statistics.median(waits):18.2f} s {max(waits):6.2f} s {longest:11.2f} s {recovery:19.2f} s"
        lines.append(f"{' + '.join(kinds):32} {len(of_kind):5}  {numbers}")
    return lines


def as_json(plan: Plan, network: Network, outcome: Outcome) -> dict[str, Any]:
    return {
        "seed": plan.seed,
        "network": network.kind,
        "faults": outcome.faults,
        "ok": outcome.ok,
        "sent": outcome.report.sent,
        "acknowledged": outcome.report.acknowledged,
        "read": outcome.report.read,
        "findings": outcome.findings().splitlines(),
        "injected": [
            {
                "kinds": fault.kinds,
                "what": fault.what,
                "next produce s": fault.next_produce_s,
                "longest wait s": fault.longest_wait_s,
                "recovery s": fault.recovery_s,
            }
            for fault in outcome.injected
        ],
    }


if __name__ == "__main__":
    sys.exit(main())
