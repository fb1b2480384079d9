"""Subscriptions under load while workers misbehave and nodes have faults; then every message is checked.

One topic has a plain, an ordered and a filtered subscription for each delivery mode. Some messages are delayed, and
some are poison that no worker accepts. Worker processes, with Millstream's own client and with Kafka's share consumers
in both acknowledgement modes, consume them and record what they see (`subscription_program`). Faults of nodes
(`cluster_faults`) and of worker processes (`trial_worker`) are drawn from a seed, round by round. At the end all
queues must drain, and the workers' journals are compared with the topic and the dead letter topics
(`subscription_check`).
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Final

from millstream.core.errors import MillstreamError
from millstream.core.subscription import AT_LEAST_ONCE, AT_MOST_ONCE, BACKOFF_MIN, EXACTLY_ONCE, FILTER
from millstream.protocol.records.record import Headers, NewRecord, Record
from millstream.protocol.wire.client import Client
from millstream_testing.cluster_faults import KINDS, FaultContext
from millstream_testing.queue_trial import Outcome, PrintLine, QueueTrial, cancel
from millstream_testing.server import Server
from millstream_testing.subscription_check import Finding, check
from millstream_testing.subscription_history import (
    GroundTruth,
    Guarantees,
    History,
    Position,
    Span,
    Spans,
    decode,
    histories,
    now_ms,
    summary,
)
from millstream_testing.subscription_worker import POISON, Task
from millstream_testing.trial_cluster import TrialCluster, TrialNode
from millstream_testing.trial_topic import dead_letters_of, published
from millstream_testing.trial_worker import WORKER_KINDS, Step, TrialWorker

POLL_S: Final = 0.25
RESPONSE_S: Final = 2.0
SILENT_S: Final = 5.0
DETECTION_MS: Final = 2_000
"""A change of leader is noticed at most this much later, and its effects take at most as long again."""


class Watch:
    def __init__(self, cluster: TrialCluster, topics: Sequence[str], print_line: Callable[[str], None]) -> None:
        self._cluster = cluster
        self._topics = topics
        self._print_line = print_line
        self._epochs: dict[tuple[str, int], int] = {}
        self.leader_changes: list[Span] = []
        """When leaders changed."""
        self.silences: list[str] = []
        """Running nodes that did not respond for long."""

    async def run(self) -> None:
        await asyncio.gather(*(self._watch(node) for node in self._cluster.nodes.values()))

    async def _watch(self, node: TrialNode) -> None:
        response_s = time.monotonic()
        is_reported = False
        while True:
            began_s = time.monotonic()
            responded = await self._poll(node)
            if responded or not node.must_respond:
                if is_reported:
                    self._record_silence(node, began_s - response_s)
                response_s, is_reported = time.monotonic(), False
            elif time.monotonic() - response_s > SILENT_S and not is_reported:
                is_reported = True
                self._print_line(f"node {node.number} runs, but is silent: its log has what it is doing")
                with suppress(ProcessLookupError, RuntimeError):
                    node.dump_stacks()
            await asyncio.sleep(max(0.0, began_s + POLL_S - time.monotonic()))

    def _record_silence(self, node: TrialNode, seconds: float) -> None:
        self.silences.append(f"node {node.number} was silent for {seconds:.1f} s until {time.strftime('%H:%M:%S')}")
        self._print_line(self.silences[-1])

    async def _poll(self, node: TrialNode) -> bool:
        try:
            async with asyncio.timeout(RESPONSE_S):
                async with Client.connect(node.kafka, client_id="watch", timeout_s=RESPONSE_S) as client:
                    metadata = await client.metadata(self._topics)
        except (MillstreamError, OSError, TimeoutError):
            return False
        for name, topic in metadata.topics.items():
            for partition in topic.partitions.values():
                self._record_epoch((name, int(partition.partition)), int(partition.leader_epoch))
        return True

    def _record_epoch(self, partition: tuple[str, int], epoch: int) -> None:
        known = self._epochs.get(partition, -1)
        if epoch > known:
            self._epochs[partition] = epoch
            if known >= 0:
                seen_ms = now_ms()
                self.leader_changes.append(Span(seen_ms - DETECTION_MS, seen_ms + DETECTION_MS))


TOPIC: Final = "work"
STATES: Final = "__subscriptions"
PROGRAM: Final = "millstream_testing.subscription_program"
DELIVERY_MODES: Final = (AT_MOST_ONCE, AT_LEAST_ONCE, EXACTLY_ONCE)
VARIANTS: Final = ("plain", "ordered", "filtered")
FILTER_TEXT: Final = "payload.even = TRUE"
WORKER_PROCESSES: Final = {"own": 2, "implicit": 1, "explicit": 1}
NODE_KINDS: Final = {
    "kill": 6,
    "pause": 4,
    "stop": 2,
    "cut": 2,
    "cut-from-etcd": 2,
    "cut-from-nodes": 2,
    "cut-from-all": 2,
    "cut-one-way": 2,
    "clock": 2,
    "etcd": 1,
    "kill-all": 1,
}
SINGLE_NODE_KINDS: Final = ("kill", "pause", "stop", "clock")
"""The kinds of faults that apply to a single node."""
SETTINGS: Final[dict[str, object]] = {
    "subscriptions-partitions": 3,
    "leader-balance-ms": 1000,
    "group-initial-delay-ms": 100,
}
_RESTART_CHECK_S: Final = 0.1
_AFTERMATH_MS: Final = 1_000
"""The effects of a fault last at most this long after everything is healthy again."""


@dataclass(slots=True, kw_only=True)
class Plan:
    seed: int
    faults: int = 30
    """The number of node faults."""
    minutes_max: float = 20.0
    """Inject no more faults after this long."""
    node_kinds: Mapping[str, int] = field(default_factory=lambda: dict(NODE_KINDS))
    """The weight of each kind of fault."""
    worker_kinds: Mapping[str, int] = field(
        default_factory=lambda: {kind: weight for kind, (_, weight) in WORKER_KINDS.items() if kind != "worker-double"}
    )
    worker_faults: tuple[int, int] = (0, 2)
    """The minimum and maximum number of worker processes with a fault in a round."""
    load_s: tuple[float, float] = (0.5, 3.0)
    messages_per_s: float = 40.0
    partitions: int = 3
    keys: int = 20
    worker_processes: Mapping[str, int] = field(default_factory=lambda: dict(WORKER_PROCESSES))
    """The number of worker processes for each kind of client."""
    attempts: int = 5
    lease_ms: int = 2000
    delayed_share: float = 0.05
    poison_share: float = 0.02
    node_lease_s: float = 2.0
    heal_s_max: float = 90.0
    drain_s_max: float = 120.0
    delivery_modes: tuple[str, ...] = DELIVERY_MODES
    variants: tuple[str, ...] = VARIANTS


class SubscriptionTrial(QueueTrial):
    """A run on running nodes."""

    def __init__(self, folder: Path, cluster: TrialCluster, plan: Plan, print_line: PrintLine) -> None:
        super().__init__(
            cluster,
            TOPIC,
            print_line,
            seed=plan.seed,
            partitions=plan.partitions,
            messages_per_s=plan.messages_per_s,
            heal_s_max=plan.heal_s_max,
            drain_s_max=plan.drain_s_max,
            compressions=(0, 0, 4),
        )
        self._folder = folder
        self._plan = plan
        self._stepped: list[Span] = []
        self._broken: list[Finding] = []
        self._subscriptions = {
            f"{mode}-{variant}": self._guarantees(mode, variant)
            for mode in plan.delivery_modes
            for variant in plan.variants
        }
        self._watch = Watch(cluster, (TOPIC, STATES), print_line)
        self._workers = [
            TrialWorker(f"{client_kind}-{number}", folder, self._tasks(client_kind), PROGRAM)
            for client_kind, count in plan.worker_processes.items()
            for number in range(count)
        ]

    async def run(self) -> Outcome:
        """Apply load and faults, drain all queues, and check."""
        await self._wait_until_healthy("the start")
        await self._declare()
        publishing = asyncio.ensure_future(self._publisher.run())
        watching = asyncio.ensure_future(self._watch.run())
        try:
            for worker in self._workers:
                worker.start()
            await self._inject_faults()
            self._publisher.stop()
            await publishing
            self._is_well_behaved = True
            for worker in self._workers:
                worker.stop()
            left = await self._drain()
        finally:
            await cancel([publishing, watching])
            for worker in self._workers:
                worker.end()
        return await self._check_results(left)

    def _guarantees(self, mode: str, variant: str) -> Guarantees:
        plan = self._plan
        return Guarantees(delivery=mode, ordered=variant == "ordered", attempts=plan.attempts, lease_ms=plan.lease_ms)

    def _tasks(self, client_kind: str) -> Callable[[str], Task]:
        """Return a factory for the tasks of a worker's processes."""

        def task(name: str) -> Task:
            return Task(
                producer=name,
                client_kind=client_kind,
                brokers=self._cluster.kafka,
                nodes=self._cluster.brokers_max,
                topic=TOPIC,
                subscriptions=list(self._subscriptions),
                lease_ms=self._plan.lease_ms,
                file=str(self._folder / f"{name}.jsonl"),
                seed=f"{self._plan.seed}/{name}",
                is_well_behaved=self._is_well_behaved,
            )

        return task

    # -- load --------------------------------------------------------------------------------------------------

    def _more_settings(self, name: str) -> dict[str, str]:
        settings = {BACKOFF_MIN: "50"}
        return settings | {FILTER: FILTER_TEXT} if name.endswith("filtered") else settings

    def _make_record(self, random: Random, number: int) -> NewRecord:
        plan = self._plan
        key = POISON if random.random() < plan.poison_share else b"key-%d" % random.randrange(plan.keys)
        headers: Headers = ()
        if random.random() < plan.delayed_share:
            headers = (("deliver-at", str(now_ms() + random.randint(0, 3000)).encode()),)
        value = json.dumps({"number": number, "even": number % 2 == 0}).encode()
        return NewRecord(key, value, headers, now_ms())

    # -- faults ------------------------------------------------------------------------------------------------

    async def _inject_faults(self) -> None:
        deadline = time.monotonic() + self._plan.minutes_max * 60
        for number in range(self._plan.faults):
            if time.monotonic() > deadline:
                return
            await self._sleep(self._random.uniform(*self._plan.load_s))
            await self._inject_fault(number + 1)

    async def _inject_fault(self, number: int) -> None:
        """Run faults of nodes and workers at about the same time, and wait until the nodes are healthy."""
        kinds = self._plan.node_kinds
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        context = FaultContext(cluster=self._cluster, random=self._random, lease_s=self._plan.node_lease_s)
        fault = KINDS[kind][0](context)
        workers = self._draw_worker_faults()
        steps = [Step(0.0, fault.begin), Step(fault.duration_s, fault.end)]
        steps += [step for _, steps in workers for step in steps]
        self._faults.update([kind, *(kind for kind, _ in workers)])
        self._print_line(f"{number:3} {fault}; {len(workers)} worker faults")
        began_s, began_ms = time.monotonic(), now_ms()
        try:
            for step in sorted(steps, key=lambda step: step.at_s):
                await self._sleep(began_s + step.at_s - time.monotonic())
                await asyncio.to_thread(step.do)
        finally:
            await self._wait_until_healthy(str(fault))
            span = Span(began_ms, now_ms() + _AFTERMATH_MS)
            self._fault_spans.append(span)
            if kind == "clock":
                self._stepped.append(span)

    def _draw_worker_faults(self) -> list[tuple[str, list[Step]]]:
        kinds = self._plan.worker_kinds
        found = []
        count = min(self._random.randint(*self._plan.worker_faults), len(self._workers))
        for worker in self._random.sample(self._workers, count):
            (kind,) = self._random.choices(list(kinds), list(kinds.values()))
            later_s = self._random.uniform(0.0, 1.5 * self._plan.node_lease_s)
            fault = WORKER_KINDS[kind][0](worker, self._random)
            found.append((kind, [step._replace(at_s=step.at_s + later_s) for step in fault.steps]))
        return found

    async def _sleep(self, seconds: float) -> None:
        """Wait, and restart ended workers meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            await asyncio.sleep(min(left, _RESTART_CHECK_S))
            for worker in self._workers:
                if worker.processes:
                    worker.restart_if_ended()

    # -- checks -----------------------------------------------------------------------------------------------

    async def _check_results(self, left: list[Finding]) -> Outcome:
        async with self._client() as client:
            records, missing = await self._published(client)
            dead_letters = {name: await self._dead_letters(client, name, records) for name in self._subscriptions}
        findings = left + missing + [found for node in self._cluster.nodes.values() for found in _tracebacks(node)]
        disturbed, stepped = Spans([*self._fault_spans, *self._watch.leader_changes]), Spans(self._stepped)
        found = histories(decode(line) for worker in self._workers for line in worker.lines())
        truths: dict[str, GroundTruth] = {}
        for name, guarantees in self._subscriptions.items():
            only_even = name.endswith("filtered")
            expected = {
                position: published(record)
                for position, record in records.items()
                if not only_even or json.loads(record.value or b"")["even"]
            }
            is_single_node = len(self._cluster.nodes) == 1
            truths[name] = GroundTruth(expected, dead_letters[name], disturbed, stepped, is_single_node)
            broken = check(guarantees, found.setdefault(name, History()), truths[name])
            findings += [f"{name}: {violation}" for violation in broken]
        return Outcome(findings + self._broken, self._summary(records, truths, found))

    def _summary(
        self, records: dict[Position, Record], truths: Mapping[str, GroundTruth], found: Mapping[str, History]
    ) -> str:
        never = sum(
            len(truths[name].expected.keys() - {delivery.position for delivery in found[name].deliveries})
            for name, guarantees in self._subscriptions.items()
            if guarantees.delivery == AT_MOST_ONCE
        )
        processes = sum(len(worker.processes) for worker in self._workers)
        return (
            f"{self._summary_of_load(records)}; {len(self._watch.leader_changes)} leader changes, "
            f"{len(self._watch.silences)} silences, {processes} worker processes; "
            f"{summary(list(found.values()), list(truths.values()))}; {never} messages lost at most once"
        )

    async def _dead_letters(self, client: Client, name: str, records: Mapping[Position, Record]) -> Counter[Position]:
        found: Counter[Position] = Counter()
        for position, letter in await dead_letters_of(client, f"dead-{name}"):
            found[position] += 1
            if position in records and (letter.key, letter.value) != (records[position].key, records[position].value):
                self._broken.append(f"{name}: the dead letter of {position} has different content")
        return found


def _tracebacks(node: Server) -> list[Finding]:
    """Return unexpected lines in a node's log."""
    lines = node.log.read_text(errors="replace").splitlines()
    found = [at for at, line in enumerate(lines) if line.startswith("Traceback")]
    return [f"{node.log.name}: {lines[max(0, at - 2)]}" for at in found[:3]]
