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
from millstream_testing.trial_clients import QUIET_RECONNECT, Place, Topics, TrialFailed

READ_S_MAX = 60.0
_ASK_S = 5.0
_ASK_EVERY_S = 0.4


class TransactionNotes:
    """The history, written by several threads, and the first error of one of them."""

    def __init__(self) -> None:
        self.history = TransactionHistory()
        self.lock = threading.Lock()
        self.stopping = threading.Event()
        self.failure: str | None = None

    def note(self, events: Iterable[Event]) -> None:
        """Record events."""
        with self.lock:
            for event in events:
                self.history.note(event)

    def fail(self, reason: str) -> None:
        """Report that an observer failed; the first reason counts."""
        if self.failure is None:
            self.failure = reason

    def check(self, written: Iterable[Event], *, complete: Sequence[str] = ()) -> Report:
        """Check the history with what programs have recorded meanwhile, which is ahead of what was read."""
        with self.lock:
            for event in written:
                self.history.note(event)
            return check(self.history, complete=complete)


class Observer(threading.Thread):
    """Reads all partitions from their start while the trial runs, and tracks its position."""

    def __init__(self, name: str, notes: TransactionNotes, address: str, topics: Topics, *, committed: bool) -> None:
        super().__init__(name=name, daemon=True)
        self._notes = notes
        self._places = storage_of(topics)
        self._client = Consumer(
            {
                "bootstrap.servers": address,
                "group.id": name,
                "isolation.level": "read_committed" if committed else "read_uncommitted",
                "enable.auto.commit": False,
                "enable.partition.eof": True,
                # Nothing is ever deleted here, so a missing offset is a fault.
                "auto.offset.reset": "error",
                **QUIET_RECONNECT,
            }
        )
        self.reached: dict[Place, int] = {}
        """By partition, the last end that it reached."""
        notes.note([ConsumerStarted(name, committed), *(Positioned(name, *place, 0) for place in self._places)])

    def run(self) -> None:
        """Read until the trial ends."""
        self._client.assign([TopicPartition(*place, 0) for place in self._places])
        try:
            while not self._notes.stopping.is_set():
                self._take(self._client.consume(1000, 0.2))
        except (KafkaException, ValueError) as error:
            self._notes.fail(f"{self.name}: {error}")
        self._client.close()

    def _take(self, messages: Sequence[Message]) -> None:
        at = time.monotonic_ns()
        polled = []
        for message in messages:
            error, place = message.error(), (message.topic() or "", message.partition() or 0)
            if error is None:
                polled.append(polled_of(self.name, place, message.offset() or 0, message.value() or b"", at))
            elif error.code() == KafkaError._PARTITION_EOF:
                self.reached[place] = message.offset() or 0
            elif error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                self._notes.fail(f"{self.name}: {place}: {error}")
        self._notes.note(polled)


class OffsetObserver(threading.Thread):
    """Polls the committed offsets of groups, and takes only stable ones."""

    def __init__(self, notes: TransactionNotes, address: str, groups: Sequence[str], source: Place) -> None:
        super().__init__(name="offsets", daemon=True)
        self._notes = notes
        self._address = address
        self._groups = groups
        self._topic, self._partitions = source
        self.observed_offsets: dict[tuple[str, int], int] = {}
        """By group and partition, the last response."""
        self.end_requested = 0
        """The number of completed rounds; one that started after some moment covers that moment."""

    def run(self) -> None:
        """Poll until the trial ends."""
        clients: dict[str, Consumer] = {}
        while not self._notes.stopping.wait(_ASK_EVERY_S):
            responded = [self._ask(clients, group) for group in self._groups]
            self.end_requested += all(responded)

    def _ask(self, clients: dict[str, Consumer], group: str) -> bool:
        client = clients.get(group)
        if client is None:
            settings = {"bootstrap.servers": self._address, "group.id": group, "isolation.level": "read_committed"}
            client = clients[group] = Consumer({**settings, **QUIET_RECONNECT})
        try:
            found = client.committed([TopicPartition(self._topic, at) for at in range(self._partitions)], _ASK_S)
        except KafkaException:
            # A client that only polls does not look for a coordinator that has moved; a new one does.
            clients.pop(group).close()
            return False
        at = time.monotonic_ns()
        known = [one for one in found if one.error is None and one.offset >= 0]
        self._notes.note(OffsetObserved(self.name, group, one.topic, one.partition, one.offset, at) for one in known)
        self.observed_offsets.update({(group, one.partition): one.offset for one in known})
        return True


async def read_with_aiokafka(name: str, notes: TransactionNotes, address: str, topics: Topics) -> None:
    """Read everything that is committed from start to end, with a client that filters it itself."""
    partitions = {AioPartition(*place): place for place in storage_of(topics)}
    consumer = AIOKafkaConsumer(
        bootstrap_servers=address, isolation_level="read_committed", auto_offset_reset="earliest", group_id=None
    )
    notes.note([ConsumerStarted(name, committed=True), *(Positioned(name, *place, 0) for place in partitions.values())])
    consumer.assign(list(partitions))
    async with asyncio.timeout(READ_S_MAX), consumer:
        ends: Mapping[Any, int] = await consumer.end_offsets(list(partitions))
        while [one for one in partitions if await consumer.position(one) < ends[one]]:
            polled = await consumer.getmany(timeout_ms=500, max_records=5000)
            at = time.monotonic_ns()
            for one, records in polled.items():
                place = partitions[one]
                notes.note(polled_of(name, place, record.offset, record.value or b"", at) for record in records)


def polled_of(reader: str, place: Place, offset: int, value: bytes, at: int) -> Polled:
    """Return what a reader received, decoded from the value; raise `ValueError` if it cannot be decoded."""
    producer, number, index, _ = value.split(b" ", 3)
    return Polled(reader, *place, offset, producer.decode(), int(number), int(index), at)


def storage_of(topics: Topics) -> list[Place]:
    """Return every partition of some topics."""
    return [(topic, index) for topic, partitions in topics.items() for index in range(partitions)]


def ends_of(address: str, topics: Topics, *, committed: bool) -> dict[Place, int]:
    """Return the ends of all partitions: the high watermarks, or the last stable offsets."""
    deadline = time.monotonic() + READ_S_MAX
    while True:
        try:
            return _ask_ends(address, storage_of(topics), "read_committed" if committed else "read_uncommitted")
        except KafkaException as error:
            # Leaders may still be changing; the client gives up at once on some of that.
            if time.monotonic() > deadline:
                raise TrialFailed(f"the ends of the partitions are unknown: {error}") from error
        time.sleep(_ASK_EVERY_S)


def _ask_ends(address: str, places: Iterable[Place], isolation: str) -> dict[Place, int]:
    settings = {"bootstrap.servers": address, "group.id": "ends", "isolation.level": isolation}
    client = Consumer({**settings, **QUIET_RECONNECT})
    try:
        return {place: int(client.get_watermark_offsets(TopicPartition(*place), timeout=_ASK_S)[1]) for place in places}
    finally:
        client.close()
