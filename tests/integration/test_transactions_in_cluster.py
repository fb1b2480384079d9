"""Transactions over three nodes: leaders and coordinators are killed in the middle, and nothing is torn."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.testing.etcd_server import EtcdServer
from millstream.testing.postgres_server import PostgresServer
from millstream.testing.server_group import ServerGroup

WAIT_S = 60.0
PARTITIONS = 3
SETTINGS = {"group-initial-delay-ms": 100, "leader-balance-ms": 500, "lease-ms": 2000, "transactions-partitions": 3}


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer, postgres: PostgresServer
) -> Iterator[ServerGroup]:
    folder = tmp_path_factory.mktemp("transactions-in-cluster")
    with ServerGroup(folder, etcd.url, postgres.new_database(), settings=SETTINGS) as started:
        yield started


def leader_of(cluster: ServerGroup, topic: str, partition: int = 0) -> int:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    return int(admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions[partition].leader)


def end(producer: Producer, *, commit: bool) -> bool:
    """Commit or abort, again as long as the client says that it may help; False if it could only be aborted."""
    deadline = time.monotonic() + WAIT_S
    while True:
        try:
            if commit:
                producer.commit_transaction(5)
            else:
                producer.abort_transaction(5)
        except KafkaException as error:
            if error.args[0].txn_requires_abort():
                end(producer, commit=False)
                return False
            if time.monotonic() > deadline or not error.args[0].retriable():
                raise
        else:
            return commit


def write(producer: Producer, topic: str, value: bytes, group: Consumer, offset: int) -> None:
    producer.begin_transaction()
    for partition in range(PARTITIONS):
        producer.produce(topic, value, partition=partition)
    position = TopicPartition(topic, 0, offset)
    producer.send_offsets_to_transaction([position], group.consumer_group_metadata(), WAIT_S)


def consumer_of(cluster: ServerGroup) -> Consumer:
    settings = {"bootstrap.servers": cluster.kafka, "log_level": 0, "group.id": "readers"}
    settings |= {"isolation.level": "read_committed"}
    return Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})


def read_committed(cluster: ServerGroup, topic: str) -> Counter[tuple[int, bytes]]:
    consumer = consumer_of(cluster)
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(PARTITIONS)])
    got: Counter[tuple[int, bytes]] = Counter()
    ended: set[int] = set()
    deadline = time.monotonic() + WAIT_S
    while len(ended) < PARTITIONS:
        assert time.monotonic() < deadline, "a transaction hangs"
        message = consumer.poll(1.0)
        if message is None:
            continue
        if message.error() is None:
            got[message.partition() or 0, message.value() or b""] += 1
        elif message.value() != b"":
            ended.add(message.partition() or 0)
    consumer.close()
    return got


def test_nothing_is_torn_when_nodes_are_killed(cluster: ServerGroup, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    admin.create_topics([NewTopic(topic, PARTITIONS, 3)], operation_timeout=WAIT_S)[topic].result()
    group = consumer_of(cluster)
    producer = Producer({"bootstrap.servers": cluster.kafka, "log_level": 0, "transactional.id": "writer"})
    producer.init_transactions(WAIT_S)
    committed: list[bytes] = []
    killed = [0]
    for number in range(16):
        value = str(number).encode()
        write(producer, topic, value, group, number)
        if number in (4, 10):
            killed.append(leader_of(cluster, "__transaction_state" if number == 4 else topic))
            cluster[killed[-1]].kill()
        if end(producer, commit=number % 4 != 3):
            committed.append(value)
        if number in (7, 13):
            cluster.start()
    cluster.start()

    expected = {(partition, value) for partition in range(PARTITIONS) for value in committed}
    got = read_committed(cluster, topic)
    assert set(got) == expected
    assert set(got.values()) == {1}
    # A consumer that only asks does not look for a coordinator that has moved; a new one does.
    group.close()
    group = consumer_of(cluster)
    (position,) = group.committed([TopicPartition(topic, 0)], timeout=WAIT_S)
    assert position.offset == int(committed[-1])
    group.close()
