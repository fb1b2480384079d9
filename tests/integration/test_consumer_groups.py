"""Consumer groups with confluent-kafka: members join, leave and die, and nothing is missed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import pytest
from confluent_kafka import Consumer, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from conformance.question import Broker, frame_of, read_plain_response, receive_frame

from millstream_testing.server import Server

PARTITIONS = 4
WAIT_S = 60.0
ALL = set(range(PARTITIONS))


class Member:
    """A member of a group that records its partitions and messages."""

    def __init__(self, server: Server, topic: str, **settings: Any) -> None:
        self.held: set[int] = set()
        self.read: dict[int, list[int]] = defaultdict(list)
        self.client = Consumer(
            {
                "bootstrap.servers": server.kafka,
                "log_level": 0,
                "group.id": f"{topic}-group",
                "auto.offset.reset": "earliest",
                "enable.auto.commit": False,
                "session.timeout.ms": 60_000,
                "heartbeat.interval.ms": 200,
                **settings,
            }
        )
        self.client.subscribe([topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)

    def _assigned(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self.held |= {partition.partition for partition in partitions}

    def _revoked(self, client: Consumer, partitions: list[TopicPartition]) -> None:
        self.held -= {partition.partition for partition in partitions}

    def step(self) -> None:
        for message in self.client.consume(100, 0.05):
            if message.error() is None:
                self.read[_number(message.partition())].append(_number(message.offset()))

    def commit(self) -> None:
        self.client.commit(asynchronous=False)

    def close(self) -> None:
        self.client.close()


def _number(value: int | None) -> int:
    assert value is not None
    return value


def step_until(condition: Callable[[], bool], *members: Member) -> None:
    deadline = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < deadline, [(member.held, dict(member.read)) for member in members]
        for member in members:
            member.step()


def create(server: Server, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    for created in admin.create_topics([NewTopic(topic, PARTITIONS, 1)]).values():
        created.result(WAIT_S)


def send(server: Server, topic: str, per_partition: int) -> None:
    delivered: list[Message] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for number in range(per_partition):
        for partition in range(PARTITIONS):
            producer.produce(
                topic, b"%d" % number, partition=partition, on_delivery=lambda _, message: delivered.append(message)
            )
    assert producer.flush(WAIT_S) == 0
    assert len(delivered) == per_partition * PARTITIONS


def total(*members: Member) -> int:
    return sum(len(offsets) for member in members for offsets in member.read.values())


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_a_member_joins_and_another_leaves(server: Server, topic: str, strategy: str) -> None:
    create(server, topic)
    settings = {"partition.assignment.strategy": strategy}
    first = Member(server, topic, **settings)
    step_until(lambda: first.held == ALL, first)
    second = Member(server, topic, **settings)
    step_until(lambda: len(first.held) == len(second.held) == 2 and first.held | second.held == ALL, first, second)
    send(server, topic, 50)
    step_until(lambda: total(first, second) == 50 * PARTITIONS, first, second)
    assert set(first.read) == first.held
    assert set(second.read) == second.held
    first.commit()
    second.commit()
    first.close()
    step_until(lambda: second.held == ALL, second)
    send(server, topic, 50)
    step_until(lambda: total(first, second) == 100 * PARTITIONS, second)
    for partition in range(PARTITIONS):
        assert first.read[partition] + second.read[partition] == list(range(100))
    second.close()


MEMBER_PROGRAM = """
import sys
from confluent_kafka import Consumer
address, topic = sys.argv[1:]
client = Consumer({
    "bootstrap.servers": address, "group.id": topic + "-group", "auto.offset.reset": "earliest",
    "session.timeout.ms": 3000, "heartbeat.interval.ms": 200, "enable.auto.commit": False,
})
client.subscribe([topic], on_assign=lambda _, partitions: print(len(partitions), flush=True))
while True:
    client.poll(0.1)
"""


def test_a_member_dies(server: Server, topic: str) -> None:
    create(server, topic)
    first = Member(server, topic)
    step_until(lambda: first.held == ALL, first)
    with subprocess.Popen([sys.executable, "-c", MEMBER_PROGRAM, server.kafka, topic], stdout=subprocess.PIPE) as other:
        try:
            step_until(lambda: len(first.held) == 2, first)
            send(server, topic, 20)
            os.kill(other.pid, signal.SIGKILL)
            step_until(lambda: first.held == ALL, first)
            step_until(lambda: set(first.read) == ALL and total(first) >= 20 * PARTITIONS, first)
        finally:
            other.kill()
    assert all(offsets[-20:] == list(range(20)) for offsets in first.read.values())
    first.close()


def test_a_static_member_returns_without_a_rebalance(server: Server, topic: str) -> None:
    create(server, topic)
    one = Member(server, topic, **{"group.instance.id": "one"})
    two = Member(server, topic, **{"group.instance.id": "two"})
    step_until(lambda: len(one.held) == len(two.held) == 2, one, two)
    held = two.held
    kept = set(one.held)
    two.close()
    again = Member(server, topic, **{"group.instance.id": "two"})
    step_until(lambda: len(again.held) == 2, one, again)
    assert again.held | kept == ALL
    assert one.held == kept
    assert not held
    one.close()
    again.close()


def test_two_groups_each_read_everything(server: Server, topic: str) -> None:
    create(server, topic)
    send(server, topic, 30)
    members = [Member(server, topic, **{"group.id": f"{topic}-{name}"}) for name in ("a", "b")]
    step_until(lambda: all(total(member) == 30 * PARTITIONS for member in members), *members)
    for member in members:
        assert {index: list(range(30)) for index in ALL} == dict(member.read)
        member.close()


def test_committed_offsets_can_be_queried(server: Server, topic: str) -> None:
    create(server, topic)
    send(server, topic, 10)
    member = Member(server, topic)
    step_until(lambda: total(member) == 10 * PARTITIONS, member)
    member.client.commit(
        offsets=[TopicPartition(topic, index, index + 1, metadata=f"note {index}") for index in range(PARTITIONS)],
        asynchronous=False,
    )
    committed = member.client.committed([TopicPartition(topic, index) for index in range(PARTITIONS)], timeout=WAIT_S)
    assert [(place.offset, place.metadata) for place in committed] == [(index + 1, f"note {index}") for index in ALL]
    member.close()


def syncs(server: Server) -> float:
    (count,) = re.findall(r"^millstream_log_commit_seconds_count (\S+)", server.metrics(), re.MULTILINE)
    return float(count)


def test_commits_that_arrive_together_share_a_sync_and_fetches_need_none(server: Server, topic: str) -> None:
    """A commit that waits for the previous one, or a fetch for a write, takes many times as long as Produce."""
    create(server, topic)
    groups = [f"{topic}-{number}" for number in range(200)]
    commits = [
        frame_of(8, 8, {"group_id": group, "topics": [{"name": topic, "partitions": [{"committed_offset": at}]}]})
        for at, group in enumerate(groups)
    ]
    fetches = [
        frame_of(9, 7, {"group_id": group, "topics": [{"name": topic, "partition_indexes": [0]}]}) for group in groups
    ]

    def ask(key: int, version: int, frames: list[bytes]) -> list[Any]:
        connection.sendall(b"".join(frames))
        responses = [read_plain_response(key, version, receive_frame(connection)) for _ in frames]
        return [response["topics"][0]["partitions"][0] for response in responses]

    with Broker(server.kafka).connected() as connection:
        # The offsets topic is created and loaded.
        Broker(server.kafka).ask(10, 2, {"key": topic, "key_type": 0})
        while {response["error_code"] for response in ask(8, 8, commits)} != {"none"}:
            pass
        before = syncs(server)
        assert {response["error_code"] for response in ask(8, 8, commits)} == {"none"}
        after = syncs(server)
        assert [response["committed_offset"] for response in ask(9, 7, fetches)] == list(range(200))
        assert 1 <= after - before <= 100
        assert syncs(server) - after <= 10
