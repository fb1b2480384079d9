"""Members of a group with confluent-kafka that run in the test's own thread, one step at a time."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any, Final

from confluent_kafka import Consumer, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.cimpl import NewTopic

from millstream_testing.server import Server
from millstream_testing.trial_clients import create_topics
from millstream_testing.waiting import wait_until

PARTITIONS: Final = 4
ALL: Final = set(range(PARTITIONS))
WAIT_S: Final = 60.0


class Member:
    """A member of a group that records its partitions and messages."""

    def __init__(self, server: Server, topic: str, **settings: Any) -> None:
        self.held: set[tuple[str, int]] = set()
        self.read: dict[int, list[int]] = defaultdict(list)
        self.client = Consumer(
            {
                "bootstrap.servers": server.kafka,
                "log_level": 0,
                "group.id": f"{topic}-group",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                # Refresh metadata soon after a broker returns.
                "reconnect.backoff.max.ms": 500,
                **settings,
            }
        )
        self.client.subscribe([topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)

    @property
    def partitions(self) -> set[int]:
        """The partitions it holds."""
        return {partition for _, partition in self.held}

    def _assigned(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.held |= {(partition.topic, partition.partition) for partition in partitions}

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.held -= {(partition.topic, partition.partition) for partition in partitions}

    def step(self) -> None:
        """Read available messages."""
        for message in self.client.consume(100, 0.05):
            partition, offset = message.partition(), message.offset()
            if message.error() is None and partition is not None and offset is not None:
                self.read[partition].append(offset)

    def commit(self) -> None:
        """Commit, and retry where the epoch has changed meanwhile."""
        wait_until(self._is_committed)

    def _is_committed(self) -> bool:
        try:
            self.client.commit(asynchronous=False)
        except KafkaException:
            self.step()
            return False
        return True

    def close(self) -> None:
        self.client.close()


def step_until(condition: Callable[[], bool], *members: Member) -> None:
    """Let members read until a condition holds."""
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, [(member.held, dict(member.read)) for member in members]
        for member in members:
            member.step()


def evenly(*members: Member) -> Callable[[], bool]:
    """Whether the members hold every partition exactly once, and no two differ by more than one."""

    def check() -> bool:
        counts = [len(member.partitions) for member in members]
        everything = set().union(*(member.partitions for member in members))
        return everything == ALL and sum(counts) == PARTITIONS and max(counts) - min(counts) <= 1

    return check


def total(*members: Member) -> int:
    return sum(len(offsets) for member in members for offsets in member.read.values())


def create(server: Server, topic: str, partitions: int = PARTITIONS) -> None:
    create_topics(server.kafka, [NewTopic(topic, partitions, 1)])


def send(server: Server, topic: str, per_partition: int) -> None:
    """Produce to every partition of a topic, and wait for the responses."""
    delivered: list[Message] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for number in range(per_partition):
        for partition in range(PARTITIONS):
            producer.produce(
                topic, b"%d" % number, partition=partition, on_delivery=lambda _, message: delivered.append(message)
            )
    assert producer.flush(WAIT_S) == 0
    assert len(delivered) == per_partition * PARTITIONS
