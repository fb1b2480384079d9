"""The clients of a trial: unmodified librdkafka producers, members of groups and auditors, which record what they do.

Everything goes into one history, which `history.py` checks. A rejected message or a member that fails permanently fails
the trial, since clients with these settings should notice no more than a delay.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.history import UNKNOWN, History, Report

SETTLE_S_MAX = 120.0
QUIET_RECONNECT: dict[str, Any] = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200, "log_level": 0}
COMPRESSIONS = ("none", "lz4", "zstd", "snappy", "gzip")
_AT_ONCE = 10

PartitionKey = tuple[str, int]
"""A partition: its topic and its number."""

Topics = Mapping[str, int]
"""Topics with the number of their partitions."""


class TrialFailed(Exception):
    """The trial could not continue. Findings of the history checker are reported, not raised."""


class Recovery:
    """When each partition first acknowledged a message sent after some moment, and how long messages waited."""

    def __init__(self, longest_s: float = 0.0) -> None:
        self.since = time.monotonic()
        self.first: dict[PartitionKey, float] = {}
        self.longest_s = longest_s
        """The longest that any message, sent before or after, waited for its acknowledgement."""

    def acknowledged(self, partition_key: PartitionKey, sent_at: float) -> None:
        """Record an acknowledgement that has just arrived."""
        now = time.monotonic()
        self.longest_s = max(self.longest_s, now - sent_at)
        if sent_at >= self.since:
            self.first.setdefault(partition_key, now)

    @property
    def slowest_s(self) -> float:
        """Return how long the slowest of the partitions took."""
        return max(self.first.values(), default=self.since) - self.since


class TrialState:
    """The history, written by several threads, and the first error of one of them."""

    def __init__(self) -> None:
        self.history = History()
        self.lock = threading.Lock()
        self.loading = threading.Event()
        self.stopping = threading.Event()
        self.failure: str | None = None
        self.recovery = Recovery()
        self.commits: dict[tuple[str, PartitionKey], int] = {}
        """By group and partition, the largest offset whose commit was acknowledged."""

    def fail(self, reason: str) -> None:
        """Report that a client failed; the first reason counts."""
        if self.failure is None:
            self.failure = reason

    def check(self, *, complete: list[str]) -> Report:
        with self.lock:
            return self.history.check(complete=complete)

    @property
    def acknowledgements(self) -> int:
        with self.lock:
            return self.history.acknowledgements

    def measure_recovery(self, *, longest_s: float = 0.0) -> Recovery:
        """Start measuring the next acknowledgement of each partition; some message has already waited `longest_s`."""
        with self.lock:
            self.recovery = Recovery(longest_s)
            return self.recovery

    def wait(self, condition: Callable[[], bool], problem: str, timeout_s: float = SETTLE_S_MAX) -> None:
        """Wait until a condition holds; raise `TrialFailed` on a timeout or when a client has failed."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.failure is not None:
                raise TrialFailed(self.failure)
            if time.monotonic() > deadline:
                raise TrialFailed(f"{problem} within {timeout_s:g} s")
            time.sleep(0.02)


class LoadProducer(threading.Thread):
    """A producer that sends while there is load."""

    def __init__(
        self,
        name: str,
        state: TrialState,
        settings: Mapping[str, Any],
        topics: Topics,
        *,
        seed: object,
        messages_per_s: int,
        steady: bool = False,
        message_bytes_max: int = 2000,
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._state = state
        self._partition_keys = [(topic, index) for topic, partitions in topics.items() for index in range(partitions)]
        self._pause_s = _AT_ONCE / messages_per_s
        self._steady = steady
        self._bytes_max = message_bytes_max
        self._random = random.Random(f"{seed}/{name}")
        self._client = Producer({**settings, **QUIET_RECONNECT})
        self._sequence = 0

    def run(self) -> None:
        """Send while there is load, and process responses until the trial ends."""
        try:
            while not self._state.stopping.is_set():
                if self._state.loading.is_set():
                    for _ in range(_AT_ONCE):
                        self._send()
                self._poll()
        except (KafkaException, TrialFailed) as error:
            self._state.fail(f"{self.name}: {error}")
            self._state.stopping.set()

    def settle(self) -> None:
        """Wait until everything gets a response; the thread of this producer processes the responses."""
        deadline = time.monotonic() + SETTLE_S_MAX
        while len(self._client) and self._state.failure is None:
            if time.monotonic() > deadline:
                left = len(self._client)
                raise TrialFailed(f"{self.name}: {left} messages got no response within {SETTLE_S_MAX:g} s")
            time.sleep(0.01)

    def _poll(self) -> None:
        until = time.monotonic() + self._pause_s
        self._client.poll(self._pause_s)
        while self._steady and (left := until - time.monotonic()) > 0:
            self._client.poll(left)

    def _send(self) -> None:
        sequence = self._sequence
        topic, partition = partition_key = self._random.choice(self._partition_keys)
        value = f"{self.name} {sequence} ".encode() + bytes(self._random.randrange(self._bytes_max))
        with self._state.lock:
            self._state.history.sent(self.name, sequence, topic, partition)
        try:
            self._client.produce(
                topic, value, partition=partition, on_delivery=self._responded(sequence, partition_key)
            )
        except (BufferError, KafkaException):
            # Nothing was queued, so the next message gets the same sequence.
            return
        self._sequence += 1

    def _responded(self, sequence: int, partition_key: PartitionKey) -> Callable[[KafkaError | None, Message], None]:
        sent_at = time.monotonic()

        def record(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._state.fail(f"{self.name}: message {sequence} was rejected: {error}")
                return
            with self._state.lock:
                self._state.history.acknowledged(self.name, sequence, *position_of(message))
                self._state.recovery.acknowledged(partition_key, sent_at)

        return record


class GroupMember(threading.Thread):
    """A member of a group that reads and commits until the trial ends. It is called `group/member`."""

    def __init__(self, name: str, state: TrialState, settings: Mapping[str, Any], topics: Topics) -> None:
        super().__init__(name=name, daemon=True)
        self._state = state
        self.group = name.partition("/")[0]
        self._client = Consumer(
            {
                "group.id": self.group,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 200,
                "on_commit": self._committed,
                **QUIET_RECONNECT,
                **settings,
            }
        )
        self._client.subscribe(list(topics), on_assign=self._assigned)

    def run(self) -> None:
        """Read until the trial ends."""
        try:
            while not self._state.stopping.is_set():
                record_reads(self._state, self.name, self._client.consume(1000, 0.1))
        except KafkaException as error:
            self._state.fail(f"{self.name}: {error}")
        self._client.close()

    def _assigned(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        with self._state.lock:
            for partition in partitions:
                self._state.history.positioned(self.name, partition.topic, partition.partition)

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        with self._state.lock:
            for partition in partitions if error is None else ():
                if partition.error is None and partition.offset >= 0:
                    key = (self.group, (partition.topic, partition.partition))
                    self._state.commits[key] = max(partition.offset, self._state.commits.get(key, 0))


class Auditor:
    """Reads every partition of the topics up to its end, and continues from there the next time."""

    def __init__(self, name: str, state: TrialState, address: str, topics: Topics) -> None:
        self.name = name
        self._state = state
        self._address = address
        self._partition_keys = [(topic, index) for topic, partitions in topics.items() for index in range(partitions)]
        self.position: dict[PartitionKey, int] = {}

    def read(self) -> None:
        settings = {"bootstrap.servers": self._address, "group.id": self.name, "enable.auto.commit": False}
        client = Consumer({**settings, **QUIET_RECONNECT})
        try:
            ends = {partition_key: self._end_of(client, partition_key) for partition_key in self._partition_keys}
            client.assign([self._start(partition_key) for partition_key in self._partition_keys])
            deadline = time.monotonic() + SETTLE_S_MAX
            while any(self.position.get(partition_key, 0) < end for partition_key, end in ends.items()):
                if time.monotonic() > deadline:
                    raise TrialFailed(f"{self.name} is at {self.position}, not at {ends}, after {SETTLE_S_MAX:g} s")
                self.position.update(record_reads(self._state, self.name, client.consume(10_000, 0.5)))
        finally:
            client.close()

    def _start(self, partition_key: PartitionKey) -> TopicPartition:
        start = self.position.get(partition_key, 0)
        with self._state.lock:
            self._state.history.positioned(self.name, *partition_key, start)
        return TopicPartition(*partition_key, start if start else OFFSET_BEGINNING)

    def _end_of(self, client: Consumer, partition_key: PartitionKey) -> int:
        try:
            _, end = client.get_watermark_offsets(TopicPartition(*partition_key), timeout=SETTLE_S_MAX)
        except KafkaException as error:
            raise TrialFailed(f"partition {partition_key} has no known end offset: {error}") from error
        return int(end)


class TrialLoad:
    """The producers, members of groups and auditor of a trial, all on the same topics."""

    def __init__(self, topics: Topics, *, seed: object) -> None:
        self.state = TrialState()
        self.topics = topics
        self.brokers = ""
        """The addresses for the clients; set it before they are added."""
        self._seed = seed
        self._producers: list[LoadProducer] = []
        self._members: list[GroupMember] = []
        self._auditor = self.new_auditor("audit")

    @property
    def groups(self) -> list[str]:
        return list(dict.fromkeys(member.group for member in self._members))

    def add_producer(self, name: str, settings: Mapping[str, Any], **pace: Any) -> None:
        """Add a producer; `pace` is how much it sends, see `LoadProducer`."""
        address = {"bootstrap.servers": self.brokers}
        self._producers.append(
            LoadProducer(name, self.state, {**address, **settings}, self.topics, seed=self._seed, **pace)
        )

    def add_members(self, group: str, count: int, settings: Mapping[str, Any]) -> None:
        for number in range(count):
            given = {"bootstrap.servers": self.brokers, **settings}
            self._members.append(GroupMember(f"{group}/{number}", self.state, given, self.topics))

    def start(self) -> None:
        """Start all clients; they produce once `state.loading` is set."""
        self._auditor = self.new_auditor("audit")
        for thread in [*self._producers, *self._members]:
            thread.start()

    def end(self, timeout_s: float = SETTLE_S_MAX) -> None:
        """End all clients. librdkafka's consumers sometimes hang forever when they close, so the wait is bounded."""
        self.state.stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in [*self._producers, *self._members]:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))

    def save_history(self, path: Path) -> None:
        with self.state.lock:
            self.state.history.save(path)

    def new_auditor(self, name: str) -> Auditor:
        return Auditor(name, self.state, self.brokers, self.topics)

    def wait_for_acknowledgements(
        self, when: str, timeout_s: float = SETTLE_S_MAX, recovery: Recovery | None = None
    ) -> None:
        """Wait until every partition has acknowledged a message that was sent after now, or after `recovery` began."""
        measured = recovery or self.state.measure_recovery()
        self.state.wait(
            lambda: len(measured.first) == sum(self.topics.values()),
            f"{when}: not every partition acknowledged a message",
            timeout_s,
        )

    def settle(self) -> None:
        """Stop the load, and wait for messages in flight."""
        self.state.loading.clear()
        for producer in self._producers:
            producer.settle()
        if self.state.failure is not None:
            raise TrialFailed(self.state.failure)

    def settle_and_check(self) -> Report:
        """Stop the load, wait for messages in flight, read the new messages and check the history."""
        self.settle()
        self._auditor.read()
        return self.state.check(complete=[self._auditor.name])

    def check_everything(self) -> Report:
        """Run the final check: another auditor reads all messages, and every group must have read them."""
        report = self.settle_and_check()
        if not report.ok:
            return report
        final = self.new_auditor("final")
        final.read()
        for group in self.groups:
            self.state.wait(
                lambda group=group: self._positions(group) == final.position,  # type: ignore[misc]
                f"group {group} did not read everything",
            )
        return self.state.check(complete=[self._auditor.name, final.name, *self.groups])

    @property
    def ends(self) -> dict[PartitionKey, int]:
        """Up to where the auditor has read each partition."""
        return self._auditor.position

    def _positions(self, group: str) -> dict[PartitionKey, int]:
        with self.state.lock:
            history = self.state.history
            return {
                (topic, index): offset
                for topic in self.topics
                for index, offset in history.next_offsets(group, topic).items()
            }


def create_topics(brokers: str, topics: Iterable[NewTopic]) -> None:
    """Create topics, and wait until they exist."""
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
    for created in admin.create_topics(list(topics), operation_timeout=SETTLE_S_MAX).values():
        created.result(SETTLE_S_MAX)


def record_reads(state: TrialState, reader: str, messages: list[Message]) -> dict[PartitionKey, int]:
    """Record what a reader received; return the next offset by partition."""
    position = {}
    with state.lock:
        for message in messages:
            error = message.error()
            if error is not None:
                if error.fatal():
                    state.fail(f"{reader}: {error}")
                continue
            producer, sequence, _ = (message.value() or b"").split(b" ", 2)
            topic, index, offset = position_of(message)
            state.history.read(reader, topic, index, offset, producer.decode(), int(sequence))
            position[topic, index] = offset + 1
    return position


def position_of(message: Message) -> tuple[str, int, int]:
    """Return the position of a message. If the broker had it already, the client may not know the offset."""
    topic, index, offset = message.topic(), message.partition(), message.offset()
    if topic is None or index is None:
        raise TrialFailed("the client returned a message without a position")
    return topic, index, UNKNOWN if offset is None else offset
