"""The observers of a transaction trial: readers of both isolation levels, and one that fetches offsets."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from aiokafka import AIOKafkaConsumer
from aiokafka import TopicPartition as AioPartition
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition

from millstream_testing.transaction_check import Report, check
from millstream_testing.transaction_events import ConsumerStarted, Event, OffsetObserved, Polled, Positioned
from millstream_testing.transaction_history import TransactionHistory
from millstream_testing.trial_clients import QUIET_RECONNECT, PartitionKey, Topics, TrialFailed

READ_S_MAX = 60.0
_REQUEST_S = 5.0
_POLL_S = 0.4


class TransactionTrialState:
    """The history, written by several threads, and the first error of one of them."""

    def __init__(self) -> None:
        self.history = TransactionHistory()
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.failure: str | None = None

    def record(self, events: Iterable[Event]) -> None:
        with self.lock:
            for event in events:
                self.history.add(event)

    def fail(self, reason: str) -> None:
        """Report that an observer failed; the first reason is kept."""
        if self.failure is None:
            self.failure = reason

    def check(self, written: Iterable[Event], *, complete: Sequence[str] = ()) -> Report:
        """Add what programs have recorded meanwhile, and check the history."""
        with self.lock:
            for event in written:
                self.history.add(event)
            return check(self.history, complete=complete)


class Observer(threading.Thread):
    """Reads all partitions from their start while the trial runs, and tracks its position."""

    def __init__(
        self, name: str, state: TransactionTrialState, address: str, topics: Topics, *, committed: bool
    ) -> None:
        super().__init__(name=name, daemon=True)
        self._state = state
        self._partition_keys = partitions_of(topics)
        self._client = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": name,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                # Nothing is ever deleted here, so a missing offset is an error.
                "auto.offset.reset": "error",
                **QUIET_RECONNECT,
            }
        )
        self.end_reached: dict[PartitionKey, int] = {}
        """By partition, the last end offset that it reached."""
        state.record(
            [
                ConsumerStarted(name, committed),
                *(Positioned(name, *partition_key, 0) for partition_key in self._partition_keys),
            ]
        )

    def run(self) -> None:
        """Read until the trial ends."""
        self._client.assign([TopicPartition(*partition_key, 0) for partition_key in self._partition_keys])
        try:
            while not self._state.stopping.is_set():
                self._record_polls(self._client.consume(1000, 0.2))
        except (KafkaException, ValueError) as error:
            self._state.fail(f"{self.name}: {error}")
        self._client.close()

    def _record_polls(self, messages: Sequence[Message]) -> None:
        at = time.monotonic_ns()
        polled = []
        for message in messages:
            error, partition_key = message.error(), (message.topic() or "", message.partition() or 0)
            if error is None:
                polled.append(polled_of(self.name, partition_key, message.offset() or 0, message.value() or b"", at))
            elif error.code() == KafkaError._PARTITION_EOF:
                self.end_reached[partition_key] = message.offset() or 0
            elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._state.fail(f"{self.name}: {partition_key}: {error}")
        self._state.record(polled)


class OffsetObserver(threading.Thread):
    """Polls the committed offsets of groups, without those of open transactions."""

    def __init__(self, state: TransactionTrialState, address: str, groups: Sequence[str], source: PartitionKey) -> None:
        super().__init__(name="offsets", daemon=True)
        self._state = state
        self._address = address
        self._groups = groups
        self._topic, self._partitions = source
        self.committed: dict[tuple[str, int], int] = {}
        """By group and partition, the last response."""
        self.rounds = 0
        """The number of completed rounds of requests."""

    def run(self) -> None:
        """Poll until the trial ends."""
        clients: dict[str, Consumer] = {}
        while not self._state.stopping.wait(_POLL_S):
            responded = [self._fetch_offsets(clients, group) for group in self._groups]
            self.rounds += all(responded)

    def _fetch_offsets(self, clients: dict[str, Consumer], group: str) -> bool:
        client = clients.get(group)
        if client is None:
            settings = {"bootstrap.servers": self._address, "group.id": group, "isolation.level": "read_committed"}
            client = clients[group] = Consumer({**settings, **QUIET_RECONNECT})
        try:
            found = client.committed([TopicPartition(self._topic, at) for at in range(self._partitions)], _REQUEST_S)
        except KafkaException:
            # A client that only fetches offsets does not look for a moved coordinator; a new one does.
            clients.pop(group).close()
            return False
        at = time.monotonic_ns()
        known = [one for one in found if one.error is None and one.offset >= 0]
        self._state.record(OffsetObserved(self.name, group, one.topic, one.partition, one.offset, at) for one in known)
        self.committed.update({(group, one.partition): one.offset for one in known})
        return True


async def read_with_aiokafka(name: str, state: TransactionTrialState, address: str, topics: Topics) -> None:
    """Read all committed messages from start to end, with a client that filters aborted ones itself."""
    partitions = {AioPartition(*partition_key): partition_key for partition_key in partitions_of(topics)}
    consumer = AIOKafkaConsumer(
        bootstrap_servers=address, isolation_level="read_committed", auto_offset_reset="earliest", group_id=None
    )
    state.record(
        [
            ConsumerStarted(name, committed=True),
            *(Positioned(name, *partition_key, 0) for partition_key in partitions.values()),
        ]
    )
    consumer.assign(list(partitions))
    async with asyncio.timeout(READ_S_MAX), consumer:
        ends: Mapping[Any, int] = await consumer.end_offsets(list(partitions))
        while [partition for partition in partitions if await consumer.position(partition) < ends[partition]]:
            polled = await consumer.getmany(timeout_ms=500, max_records=5000)
            at = time.monotonic_ns()
            for one, records in polled.items():
                partition_key = partitions[one]
                state.record(
                    polled_of(name, partition_key, record.offset, record.value or b"", at) for record in records
                )


def polled_of(reader: str, partition_key: PartitionKey, offset: int, value: bytes, at: int) -> Polled:
    """Return what a reader received, decoded from the value; raise `ValueError` if it cannot be decoded."""
    producer, number, index, _ = value.split(b" ", 3)
    return Polled(reader, *partition_key, offset, producer.decode(), int(number), int(index), at)


def partitions_of(topics: Topics) -> list[PartitionKey]:
    return [(topic, index) for topic, partitions in topics.items() for index in range(partitions)]


def ends_of(address: str, topics: Topics, *, committed: bool) -> dict[PartitionKey, int]:
    """Return the ends of all partitions: the high watermarks, or the last stable offsets."""
    deadline = time.monotonic() + READ_S_MAX
    while True:
        try:
            return _fetch_ends(address, partitions_of(topics), "read_committed" if committed else "read_uncommitted")
        except KafkaException as error:
            # Leaders may still be changing; the client fails at once on some of these errors.
            if time.monotonic() > deadline:
                raise TrialFailed(f"the ends of the partitions are unknown: {error}") from error
        time.sleep(_POLL_S)


def _fetch_ends(address: str, partition_keys: Iterable[PartitionKey], isolation: str) -> dict[PartitionKey, int]:
    settings = {"bootstrap.servers": address, "group.id": "ends", "isolation.level": isolation}
    client = Consumer({**settings, **QUIET_RECONNECT})
    try:
        return {
            partition_key: int(client.get_watermark_offsets(TopicPartition(*partition_key), timeout=_REQUEST_S)[1])
            for partition_key in partition_keys
        }
    finally:
        client.close()
