"""`make chaos-http`: nodes of a cluster are killed while messages are published, leased and settled over HTTP.

python -m trials.chaos_http [--faults N] [--seed N]

Every request goes to a random node. Publishers retry a message, with deduplication, until it is acknowledged; workers
accept, release and abandon what they lease. At the end every acknowledged message must have been accepted, none may
have been delivered after its acceptance was confirmed (the subscription is exactly-once), and none may be stored twice.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import httpx

from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server, ServerGroup

TOPIC, SUBSCRIPTION = "orders", "billing"
PUBLISHERS, WORKERS, PARTITIONS = 4, 6, 6
REQUEST_S, DRAIN_S = 30.0, 180.0
TRACE_LINES = 40
INTERNAL_ERROR = 500
"""Failures of other nodes are transient and must be reported as such, never with this status."""
SETTINGS = {"group-initial-delay-ms": 100, "leader-balance-ms": 500, "lease-ms": 2000}


class Trial:
    """One run, with the known state of every message."""

    def __init__(self, cluster: ServerGroup, http: httpx.AsyncClient, seed: int) -> None:
        self._cluster = cluster
        self._http = http
        self._random = random.Random(seed)
        self._publishing = True
        self._working = True
        self.acknowledged: set[str] = set()
        self.accepted: set[str] = set()
        self.uncertain: set[str] = set()
        """The messages whose acceptance got no response."""
        self.positions: dict[str, set[tuple[int, int]]] = {}
        self.violations: list[str] = []
        self.errors: dict[int | str, int] = {}

    async def declare(self) -> None:
        """Create the topic and the subscription."""
        topic = {"topic": TOPIC, "partitions": PARTITIONS, "replication": 3}
        subscription = {
            "name": SUBSCRIPTION,
            "topics": [TOPIC],
            "delivery": "exactly-once",
            "lease_ms": 10_000,
            "attempts": 0,
        }
        await self._retry(lambda: self._send("/topics", json=topic))
        await self._retry(lambda: self._send("/subscriptions", json=subscription))

    async def publish(self, number: int) -> None:
        """Publish one message after the other, each until it is acknowledged."""
        at = 0
        while self._publishing:
            at += 1
            name = f"{number}-{at}"
            headers = {"message-id": name, "message-key": name}
            path = f"/topics/{TOPIC}/messages?deduplicate=true"
            response = await self._retry(lambda: self._send(path, content=b"x" * 100, headers=headers))  # noqa: B023
            self._record_position(name, response.json())
            self.acknowledged.add(name)
            await asyncio.sleep(0.005)

    async def work(self) -> None:
        """Lease messages, and settle some of them."""
        while self._working:
            pull_request = {"max": 20, "wait_ms": 2000}
            response = await self._send(f"/subscriptions/{SUBSCRIPTION}/messages:pull", json=pull_request)
            if response is None or response.status_code != 200:
                await asyncio.sleep(0.1)
                continue
            messages = response.json()["messages"]
            for message in messages:
                self._record_position(message["id"], message)
                if message["id"] in self.accepted:
                    self.violations.append(f"{message['id']} was delivered after it was accepted")
            await self._settle(messages)

    async def kill(self, faults: int) -> None:
        """Kill nodes, one at a time, and start them again."""
        for fault in range(faults):
            await asyncio.sleep(self._random.uniform(2, 5))
            victim = self._random.choice(list(self._cluster))
            victim.kill()
            await asyncio.sleep(self._random.uniform(1, 5))
            await asyncio.to_thread(victim.start)
            so_far = f"{len(self.acknowledged):,} published, {len(self.accepted):,} accepted"
            sys.stderr.write(f"fault {fault + 1} of {faults}: {so_far}\n")

    async def run(self, faults: int) -> None:
        """Run publishers, workers and kills concurrently; then drain the subscription."""
        await self.declare()
        publishers = [asyncio.create_task(self.publish(number)) for number in range(PUBLISHERS)]
        workers = [asyncio.create_task(self.work()) for _ in range(WORKERS)]
        await self.kill(faults)
        self._publishing = False
        await asyncio.gather(*publishers)
        deadline = time.monotonic() + DRAIN_S
        while self.acknowledged - self.accepted - self.uncertain and time.monotonic() < deadline:
            await asyncio.sleep(0.2)
        self._working = False
        await asyncio.gather(*workers)

    def check(self) -> list[str]:
        lost = sorted(self.acknowledged - self.accepted - self.uncertain)
        duplicated = sorted(name for name, positions in self.positions.items() if len(positions) > 1)
        return [
            *self.violations,
            *(f"{name} was acknowledged and never accepted" for name in lost),
            *(f"{name} is stored at {sorted(self.positions[name])}" for name in duplicated),
            *(bug for node in self._cluster for bug in tracebacks(node)),
        ]

    async def _settle(self, messages: list[dict[str, Any]]) -> None:
        body: dict[str, list[Any]] = {"accept": [], "release": []}
        names: dict[str, str] = {}
        for message in messages:
            choice = self._random.random()
            if choice < 0.85:
                body["accept"].append(message["lease"])
                names[message["lease"]] = message["id"]
            elif choice < 0.95:
                body["release"].append({"lease": message["lease"], "delay_ms": 0})
        if not body["accept"] and not body["release"]:
            return
        response = await self._send(f"/subscriptions/{SUBSCRIPTION}/messages:settle", json=body)
        if response is None or response.status_code != 200:
            # They may have been accepted; otherwise they are delivered again.
            self.uncertain.update(names.values())
            return
        for result in response.json()["results"]:
            if "error" not in result and result["lease"] in names:
                self.accepted.add(names[result["lease"]])

    async def _send(self, path: str, **what: Any) -> httpx.Response | None:
        node = self._random.choice(list(self._cluster))
        try:
            response = await self._http.post(f"http://{node.http}/v1{path}", **what)
        except httpx.HTTPError as error:
            self._count_error(type(error).__name__)
            return None
        if response.status_code >= 300:
            self._count_error(response.status_code)
        if response.status_code == INTERNAL_ERROR:
            self.violations.append(f"{path} got {response.text}")
        return response

    async def _retry(self, attempt: Callable[[], Awaitable[httpx.Response | None]]) -> httpx.Response:
        while True:
            response = await attempt()
            if response is not None and (response.status_code < 300 or response.status_code == 409):
                return response
            await asyncio.sleep(0.05)

    def _count_error(self, what: int | str) -> None:
        self.errors[what] = self.errors.get(what, 0) + 1

    def _record_position(self, name: str, receipt: dict[str, Any]) -> None:
        self.positions.setdefault(name, set()).add((receipt["partition"], receipt["offset"]))


def tracebacks(node: Server) -> list[str]:
    """Return unexpected log lines of a node or its gateway."""
    lines = node.log.read_text(errors="replace").splitlines()
    positions = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
    return ["\n".join(lines[max(0, at - 2) : at + TRACE_LINES]) for at in positions[:3]]


async def run(cluster: ServerGroup, faults: int, seed: int) -> Trial:
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(timeout=REQUEST_S, limits=limits) as http:
        trial = Trial(cluster, http, seed)
        await trial.run(faults)
    return trial


def main() -> int:
    """Run the trial and print the outcome; return 1 if a guarantee was violated."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        EtcdServer() as etcd,
        PostgresServer() as postgres,
        ServerGroup(Path(folder), etcd.url, postgres.new_database(), settings=SETTINGS) as cluster,
    ):
        trial = asyncio.run(run(cluster, options.faults, options.seed))
        violations = trial.check()
    for line in violations[:50]:
        sys.stdout.write(line + "\n")
    sys.stdout.write(
        f"{len(trial.acknowledged):,} messages, {options.faults} kills: {len(violations)} violations; "
        f"errors of clients: {dict(sorted(trial.errors.items(), key=str))}\n"
    )
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main())
