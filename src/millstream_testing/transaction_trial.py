"""The trial of transactions: programs consume, transform and produce while they and the brokers are killed.

An idempotent producer fills a topic. Groups of programs process all of it, each message once for each group: one of the
classic protocol and one of the newer one with confluent-kafka, one with aiokafka, and where there is Java, one with
Apache Kafka's own client. Each program is its own process (`transaction_program.py`) that writes to several topics
and commits its offsets in the same transactions, some of which it aborts. Nodes and programs are killed, stopped and
paused, and programs are duplicated, at times drawn from a seed; after each round every group must process what was
written before it, within a bound. Meanwhile observers read at both isolation levels and fetch the offsets. At the end
two clients read everything again, no transaction may be open, and the history is checked (`transaction_check.py`).
"""

from __future__ import annotations

import asyncio
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.cluster_faults import KINDS, Fault, FaultContext, GracefulStop, Kill, KillAll
from millstream_testing.command import CommandLine
from millstream_testing.history import Report as SourceReport
from millstream_testing.replica_bytes import differing_replicas
from millstream_testing.transaction_check import Report, check
from millstream_testing.transaction_history import (
    ConsumerStarted,
    Event,
    OffsetObserved,
    Polled,
    Positioned,
    TransactionHistory,
)
from millstream_testing.transaction_worker import Task
from millstream_testing.trial_clients import (
    COMPRESSIONS,
    QUIET_RECONNECT,
    SETTLE_S_MAX,
    PartitionKey,
    Topics,
    TrialFailed,
    TrialLoad,
    create_topics,
)
from millstream_testing.trial_cluster import TrialCluster
from millstream_testing.trial_worker import WORKER_KINDS, Step, TrialWorker, WorkerFault

READ_S_MAX = 60.0
_REQUEST_S = 5.0
_POLL_S = 0.4


class TransactionTrialState:
    """The history, written by several threads, and the first error of one of them."""

    def __init__(self) -> None:
        self.history = TransactionHistory()
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.failure: str | None = None

    def record(self, events: Iterable[Event]) -> None:
        with self.lock:
            for event in events:
                self.history.add(event)

    def fail(self, reason: str) -> None:
        """Report that an observer failed; the first reason is kept."""
        if self.failure is None:
            self.failure = reason

    def check(self, written: Iterable[Event], *, complete: Sequence[str] = ()) -> Report:
        """Add what programs have recorded meanwhile, and check the history."""
        with self.lock:
            for event in written:
                self.history.add(event)
            return check(self.history, complete=complete)


class Observer(threading.Thread):
    """Reads all partitions from their start while the trial runs, and tracks its position."""

    def __init__(
        self, name: str, state: TransactionTrialState, address: str, topics: Topics, *, committed: bool
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._state = state
        self._partition_keys = partitions_of(topics)
        self._client = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": name,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                # Nothing is ever deleted here, so a missing offset is an error.
                "auto.offset.reset": "error",
                **QUIET_RECONNECT,
            }
        )
        self.end_reached: dict[PartitionKey, int] = {}
        """By partition, the last end offset that it reached."""
        state.record(
            [
                ConsumerStarted(name, committed),
                *(Positioned(name, *partition_key, 0) for partition_key in self._partition_keys),
            ]
        )

    def run(self) -> None:
        """Read until the trial ends."""
        self._client.assign([TopicPartition(*partition_key, 0) for partition_key in self._partition_keys])
        try:
            while not self._state.stopping.is_set():
                self._record_polls(self._client.consume(1000, 0.2))
        except (KafkaException, ValueError) as error:
            self._state.fail(f"{self.name}: {error}")
        self._client.close()

    def _record_polls(self, messages: Sequence[Message]) -> None:
        at = time.monotonic_ns()
        polled = []
        for message in messages:
            error, partition_key = message.error(), (message.topic() or "", message.partition() or 0)
            if error is None:
                polled.append(polled_of(self.name, partition_key, message.offset() or 0, message.value() or b"", at))
            elif error.code() == KafkaError._PARTITION_EOF:
                self.end_reached[partition_key] = message.offset() or 0
            elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._state.fail(f"{self.name}: {partition_key}: {error}")
        self._state.record(polled)


class OffsetObserver(threading.Thread):
    """Polls the committed offsets of groups, without those of open transactions."""

    def __init__(self, state: TransactionTrialState, address: str, groups: Sequence[str], source: PartitionKey) -> None:
        super().__init__(name="offsets", daemon=True)
        self._state = state
        self._address = address
        self._groups = groups
        self._topic, self._partitions = source
        self.committed: dict[tuple[str, int], int] = {}
        """By group and partition, the last response."""
        self.rounds = 0
        """The number of completed rounds of requests."""

    def run(self) -> None:
        """Poll until the trial ends."""
        clients: dict[str, Consumer] = {}
        while not self._state.stopping.wait(_POLL_S):
            responded = [self._fetch_offsets(clients, group) for group in self._groups]
            self.rounds += all(responded)

    def _fetch_offsets(self, clients: dict[str, Consumer], group: str) -> bool:
        client = clients.get(group)
        if client is None:
            settings = {"bootstrap.servers": self._address, "group.id": group, "isolation.level": "read_committed"}
            client = clients[group] = Consumer({**settings, **QUIET_RECONNECT})
        try:
            found = client.committed([TopicPartition(self._topic, at) for at in range(self._partitions)], _REQUEST_S)
        except KafkaException:
            # A client that only fetches offsets does not look for a moved coordinator; a new one does.
            clients.pop(group).close()
            return False
        at = time.monotonic_ns()
        known = [offset for offset in found if offset.error is None and offset.offset >= 0]
        self._state.record(
            OffsetObserved(self.name, group, offset.topic, offset.partition, offset.offset, at) for offset in known
        )
        self.committed.update({(group, offset.partition): offset.offset for offset in known})
        return True


async def read_with_aiokafka(name: str, state: TransactionTrialState, address: str, topics: Topics) -> None:
    """Read all committed messages from start to end, with a client that filters aborted ones itself."""
    partitions = {AioPartition(*partition_key): partition_key for partition_key in partitions_of(topics)}
    consumer = AIOKafkaConsumer(
        bootstrap_servers=address, isolation_level="read_committed", auto_offset_reset="earliest", group_id=None
    )
    state.record(
        [
            ConsumerStarted(name, committed=True),
            *(Positioned(name, *partition_key, 0) for partition_key in partitions.values()),
        ]
    )
    consumer.assign(list(partitions))
    async with asyncio.timeout(READ_S_MAX), consumer:
        ends: Mapping[Any, int] = await consumer.end_offsets(list(partitions))
        while [partition for partition in partitions if await consumer.position(partition) < ends[partition]]:
            polled = await consumer.getmany(timeout_ms=500, max_records=5000)
            at = time.monotonic_ns()
            for consumer_partition, records in polled.items():
                partition_key = partitions[consumer_partition]
                state.record(
                    polled_of(name, partition_key, record.offset, record.value or b"", at) for record in records
                )


def polled_of(reader: str, partition_key: PartitionKey, offset: int, value: bytes, at: int) -> Polled:
    """Return what a reader received, decoded from the value; raise `ValueError` if it cannot be decoded."""
    producer, number, index, _ = value.split(b" ", 3)
    return Polled(reader, *partition_key, offset, producer.decode(), int(number), int(index), at)


def partitions_of(topics: Topics) -> list[PartitionKey]:
    return [(topic, index) for topic, partitions in topics.items() for index in range(partitions)]


def ends_of(address: str, topics: Topics, *, committed: bool) -> dict[PartitionKey, int]:
    """Return the ends of all partitions: the high watermarks, or the last stable offsets."""
    deadline = time.monotonic() + READ_S_MAX
    while True:
        try:
            return _fetch_ends(address, partitions_of(topics), "read_committed" if committed else "read_uncommitted")
        except KafkaException as error:
            # Leaders may still be changing; the client fails at once on some of these errors.
            if time.monotonic() > deadline:
                raise TrialFailed(f"the ends of the partitions are unknown: {error}") from error
        time.sleep(_POLL_S)


def _fetch_ends(address: str, partition_keys: Iterable[PartitionKey], isolation: str) -> dict[PartitionKey, int]:
    settings = {"bootstrap.servers": address, "group.id": "ends", "isolation.level": isolation}
    client = Consumer({**settings, **QUIET_RECONNECT})
    try:
        return {
            partition_key: int(client.get_watermark_offsets(TopicPartition(*partition_key), timeout=_REQUEST_S)[1])
            for partition_key in partition_keys
        }
    finally:
        client.close()


SOURCE = "source"
OUTPUTS = {"results": 3, "trail": 2}
"""Topics that programs write to, with the number of their partitions."""

FLUSH = {SOURCE: "os", "results": "os", "trail": "always"}
GROUPS = ("classic", "consumer", "aiokafka")
JAVA = "java"
"""A group of programs with Apache Kafka's own client, where there is one."""

NODE_KINDS = {"kill": 6, "stop": 2, "pause": 2, "kill-all": 1}
SETTINGS: dict[str, object] = {
    "leader-balance-ms": 3000,
    "group-initial-delay-ms": 100,
    "group-session-min-ms": 1000,
    "group-consumer-heartbeat-ms": 500,
    "group-consumer-session-ms": 5000,
    "auto-create-topics": "false",
}
_PROBE_S = 0.1
_STUCK_SHARE = 0.8
_CONFLUENT: dict[str, Any] = {"socket.timeout.ms": 5_000}
# Otherwise the client would forget the only broker when none responds, and calls to a forgotten coordinator never
# return.
_SINGLE_NODE: dict[str, Any] = {"metadata.recovery.strategy": "none"}
_AIOKAFKA: dict[str, Any] = {"request_timeout_ms": 5_000, "metadata_max_age_ms": 2_000}
_JAVA: dict[str, Any] = {"request.timeout.ms": 5_000, "metadata.max.age.ms": 2_000}


@dataclass(slots=True, kw_only=True)
class Plan:
    kills: int = 100
    """Continue until this many processes were killed."""
    rounds: int | None = None
    """Stop after this many rounds, however many processes were killed."""
    minutes_max: float = 30.0
    """Stop after this long in any case."""
    node_kinds: Mapping[str, int] = field(default_factory=lambda: dict(NODE_KINDS))
    """The weight of each kind of fault."""
    worker_kinds: Mapping[str, int] = field(
        default_factory=lambda: {kind: weight for kind, (_, weight) in WORKER_KINDS.items()}
    )
    node_share: float = 0.7
    """The share of rounds with a node fault."""
    worker_faults: tuple[int, int] = (1, 4)
    """The minimum and maximum number of programs with a fault in a round."""
    groups: tuple[str, ...] = GROUPS
    java: tuple[str, ...] = ()
    """The command of a program with Apache Kafka's own client, which speaks the newer protocol of transactions."""
    workers: int = 2
    """The number of programs in each group."""
    partitions: int = 4
    messages_per_s: int = 40
    abort_share: float = 0.15
    aiokafka_idle_s_max: float | None = None
    """Restart aiokafka programs after this long without progress, where brokers return at other addresses."""
    lease_ms: int = 2000
    replica_lag_ms: int = 3000
    load_s: tuple[float, float] = (0.3, 2.0)
    check_every: int = 10
    heal_s_max: float = 90.0
    seed: int = field(default_factory=lambda: random.randrange(2**32))


@dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """The faults of one round, and the recovery."""

    kinds: tuple[str, ...]
    what: str
    kills: int
    healed_s: float
    """The time from the last repair until nodes and groups had caught up."""

    def __str__(self) -> str:
        return f"{self.what}: caught up {self.healed_s:.1f} s later"


@dataclass(slots=True)
class Outcome:
    report: Report
    rounds: list[Round]
    source: SourceReport | None = None
    more: list[str] = field(default_factory=list)
    """Open transactions, differing replicas and missing kills."""

    @property
    def ok(self) -> bool:
        """Whether nothing was found."""
        return self.report.ok and (self.source is None or self.source.ok) and not self.more

    @property
    def kills(self) -> int:
        return sum(trial_round.kills for trial_round in self.rounds)

    def findings(self) -> str:
        """Return all findings, or that there are none."""
        source = [] if self.source is None else [f"the source: {self.source}"]
        return "\n".join([str(self.report), *source, *self.more])


class TransactionTrial:
    """A trial on a cluster, or on one node. Everything that it starts ends with it."""

    def __init__(
        self, folder: Path, cluster: TrialCluster, plan: Plan, print_line: Callable[[str], None] = lambda _: None
    ) -> None:
        self.cluster = cluster
        self._folder = folder
        self._plan = plan
        self._print_line = print_line
        self._random = random.Random(plan.seed)
        self._stack = ExitStack()
        self._source = TrialLoad({SOURCE: plan.partitions}, seed=plan.seed)
        self._state = TransactionTrialState()
        self._topics = {SOURCE: plan.partitions, **OUTPUTS}
        self._observers: list[Observer] = []
        self._offsets: OffsetObserver
        self._workers: list[TrialWorker] = []
        self._rounds: list[Round] = []

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.cluster)
            self.prepare()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        self.end_clients()
        self._stack.close()

    def prepare(self) -> None:
        """Create the topics and start the clients, on running nodes."""
        self._wait(self.cluster.unhealthy_reason, "the start")
        self._create_topics()
        self._wait(self.cluster.unhealthy_reason, "the start with topics")
        self._commit_start()
        self._start_clients()

    def end_clients(self) -> None:
        """End the producer, the readers and the programs."""
        self._source.state.stopping.set()
        self._state.stopping.set()
        for worker in self._workers:
            worker.end()

    def run(self) -> Outcome:
        """Kill as often as planned, then run the final check; stop early at a finding."""
        deadline = time.monotonic() + self._plan.minutes_max * 60
        while not self._is_finished and time.monotonic() < deadline:
            self._inject()
            if len(self._rounds) % self._plan.check_every == 0:
                report = self._check()
                self._print_line(f"  {self._kills} kills: {str(report).splitlines()[0]}")
                if not report.ok:
                    return Outcome(report, self._rounds)
        return self._check_everything()

    def save_history(self, path: Path) -> None:
        with self._state.lock:
            self._state.history.save(path)

    @property
    def restarts(self) -> int:
        """Return how often programs ended by themselves and were restarted."""
        return sum(worker.restarts for worker in self._workers)

    @property
    def _is_finished(self) -> bool:
        rounds = self._plan.rounds
        return self._kills >= self._plan.kills if rounds is None else len(self._rounds) >= rounds

    @property
    def _kills(self) -> int:
        return sum(trial_round.kills for trial_round in self._rounds)

    # -- faults ------------------------------------------------------------------------------------------------

    def _inject(self) -> None:
        """Inject node and program faults at about the same time, and wait for recovery."""
        self._sleep(self._random.uniform(*self._plan.load_s))
        drawn = self._draw_node_fault()
        drawn += self._draw_worker_faults(at_least=0 if drawn else 1)
        steps = sorted((step for _, fault in drawn for step in fault.steps), key=lambda step: step.at_s)
        started = time.monotonic()
        for step in steps:
            self._sleep(started + step.at_s - time.monotonic())
            step.do()
        what = " + ".join(fault.what for _, fault in drawn)
        repaired = time.monotonic()
        self._wait(
            self._missing_after(ends_of(self.cluster.kafka, {SOURCE: self._plan.partitions}, committed=False)), what
        )
        kinds, kills = tuple(kind for kind, _ in drawn), sum(fault.kills for _, fault in drawn)
        self._rounds.append(Round(kinds=kinds, what=what, kills=kills, healed_s=time.monotonic() - repaired))
        self._print_line(f"{self._kills:4} {self._rounds[-1]}")

    def _draw_node_fault(self) -> list[tuple[str, WorkerFault]]:
        kinds = self._plan.node_kinds
        if not kinds or self._random.random() > self._plan.node_share:
            return []
        (kind,) = self._random.choices(list(kinds), list(kinds.values()))
        context = FaultContext(cluster=self.cluster, random=self._random, lease_s=self._plan.lease_ms / 1000)
        fault = KINDS[kind][0](context)
        steps = [Step(0.0, fault.begin), Step(fault.duration_s, fault.end)]
        return [(kind, WorkerFault(str(fault), _kills_of(fault), steps))]

    def _draw_worker_faults(self, *, at_least: int) -> list[tuple[str, WorkerFault]]:
        kinds = self._plan.worker_kinds
        fewest, most = self._plan.worker_faults
        number = min(self._random.randint(max(fewest, at_least), max(most, at_least)), len(self._workers))
        chosen = self._random.sample(self._workers, number)
        found = []
        for worker in chosen if kinds else ():
            (kind,) = self._random.choices(list(kinds), list(kinds.values()))
            fault = WORKER_KINDS[kind][0](worker, self._random)
            later_s = self._random.choice([0.0, self._random.uniform(0.0, 3.0)])
            steps = [step._replace(at_s=step.at_s + later_s) for step in fault.steps]
            found.append((kind, fault._replace(steps=steps)))
        return found

    # -- waiting -----------------------------------------------------------------------------------------------

    def _sleep(self, seconds: float) -> None:
        """Wait, and restart programs meanwhile."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            time.sleep(min(left, _PROBE_S))
            self._restart_ended()

    def _restart_ended(self) -> None:
        for worker in self._workers:
            worker.restart_if_ended()
        for failure in (self._source.state.failure, self._state.failure):
            if failure is not None:
                raise TrialFailed(failure)

    def _wait(self, missing: Callable[[], str], after: str) -> None:
        """Wait until nothing is missing; raise `TrialFailed` after a timeout."""
        deadline = time.monotonic() + self._plan.heal_s_max
        while reason := missing():
            if time.monotonic() > deadline:
                raise TrialFailed(f"{after}: after {self._plan.heal_s_max:g} s, {reason}")
            self._sleep(_PROBE_S)

    def _missing_after(self, source_ends: Mapping[tuple[str, int], int]) -> Callable[[], str]:
        """Return what is missing until the nodes are healthy and every group has processed the source."""

        def missing() -> str:
            behind = [
                f"{group} is at {at} of {SOURCE}-{partition}, not at {end}"
                for group in self._plan.groups
                for (_, partition), end in source_ends.items()
                if (at := self._offsets.committed.get((group, partition), 0)) < end
            ]
            replaced = [
                f"{name} continues although it was replaced" for worker in self._workers for name in worker.replaced
            ]
            return "; ".join([*behind, *replaced]) or self.cluster.unhealthy_reason()

        return missing

    # -- clients -----------------------------------------------------------------------------------------------

    def _create_topics(self) -> None:
        nodes = len(self.cluster.nodes)
        more = {"min.insync.replicas": "2"} if nodes > 1 else {}
        topics = (
            NewTopic(name, partitions, nodes, config={**more, "flush": FLUSH[name]})
            for name, partitions in self._topics.items()
        )
        create_topics(self.cluster.kafka, topics)

    def _commit_start(self) -> None:
        """Commit an initial offset for every group.

        A consumer without one looks up the start of the partition. If librdkafka gets that response late, after it has
        lost the partition, it reads from the start, and may deliver what it has read when it is assigned the partition
        again, regardless of later commits (docs/transactions.md, "Clients in an outage").
        """
        admin = AdminClient({"bootstrap.servers": self.cluster.kafka, "log_level": 0})
        start = [TopicPartition(SOURCE, partition, 0) for partition in range(self._plan.partitions)]
        for group in self._plan.groups:
            committed = admin.alter_consumer_group_offsets([ConsumerGroupTopicPartitions(group, start)])
            committed[group].result(SETTLE_S_MAX)

    def _start_clients(self) -> None:
        address, plan = self.cluster.kafka, self._plan
        self._source.brokers = address
        self._source.add_producer(
            "feeder",
            {"enable.idempotence": True, "message.timeout.ms": 600_000},
            messages_per_s=plan.messages_per_s,
            steady=True,
            message_bytes_max=200,
        )
        self._observers = [
            Observer("reads-committed", self._state, address, OUTPUTS, committed=True),
            Observer("reads-everything", self._state, address, OUTPUTS, committed=False),
        ]
        self._offsets = OffsetObserver(self._state, address, plan.groups, (SOURCE, plan.partitions))
        self._workers = [
            TrialWorker(f"{group}-{number}", self._folder, self._tasks(group, number))
            for group in plan.groups
            for number in range(plan.workers)
        ]
        self._source.start()
        for thread in [*self._observers, self._offsets]:
            thread.start()
        for worker in self._workers:
            worker.start()
        self._source.state.loading.set()

    def _tasks(self, group: str, number: int) -> Callable[[str], Task]:
        """Return a factory for the tasks of one program's processes."""
        plan = self._plan
        client = "aiokafka" if group == "aiokafka" else "confluent"
        settings = _settings(group, number, plan.seed, is_single_node=self.cluster.brokers_max == 1)

        def task(producer: str) -> Task:
            return Task(
                producer=producer,
                client=client,
                brokers=self.cluster.kafka,
                group=group,
                transactional_id=f"{group}-{number}",
                source=SOURCE,
                outputs=OUTPUTS,
                file=str(self._folder / f"{producer}.jsonl"),
                seed=f"{plan.seed}/{producer}",
                abort_share=plan.abort_share,
                timeout_ms=10_000,
                stuck_s=plan.heal_s_max * _STUCK_SHARE,
                idle_s_max=plan.aiokafka_idle_s_max if group == "aiokafka" else None,
                partitions=list(range(number, plan.partitions, plan.workers)),
                command=list(plan.java) if group == JAVA else [],
                settings=settings,
            )

        return task

    # -- checks -----------------------------------------------------------------------------------------------

    def _check(self, complete: tuple[str, ...] = ()) -> Report:
        """Read the journals of the programs, and check everything so far."""
        return self._state.check((event for worker in self._workers for event in worker.events()), complete=complete)

    def _check_everything(self) -> Outcome:
        """Run the final check: programs have ended, no transaction is open, and all readers have read to the end."""
        self._source.settle()
        source_ends = ends_of(self.cluster.kafka, {SOURCE: self._plan.partitions}, committed=False)
        self._wait(self._missing_after(source_ends), "the end")
        for worker in self._workers:
            worker.finish()
        self._wait(self._open_transactions, "the end")
        source_report = self._source.settle_and_check()
        self._observers.append(Observer("from-the-start", self._state, self.cluster.kafka, OUTPUTS, committed=True))
        self._observers[-1].start()
        self._wait(self._unread, "the end")
        asyncio.run(read_with_aiokafka("aiokafka-reader", self._state, self.cluster.kafka, OUTPUTS))
        self._wait_for_offsets()
        self._state.stopping.set()
        complete = (*(observer.name for observer in self._observers), "aiokafka-reader")
        report = self._check(complete)
        return Outcome(report, self._rounds, source_report, self._other_findings())

    def _open_transactions(self) -> str:
        """Return what is still open, according to partitions and coordinators."""
        stable = ends_of(self.cluster.kafka, OUTPUTS, committed=True)
        behind = [
            f"{topic}-{index} is stable up to {stable[topic, index]} of {end}"
            for (topic, index), end in ends_of(self.cluster.kafka, OUTPUTS, committed=False).items()
            if stable[topic, index] < end
        ]
        states = Counter(transaction["state"] for transaction in self._listed())
        opened = [f"{count} transactions are {state}" for state, count in states.items() if state not in _CLOSED]
        return "; ".join([*behind, *opened])

    def _unread(self) -> str:
        ends = ends_of(self.cluster.kafka, OUTPUTS, committed=True)
        return "; ".join(
            f"{observer.name} is at {at} of {topic}-{index}, not at {end}"
            for observer in self._observers
            for (topic, index), end in ends.items()
            if (at := observer.end_reached.get((topic, index), 0)) < end
        )

    def _wait_for_offsets(self) -> None:
        """Wait until the observer has fetched offsets once more."""
        rounds_min = self._offsets.rounds + 2
        self._wait(
            lambda: "" if self._offsets.rounds >= rounds_min else "no node responds with the offsets of the groups",
            "the end",
        )

    def _other_findings(self) -> list[str]:
        more = []
        if not self._is_finished:
            more.append(
                f"only {len(self._rounds)} rounds with {self._kills} kills in {self._plan.minutes_max:g} minutes"
            )
        hanging = CommandLine(self.cluster.kafka)("transaction", "list", "--hanging", "--json")
        if hanging.code or hanging.document["hanging"]:
            more.append(f"hanging transactions: {hanging.out or hanging.err}")
        if len(self.cluster.nodes) > 1:
            self._wait(self.cluster.unhealthy_reason, "the end")
            more += [f"differing replicas: {replica}" for replica in self._differing_replicas()]
        return more

    def _differing_replicas(self) -> list[str]:
        metadata = self.cluster.run_request(lambda client: client.metadata())
        ids = {name: metadata.topics[name].topic_id for name in self._topics}
        folders = {number: node.data for number, node in self.cluster.nodes.items()}
        self.cluster.stop()
        return [
            replica
            for name, partitions in self._topics.items()
            for replica in differing_replicas(folders, [ids[name]], partitions)
        ]

    def _listed(self) -> list[dict[str, Any]]:
        listed = CommandLine(self.cluster.kafka)("transaction", "list", "--json")
        found: list[dict[str, Any]] = listed.document["transactions"] if not listed.code else [{"state": listed.err}]
        return found

    def describe_waiting(self) -> str:
        """Describe the transactions, groups, programs and nodes of a trial that hangs."""
        command = CommandLine(self.cluster.kafka)
        responses = [
            command("transaction", "list", "--json"),
            command("transaction", "list", "--hanging", "--json"),
        ]
        responses += [
            command("transaction", "describe", transaction["transactional_id"], "--json")
            for transaction in self._listed()
            if "transactional_id" in transaction and transaction["state"] not in _CLOSED
        ]
        responses += [command("group", "describe", group, "--json") for group in self._plan.groups]
        printed = [response.out or response.err for response in responses]
        logs = [f"--- {worker.current.task.producer}\n{worker.current.log_tail()}" for worker in self._workers]
        return "\n".join([*printed, *logs, self.cluster.logs()])


_CLOSED = {"Empty", "CompleteCommit", "CompleteAbort", "Dead"}


def _kills_of(fault: Fault) -> int:
    """Return how many processes a node fault kills."""
    if isinstance(fault, GracefulStop) or not isinstance(fault, Kill | KillAll):
        return 0
    return len(fault.nodes)


def _settings(group: str, number: int, seed: int, *, is_single_node: bool) -> dict[str, dict[str, Any]]:
    if group == "aiokafka":
        compression = None if number == 0 else "lz4"
        return {"consumer": _AIOKAFKA, "producer": {**_AIOKAFKA, "compression_type": compression}}
    compression = COMPRESSIONS[(seed + number) % len(COMPRESSIONS)]
    if group == JAVA:
        protocol = ("classic", "consumer")[seed % 2]
        return {
            "consumer": {**_JAVA, "group.protocol": protocol},
            "producer": {**_JAVA, "delivery.timeout.ms": 60_000, "compression.type": compression},
        }
    client = {**_CONFLUENT, **(_SINGLE_NODE if is_single_node else {})}
    consumer: dict[str, Any] = {**client, "group.protocol": group}
    if group == "classic":
        strategy = ("range", "cooperative-sticky")[seed % 2]
        consumer |= {"session.timeout.ms": 5_000, "heartbeat.interval.ms": 500}
        consumer["partition.assignment.strategy"] = strategy
        if number == 0:
            # In the new protocol an instance id is free only when its member has expired, which is tested elsewhere.
            consumer["group.instance.id"] = f"{group}-{number}"
    return {"consumer": consumer, "producer": {**client, "compression.type": compression}}
