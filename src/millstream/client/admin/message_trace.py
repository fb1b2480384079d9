"""The history of a message in every subscription, from the broker that leads its partition."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, NamedTuple
from uuid import UUID

import msgspec

from millstream.client.admin.cluster_status import find_lost
from millstream.client.admin.messages import ReadRecord, find_message, read_record, utc
from millstream.client.admin.position import LATEST_TIMESTAMP
from millstream.client.admin.position import parse_position as position_of
from millstream.client.admin.topics import find_topic
from millstream.core.errors import (
    CorruptBatch,
    InvalidRequest,
    NotFound,
    OffsetOutOfRange,
    TopicNotAuthorized,
    UnknownTopic,
)
from millstream.core.ids import message_id
from millstream.protocol.private.subscriptions import message_trace
from millstream.protocol.records.batch import BatchHeader, Buffer, iterate_whole_headers
from millstream.protocol.records.record import decode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata


class Position(NamedTuple):
    """The position of a message; the topic is a name or an id."""

    topic: str
    partition: int
    offset: int


def parse_position(text: str) -> Position:
    """Parse `topic/partition/offset`, or with `@` before the offset, as shown; the topic may be an id."""
    topic, _, rest = text.partition("/")
    partition, _, offset = rest.replace("@", "/").partition("/")
    if not topic or not _is_number(partition) or not _is_number(offset):
        raise InvalidRequest(f"a position must be TOPIC/PARTITION/OFFSET, as in orders/0/4711, not {text!r}")
    return Position(topic, int(partition), int(offset))


def _is_number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 18


async def trace_message(client: Client, position: str) -> dict[str, Any]:
    parsed = parse_position(position)
    try:
        return await trace_at(client, parsed._replace(topic=await topic_name(client, parsed.topic)))
    except OffsetOutOfRange as error:
        raise NotFound(f"there is no message at {position}: {error}") from error


def lacks_history(document: dict[str, Any]) -> bool:
    """Whether the ledger's table may have more events of a message than the broker's trace."""
    is_unfinished = any(
        subscription["ledger"] and not subscription["is_complete"] for subscription in document["subscriptions"]
    )
    return is_unfinished or document["published_ms"] is None


async def find_by_id(
    client: Client, searched_id: str, topic: str, since: str, until: str = "end", *, note: Callable[[str], None]
) -> list[Position]:
    """Find the messages of a topic with an id in a time range, by reading that part of the log.

    What the disk of a broker has lost of it is noted.
    """
    topic_metadata = await find_topic(client, topic)
    places: list[Position] = []
    for partition in sorted(topic_metadata.partitions):
        offset, end = [await _offset_at(client, topic, partition, when) for when in (since, until)]
        while offset < end and len(places) < FOUND_MAX:
            try:
                response = await client.fetch(topic, partition, offset, max_bytes=FETCH_BYTES, max_wait_ms=0)
            except CorruptBatch:
                lost = await find_lost(client, topic, partition, offset)
                if lost is None:
                    raise
                note(f"{lost}, so they are not searched.")
                offset = lost.end
                continue
            before = offset
            for header in iterate_whole_headers(response.records):
                offset = max(offset, header.next_offset)
                if header.is_control:
                    continue
                # In a thread: batches may be large and compressed.
                places += await asyncio.to_thread(
                    _with_id, response.records, header, searched_id, topic_metadata, partition
                )
            if offset == before:
                break
    return [place for place in places if place.offset >= 0][:FOUND_MAX]


FOUND_MAX: Final = 100
"""How many messages with the same id are traced: publishers may repeat themselves."""
FETCH_BYTES: Final = 4 * 1024 * 1024


def _with_id(
    records: Buffer, header: BatchHeader, searched_id: str, topic: TopicMetadata, partition: int
) -> list[Position]:
    return [
        Position(topic.name, partition, record.offset)
        for record in decode_batch(records, header)
        if message_id(topic.topic_id, partition, record.offset, record.headers) == searched_id
    ]


async def _offset_at(client: Client, topic: str, partition: int, when: str) -> int:
    position = position_of(when)
    timestamp = position.lookup_timestamp
    if timestamp is None:
        return position.value
    offset = (await client.list_offsets(topic, {partition: timestamp}))[partition].offset
    if offset < 0:
        # No message is that new.
        offset = (await client.list_offsets(topic, {partition: LATEST_TIMESTAMP}))[partition].offset
    return int(offset)


async def trace_at(
    client: Client, at: Position, *, reading: Client | None = None, read_record: ReadRecord = read_record
) -> dict[str, Any]:
    """Return the trace of the message at a position of a topic; messages are read through `reading`."""
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
        "subscriptions": [msgspec.to_builtins(subscription) for subscription in trace.subscriptions],
    }


async def topic_name(client: Client, topic: str) -> str:
    try:
        topic_id = UUID(topic)
    except ValueError:
        return topic
    for topic_metadata in (await client.metadata()).topics.values():
        if topic_metadata.topic_id == topic_id:
            return topic_metadata.name
    return topic
