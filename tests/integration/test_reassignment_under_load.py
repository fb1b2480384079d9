"""Partitions move between nodes, by hand and by plans, while clients write and read: nothing is lost or duplicated."""

from __future__ import annotations

import threading
import time
from base64 import urlsafe_b64decode
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicCollection
from confluent_kafka import TopicPartition as Place
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from kafka.admin import KafkaAdminClient
from kafka.structs import TopicPartition

from millstream_testing.command import CommandLine
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.replica_bytes import differing_replicas
from millstream_testing.server import ServerGroup
from millstream_testing.waiting import wait_until

WAIT_S = 120.0
BEFORE = [[1, 2], [2, 1]]
AFTER = [[2, 3], [3, 2]]
ENOUGH = 50
"""So many messages show that a partition is written to."""


@pytest.fixture
def cluster(tmp_path: Path, etcd: EtcdServer, postgres: PostgresServer) -> Iterator[ServerGroup]:
    settings = {"leader-balance-ms": 500, "lease-ms": 2000}
    group = ServerGroup(tmp_path, etcd.url, postgres.new_database(), nodes=3, settings=settings)
    for number, node in group.nodes.items():
        # Each node simulates a separate machine.
        node.settings["rack"] = f"machine-{number}"
    with group as started:
        yield started


class Writer(threading.Thread):
    """An idempotent producer that numbers its messages per partition, until it is stopped."""

    def __init__(self, cluster: ServerGroup, topic: str) -> None:
        super().__init__(daemon=True)
        self._topic = topic
        self._ended = threading.Event()
        self.acknowledged = [0] * len(BEFORE)
        self.errors: list[str] = []
        self._producer = Producer(
            {
                "bootstrap.servers": cluster.kafka,
                "log_level": 0,
                "enable.idempotence": True,
                "linger.ms": 2,
                "message.timeout.ms": int(WAIT_S * 1000),
            }
        )

    def run(self) -> None:
        number = 0
        while not self._ended.is_set():
            for partition in range(len(BEFORE)):
                self._send(partition, b"%d " % number + b"x" * 500)
            number += 1
            self._producer.poll(0.005)
        if self._producer.flush(WAIT_S):
            self.errors.append("not everything got a response")

    def _send(self, partition: int, value: bytes) -> None:
        while True:
            try:
                self._producer.produce(self._topic, value, partition=partition, on_delivery=self._delivered)
            except BufferError:
                # The client's buffer is full; on a busy machine a failover takes that long.
                self._producer.poll(0.1)
            else:
                return

    def finish(self) -> None:
        """Wait for all messages in flight."""
        self._ended.set()
        self.join(2 * WAIT_S)

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(str(error))
        else:
            self.acknowledged[message.partition() or 0] += 1


class Reader(threading.Thread):
    """A consumer that reads continuously and records its messages, until it has seen a given number."""

    def __init__(self, cluster: ServerGroup, topic: str) -> None:
        super().__init__(daemon=True)
        self.seen: list[list[int]] = [[] for _ in BEFORE]
        self.expected: list[int] | None = None
        settings = {"bootstrap.servers": cluster.kafka, "log_level": 0, "group.id": "unused"}
        self._consumer = Consumer({**settings, "enable.auto.commit": False})
        self._consumer.assign([Place(topic, partition, 0) for partition in range(len(BEFORE))])

    def run(self) -> None:
        deadline = time.monotonic() + 3 * WAIT_S
        while time.monotonic() < deadline and [len(seen) for seen in self.seen] != self.expected:
            for message in self._consumer.consume(1000, 0.2):
                if message.error() is None:
                    self.seen[message.partition() or 0].append(int((message.value() or b"").split()[0]))
        self._consumer.close()


def replicas(admin: AdminClient, topic: str) -> list[tuple[list[int], set[int]]]:
    """The replicas of each partition, and those in sync."""
    partitions = admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions
    return [(partitions[index].replicas, set(partitions[index].isrs)) for index in sorted(partitions)]


def topic_id(admin: AdminClient, topic: str) -> UUID:
    found_topic_id = admin.describe_topics(TopicCollection([topic]))[topic].result(WAIT_S).topic_id
    return UUID(bytes=urlsafe_b64decode(f"{found_topic_id}=="))


def test_partitions_move_to_other_nodes_under_load(cluster: ServerGroup, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    new = NewTopic(topic, len(BEFORE), replica_assignment=BEFORE)
    admin.create_topics([new], operation_timeout=WAIT_S)[topic].result(WAIT_S)
    writer, reader = Writer(cluster, topic), Reader(cluster, topic)
    writer.start()
    reader.start()
    wait_until(lambda: min(writer.acknowledged) > ENOUGH)
    mover = KafkaAdminClient(bootstrap_servers=cluster[3].kafka)
    mover.alter_partition_reassignments({TopicPartition(topic, index): target for index, target in enumerate(AFTER)})
    wait_until(lambda: replicas(admin, topic) == [(target, set(target)) for target in AFTER])
    wait_until(lambda: mover.list_partition_reassignments() == {})
    mover.close()
    identity = topic_id(admin, topic)
    wait_until(lambda: not any((cluster[1].data / "partitions" / str(identity)).glob("[0-9]*")))
    remove_by_a_plan(cluster, admin, topic)
    # The node that they left is no longer needed for them, and holds nothing of them.
    wait_until(lambda: not any((cluster[3].data / "partitions" / str(identity)).glob("[0-9]*")))
    cluster[3].kill()
    moved = list(writer.acknowledged)
    wait_until(lambda: all(now > then + ENOUGH for now, then in zip(writer.acknowledged, moved, strict=True)))
    writer.finish()
    assert writer.errors == []
    reader.expected = writer.acknowledged
    reader.join(2 * WAIT_S)
    # Nothing is lost, duplicated or reordered.
    assert reader.seen == [list(range(count)) for count in writer.acknowledged]
    for number in (1, 2):
        cluster[number].stop()
    folders = {number: cluster[number].data for number in (1, 2)}
    assert differing_replicas(folders, [identity], len(BEFORE)) == []


@pytest.mark.trial
def test_replicas_return_to_a_node_that_was_drained_and_restarted(cluster: ServerGroup, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    new = NewTopic(topic, 4, replica_assignment=[[3, 1], [3, 2], [3, 1], [3, 2]])
    admin.create_topics([new], operation_timeout=WAIT_S)[topic].result(WAIT_S)
    producer = Producer({"bootstrap.servers": cluster.kafka, "log_level": 0})
    for number in range(4000):
        producer.produce(topic, b"x" * 500, partition=number % 4)
        producer.poll(0)
    assert producer.flush(WAIT_S) == 0
    millstream = CommandLine(",".join(cluster[number].kafka for number in (1, 2)))
    folder = cluster[3].data / "partitions" / str(topic_id(admin, topic))

    def drain(node: int) -> None:
        for command in (("plan", "drain", node), ("apply", "--wait")):
            response = millstream("cluster", *command)
            assert response.code == 0, response.err

    # Its stop writes checkpoints of all its logs.
    cluster[3].restart()
    drain(3)
    wait_until(lambda: not any(folder.glob("[0-9]*")))
    cluster[3].restart()
    assert millstream("cluster", "undrain", 3).code == 0
    drain(2)
    assert any(folder.glob("[0-9]*"))
    assert cluster[3].log is not None
    assert "damaged" not in cluster[3].log.read_text(errors="replace")


def remove_by_a_plan(cluster: ServerGroup, admin: AdminClient, topic: str) -> None:
    """Plan to remove node 3, and apply the plan while the controller dies."""
    millstream = CommandLine(",".join(cluster[number].kafka for number in (1, 2)))
    assert "node 9" in millstream("cluster", "plan", "drain", 9).err
    refused = millstream("topic", "replicate", topic, "--to", 4)
    assert refused.code != 0
    assert "4 replicas need as many machines" in refused.err
    # Internal topics have three replicas, and need node 3 until they have fewer.
    assert "cannot move" in millstream("cluster", "plan", "remove", 3).err
    assert millstream("topic", "replicate", "__*", "--to", 2).code == 0
    wait_until(lambda: millstream("cluster", "plan", "show", "--json").document["state"] == "done", timeout_s=WAIT_S)
    plan = millstream("cluster", "plan", "remove", 3, "--json").document
    assert {move["topic"] for move in plan["moves"]} >= {topic}
    assert all(3 in move["from"] and 3 not in move["to"] for move in plan["moves"])
    assert plan["bytes"] > 0
    # Nothing moves before it is applied.
    assert millstream("cluster", "plan", "show", "--json").document["state"] == "proposed"
    assert replicas(admin, topic) == [(target, set(target)) for target in AFTER]
    assert millstream("cluster", "apply", plan["plan"], "--throttle", 2_000_000).code == 0
    controller = millstream("cluster", "status", "--json").document["controller"]
    if controller != 3:
        cluster[controller].kill()
        cluster[controller].start()
    wait_until(
        lambda: millstream("cluster", "plan", "show", "--json").document.get("state") == "done", timeout_s=WAIT_S
    )
    shown = millstream("cluster", "plan", "show", "--json").document
    assert (shown["moved"], shown["superseded"], shown["drained"]) == (len(plan["moves"]), 0, [3])
    assert millstream("cluster", "apply", plan["plan"]).code == 5
    assert all(3 not in now and now_in_sync == set(now) for now, now_in_sync in replicas(admin, topic))
    # A drained node gets no replicas.
    assert millstream("topic", "create", f"{topic}-later", "--partitions", 6, "--replication", 2).code == 0
    assert all(3 not in now for now, _ in replicas(admin, f"{topic}-later"))
    assert "not drained" in millstream("cluster", "undrain", 1).err
