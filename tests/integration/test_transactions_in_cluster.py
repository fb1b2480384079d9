"""Transactions over three nodes: leaders and coordinators are killed midway, and no transaction is torn."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.broker.coordination.runtime import partition_for
from millstream_testing.committed_messages import committed_records
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import ServerGroup

WAIT_S = 120.0
HANGS_S = 20.0
PARTITIONS = 3
INTERNAL = {"__consumer_offsets": 3, "__transaction_state": 3}
SETTINGS = {"group-initial-delay-ms": 100, "leader-balance-ms": 500, "lease-ms": 2000}
SETTINGS |= {"offsets-partitions": 3, "transactions-partitions": 3}
GROUP = "readers"
TRANSACTIONAL_ID = "writer"
CLIENT = {"log_level": 0, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 500}
PRODUCER = {
    "transactional.id": TRANSACTIONAL_ID,
    # However slow the machine is, the coordinator must not time out a transaction: no producer may be fenced here.
    "transaction.timeout.ms": 600_000,
    # librdkafka may wait for ever for a group's coordinator that has left the cluster, if it remembers it as such (its
    # issue 5511); it does so for this long.
    "metadata.max.age.ms": 100,
}


@pytest.fixture
def cluster(
    tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer, postgres: PostgresServer
) -> Iterator[ServerGroup]:
    folder = tmp_path_factory.mktemp("transactions-in-cluster")
    with ServerGroup(folder, etcd.url, postgres.new_database(), settings=SETTINGS) as started:
        yield started


def coordinator_of(cluster: ServerGroup, topic: str, name: str) -> int:
    partition = partition_for(name, INTERNAL[topic])
    admin = AdminClient({"bootstrap.servers": cluster.kafka, **CLIENT})
    return int(admin.list_topics(topic, timeout=WAIT_S).topics[topic].partitions[partition].leader)


def within(seconds: float, call: Callable[[], bool]) -> bool:
    """Call in a separate thread, which is abandoned with a `TimeoutError` if it does not return."""
    response: Future[bool] = Future()

    def run() -> None:
        try:
            response.set_result(call())
        except BaseException as error:
            response.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    try:
        return response.result(seconds)
    except TimeoutError:
        raise TimeoutError(f"the client did not come back within {seconds:g} s") from None


def end(producer: Producer, *, commit: bool) -> bool:
    """Commit or abort, and retry while the client says that it may help; return False if it could only be aborted."""
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


class Writer:
    """A transactional producer, replaced by a new one when the client does not return from a call."""

    def __init__(self, cluster: ServerGroup, topic: str) -> None:
        self._cluster = cluster
        self._topic = topic
        consumer = consumer_of(cluster)
        self._group = consumer.consumer_group_metadata()
        consumer.close()
        self._producer = self._begun()

    def write(self, value: bytes, offset: int) -> None:
        """Write to every partition and commit an offset; if a client hangs, the next one aborts."""
        try:
            within(HANGS_S, lambda: self._write(self._producer, value, offset))
        except TimeoutError:
            self._producer = self._begun()
            within(WAIT_S, lambda: self._write(self._producer, value, offset))

    def end(self, *, commit: bool) -> bool:
        """Whether it is committed, as far as the client knows; it always knows in the end."""
        return within(2 * WAIT_S, lambda: end(self._producer, commit=commit))

    def _begun(self) -> Producer:
        producer = Producer({"bootstrap.servers": self._cluster.kafka, **CLIENT, **PRODUCER})
        producer.init_transactions(WAIT_S)
        return producer

    def _write(self, producer: Producer, value: bytes, offset: int) -> bool:
        producer.begin_transaction()
        for partition in range(PARTITIONS):
            producer.produce(self._topic, value, partition=partition)
        position = TopicPartition(self._topic, 0, offset)
        producer.send_offsets_to_transaction([position], self._group, WAIT_S)
        return True


def consumer_of(cluster: ServerGroup) -> Consumer:
    settings = {"bootstrap.servers": cluster.kafka, **CLIENT, "group.id": GROUP}
    settings |= {"isolation.level": "read_committed"}
    return Consumer({**settings, "enable.partition.eof": True, "enable.auto.commit": False})


def read_committed(cluster: ServerGroup, topic: str) -> Counter[tuple[int, bytes]]:
    return Counter((record.partition, record.value or b"") for record in committed_records(cluster.kafka, topic))


@pytest.mark.timeout(300)
def test_no_transaction_is_torn_when_nodes_are_killed(cluster: ServerGroup, topic: str) -> None:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, **CLIENT})
    admin.create_topics([NewTopic(topic, PARTITIONS, 3)], operation_timeout=WAIT_S)[topic].result()
    writer = Writer(cluster, topic)
    committed: list[bytes] = []
    for number in range(16):
        value = str(number).encode()
        # The coordinator is looked up before, so that the kill comes while messages to that node are in flight too.
        victim = None
        if number == 4:
            victim = coordinator_of(cluster, "__transaction_state", TRANSACTIONAL_ID)
        if number == 10:
            victim = coordinator_of(cluster, "__consumer_offsets", GROUP)
        writer.write(value, number)
        if victim is not None:
            cluster[victim].kill()
        if writer.end(commit=number % 4 != 3):
            committed.append(value)
        if number in (7, 13):
            cluster.start()
    cluster.start()

    expected = {(partition, value) for partition in range(PARTITIONS) for value in committed}
    got = read_committed(cluster, topic)
    assert set(got) == expected
    assert set(got.values()) == {1}
    group = consumer_of(cluster)
    (position,) = group.committed([TopicPartition(topic, 0)], timeout=WAIT_S)
    assert position.offset == int(committed[-1])
    group.close()
