"""Turn a loaded machine into a cluster and move its partitions, while processes are killed; check every message.

Idempotent producers write to a topic, a group reads and commits, and workers accept the messages of an exactly-once
subscription. Meanwhile:

1. the machine, with two broker processes, is killed and started again;
2. with the machine stopped, `cluster adopt` runs, is killed at random moments and repeated until it completes;
3. three nodes join, and `topic replicate` gives every topic, internal ones included, three replicas;
4. the nodes of the first machine are drained and removed, and the rest is balanced.

While plans are applied, nodes are killed, the controller among them. At the end everything is read from the start: no
message may be lost, duplicated or out of order, the group must have read all of it and kept its commits, no message may
have been accepted twice, and all replicas must be identical byte for byte.
"""

from __future__ import annotations

import asyncio
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self
from uuid import UUID

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.cli.local_process import is_free
from millstream.core.errors import MillstreamError
from millstream.core.subscription import DELIVERY, EXACTLY_ONCE, LEASE, START, Verb
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream_testing import killed_adopt
from millstream_testing.command import CommandLine, Outcome
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.queue_trial import pending_messages
from millstream_testing.replica_bytes import differing_replicas
from millstream_testing.server import Server
from millstream_testing.trial_clients import SETTLE_S_MAX, TrialFailed, TrialLoad, create_topics

TOPIC = "trial"
PARTITIONS = 4
QUEUE = "queue"
GROUP = "group"
CORES = 2
NODES = (1, 1001, 2, 3, 4)
"""The first two are the processes of the machine that is adopted."""
JOINED = (2, 3, 4)
SETTINGS: dict[str, object] = {
    "lease-ms": 2000,
    "replica-lag-ms": 3000,
    "leader-balance-ms": 2000,
    "group-initial-delay-ms": 100,
}
WAIT_S = 300.0
_POLL_S = 0.3
_PORTS = range(20_000, 30_000)


@dataclass(slots=True, kw_only=True)
class Plan:
    adoption_kills: int = 8
    kills_per_step: int = 3
    """How many nodes are killed while a plan is applied."""
    messages_per_s: int = 200
    producers: int = 2
    workers: int = 2
    seed: int = field(default_factory=lambda: random.randrange(2**32))


class Worker(threading.Thread):
    """Accept the messages of a subscription, and count the confirmed acceptances."""

    def __init__(self, name: str, brokers: str, stopping: threading.Event) -> None:
        super().__init__(name=name, daemon=True)
        self._brokers = brokers
        self._stopping = stopping
        self.accepted: Counter[tuple[int, int]] = Counter()
        """How often the acceptance of each message, by partition and offset, was confirmed."""

    def run(self) -> None:
        asyncio.run(self._run())

    async def _run(self) -> None:
        while not self._stopping.is_set():
            try:
                async with Client.connect(self._brokers, client_id=self.name, timeout_s=15.0) as client:
                    await self._work(SubscriptionClient(client))
            except (MillstreamError, OSError, TimeoutError):
                await asyncio.sleep(_POLL_S)

    async def _work(self, subscriptions: SubscriptionClient) -> None:
        while not self._stopping.is_set():
            messages = await subscriptions.receive(QUEUE, self.name, max_records=50, wait_ms=500)
            if not messages:
                continue
            responses = await subscriptions.settle(QUEUE, self.name, messages, Verb.ACCEPT)
            self.accepted.update(
                (message.partition, int(message.record.offset))
                for message, error in zip(messages, responses, strict=True)
                if error is None
            )


class GrowTrial:
    """Run one trial; leaving it ends every process that it started."""

    def __init__(self, folder: Path, plan: Plan, print_line: Callable[[str], None]) -> None:
        self._folder = folder
        self._plan = plan
        self._print_line = print_line
        self._random = random.Random(plan.seed)
        self._stack = ExitStack()
        self._load = TrialLoad({TOPIC: PARTITIONS}, seed=plan.seed)
        self._workers_stopping = threading.Event()
        """Set when the workers should stop."""
        self._workers: list[Worker] = []
        self._machine = self._server(1, {"cores": CORES})
        self._nodes: dict[int, Server] = {1: self._machine}
        self.kills = 0

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._etcd = self._stack.enter_context(EtcdServer())
        self._postgres = self._stack.enter_context(PostgresServer())
        self._stores = {
            "etcd": self._etcd.url,
            "catalog": self._postgres.new_database(),
            "cluster": uuid.uuid4().hex,
        }
        # Every node is a separate machine here.
        self._nodes |= {node: self._server(node, {**self._stores, "rack": f"machine-{node}"}) for node in JOINED}
        for server in self._nodes.values():
            self._stack.callback(server.kill)
        self._load.brokers = ",".join(server.kafka for server in self._nodes.values())
        return self

    def __exit__(self, *exception: object) -> None:
        self._workers_stopping.set()
        self._load.end(15.0)
        for worker in self._workers:
            worker.join(15.0)
        self._stack.close()

    def run(self) -> list[str]:
        self._machine.start()
        self._start_clients()
        self._kill_under_load(self._machine)
        self._adopt()
        self._grow()
        return self._check_results()

    def log_tails(self) -> str:
        return "\n".join(f"--- node {number}\n{node.log_tail()}" for number, node in self._nodes.items())

    def _server(self, node: int, settings: dict[str, object]) -> Server:
        server = Server(self._folder / f"node-{node}", settings={"node-id": node, **SETTINGS, **settings})
        # The processes of a machine listen on consecutive ports.
        base = next(
            base
            for base in self._random.sample(_PORTS, len(_PORTS))
            if all(is_free("127.0.0.1", base + number) for number in range(CORES))
        )
        server.kafka = f"127.0.0.1:{base}"
        return server

    # -- clients -----------------------------------------------------------------------------------------------

    def _start_clients(self) -> None:
        create_topics(self._machine.kafka, [NewTopic(TOPIC, PARTITIONS)])
        asyncio.run(self._subscribe())
        load = self._load
        for number in range(self._plan.producers):
            load.add_producer(
                f"producer-{number}",
                {"enable.idempotence": True, "message.timeout.ms": 600_000, "linger.ms": 3 * number},
                messages_per_s=self._plan.messages_per_s,
                steady=True,
                message_bytes_max=300,
            )
        load.add_members(GROUP, 2, {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 500})
        load.start()
        self._workers = [
            Worker(f"worker-{number}", load.brokers, self._workers_stopping) for number in range(self._plan.workers)
        ]
        for worker in self._workers:
            worker.start()
        load.state.loading.set()
        load.wait_for_acknowledgements("the start", WAIT_S)

    async def _subscribe(self) -> None:
        async with Client.connect(self._machine.kafka, client_id="trial", timeout_s=30.0) as client:
            settings = {DELIVERY: EXACTLY_ONCE, START: "earliest", LEASE: "5000"}
            await SubscriptionClient(client).create(QUEUE, [TOPIC], settings)

    # -- steps -------------------------------------------------------------------------------------------------

    def _kill_under_load(self, server: Server) -> None:
        time.sleep(self._random.uniform(0.3, 1.5))
        server.kill()
        self.kills += 1
        server.start()
        self._load.wait_for_acknowledgements("a kill", WAIT_S)
        self._print_line(f"node {server.settings['node-id']} killed and started again")

    def _adopt(self) -> None:
        """Run `cluster adopt`, kill it at random moments, and repeat it until it completes."""
        self._machine.stop()
        flags = [part for name, value in self._stores.items() for part in (f"--{name}", value)]
        adopt = ["cluster", "adopt", "--data", str(self._machine.data), *flags]
        killed = self._adopt_step_by_step(adopt) if self._plan.adoption_kills else 0
        command = [sys.executable, "-m", "millstream.cli.main", *adopt]
        duration_s_max = 3.0
        killed_at_random = 0
        while True:
            started = time.monotonic()
            adopting = subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, process_group=0
            )
            is_last = killed_at_random >= self._plan.adoption_kills
            patience_s = WAIT_S if is_last else self._random.uniform(0.0, duration_s_max)
            try:
                output, _ = adopting.communicate(timeout=patience_s)
            except subprocess.TimeoutExpired:
                adopting.send_signal(signal.SIGKILL)
                adopting.communicate()
                killed_at_random += 1
                # Kills near the end are as likely as those near the start.
                duration_s_max = max(duration_s_max, 1.2 * (time.monotonic() - started))
                continue
            if adopting.returncode:
                raise TrialFailed(f"the adoption failed: {output}")
            break
        self.kills += killed + killed_at_random
        self._print_line(f"adopted; killed after each of {killed} steps, and {killed_at_random} times at random")
        self._machine.settings |= {**self._stores, "rack": "machine-1"}
        self._machine.start()
        self._load.wait_for_acknowledgements("the adoption", WAIT_S)

    def _adopt_step_by_step(self, adopt: Sequence[str]) -> int:
        """Run the command once per step, killed after that step; return the number of steps."""
        for step in killed_adopt.STEPS:
            command = [sys.executable, "-m", killed_adopt.MODULE, step, *adopt]
            adopting = subprocess.run(command, capture_output=True, text=True, timeout=WAIT_S, check=False)
            if adopting.returncode != -signal.SIGKILL:
                raise TrialFailed(f"not killed after {step!r}, but: {adopting.stdout}{adopting.stderr}")
        return len(killed_adopt.STEPS)

    def _grow(self) -> None:
        for node in JOINED:
            self._nodes[node].start()
        expected = {*JOINED, 1, 1001}
        self._wait(lambda: _missing(self._status(), expected), "the nodes joined")
        self._apply("replicate", self._command("topic", "replicate", "*", "--to", 3, "--throttle", 50_000_000))
        self._check_replicas(lambda replicas: len(replicas) == 3)
        for node in (1001, 1):
            self._apply(f"drain {node}", self._plan_and_apply("drain", node))
        for node in (1001, 1):
            self._apply(f"remove {node}", self._plan_and_apply("remove", node))
        self._check_replicas(lambda replicas: not replicas & {1, 1001})
        self._machine.stop()
        del self._nodes[1]
        self._load.wait_for_acknowledgements("the machine left", WAIT_S)
        planned = self._command("cluster", "plan", "balance", "--json").document
        if planned["moves"]:
            self._apply("balance", self._command("cluster", "apply", planned["plan"]))

    def _plan_and_apply(self, kind: str, node: int) -> Outcome:
        planned = self._command("cluster", "plan", kind, node, "--json")
        if planned.code:
            raise TrialFailed(f"{kind} {node}: {planned.err}")
        return self._command("cluster", "apply", planned.document["plan"], "--throttle", 50_000_000)

    def _apply(self, what: str, applied: Outcome) -> None:
        """Kill nodes while a plan is applied, and wait until it is done."""
        if applied.code:
            raise TrialFailed(f"{what}: {applied.err or applied.out}")
        started = time.monotonic()
        for _ in range(self._plan.kills_per_step):
            time.sleep(self._random.uniform(0.0, 1.5))
            node = self._random.choice([*self._nodes, self._controller()])
            victim = self._nodes.get(node) or self._machine
            victim.kill()
            self.kills += 1
            time.sleep(self._random.choice((0.0, 3.0)))
            victim.start()
        self._wait(lambda: _unfinished(self._plan_status()), what)
        self._load.wait_for_acknowledgements(what, WAIT_S)
        self._print_line(f"{what}: done after {time.monotonic() - started:.1f} s; {self.kills} kills so far")

    def _command(self, *arguments: object) -> Outcome:
        return CommandLine(self._load.brokers)(*arguments)

    def _status(self) -> dict[str, Any]:
        found = self._command("cluster", "status", "--json")
        # Exit code 1 means that the cluster is unhealthy; the document is printed anyway.
        document: dict[str, Any] = found.document if found.out else {}
        return document

    def _plan_status(self) -> dict[str, Any]:
        found = self._command("cluster", "plan", "show", "--json")
        document: dict[str, Any] = found.document if found.out else {}
        return document

    def _controller(self) -> int:
        return int(self._status().get("controller") or 1)

    def _check_replicas(self, is_right: Callable[[set[int]], bool]) -> None:
        metadata = AdminClient({"bootstrap.servers": self._load.brokers, "log_level": 0}).list_topics(
            timeout=SETTLE_S_MAX
        )
        wrong = [
            f"{name}-{index} on {partition.replicas}"
            for name, topic in metadata.topics.items()
            for index, partition in topic.partitions.items()
            if not is_right(set(partition.replicas))
        ]
        if wrong:
            raise TrialFailed(f"wrong replicas: {wrong[:5]}")

    def _wait(self, lacking: Callable[[], str], what: str) -> None:
        deadline = time.monotonic() + WAIT_S
        while left := lacking():
            if self._load.state.failure is not None:
                raise TrialFailed(f"{what}: {self._load.state.failure}")
            if time.monotonic() > deadline:
                raise TrialFailed(f"{what}: after {WAIT_S:g} s, {left}")
            time.sleep(_POLL_S)

    # -- checks -----------------------------------------------------------------------------------------------

    def _check_results(self) -> list[str]:
        report = self._load.check_everything()
        self._print_line(str(report))
        findings = [] if report.ok else [str(report)]
        self._wait(self._pending_messages, "the queue drained")
        findings += self._check_acceptances({index: end for (_, index), end in self._load.ends.items()})
        identity = self._topic_id()
        self._wait(self._unhealthy_partitions, "the replicas are in sync")
        self._load.state.stopping.set()
        self._workers_stopping.set()
        folders = {node: server.data for node, server in self._nodes.items()}
        for server in self._nodes.values():
            server.stop()
        return findings + [
            f"differing replicas: {difference}" for difference in differing_replicas(folders, [identity], PARTITIONS)
        ]

    def _pending_messages(self) -> str:
        async def ask() -> Sequence[dict[str, Any]]:
            async with Client.connect(self._load.brokers, client_id="trial", timeout_s=30.0) as client:
                return await SubscriptionClient(client).describe([QUEUE])

        try:
            (found,) = asyncio.run(ask())
        except (MillstreamError, OSError, TimeoutError) as error:
            return repr(error)
        return "; ".join(pending_messages(found, PARTITIONS))

    def _check_acceptances(self, ends: dict[int, int]) -> list[str]:
        """Compare the confirmed acceptances with the topic; those whose confirmation was lost are not counted."""
        accepted = sum((worker.accepted for worker in self._workers), Counter[tuple[int, int]]())
        twice = [position for position, times in accepted.items() if times > 1]
        beyond = [position for position in accepted if position[1] >= ends[position[0]]]
        total = sum(ends.values())
        self._print_line(f"{len(accepted)} of {total} messages were accepted with a response")
        found = [f"accepted twice: {twice[:5]}"] if twice else []
        return found + ([f"accepted, but not in the topic: {beyond[:5]}"] if beyond else [])

    def _topic_id(self) -> UUID:
        async def ask() -> UUID:
            async with Client.connect(self._load.brokers, client_id="trial", timeout_s=30.0) as client:
                return (await client.metadata([TOPIC])).topics[TOPIC].topic_id

        return asyncio.run(ask())

    def _unhealthy_partitions(self) -> str:
        status = self._status()
        return str(status.get("troubled") or "") if status else "no response"


def _missing(status: dict[str, Any], expected: set[int]) -> str:
    live = {node["id"] for node in status.get("nodes", []) if node["state"] == "ready"}
    return "" if expected <= live else f"{sorted(expected - live)} are missing"


def _unfinished(plan_status: dict[str, Any]) -> str:
    return (
        ""
        if plan_status.get("state") == "done"
        else str({name: plan_status.get(name) for name in ("state", "moved", "left")})
    )
