"""`make chaos`: subscriptions deliver while workers and nodes fail; then every message is checked.

    python -m trials.chaos_subscriptions [--nodes 1|3|both] [--faults N] [--seed S] [--kinds kill,pause]
        [--minutes M] [--plant BUG] [--keep FOLDER]

The trial is `src/millstream_testing/subscription_trial.py`, its checker `subscription_check.py`. As root on Linux the
nodes of a cluster run in network namespaces, otherwise links are relays. The exit code is 1, and the seed is printed,
when a guarantee was violated or a queue did not drain; with `--plant` it is 1 when nothing was found.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from trials.command_line import print_line, seed_of, trial_folder, trial_parser

from millstream_testing.cluster_network import NamespaceNetwork, RelayNetwork, can_create_namespaces
from millstream_testing.planted_serve import BUGS, planted
from millstream_testing.server import ServerFailed
from millstream_testing.stepped_serve import PROGRAM
from millstream_testing.subscription_trial import NODE_KINDS, SETTINGS, SINGLE_NODE_KINDS, Plan, SubscriptionTrial
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialCluster, TrialSingleNode

CLUSTER = 3
FAULTS = {1: 30, CLUSTER: 60}


def main() -> int:
    """Run the trials; return 0 if all passed, 1 otherwise."""
    arguments = _arguments()
    seed = seed_of(arguments)
    with trial_folder(arguments) as folder:
        sizes = (1, CLUSTER) if arguments.nodes == "both" else (int(arguments.nodes),)
        passed = [trial(arguments, seed, nodes, folder / f"nodes-{nodes}") for nodes in sizes]
    if arguments.plant:
        print_line(f"{arguments.plant} was {'not found' if any(passed) else 'found'}")
    return int(any(passed) if arguments.plant else not all(passed))


def _arguments() -> argparse.Namespace:
    parser = trial_parser("chaos_subscriptions", __doc__)
    parser.add_argument("--nodes", choices=("1", "3", "both"), default="both", help="one node, a cluster, or both")
    parser.add_argument(
        "--faults", type=int, help="the number of node faults (default: 30 for one node, 60 for a cluster)"
    )
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="stop injecting faults after this long (default: 20)"
    )
    parser.add_argument("--rate", type=float, default=40.0, help="messages per second (default: 40)")
    parser.add_argument("--kinds", default="", help=f"the kinds of node faults, some of {','.join(NODE_KINDS)}")
    parser.add_argument("--plant", choices=BUGS, help="plant a bug in the nodes, which the checker must find")
    return parser.parse_args()


def trial(arguments: argparse.Namespace, seed: int, nodes: int, folder: Path) -> bool:
    """Run on this many nodes and print the outcome; return whether it passed."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = arguments.faults or FAULTS[nodes]
    plan = Plan(seed=seed, faults=faults, minutes_max=arguments.minutes, messages_per_s=arguments.rate)
    chosen = arguments.kinds.split(",") if arguments.kinds else list(NODE_KINDS)
    plan.node_kinds = {kind: NODE_KINDS[kind] for kind in chosen if nodes > 1 or kind in SINGLE_NODE_KINDS}
    print_line(f"{nodes} nodes, {faults} faults, seed {seed}")
    program = planted(arguments.plant) if arguments.plant else PROGRAM
    try:
        with cluster_of(nodes, folder, program) as cluster:
            outcome = asyncio.run(SubscriptionTrial(folder, cluster, plan, print_line).run())
    except (TrialFailed, ServerFailed) as error:
        print_line(f"the trial failed: {error}\nseed {seed}")
        return False
    print_line(outcome.summary)
    for finding in outcome.findings:
        print_line(f"VIOLATION {finding}")
    print_line(f"{nodes} nodes: {'passed' if outcome.ok else f'seed {seed}'}")
    return outcome.ok


def cluster_of(nodes: int, folder: Path, program: tuple[str, ...]) -> TrialCluster:
    if nodes == 1:
        return TrialSingleNode(folder, settings=SETTINGS, program=program)
    network = NamespaceNetwork(nodes) if can_create_namespaces() else RelayNetwork(nodes)
    settings = SETTINGS | {"lease-ms": 2000, "replica-lag-ms": 3000}
    return TrialCluster(folder, network, nodes=nodes, settings=settings, program=program)


if __name__ == "__main__":
    sys.exit(main())
