"""A cluster on an etcd of three members, which are stopped one after another without client errors."""

from __future__ import annotations

import time
from collections import Counter
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.etcd_group import EtcdGroup
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server_group import ServerGroup

WAIT_S = 60.0


class Load:
    """An idempotent producer that records acknowledged messages, and every error."""

    def __init__(self, brokers: str, topic: str) -> None:
        self._topic = topic
        self._sent = 0
        self.acknowledged: list[bytes] = []
        self.errors: list[KafkaError] = []
        settings = {"bootstrap.servers": brokers, "log_level": 0, "enable.idempotence": True, "linger.ms": 2}
        self._producer = Producer(settings)

    def more(self, number: int) -> None:
        """Produce until so many more are acknowledged."""
        goal = len(self.acknowledged) + number
        deadline = time.monotonic() + WAIT_S
        while len(self.acknowledged) < goal:
            assert time.monotonic() < deadline, self.errors
            self._producer.produce(self._topic, b"%d" % self._sent, on_delivery=self._delivered)
            self._sent += 1
            self._producer.poll(0.002)

    def finish(self) -> None:
        assert self._producer.flush(WAIT_S) == 0

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.acknowledged.append(message.value() or b"")


def read_all(brokers: str, topic: str, number: int) -> list[bytes]:
    consumer = Consumer({"bootstrap.servers": brokers, "log_level": 0, "group.id": "unused"})
    consumer.assign([TopicPartition(topic, partition, 0) for partition in range(3)])
    found: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    while len(found) < number:
        assert time.monotonic() < deadline
        found += [one.value() or b"" for one in consumer.consume(1000, 0.5) if one.error() is None]
    consumer.close()
    return found


@pytest.mark.trial
def test_stopping_a_member_of_etcd_causes_no_client_errors(tmp_path: Path, postgres: PostgresServer) -> None:
    with EtcdGroup() as etcd, ServerGroup(tmp_path, etcd.url, postgres.new_database()) as cluster:
        admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})

        def create(topic: str) -> None:
            admin.create_topics([NewTopic(topic, 3, 3)], operation_timeout=WAIT_S)[topic].result()

        create("orders")
        load = Load(cluster.kafka, "orders")
        load.more(100)
        # First the member that all nodes use, then the leader, if that is another one.
        for is_first in (True, False):
            stopped = etcd.members[0] if is_first else etcd.leader()
            stopped.stop()
            load.more(300)
            # Operations that need etcd work too.
            create(f"without-{stopped.name}-{len(load.acknowledged)}")
            load.more(100)
            stopped.start()
            stopped.wait_until_healthy()
        load.finish()
        assert load.errors == []
        assert Counter(read_all(cluster.kafka, "orders", len(load.acknowledged))) == Counter(load.acknowledged)
