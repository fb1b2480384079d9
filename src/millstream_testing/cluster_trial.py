"""The cluster trial: three loaded nodes, faults of every kind, and every acknowledged message must survive them all.

Idempotent librdkafka producers write with acks=all to replicated topics (one with `flush=os`, one with `flush=always`)
while groups of both protocols read and commit. Faults are drawn from a seed, see `cluster_faults.py`. After each one
the cluster has to accept writes to every partition and be healthy again within a bound. From time to time the load is
paused, an auditor reads the new messages, and the history is checked. At the end everything is read from the start, the
groups must have read everything and kept their commits, and the replicas must be identical byte for byte.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from confluent_kafka import Consumer, TopicPartition
from confluent_kafka.cimpl import NewTopic

from millstream_testing.cluster_faults import KINDS, Fault, FaultContext, draw
from millstream_testing.cluster_network import Network
from millstream_testing.history import Report
from millstream_testing.replica_bytes import differing_replicas
from millstream_testing.trial_clients import COMPRESSIONS, SETTLE_S_MAX, TrialFailed, TrialLoad, create_topics
from millstream_testing.trial_cluster import TrialCluster

TOPICS = {"trial-os": "os", "trial-always": "always"}
"""The topics, and the `flush` setting of each."""

PROTOCOLS = ("classic", "consumer")
PrintLine = Callable[[str], None]
REPLICATION = 3
_PROBE_S = 0.2
_CLOSE_S_MAX = 15.0
_TOPIC_SETTINGS = {
    "min.insync.replicas": "2",
    "segment.bytes": str(4 * 1024 * 1024),
    # Otherwise a node whose clock is hours behind would correctly reject records.
    "message.timestamp.after.max.ms": str(2**63 - 1),
}
_SETTINGS: dict[str, object] = {
    "leader-balance-ms": 3000,
    "group-initial-delay-ms": 100,
    "group-consumer-heartbeat-ms": 500,
    "group-consumer-session-ms": 10_000,
    "auto-create-topics": "false",
}


@dataclass(slots=True, kw_only=True)
class Plan:
    faults: int = 200
    minutes_max: float = 0.0
    """Stop injecting faults after this long; 0 means never."""
    kinds: Mapping[str, int] = field(default_factory=lambda: {kind: weight for kind, (_, weight) in KINDS.items()})
    """The weight of each kind of fault."""
    each_once: bool = False
    """Inject each kind once, in random order, instead of drawing them."""
    pairs: bool = True
    """Whether two faults sometimes happen at once."""
    nodes: int = 3
    partitions: int = 3
    producers: int = 3
    members: int = 2
    messages_per_s: int = 100
    message_bytes_max: int = 500
    lease_ms: int = 2000
    replica_lag_ms: int = 3000
    load_s: tuple[float, float] = (0.5, 2.0)
    check_every: int = 10
    heal_s_max: float = 90.0
    seed: int = field(default_factory=lambda: random.randrange(2**32))


@dataclass(frozen=True, slots=True, kw_only=True)
class InjectedFault:
    """A fault, or two at once, and how the cluster recovered."""

    kinds: tuple[str, ...]
    what: str
    next_produce_s: float
    """From the fault until every partition had acknowledged a message that was sent after it."""
    longest_wait_s: float
    """The longest that any message waited for its acknowledgement until the cluster was healthy again."""
    recovery_s: float
    """From the repair until every node was ready and every replica in sync."""

    def __str__(self) -> str:
        waits = f"next produce after {self.next_produce_s:.2f} s, longest wait {self.longest_wait_s:.2f} s"
        return f"{self.what}: {waits}, healthy {self.recovery_s:.2f} s after repair"


@dataclass(slots=True)
class Outcome:
    report: Report
    injected: list[InjectedFault]
    differing: list[str] = field(default_factory=list)
    """Replicas that differ."""
    lost_commits: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.report.ok and not self.differing and not self.lost_commits

    @property
    def faults(self) -> int:
        return sum(len(injected.kinds) for injected in self.injected)

    def findings(self) -> str:
        """Return all findings, or that there are none."""
        more = [f"differing replicas: {difference}" for difference in self.differing]
        more += [f"lost commit: {lost_commit}" for lost_commit in self.lost_commits]
        return "\n".join([str(self.report), *more])


class ClusterTrial:
    """A trial. Everything that it starts ends with it."""

    def __init__(
        self, folder: Path, network: Network, plan: Plan, print_line: Callable[[str], None] = lambda _: None
    ) -> None:
        settings = _SETTINGS | {"lease-ms": plan.lease_ms, "replica-lag-ms": plan.replica_lag_ms}
        self.cluster = TrialCluster(folder, network, nodes=plan.nodes, settings=settings, disks="disk" in plan.kinds)
        self._plan = plan
        self._print_line = print_line
        self._random = random.Random(plan.seed)
        self.load = TrialLoad(dict.fromkeys(TOPICS, plan.partitions), seed=plan.seed)
        self._injected: list[InjectedFault] = []

    def __enter__(self) -> Self:
        self.cluster.__enter__()
        try:
            self._wait_until_healthy()
            self._create_topics()
            self._wait_until_healthy()
            self._start_clients()
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.load.end(_CLOSE_S_MAX)
        self.cluster.__exit__(kind, error, trace)

    def run(self) -> Outcome:
        """Inject all faults, then run the final check; stop early at a finding."""
        deadline = time.monotonic() + self._plan.minutes_max * 60 if self._plan.minutes_max else float("inf")
        unchecked = 0
        for drawn in self._draw_faults():
            # Two faults at once may exceed the requested number by one.
            faults = drawn[: max(1, self._plan.faults - self._fault_count())]
            self._inject(faults)
            unchecked += len(faults)
            done = self._fault_count()
            if unchecked >= self._plan.check_every:
                unchecked = 0
                report = self.load.settle_and_check()
                self._print_line(f"  {done} faults: {str(report).splitlines()[0]}")
                if not report.ok:
                    return Outcome(report, self._injected)
            if done >= self._plan.faults or time.monotonic() > deadline:
                break
        return self._check_everything()

    def _fault_count(self) -> int:
        return sum(len(injected.kinds) for injected in self._injected)

    # -- faults ----------------------------------------------------------------------------------------------

    def _draw_faults(self) -> Iterable[list[tuple[str, Fault]]]:
        context = FaultContext(cluster=self.cluster, random=self._random, lease_s=self._plan.lease_ms / 1000)
        kinds = {kind: weight for kind, weight in self._plan.kinds.items() if kind != "disk" or self.cluster.disks}
        if self._plan.each_once:
            order = list(kinds)
            self._random.shuffle(order)
            return ([(kind, KINDS[kind][0](context))] for kind in order)
        return islice(draw(context, kinds, pairs=self._plan.pairs), self._plan.faults)

    def _inject(self, faults: Sequence[tuple[str, Fault]]) -> None:
        """Inject one or two faults under load, repair them, and wait until the cluster is healthy."""
        state = self.load.state
        state.loading.set()
        self.load.wait_for_acknowledgements("under load")
        time.sleep(self._random.uniform(*self._plan.load_s))
        what = " + ".join(str(fault) for _, fault in faults)
        before = state.measure_recovery()
        for _, fault in faults:
            fault.begin()
        # Acknowledgements while nodes were still being killed do not count.
        recovery = state.measure_recovery(longest_s=before.longest_s)
        started = time.monotonic()
        # Faults that start nodes are repaired last, since nodes need everything else.
        for _, fault in sorted(faults, key=lambda pair: (pair[1].is_repaired_last, pair[1].duration_s)):
            time.sleep(max(0.0, started + fault.duration_s - time.monotonic()))
            fault.end()
        repaired = time.monotonic()
        self.load.wait_for_acknowledgements(what, self._plan.heal_s_max, recovery)
        self._wait_until_healthy(what)
        recovery_s = time.monotonic() - repaired
        kinds = tuple(kind for kind, _ in faults)
        waits = {"next_produce_s": recovery.slowest_s, "longest_wait_s": recovery.longest_s}
        self._injected.append(InjectedFault(kinds=kinds, what=what, recovery_s=recovery_s, **waits))
        self._print_line(f"{self._fault_count():4} {self._injected[-1]}")

    def _wait_until_healthy(self, after: str = "the start") -> None:
        deadline = time.monotonic() + self._plan.heal_s_max
        while unhealthy_reason := self.cluster.unhealthy_reason():
            if self.load.state.failure is not None:
                raise TrialFailed(f"{after}: {self.load.state.failure}")
            if time.monotonic() > deadline:
                raise TrialFailed(f"{after}: not healthy within {self._plan.heal_s_max:g} s: {unhealthy_reason}")
            time.sleep(_PROBE_S)

    # -- clients ---------------------------------------------------------------------------------------------

    def _create_topics(self) -> None:
        topics = (
            NewTopic(
                name,
                num_partitions=self._plan.partitions,
                replication_factor=REPLICATION,
                config=_TOPIC_SETTINGS | {"flush": flush},
            )
            for name, flush in TOPICS.items()
        )
        create_topics(self.cluster.kafka, topics)

    def _start_clients(self) -> None:
        load, plan = self.load, self._plan
        load.brokers = self.cluster.kafka
        pace = {"messages_per_s": plan.messages_per_s, "steady": True, "message_bytes_max": plan.message_bytes_max}
        for number in range(plan.producers):
            settings: dict[str, Any] = {
                "enable.idempotence": True,
                "acks": "all",
                "compression.type": COMPRESSIONS[number % len(COMPRESSIONS)],
                "linger.ms": number * 3,
                "message.timeout.ms": int(SETTLE_S_MAX * 5000),
            }
            if number % 2 == 0:
                # It retries at a new leader while the old one still has the request. Only one is in flight: with more,
                # a client that sees a gap in one partition starts a new epoch for all, and sends requests that timed
                # out in another partition twice.
                settings |= {"request.timeout.ms": 2_000, "max.in.flight": 1}
            load.add_producer(f"producer-{number}", settings, **pace)
        for protocol in PROTOCOLS:
            session = {"session.timeout.ms": 10_000, "heartbeat.interval.ms": 500} if protocol == "classic" else {}
            load.add_members(protocol, plan.members, {"group.protocol": protocol} | session)
        load.start()

    # -- checks ---------------------------------------------------------------------------------------------

    def _check_everything(self) -> Outcome:
        """Run the final check: all messages, groups, commits, and then the files of the stopped nodes."""
        report = self.load.check_everything()
        if not report.ok:
            return Outcome(report, self._injected)
        self.load.end(_CLOSE_S_MAX)
        self._wait_until_healthy("the end")
        lost = [lost_commit for group in self.load.groups for lost_commit in self._lost_commits(group)]
        return Outcome(report, self._injected, self._differing_replicas(), lost)

    def _lost_commits(self, group: str) -> list[str]:
        client = Consumer({"bootstrap.servers": self.cluster.kafka, "group.id": group, "log_level": 0})
        expected = {
            partition_key: offset for (of, partition_key), offset in self.load.state.commits.items() if of == group
        }
        try:
            found = client.committed(
                [TopicPartition(*partition_key) for partition_key in expected], timeout=SETTLE_S_MAX
            )
        finally:
            client.close()
        return [
            f"{group} has committed {expected[place.topic, place.partition]} of {place.topic}-{place.partition}, "
            f"not {place.offset}"
            for place in found
            if place.offset < expected[place.topic, place.partition]
        ]

    def _differing_replicas(self) -> list[str]:
        metadata = self.cluster.run_request(lambda client: client.metadata())
        ids = [metadata.topics[name].topic_id for name in self.load.topics]
        folders = {number: node.data for number, node in self.cluster.nodes.items()}
        self.cluster.stop()
        return differing_replicas(folders, ids, self._plan.partitions)
