"""What is committed in a topic, read to its end by a client of Kafka."""

from __future__ import annotations

import uuid

from confluent_kafka import Consumer, TopicPartition

POLL_S = 60.0


def committed_messages(brokers: str, topic: str) -> list[bytes]:
    """The values of all messages, in the order of each partition."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": uuid.uuid4().hex,
            "isolation.level": "read_committed",
            "enable.partition.eof": True,
            "log_level": 0,
        }
    )
    found = consumer.list_topics(topic, timeout=POLL_S).topics[topic]
    consumer.assign([TopicPartition(topic, number, 0) for number in found.partitions])
    values: list[bytes] = []
    open_ends = len(found.partitions)
    while open_ends:
        message = consumer.poll(POLL_S)
        if message is None:
            raise TimeoutError(f"topic {topic} was not read to its end within {POLL_S:g} s of its last message")
        if message.error():
            open_ends -= 1
        else:
            values.append(message.value() or b"")
    consumer.close()
    return values
