"""`make chaos`: workers misbehave and brokers are killed while subscriptions deliver; every message is accounted for.

    python -m benchmarks.chaos_subscriptions [--seed S] [--seconds N] [--kills N] [--nodes 1|3|both] [--keep FOLDER]

What is tried, and how it is judged: `src/millstream/testing/subscription_trial.py`. The exit code is 1, and the seed is
told, when a promise was broken or a queue did not run empty.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from millstream.testing.etcd_server import EtcdServer
from millstream.testing.postgres_server import PostgresServer
from millstream.testing.server import Server
from millstream.testing.server_group import ServerGroup
from millstream.testing.subscription_trial import Outcome, Plan, SubscriptionTrial

SETTINGS = {"lease-ms": 2000, "leader-balance-ms": 1000, "subscriptions-partitions": 3}
CLUSTER = 3


def main() -> int:
    """Run the trials; 0 when nothing was wrong, 1 otherwise."""
    arguments = _arguments()
    seed = random.randrange(1_000_000) if arguments.seed is None else arguments.seed
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    with tempfile.TemporaryDirectory(prefix="millstream-chaos-") as folder:
        kept = folder if arguments.keep is None else arguments.keep
        sizes = (1, CLUSTER) if arguments.nodes == "both" else (int(arguments.nodes),)
        outcomes = [trial(arguments, seed, nodes, Path(kept) / f"nodes-{nodes}") for nodes in sizes]
    return 0 if all(outcome.ok for outcome in outcomes) else 1


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.chaos_subscriptions", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--seed", type=int, help="repeat the random choices of another run")
    parser.add_argument("--seconds", type=float, default=120.0, help="how long messages come; the default is 120")
    parser.add_argument("--kills", type=int, default=15, help="how often a broker is killed; the default is 15")
    parser.add_argument("--rate", type=float, default=40.0, help="messages in a second; the default is 40")
    parser.add_argument("--nodes", choices=("1", "3", "both"), default="both", help="one node, a cluster, or both")
    parser.add_argument("--keep", type=Path, help="leave the data and the logs in this folder")
    return parser.parse_args()


def trial(arguments: argparse.Namespace, seed: int, nodes: int, folder: Path) -> Outcome:
    """Run on so many nodes and tell the outcome."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan(seed=seed, load_s=arguments.seconds, kills=arguments.kills, messages_per_s=arguments.rate)
    plan.replication = nodes
    tell(f"{nodes} nodes, {plan.kills} kills in {plan.load_s:g} s, seed {seed}")
    with _servers(nodes, folder) as servers:
        outcome = asyncio.run(SubscriptionTrial(servers, plan, tell).run())
    tell(outcome.account)
    for finding in outcome.findings:
        tell(f"BROKEN {finding}")
    tell(f"{nodes} nodes: {'nothing was wrong' if outcome.ok else f'seed {seed}'}")
    return outcome


@contextmanager
def _servers(nodes: int, folder: Path) -> Iterator[dict[int, Server]]:
    if nodes == 1:
        with Server(folder / "node-1", settings={"subscriptions-partitions": 3}) as server:
            yield {1: server}
        return
    with (
        EtcdServer() as etcd,
        PostgresServer() as postgres,
        ServerGroup(folder, etcd.url, postgres.new_database(), nodes=nodes, settings=SETTINGS) as group,
    ):
        yield group.nodes


def tell(line: str) -> None:
    """Say something with the time."""
    print(time.strftime("%H:%M:%S ") + line, flush=True)


if __name__ == "__main__":
    sys.exit(main())
