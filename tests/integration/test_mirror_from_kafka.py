"""Migration from Apache Kafka to Millstream: records, transactions, compaction, headers, codecs and offsets."""

from __future__ import annotations

import time
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.command import CommandLine
from millstream_testing.server import Server

pytestmark = [pytest.mark.trial, pytest.mark.timeout(900)]

PATIENCE_S = 60.0


def read_all(brokers: str, topic: str, count: int) -> list[tuple[Any, ...]]:
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"all-{time.monotonic_ns()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": "read_committed",
        }
    )
    records: list[tuple[Any, ...]] = []
    try:
        consumer.subscribe([topic])
        deadline = time.monotonic() + PATIENCE_S
        while len(records) < count and time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is not None:
                assert message.error() is None
                records.append(
                    (
                        message.partition(),
                        message.offset(),
                        message.key(),
                        message.value(),
                        message.headers(),
                        message.timestamp(),
                    )
                )
    finally:
        consumer.close()
    assert len(records) >= count, f"{len(records)} of {count}"
    return sorted(records, key=lambda record: record[:2])


def fill(peer: Server) -> int:
    """Publish to `moved` and `moved-kept` with every codec and in transactions; return what readers of `moved` see."""
    admin = AdminClient({"bootstrap.servers": peer.kafka})
    topics = [NewTopic("moved", 3, 1), NewTopic("moved-kept", 1, 1, config={"cleanup.policy": "compact"})]
    for creating in admin.create_topics(topics).values():
        creating.result(PATIENCE_S)
    total = 0
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        producer = Producer({"bootstrap.servers": peer.kafka, "compression.type": codec, "linger.ms": 20})
        for number in range(200):
            producer.produce("moved", f"{codec}-{number}", key=str(number), headers={"codec": codec})
            total += 1
        assert producer.flush(PATIENCE_S) == 0
    for commit in (True, False, True):
        producer = Producer({"bootstrap.servers": peer.kafka, "transactional.id": "mover"})
        producer.init_transactions(PATIENCE_S)
        producer.begin_transaction()
        for number in range(50):
            producer.produce("moved", f"transaction-{commit}-{number}", key=str(number))
            producer.produce("moved-kept", f"{number}", key=f"{number % 5}")
        producer.flush(PATIENCE_S)
        (producer.commit_transaction if commit else producer.abort_transaction)(PATIENCE_S)
        total += 50 if commit else 0
    return total


def test_migrated_consumers_miss_and_repeat_nothing(peer: Server, server: Server) -> None:
    millstream = CommandLine(server.kafka)
    total = fill(peer)
    settings = {"group.id": "movers", "auto.offset.reset": "earliest", "enable.auto.commit": False}
    consumer = Consumer({"bootstrap.servers": peer.kafka, "isolation.level": "read_committed", **settings})
    consumer.subscribe(["moved"])
    before: set[tuple[Any, Any]] = set()

    def consume(count: int) -> None:
        while len(before) < count:
            message = consumer.poll(PATIENCE_S)
            assert message is not None
            assert message.error() is None
            before.add((message.partition(), message.offset()))
            consumer.commit(message=message, asynchronous=False)

    consume(total // 4)
    made = millstream("mirror", "create", "kafka", "--from", peer.kafka, "--topics", "moved.*")
    assert made.code == 0, made.err
    deadline = time.monotonic() + PATIENCE_S
    while millstream("mirror", "describe", "kafka", "--json").document["lag"] != 0:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    # Offsets committed just before the cutover are transferred by the cutover itself.
    consume(total // 2)
    consumer.close()
    cut = millstream("mirror", "cutover", "kafka", "--idle", "0", "--json")
    assert cut.code == 0, cut.err
    assert cut.document["complete"]
    assert read_all(server.kafka, "moved", total) == read_all(peer.kafka, "moved", total)
    latest = {record[2]: record[3] for record in read_all(peer.kafka, "moved-kept", 100)}
    assert {record[2]: record[3] for record in read_all(server.kafka, "moved-kept", 100)} == latest

    consumer = Consumer({"bootstrap.servers": server.kafka, "isolation.level": "read_committed", **settings})
    consumer.subscribe(["moved"])
    after: set[tuple[Any, Any]] = set()
    deadline = time.monotonic() + PATIENCE_S
    while len(after) < total - len(before) and time.monotonic() < deadline:
        message = consumer.poll(1.0)
        if message is not None:
            assert message.error() is None
            after.add((message.partition(), message.offset()))
    committed = consumer.committed([TopicPartition("moved", number) for number in range(3)], PATIENCE_S)
    consumer.close()
    assert len(before) + len(after) == total, committed
    assert not before & after

    producer = Producer({"bootstrap.servers": server.kafka, "enable.idempotence": True})
    refused: list[Any] = []
    producer.produce("moved", "mine", on_delivery=lambda error, _: refused.append(error) if error else None)
    assert producer.flush(PATIENCE_S) == 0
    assert not refused
