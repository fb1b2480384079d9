"""What became of a message in every subscription: asked of the broker that leads its partition."""

from __future__ import annotations

from typing import Any, NamedTuple
from uuid import UUID

import msgspec

from millstream.client.admin.messages import ReadRecord, find_message, read_record, utc
from millstream.client.admin.topics import find_topic
from millstream.core.errors import InvalidRequest, NotFound, TopicNotAuthorized, UnknownTopic
from millstream.core.message_id import message_id
from millstream.protocol.private.message_trace import message_trace
from millstream.protocol.wire.client import Client


class Position(NamedTuple):
    """The position of a message; the topic is a name or an id."""

    topic: str
    partition: int
    offset: int


def parse_position(text: str) -> Position:
    """Parse `topic/partition/offset`; the topic may be an id, so that message ids made of positions are positions."""
    topic, _, rest = text.partition("/")
    partition, _, offset = rest.partition("/")
    if not topic or not _is_number(partition) or not _is_number(offset):
        raise InvalidRequest(f"a position is TOPIC/PARTITION/OFFSET, as in orders/0/4711, not {text!r}")
    return Position(topic, int(partition), int(offset))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


async def trace_message(client: Client, position: str) -> dict[str, Any]:
    """Return the life of the message at a position, as programs see it."""
    parsed = parse_position(position)
    return await trace_at(client, parsed._replace(topic=await _topic_name(client, parsed.topic)))


async def trace_at(
    client: Client, at: Position, *, reading: Client | None = None, read_record: ReadRecord = read_record
) -> dict[str, Any]:
    """Return the life of the message at a position of a topic; messages are read through `reading`."""
    topic = await find_topic(client, at.topic)
    if at.partition not in topic.partitions:
        raise UnknownTopic(f"topic {topic.name!r} has no partition {at.partition}; the last is {max(topic.partitions)}")
    trace = await message_trace(client, topic.name, at.partition, at.offset)
    published_ms: int | None = None
    not_in_log: str | None = None
    found_id = f"{topic.topic_id}/{at.partition}/{at.offset}"
    try:
        stored = await find_message(reading or client, topic, at.partition, at.offset, read_record=read_record)
        published_ms = stored.record.timestamp_ms
        found_id = message_id(topic.topic_id, at.partition, at.offset, stored.record.headers)
    except (NotFound, TopicNotAuthorized) as error:
        not_in_log = str(error)
    return {
        "topic": topic.name,
        "topic_id": str(topic.topic_id),
        "partition": at.partition,
        "offset": at.offset,
        "id": found_id,
        "published": None if published_ms is None else utc(published_ms),
        "published_ms": published_ms,
        "not_in_log": not_in_log,
        "subscriptions": [msgspec.to_builtins(one) for one in trace.subscriptions],
    }


async def _topic_name(client: Client, topic: str) -> str:
    """Return the name of a topic that is given by name or by id."""
    try:
        wanted = UUID(topic)
    except ValueError:
        return topic
    for found in (await client.metadata()).topics.values():
        if found.topic_id == wanted:
            return found.name
    return topic
