"""Messages of numbers: an idempotent producer under load, and a group that reads them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Final

from confluent_kafka import Consumer, KafkaError, Message, Producer

WAIT_S: Final = 60.0


class ProducerLoad:
    """An idempotent producer that records acknowledged messages, and every error."""

    def __init__(self, brokers: str, topic: str) -> None:
        self._topic = topic
        self.sent = 0
        self.acknowledged: list[bytes] = []
        self.errors: list[KafkaError] = []
        self._producer = Producer(
            {
                "bootstrap.servers": brokers,
                "log_level": 0,
                "enable.idempotence": True,
                "linger.ms": 2,
                "message.timeout.ms": int(WAIT_S * 1000),
            }
        )

    def run(self, enough: Callable[[], bool]) -> None:
        """Produce to all partitions until stopped."""
        while not enough():
            value = b"%d" % self.sent
            self._producer.produce(self._topic, value, key=value, on_delivery=self._delivered)
            self.sent += 1
            self._producer.poll(0.002)

    def more(self, number: int) -> None:
        """Produce until so many more are acknowledged."""
        goal = len(self.acknowledged) + number
        deadline = time.monotonic() + WAIT_S
        self.run(lambda: len(self.acknowledged) >= goal or time.monotonic() > deadline)
        assert len(self.acknowledged) >= goal, self.errors

    def finish(self) -> None:
        assert self._producer.flush(WAIT_S) == 0

    def _delivered(self, error: KafkaError | None, message: Message) -> None:
        if error is not None:
            self.errors.append(error)
        else:
            self.acknowledged.append(message.value() or b"")


def send_numbers(brokers: str, topic: str, numbers: Iterable[int], *, wait_s: float = WAIT_S) -> None:
    producer = Producer({"bootstrap.servers": brokers, "enable.idempotence": True})
    for number in numbers:
        producer.produce(topic, b"%d" % number)
    assert producer.flush(wait_s) == 0


def read_numbers(brokers: str, topic: str, group: str, count: int, *, wait_s: float = WAIT_S) -> list[int]:
    """Read so many numbers as a group, and commit; return them in order."""
    consumer = Consumer({"bootstrap.servers": brokers, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe([topic])
    found: list[int] = []
    deadline = time.monotonic() + wait_s
    while len(found) < count and time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            found.append(int(message.value() or b""))
    consumer.commit(asynchronous=False)
    consumer.close()
    return sorted(found)
