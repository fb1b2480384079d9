"""Messages that pipelines move from one topic to others: what was published where, and what arrived.

A target has each of its messages once, unchanged, and those with the same key from one partition of the source in
their order. The order between keys, and between partitions of the source, is undefined.
"""

from __future__ import annotations

import json
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, NamedTuple

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.committed_messages import Committed, committed_records

WAIT_S = 300.0
HOUR_MS = 3_600_000
FAULTS_MAX = 20
"""The most faults that are reported; an empty target would report every message."""


class Place(NamedTuple):
    """The position of a message in the source."""

    partition: int
    offset: int


class Source:
    """A topic of JSON objects, each with a unique number under `id`."""

    def __init__(self, brokers: str, topic: str, partitions: int) -> None:
        self.topic = topic
        self.partitions = partitions
        self.published: list[int] = []
        self.messages: dict[Place, Committed] = {}
        self._brokers = brokers
        # Different from the time of writing, and recent enough to be kept.
        self._first_ms = int(time.time() * 1000) - HOUR_MS
        self._places: dict[int, Place] = {}
        make_topic(brokers, topic, partitions)
        self._producer = Producer(
            {"bootstrap.servers": brokers, "log_level": 0, "linger.ms": 5, "enable.idempotence": True}
        )

    def publish(self, documents: Iterable[Mapping[str, Any]], key: Callable[[int], bytes | None]) -> None:
        """Publish more of them to all partitions in turn; wait until they are stored."""
        for document in documents:
            number = document["id"]
            self._producer.produce(
                self.topic,
                json.dumps(document).encode(),
                key=key(number),
                headers=[("id", b"%d" % number)],
                partition=number % self.partitions,
                timestamp=self._first_ms + number,
                on_delivery=_check_delivery,
            )
            self.published.append(number)
            self._producer.poll(0)
        left = self._producer.flush(WAIT_S)
        if left:
            raise TimeoutError(f"{left} messages were not taken within {WAIT_S:g} s")

    def read(self) -> list[str]:
        """Look up the positions of all of them; return what is already wrong."""
        placed = [
            (Place(record.partition, record.offset), record) for record in committed_records(self._brokers, self.topic)
        ]
        self.messages = dict(placed)
        self._places = {self.document(place)["id"]: place for place, _ in placed}
        is_whole = sorted(self.document(place)["id"] for place, _ in placed) == sorted(self.published)
        return [] if is_whole else [f"topic {self.topic} does not have what was published"]

    def document(self, place: Place) -> dict[str, Any]:
        return dict(json.loads(self.messages[place].value or b""))

    def where(self, keeps: Callable[[dict[str, Any]], bool]) -> set[Place]:
        """Return the messages that match a condition."""
        return {place for place in self.messages if keeps(self.document(place))}

    def faults(self, found: Iterable[Committed], expected: Collection[Place]) -> list[str]:
        """Return what is wrong with a target that should have these messages unchanged."""
        placed = [(self.place_of(message), message) for message in found]
        # Only their positions may differ.
        changed = [
            f"{place} is not as it was: {message}"
            for place, message in placed
            if message[2:] != self.messages[place][2:]
        ]
        return [*faults_of(placed, expected), *changed[:FAULTS_MAX]]

    def place_of(self, found: Committed) -> Place:
        """Return the origin of a message whose payload is unchanged."""
        return self._places[json.loads(found.value or b"")["id"]]


def faults_of(found: Iterable[tuple[Place, Committed]], expected: Collection[Place]) -> list[str]:
    """Return what is wrong with a target, in words: what is missing, duplicated or out of order."""
    placed = list(found)
    times = Counter(place for place, _ in placed)
    faults = [f"{place} is missing" for place in sorted(set(expected) - times.keys())][:FAULTS_MAX]
    faults += [f"{place} does not belong there" for place in sorted(times.keys() - set(expected))][:FAULTS_MAX]
    faults += [f"{place} is there {count} times" for place, count in sorted(times.items()) if count > 1][:FAULTS_MAX]
    return faults + _disorder(placed)[:FAULTS_MAX]


def make_topic(brokers: str, topic: str, partitions: int) -> None:
    """Create a topic, and wait until it exists."""
    admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
    admin.create_topics([NewTopic(topic, partitions, 1)])[topic].result(WAIT_S)


def _disorder(placed: Iterable[tuple[Place, Committed]]) -> list[str]:
    """Find keys in several partitions, and messages of a key before one that was published earlier."""
    faults = []
    homes: defaultdict[bytes, set[int]] = defaultdict(set)
    last: dict[tuple[int, bytes], Place] = {}
    for place, message in placed:
        if message.key is None:
            continue
        homes[message.key].add(message.partition)
        before = last.get((place.partition, message.key))
        if before is not None and before >= place:
            faults.append(f"{place} with the key {message.key!r} stands behind {before}")
        last[place.partition, message.key] = place
    return faults + [f"the key {key!r} is in partitions {sorted(of)}" for key, of in homes.items() if len(of) > 1]


def _check_delivery(error: object, _message: object) -> None:
    if error is not None:
        raise RuntimeError(f"a message was not taken: {error}")
