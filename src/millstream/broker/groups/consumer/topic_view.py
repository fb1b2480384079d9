"""The topics that groups see, and a version that changes with them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import Protocol
from uuid import UUID

from millstream.core.topic import Topic

Partitions = Mapping[UUID, int]
"""The number of partitions of each topic."""


class TopicView(Protocol):
    """The topics of the cluster."""

    @property
    def version(self) -> int:
        """A number that changes whenever a topic is created, grows or is deleted."""

    def get(self, name: str) -> Topic | None:
        """Return the topic with this name, if it exists."""

    def by_id(self, topic_id: UUID) -> Topic | None:
        """Return the topic with this id, if it exists."""

    def all(self) -> Sequence[Topic]:
        """Return every topic."""


class NoTopics:
    """A cluster without topics."""

    version = 0

    def get(self, name: str) -> Topic | None:
        return None

    def by_id(self, topic_id: UUID) -> Topic | None:
        return None

    def all(self) -> Sequence[Topic]:
        """Return none."""
        return ()


def existing(view: TopicView, names: Iterable[str]) -> list[Topic]:
    return [topic for name in names if (topic := view.get(name)) is not None]


def partitions_of(topics: Iterable[Topic]) -> Partitions:
    """Return the number of partitions of each topic."""
    return {topic.topic_id: topic.partitions for topic in topics}


def metadata_hash(view: TopicView, names: Iterable[str]) -> int:
    """Hash everything about these topics that an assignment depends on, to 64 bits; 0 if none of them exists.

    Kafka stores such a hash in the same field, and only the coordinator reads it.
    """
    topics = sorted(existing(view, set(names)), key=lambda topic: topic.name)
    if not topics:
        return 0
    digest = blake2b(digest_size=8)
    for topic in topics:
        digest.update(topic.topic_id.bytes)
        digest.update(topic.partitions.to_bytes(4, "big"))
    return int.from_bytes(digest.digest(), "big", signed=True)
