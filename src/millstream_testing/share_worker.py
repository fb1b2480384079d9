"""A trial worker with Kafka's share consumer, with implicit or explicit acknowledgement."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from random import Random
from typing import Any, Final
from zlib import crc32

from confluent_kafka import AcknowledgeType, KafkaError, KafkaException, Message, ShareConsumer, TopicPartition

from millstream.core.subscription import Verb
from millstream_testing.subscription_history import JournalFile, Leased, WorkerJournal, now_ms
from millstream_testing.subscription_worker import BATCH_MAX, POISON, Task

POLL_S: Final = 0.5
COMMIT_S: Final = 8.0
PAUSE_S: Final = 0.2
IN_FLIGHT_MS: Final = 5_000
"""With healthy nodes, a response that arrived after a poll was leased at most this long before the poll ended."""

BEHAVIOURS: Final = {"accept": 60, "release": 8, "reject": 4, "forget": 2, "leave": 3}
WELL_BEHAVED: Final = {"accept": 1}
_VERBS: Final = {"accept": Verb.ACCEPT, "release": Verb.RELEASE, "reject": Verb.REJECT}
_TYPES: Final = {
    Verb.ACCEPT: AcknowledgeType.ACCEPT,
    Verb.RELEASE: AcknowledgeType.RELEASE,
    Verb.REJECT: AcknowledgeType.REJECT,
}


class ShareWorker:
    """Runs one share consumer after another in its own thread."""

    def __init__(self, task: Task, journal_file: JournalFile, subscription: str, stopping: threading.Event) -> None:
        self._task = task
        self._journal_file = journal_file
        self._subscription = subscription
        self._stopping = stopping
        self._random = Random(f"{task.seed}/{subscription}")
        self._behaviours = WELL_BEHAVED if task.is_well_behaved else BEHAVIOURS
        self._is_explicit = task.client_kind == "explicit"
        self._incarnations = 0
        self._journal = WorkerJournal(journal_file, subscription, "")
        # The numbers of settlements without a response, by partition and offset; None when a message was acknowledged
        # twice meanwhile, because the client does not say which of them a response belongs to.
        self._open: dict[tuple[int, int], int | None] = {}
        self._empty_ms = 0

    def run(self) -> None:
        while not self._stopping.is_set():
            self._incarnations += 1
            self._journal = WorkerJournal(
                self._journal_file, self._subscription, f"{self._task.producer}.{self._incarnations}"
            )
            self._open = {}
            self._empty_ms = now_ms()
            consumer = self._consumer()
            try:
                self._work(consumer)
            except KafkaException:
                time.sleep(PAUSE_S)
            finally:
                # Its messages go to others while it closes.
                self._journal.worker_left()
                with suppress(KafkaException):
                    consumer.close()

    def _consumer(self) -> ShareConsumer:
        self._wanted = self._random.choice((1, 5, 20))
        settings: dict[str, Any] = {
            "bootstrap.servers": self._task.brokers,
            "group.id": self._subscription,
            "share.acknowledgement.mode": "explicit" if self._is_explicit else "implicit",
            "max.poll.records": self._wanted,
            "socket.timeout.ms": 8_000,
            "reconnect.backoff.ms": 20,
            "reconnect.backoff.max.ms": 200,
            "log_level": 0,
        }
        if self._task.nodes == 1:
            # Otherwise the client would forget the only broker when none responds.
            settings["metadata.recovery.strategy"] = "none"
        consumer = ShareConsumer(settings)
        consumer.set_acknowledgement_commit_callback(self._acknowledged)
        consumer.subscribe([self._task.topic])
        return consumer

    def _work(self, consumer: ShareConsumer) -> None:
        held: list[Message] = []
        while not self._stopping.is_set():
            if not self._is_explicit and held:
                # The next poll accepts what the previous one returned.
                self._record_settlement(Verb.ACCEPT, held)
            held = self._poll(consumer)
            if not held:
                continue
            if self._draw("leave"):
                return
            if self._draw("forget"):
                self._stopping.wait(self._task.lease_ms / 1000 * self._random.uniform(0.5, 1.2))
            if self._is_explicit:
                self._acknowledge(consumer, held)
            elif self._random.random() < 0.5:
                self._record_settlement(Verb.ACCEPT, held)
                consumer.commit_sync(COMMIT_S)
                held = []

    def _poll(self, consumer: ShareConsumer) -> list[Message]:
        # Every node may be asked for as many, and returns whole batches.
        self._journal.receive_sent((self._wanted + BATCH_MAX) * self._task.nodes)
        messages = [message for message in consumer.poll(POLL_S) if message.error() is None]
        self._journal.receive_completed(self._empty_ms, [_leased(message) for message in messages])
        if not messages:
            self._empty_ms = now_ms() - IN_FLIGHT_MS
        return messages

    def _acknowledge(self, consumer: ShareConsumer, held: list[Message]) -> None:
        verbs: dict[Verb, list[Message]] = {}
        for message in held:
            weights = {behaviour: weight for behaviour, weight in self._behaviours.items() if behaviour in _VERBS}
            (behaviour,) = self._random.choices(list(weights), list(weights.values()))
            if message.key() == POISON:
                behaviour = self._random.choice(("release", "reject"))
            verbs.setdefault(_VERBS[behaviour], []).append(message)
        for verb, messages in verbs.items():
            self._record_settlement(verb, messages)
            for message in messages:
                consumer.acknowledge(message, _TYPES[verb])
        # Otherwise the next poll sends them.
        if self._random.random() < 0.5:
            consumer.commit_sync(COMMIT_S)

    def _record_settlement(self, verb: Verb, messages: list[Message]) -> None:
        positions = [_position(message) for message in messages]
        number = self._journal.settle_sent(verb, positions)
        for partition, offset, _ in positions:
            self._open[partition, offset] = None if (partition, offset) in self._open else number

    def _acknowledged(self, acknowledged: dict[TopicPartition, set[int]], error: KafkaException | None) -> None:
        """Record what the client reports about acknowledgements."""
        refused = error is not None and error.args[0].code() == KafkaError.INVALID_RECORD_STATE
        by_number: dict[int, list[tuple[int, int]]] = {}
        for topic_partition, offsets in acknowledged.items():
            for offset in offsets:
                position = topic_partition.partition, offset
                number = self._open.pop(position, None)
                # After other errors it is unknown whether the acknowledgement reached the broker.
                if number is not None and (error is None or refused):
                    by_number.setdefault(number, []).append(position)
        for number, positions in by_number.items():
            self._journal.settle_completed(number, positions, taken=not refused)

    def _draw(self, behaviour: str) -> bool:
        return self._random.random() < self._behaviours.get(behaviour, 0) / sum(self._behaviours.values())


def _position(message: Message) -> tuple[int, int, int]:
    return message.partition() or 0, message.offset() or 0, message.delivery_count() or 0


def _leased(message: Message) -> Leased:
    return Leased(*_position(message), 0, crc32(message.value() or b""))
