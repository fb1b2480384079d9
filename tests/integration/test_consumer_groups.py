"""Consumer groups with confluent-kafka: members join, leave and die, and nothing is missed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from typing import Any

import pytest
from confluent_kafka import TopicPartition
from conformance.question import Broker, frame_of, read_plain_response, receive_frame

from millstream_testing.group_members import ALL, PARTITIONS, WAIT_S, Member, create, evenly, send, step_until, total
from millstream_testing.server import Server


def joined(server: Server, topic: str, **settings: Any) -> Member:
    return Member(server, topic, **{"session.timeout.ms": 60_000, "heartbeat.interval.ms": 200, **settings})


@pytest.mark.parametrize("strategy", ["range", "roundrobin", "cooperative-sticky"])
def test_a_member_joins_and_another_leaves(server: Server, topic: str, strategy: str) -> None:
    create(server, topic)
    settings = {"partition.assignment.strategy": strategy}
    first = joined(server, topic, **settings)
    step_until(lambda: first.partitions == ALL, first)
    second = joined(server, topic, **settings)
    step_until(evenly(first, second), first, second)
    send(server, topic, 50)
    step_until(lambda: total(first, second) == 50 * PARTITIONS, first, second)
    assert set(first.read) == first.partitions
    assert set(second.read) == second.partitions
    first.commit()
    second.commit()
    first.close()
    step_until(lambda: second.partitions == ALL, second)
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
    first = joined(server, topic)
    step_until(lambda: first.partitions == ALL, first)
    with subprocess.Popen([sys.executable, "-c", MEMBER_PROGRAM, server.kafka, topic], stdout=subprocess.PIPE) as other:
        try:
            step_until(lambda: len(first.partitions) == 2, first)
            send(server, topic, 20)
            os.kill(other.pid, signal.SIGKILL)
            step_until(lambda: first.partitions == ALL, first)
            step_until(lambda: set(first.read) == ALL and total(first) >= 20 * PARTITIONS, first)
        finally:
            other.kill()
    assert all(offsets[-20:] == list(range(20)) for offsets in first.read.values())
    first.close()


def test_a_static_member_returns_without_a_rebalance(server: Server, topic: str) -> None:
    create(server, topic)
    one = joined(server, topic, **{"group.instance.id": "one"})
    two = joined(server, topic, **{"group.instance.id": "two"})
    step_until(lambda: len(one.partitions) == len(two.partitions) == 2, one, two)
    partitions = one.partitions
    two.close()
    again = joined(server, topic, **{"group.instance.id": "two"})
    step_until(lambda: len(again.partitions) == 2, one, again)
    assert again.partitions | partitions == ALL
    assert one.partitions == partitions
    assert not two.held
    one.close()
    again.close()


def test_two_groups_each_read_everything(server: Server, topic: str) -> None:
    create(server, topic)
    send(server, topic, 30)
    members = [joined(server, topic, **{"group.id": f"{topic}-{name}"}) for name in ("a", "b")]
    step_until(lambda: all(total(member) == 30 * PARTITIONS for member in members), *members)
    for member in members:
        assert {index: list(range(30)) for index in ALL} == dict(member.read)
        member.close()


def test_committed_offsets_can_be_queried(server: Server, topic: str) -> None:
    create(server, topic)
    send(server, topic, 10)
    member = joined(server, topic)
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
