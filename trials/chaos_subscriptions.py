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
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

from millstream_testing.cluster_network import NamespaceNetwork, RelayNetwork, can_create_namespaces
from millstream_testing.planted_serve import BUGS, planted
from millstream_testing.server import ServerFailed
from millstream_testing.stepped_serve import PROGRAM
from millstream_testing.subscription_trial import NODE_KINDS, SETTINGS, SINGLE_NODE_KINDS, Plan, SubscriptionTrial
from millstream_testing.trial_clients import TrialFailed
from millstream_testing.trial_cluster import TrialCluster
from millstream_testing.trial_single_node import TrialSingleNode

CLUSTER = 3
FAULTS = {1: 30, CLUSTER: 60}


def main() -> int:
    """Run the trials; return 0 if all passed, 1 otherwise."""
    arguments = _arguments()
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="millstream-chaos-") as folder:
        kept = folder if arguments.keep is None else arguments.keep
        sizes = (1, CLUSTER) if arguments.nodes == "both" else (int(arguments.nodes),)
        passed = [trial(arguments, seed, nodes, Path(kept) / f"nodes-{nodes}") for nodes in sizes]
    if arguments.plant:
        print_line(f"{arguments.plant} was {'not found' if any(passed) else 'found'}")
    return int(any(passed) if arguments.plant else not all(passed))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m trials.chaos_subscriptions", description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", choices=("1", "3", "both"), default="both", help="one node, a cluster, or both")
    parser.add_argument(
        "--faults", type=int, help="the number of node faults (default: 30 for one node, 60 for a cluster)"
    )
    parser.add_argument("--seed", type=int, help="repeat the random choices of an earlier run")
    parser.add_argument(
        "--minutes", type=float, default=20.0, help="stop injecting faults after this long (default: 20)"
    )
    parser.add_argument("--rate", type=float, default=40.0, help="messages per second (default: 40)")
    parser.add_argument("--kinds", default="", help=f"the kinds of node faults, some of {','.join(NODE_KINDS)}")
    parser.add_argument("--plant", choices=BUGS, help="plant a bug in the nodes, which the checker must find")
    parser.add_argument("--keep", type=Path, help="keep the data, logs and journals in this folder")
    return parser.parse_args()


def trial(arguments: argparse.Namespace, seed: int, nodes: int, folder: Path) -> bool:
    """Run on this many nodes and print the outcome; return whether it passed."""
    folder.mkdir(parents=True, exist_ok=True)
    faults = arguments.faults or FAULTS[nodes]
    plan = Plan(seed=seed, faults=faults, minutes_max=arguments.minutes, messages_per_s=arguments.rate)
    wanted = arguments.kinds.split(",") if arguments.kinds else list(NODE_KINDS)
    plan.node_kinds = {kind: NODE_KINDS[kind] for kind in wanted if nodes > 1 or kind in SINGLE_NODE_KINDS}
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
    """Return the nodes of a trial."""
    if nodes == 1:
        return TrialSingleNode(folder, settings=SETTINGS, program=program)
    network = NamespaceNetwork(nodes) if can_create_namespaces() else RelayNetwork(nodes)
    settings = SETTINGS | {"lease-ms": 2000, "replica-lag-ms": 3000}
    return TrialCluster(folder, network, nodes=nodes, settings=settings, program=program)


def print_line(line: str) -> None:
    """Print a line with the time."""
    print(time.strftime("%H:%M:%S ") + line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
