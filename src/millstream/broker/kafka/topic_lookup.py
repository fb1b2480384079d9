"""The topic that a request names, or the error that says it is not there."""

from __future__ import annotations

from uuid import UUID

from millstream.broker.cluster.topics import Topics
from millstream.core.errors import UnknownTopic, UnknownTopicId
from millstream.core.topic import Topic


def topic_named(topics: Topics, name: str) -> Topic:
    """Find a topic by its name."""
    topic = topics.get(name)
    if topic is None:
        raise UnknownTopic(f"topic {name!r} does not exist")
    return topic


def topic_with_id(topics: Topics, topic_id: UUID) -> Topic:
    """Find a topic by its id."""
    topic = topics.by_id(topic_id)
    if topic is None:
        raise UnknownTopicId(f"no topic has the id {topic_id}")
    return topic
