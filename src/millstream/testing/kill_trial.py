"""The kill trial: a loaded broker is killed again and again, and every acknowledged message must survive.

Unmodified librdkafka producers (idempotent ones with different compressions, and a plain one) write to all partitions
of a topic while a consumer group reads and commits. The broker is killed with SIGKILL in the middle of it and started
again on the same data; then an auditor reads what it has not read yet, and the history is checked. At the end another
auditor reads everything from the start, and the group must have read everything too.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.testing.history import History, Report
from millstream.testing.server import Server

TOPIC = "kill-trial"
GROUP = "group"
SETTLE_S_MAX = 120.0
_MESSAGE_BYTES_MAX = 2000
_QUIET_RECONNECT = {"reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200, "log_level": 0}


class TrialFailed(Exception):
    """The trial could not go on; a finding of the history checker is a report, not this."""


@dataclass(slots=True, kw_only=True)
class Plan:
    """How hard the trial is."""

    kills: int = 20
    partitions: int = 4
    producers: int = 3
    members: int = 2
    messages_per_s: int = 3000
    steady: bool = False
    """Whether each producer keeps to that rate; else answers let it send at once, which is harder."""
    load_s: tuple[float, float] = (0.3, 1.5)
    seed: int = field(default_factory=lambda: random.randrange(2**32))


@dataclass(slots=True)
class Outcome:
    """What the trial found, and how long each start after a kill took."""

    report: Report
    starts_s: list[float]


class _Shared:
    """The history, written to by several threads, and the first thing that went wrong in one of them."""

    def __init__(self) -> None:
        self.history = History()
        self.lock = threading.Lock()
        self.loading = threading.Event()
        self.stopping = threading.Event()
        self.failure: str | None = None

    def fail(self, reason: str) -> None:
        if self.failure is None:
            self.failure = reason

    def check(self, *, complete: list[str]) -> Report:
        with self.lock:
            return self.history.check(complete=complete)


class _Load(threading.Thread):
    """One producer that sends as long as there is load."""

    def __init__(self, name: str, shared: _Shared, settings: dict[str, Any], plan: Plan) -> None:
        super().__init__(name=name, daemon=True)
        self._shared = shared
        self._partitions = plan.partitions
        self._pause_s = 10 / plan.messages_per_s
        self._steady = plan.steady
        self._random = random.Random(f"{plan.seed}/{name}")
        self._client = Producer(settings | _QUIET_RECONNECT)
        self._sequence = 0

    def run(self) -> None:
        while not self._shared.stopping.is_set():
            if self._shared.loading.is_set():
                for _ in range(10):
                    self._send()
            self._poll()

    def _poll(self) -> None:
        until = time.monotonic() + self._pause_s
        try:
            self._client.poll(self._pause_s)
            while self._steady and (left := until - time.monotonic()) > 0:
                self._client.poll(left)
        except KafkaException as error:
            self._shared.fail(f"{self.name}: {error}")
            self._shared.stopping.set()

    def settle(self) -> None:
        """Wait until all that was sent is answered; the thread of this producer takes the answers."""
        deadline = time.monotonic() + SETTLE_S_MAX
        while len(self._client) and self._shared.failure is None:
            if time.monotonic() > deadline:
                left = len(self._client)
                raise TrialFailed(f"{self.name}: {left} messages were not answered within {SETTLE_S_MAX:g} s")
            time.sleep(0.01)

    def _send(self) -> None:
        sequence, partition = self._sequence, self._random.randrange(self._partitions)
        value = f"{self.name} {sequence} ".encode() + bytes(self._random.randrange(_MESSAGE_BYTES_MAX))
        with self._shared.lock:
            self._shared.history.sent(self.name, sequence, TOPIC, partition)
        try:
            self._client.produce(TOPIC, value, partition=partition, on_delivery=self._answered(sequence))
        except (BufferError, KafkaException):
            # Nothing was queued, so the sequence is free again; sent twice counts as sent once.
            return
        self._sequence += 1

    def _answered(self, sequence: int) -> Callable[[KafkaError | None, Message], None]:
        def note(error: KafkaError | None, message: Message) -> None:
            if error is not None:
                self._shared.fail(f"{self.name}: message {sequence} was refused: {error}")
                return
            with self._shared.lock:
                self._shared.history.acknowledged(self.name, sequence, *place_of(message))

        return note


class _Reader(threading.Thread):
    """A member of the group that reads and commits until the trial ends."""

    def __init__(self, name: str, shared: _Shared, address: str) -> None:
        super().__init__(name=name, daemon=True)
        self._shared = shared
        self._client = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": GROUP,
                "auto.offset.reset": "earliest",
                "auto.commit.interval.ms": 200,
                "session.timeout.ms": 10_000,
                "heartbeat.interval.ms": 500,
                **_QUIET_RECONNECT,
            }
        )
        self._client.subscribe([TOPIC], on_assign=self._assigned)

    def run(self) -> None:
        while not self._shared.stopping.is_set():
            note_reads(self._shared, self.name, self._client.consume(1000, 0.1))
        self._client.close()

    def _assigned(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        with self._shared.lock:
            for partition in partitions:
                self._shared.history.positioned(self.name, partition.topic, partition.partition)


def note_reads(shared: _Shared, reader: str, messages: list[Message]) -> dict[int, int]:
    """Write down what a reader saw; returns the next offset by partition."""
    position = {}
    with shared.lock:
        for message in messages:
            error = message.error()
            if error is not None:
                if error.fatal():
                    shared.fail(f"{reader}: {error}")
                continue
            producer, sequence, _ = (message.value() or b"").split(b" ", 2)
            topic, index, offset = place_of(message)
            shared.history.read(reader, topic, index, offset, producer.decode(), int(sequence))
            position[index] = offset + 1
    return position


def place_of(message: Message) -> tuple[str, int, int]:
    """Where a message lies; the client's types leave room for a message that lies nowhere."""
    topic, index, offset = message.topic(), message.partition(), message.offset()
    if topic is None or index is None or offset is None:
        raise TrialFailed("the client gave a message without a place")
    return topic, index, offset


class KillTrial:
    """One trial on one server, which it starts, kills and stops."""

    def __init__(self, server: Server, plan: Plan, tell: Callable[[str], None] = lambda _: None) -> None:
        self._server = server
        self._plan = plan
        self._tell = tell
        self._random = random.Random(plan.seed)
        self._shared = _Shared()
        self._loads: list[_Load] = []
        self._readers: list[_Reader] = []
        self._audited: dict[int, int] = {}

    def __enter__(self) -> Self:
        self._server.start()
        try:
            self._create_topic()
            self._start_clients()
        except BaseException:
            self._server.kill()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._shared.stopping.set()
        for thread in [*self._loads, *self._readers]:
            thread.join(SETTLE_S_MAX)
        self._server.kill()

    def run(self) -> Outcome:
        """Kill as often as planned, then look at everything once more; stops early when something is found."""
        starts_s = []
        report = self._shared.check(complete=[])
        for number in range(1, self._plan.kills + 1):
            self._kill_under_load()
            starts_s.append(self._server.start_s)
            report = self._settle_and_check()
            self._tell(f"kill {number}: back after {self._server.start_s:.2f} s; {str(report).splitlines()[0]}")
            if not report.ok:
                return Outcome(report, starts_s)
        return Outcome(self._check_everything(), starts_s)

    def save_history(self, path: Path) -> None:
        """Keep the history for a closer look."""
        with self._shared.lock:
            self._shared.history.save(path)

    def _create_topic(self) -> None:
        admin = AdminClient({"bootstrap.servers": self._server.kafka, "log_level": 0})
        topic = NewTopic(TOPIC, num_partitions=self._plan.partitions, replication_factor=1)
        for created in admin.create_topics([topic]).values():
            created.result(SETTLE_S_MAX)

    def _start_clients(self) -> None:
        address = {"bootstrap.servers": self._server.kafka}
        compressions = ["none", "lz4", "zstd", "snappy", "gzip"]
        for number in range(self._plan.producers):
            settings = address | {
                "enable.idempotence": True,
                "compression.type": compressions[number % len(compressions)],
                "linger.ms": number * 3,
            }
            self._loads.append(_Load(f"idempotent-{number}", self._shared, settings, self._plan))
        plain = address | {"enable.idempotence": False, "acks": "all", "max.in.flight": 1, "linger.ms": 1}
        self._loads.append(_Load("plain", self._shared, plain, self._plan))
        self._shared.history.repeats("plain")
        for number in range(self._plan.members):
            self._readers.append(_Reader(f"{GROUP}/{number}", self._shared, self._server.kafka))
        for thread in [*self._loads, *self._readers]:
            thread.start()

    def _kill_under_load(self) -> None:
        before = self._acknowledged()
        self._shared.loading.set()
        self._wait(lambda: self._acknowledged() > before, "no message was acknowledged under load")
        time.sleep(self._random.uniform(*self._plan.load_s))
        self._server.kill()
        self._server.start()

    def _acknowledged(self) -> int:
        with self._shared.lock:
            return self._shared.history.acknowledgements

    def _settle_and_check(self) -> Report:
        """Hold the load, wait for what is under way, read on and compare."""
        self._shared.loading.clear()
        for load in self._loads:
            load.settle()
        if self._shared.failure is not None:
            raise TrialFailed(self._shared.failure)
        self._audit("audit", self._audited)
        return self._shared.check(complete=["audit"])

    def _check_everything(self) -> Report:
        self._audit("final", {})
        complete = ["audit", "final"]
        if self._readers:
            ends = dict(self._audited)
            self._wait(lambda: self._group_positions() == ends, "the group did not read everything")
            complete.append(GROUP)
        return self._shared.check(complete=complete)

    def _group_positions(self) -> dict[int, int]:
        with self._shared.lock:
            return self._shared.history.next_offsets(GROUP, TOPIC)

    def _audit(self, name: str, position: dict[int, int]) -> None:
        """Read every partition from `position`, which is renewed, up to its end."""
        client = Consumer({"bootstrap.servers": self._server.kafka, "group.id": name, "enable.auto.commit": False})
        try:
            ends = {index: self._end_of(client, index) for index in range(self._plan.partitions)}
            assignment = []
            for index in range(self._plan.partitions):
                start = position.get(index, 0)
                assignment.append(TopicPartition(TOPIC, index, start if start else OFFSET_BEGINNING))
                with self._shared.lock:
                    self._shared.history.positioned(name, TOPIC, index, start)
            client.assign(assignment)
            deadline = time.monotonic() + SETTLE_S_MAX
            while any(position.get(index, 0) < end for index, end in ends.items()):
                if time.monotonic() > deadline:
                    raise TrialFailed(f"{name} is at {position}, not at {ends}, after {SETTLE_S_MAX:g} s")
                position.update(note_reads(self._shared, name, client.consume(10_000, 0.5)))
        finally:
            client.close()

    def _end_of(self, client: Consumer, index: int) -> int:
        try:
            _, end = client.get_watermark_offsets(TopicPartition(TOPIC, index), timeout=SETTLE_S_MAX)
        except KafkaException as error:
            raise TrialFailed(f"partition {index} does not tell its end: {error}") from error
        return int(end)

    def _wait(self, condition: Callable[[], bool], otherwise: str) -> None:
        deadline = time.monotonic() + SETTLE_S_MAX
        while not condition():
            if self._shared.failure is not None:
                raise TrialFailed(self._shared.failure)
            if time.monotonic() > deadline:
                raise TrialFailed(f"{otherwise} within {SETTLE_S_MAX:g} s")
            time.sleep(0.02)
