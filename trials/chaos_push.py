"""`make chaos-push`: nodes, push processes and the endpoint are killed under load, and every message is checked.

    python -m trials.chaos_push [--nodes 1|3] [--faults N] [--seed S] [--minutes M] [--keep FOLDER]

The trial and its checks are `src/millstream_testing/push_trial.py`. The exit code is 1, and the seed is printed, when a
guarantee was violated or a queue did not drain.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

from trials.command_line import print_line, seed_of, trial_folder, trial_parser

from millstream_testing.cluster_network import RelayNetwork
from millstream_testing.push_trial import SETTINGS, Plan, PushTrial
from millstream_testing.server import ServerFailed
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialCluster, TrialSingleNode


def main() -> int:
    """Run the trial; return 0 if it passed, 1 otherwise."""
    arguments = _arguments()
    seed = seed_of(arguments)
    with trial_folder(arguments) as folder:
        return int(not trial(arguments, seed, folder))


def _arguments() -> argparse.Namespace:
    parser = trial_parser("chaos_push", __doc__)
    parser.add_argument("--nodes", choices=("1", "3"), default="3", help="one node or a cluster (default: 3)")
    parser.add_argument("--faults", type=int, default=15, help="the number of faults (default: 15)")
    parser.add_argument(
        "--minutes", type=float, default=10.0, help="stop injecting faults after this long (default: 10)"
    )
    return parser.parse_args()


def trial(arguments: argparse.Namespace, seed: int, folder: Path) -> bool:
    """Run the trial and print the outcome; return whether it passed."""
    plan = Plan(seed=seed, faults=arguments.faults, minutes_max=arguments.minutes)
    print_line(f"{arguments.nodes} nodes, {plan.faults} faults, seed {seed}")
    try:
        with cluster_of(int(arguments.nodes), folder) as cluster:
            outcome = asyncio.run(PushTrial(cluster, plan, print_line).run())
    except (TrialFailed, ServerFailed) as error:
        print_line(f"the trial failed: {error}\nseed {seed}")
        return False
    print_line(outcome.summary)
    for finding in outcome.findings:
        print_line(f"VIOLATION {finding}")
    print_line(f"seed {seed}" if outcome.findings else "passed")
    return not outcome.findings


def cluster_of(nodes: int, folder: Path) -> TrialCluster:
    """Return the nodes, linked by relays because they must reach an endpoint in this process."""
    if nodes == 1:
        return TrialSingleNode(folder, settings=SETTINGS)
    settings = SETTINGS | {"lease-ms": 2000, "replica-lag-ms": 3000}
    return TrialCluster(folder, RelayNetwork(nodes), nodes=nodes, settings=settings)


if __name__ == "__main__":
    sys.exit(main())
