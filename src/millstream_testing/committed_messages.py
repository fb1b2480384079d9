"""The committed messages of a topic, read to its end by a Kafka client."""

from __future__ import annotations

import uuid
from typing import Any, NamedTuple

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

POLL_S = 60.0


class Committed(NamedTuple):
    """A message and its position."""

    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes | None], ...]
    timestamp_ms: int


def committed_records(brokers: str, topic: str) -> list[Committed]:
    """Return all messages, in the order of each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    try:
        open_ends = set(consumer.list_topics(topic, timeout=POLL_S).topics[topic].partitions)
        consumer.assign([TopicPartition(topic, number, 0) for number in open_ends])
        records: list[Committed] = []
        while open_ends:
            message = consumer.poll(POLL_S)
            if message is None:
                raise TimeoutError(f"topic {topic} was not read to its end within {POLL_S:g} s of its last message")
            error = message.error()
            if error is None:
                records.append(_record(message))
            elif error.code() == KafkaError._PARTITION_EOF:
                open_ends.discard(message.partition())
            elif not error.retriable():
                raise KafkaException(error)
        return records
    finally:
        consumer.close()


def committed_messages(brokers: str, topic: str) -> list[bytes]:
    """Return the values of all messages, in the order of each partition."""
    return [record.value or b"" for record in committed_records(brokers, topic)]


def _record(message: Any) -> Committed:
    headers = tuple((name, value) for name, value in message.headers() or ())
    return Committed(
        message.partition(), message.offset(), message.key(), message.value(), headers, message.timestamp()[1]
    )
