"""`make chaos-ledger`: kill nodes, workers and the ledger's driver, seek, redrive and delete records; then audit.

    python -m trials.chaos_ledger [--rounds N] [--seed S] [--nodes N] [--keep FOLDER]

One node or a cluster has one topic and three subscriptions with a ledger, one for each delivery mode. Messages are
published in every round, with receipts; worker processes accept, release and reject them at random and are killed, and
in most rounds so is a node (`kill -9`). Subscriptions are moved, dead letters are redriven, the start of the log is
deleted, a subscription is deleted and created again, and runs of the ledger's pipeline are killed. At the end
`millstream audit` must account for every message and every receipt. The exit code is 1, and the seed is printed, when
it does not.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Final

import millstream
from millstream.cli.exit_code import ExitCode
from millstream.core.errors import MillstreamError
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server, ServerGroup

TOPIC: Final = "work"
PARTITIONS: Final = 3
DELIVERY_MODES: Final = ("at-most-once", "at-least-once", "exactly-once")
MESSAGES: Final = 300
"""The number of messages per round."""
_COMMAND_S: Final = 600.0
_CLASSES: Final = ("accepted", "dead_lettered", "filtered", "skipped", "waiting", "expired", "lost")


def main() -> int:
    """Run the trial; return 0 if everything adds up."""
    parser = argparse.ArgumentParser(prog="python -m trials.chaos_ledger")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--nodes", type=int, default=1)
    parser.add_argument("--keep", type=Path, help="keep the data and the receipts in this folder")
    parser.add_argument("--worker", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        brokers, name = options.worker.split("|")
        asyncio.run(work(brokers, name, random.Random(options.seed)))
        return 0
    seed = random.randrange(1_000_000) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory(prefix="millstream-ledger-") as scratch:
        folder = options.keep or Path(scratch)
        adds_up = LedgerTrial(folder, random.Random(seed), options.nodes).run(options.rounds)
    print(f"seed {seed}, {options.nodes} nodes: {'everything adds up' if adds_up else 'THE AUDIT FAILED'}", flush=True)
    return int(not adds_up)


async def work(brokers: str, name: str, rng: random.Random) -> None:
    """Handle messages until this process is killed."""

    async def handle(_message: millstream.Message) -> None:
        await asyncio.sleep(rng.choice([0, 0, 0.01]))
        what = rng.random()
        if what < 0.08:
            raise millstream.Reject("unlucky")
        if what < 0.25:
            raise millstream.RetryLater(0.1, "later")

    while True:
        with suppress(MillstreamError, OSError):
            async with millstream.connect(brokers) as client:
                await client.subscribe(TOPIC, handle, name=name, concurrency=8)
                await asyncio.sleep(3600)
        await asyncio.sleep(0.2)


class LedgerTrial:
    def __init__(self, folder: Path, rng: random.Random, nodes: int) -> None:
        self._folder = folder
        self._rng = rng
        self._receipts = folder / "receipts.jsonl"
        self._lake = folder / "lake"
        self._settings = {"pipelines-enabled": "false", "ledger-bytes-max": 64 * 1024 * 1024, "lease-ms": 3000}
        self._node_count = nodes
        self._nodes: list[Server] = []
        self._workers: list[subprocess.Popen[bytes]] = []

    @property
    def _brokers(self) -> str:
        return ",".join(node.kafka for node in self._nodes)

    def run(self, rounds: int) -> bool:
        with ExitStack() as stack:
            if self._node_count == 1:
                self._nodes = [stack.enter_context(Server(self._folder / "data", settings=self._settings))]
            else:
                etcd, postgres = stack.enter_context(EtcdServer()), stack.enter_context(PostgresServer())
                stores = (etcd.url, postgres.new_database())
                group = ServerGroup(self._folder, *stores, nodes=self._node_count, settings=self._settings)
                self._nodes = list(stack.enter_context(group))
            try:
                self._command("topic", "create", TOPIC, "--partitions", PARTITIONS)
                for mode in DELIVERY_MODES:
                    self._subscribe(mode)
                for number in range(rounds):
                    self._round(number, rounds)
            finally:
                self._kill_all()
            return self._audit()

    def _subscribe(self, mode: str) -> None:
        flags = ("--delivery", mode, "--attempts", 4, "--backoff", "0.1:0.5", "--lease", 2, "--start", "start")
        self._command("subscription", "create", f"on-{mode}", "--topic", TOPIC, "--ledger", *flags)

    def _round(self, number: int, rounds: int) -> None:
        began = time.monotonic()
        self._workers += [self._start_worker(f"on-{mode}") for mode in DELIVERY_MODES]
        asyncio.run(self._publish())
        time.sleep(self._rng.uniform(0.5, 2))
        done = [self._inject(what) for what in self._rng.sample(FAULTS, 3)]
        if self._workers:
            self._kill(self._workers.pop(self._rng.randrange(len(self._workers))))
        if number in (rounds // 3, 2 * rounds // 3):
            # The driver is killed at any point before its commit, unless it completes earlier.
            self._run_driver(self._rng.uniform(5, 40))
            done.append("driver killed")
        if self._rng.random() < 0.7:
            node = self._rng.choice(self._nodes)
            node.kill()
            time.sleep(self._rng.uniform(0, 5) if len(self._nodes) > 1 else 0)
            node.start()
            self._wait_until_healthy()
            done.append(f"node {self._nodes.index(node) + 1} killed")
        print(f"round {number + 1}: {', '.join(done)} ({time.monotonic() - began:.0f} s)", flush=True)

    async def _publish(self) -> None:
        async with millstream.connect(self._brokers, receipts=str(self._receipts)) as client:
            for number in range(MESSAGES):
                await client.publish(TOPIC, {"number": number}, key=str(number % 50))

    # -- faults ---------------------------------------------------------------------------------------------------

    def _inject(self, what: str) -> str:
        mode = self._rng.choice(DELIVERY_MODES)
        name = f"on-{mode}"
        if what == "seek back":
            self._command("subscription", "seek", name, "--to", f"{self._rng.choice([1, 3, 10])}s")
        elif what == "seek forward":
            self._command("subscription", "seek", name, "--to", "end")
        elif what == "redrive":
            # Dead letters of deleted messages remain open.
            self._command("dlq", "redrive", name, allowed=(ExitCode.OK, ExitCode.CONFLICT))
        elif what == "delete records":
            asyncio.run(self._delete_records())
        else:
            self._command("subscription", "delete", name, "--force", "--yes")
            self._subscribe(mode)
        return f"{what} {name}"

    async def _delete_records(self) -> None:
        """Delete the first records of a partition."""
        from kio.schema.delete_records.v2 import request

        from millstream.protocol.wire.client import Client

        messages: Any = request
        async with Client.connect(self._brokers) as client:
            partition = self._rng.randrange(PARTITIONS)
            end = (await client.list_offsets(TOPIC, {partition: -1}))[partition].offset
            start = (await client.list_offsets(TOPIC, {partition: -2}))[partition].offset
            deletion = messages.DeleteRecordsPartition(
                partition_index=partition, offset=self._rng.randint(start, (start + end) // 2)
            )
            topic = messages.DeleteRecordsTopic(name=TOPIC, partitions=(deletion,))
            leader = await client.leader_of(TOPIC, partition)
            await client.send(leader, messages.DeleteRecordsRequest(topics=(topic,), timeout=_seconds(10)))

    def _start_worker(self, name: str) -> subprocess.Popen[bytes]:
        seed = str(self._rng.randrange(1_000_000))
        command = [sys.executable, "-m", "trials.chaos_ledger", "--worker", f"{self._brokers}|{name}"]
        return subprocess.Popen([*command, "--seed", seed], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)

    def _run_driver(self, seconds: float) -> None:
        command = [sys.executable, "-m", "millstream.cli.main", "pipeline", "run", "ledger", "--once"]
        flags = ["--lake", str(self._lake), "--brokers", self._brokers]
        driver = subprocess.Popen(
            [*command, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, process_group=0
        )
        with suppress(subprocess.TimeoutExpired):
            driver.wait(seconds)
        with suppress(ProcessLookupError):
            # This includes Java and its Python workers.
            os.killpg(driver.pid, signal.SIGKILL)
        driver.wait()

    def _wait_until_healthy(self) -> None:
        """Wait until every partition has a leader, which seeks and deletions need."""
        deadline = time.monotonic() + _COMMAND_S
        while self._run("cluster", "status").returncode and len(self._nodes) > 1:
            if time.monotonic() > deadline:
                raise RuntimeError(f"the cluster does not recover: {self._run('cluster', 'status').stdout}")
            time.sleep(0.5)

    def _kill(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        process.wait()

    def _kill_all(self) -> None:
        for worker in self._workers:
            self._kill(worker)
        self._workers.clear()

    def _command(self, *arguments: object, allowed: Sequence[int] = (ExitCode.OK,)) -> str:
        done = self._run(*arguments)
        if done.returncode not in allowed:
            raise RuntimeError(f"{' '.join(map(str, arguments))} failed: {done.stderr}")
        return done.stdout

    def _run(self, *arguments: object) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "millstream.cli.main", *map(str, arguments), "--brokers", self._brokers]
        return subprocess.run(command, capture_output=True, text=True, timeout=_COMMAND_S, check=False)

    # -- the end --------------------------------------------------------------------------------------------------

    def _audit(self) -> bool:
        receipts = ["--receipts", str(self._receipts)]
        codes = (ExitCode.OK, ExitCode.FAILED)
        report = json.loads(self._command("audit", "--json", "--lake", self._lake, *receipts, allowed=codes))
        for row in report["subscriptions"]:
            counts = {name: row[name] for name in ("published", *_CLASSES, "duplicated")}
            print(f"{row['subscription']} ({row['subscription_id'][:8]}): {counts}", flush=True)
        findings = [finding for finding in report["findings"] if finding["kind"] != "expired"] + report["damage"]
        # Receipts of deleted messages are not findings.
        findings += [receipt for receipt in report["receipts"] if receipt["kind"] != "expired"]
        print(
            f"{report['receipts_checked']:,} receipts, {len(report['receipts']):,} of them for deleted messages",
            flush=True,
        )
        for finding in findings[:20]:
            print(finding, flush=True)
        sums = all(row["published"] == sum(row[name] for name in _CLASSES) for row in report["subscriptions"])
        return not findings and sums and len(report["subscriptions"]) >= len(DELIVERY_MODES)


def _seconds(seconds: int) -> Any:
    from datetime import timedelta

    from kio.static.primitive import i32Timedelta

    return i32Timedelta.parse(timedelta(seconds=seconds))


FAULTS: Final = ("seek back", "seek forward", "redrive", "delete records", "delete")

if __name__ == "__main__":
    sys.exit(main())
