"""One stored message, and what became of it."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.message_trace import Position, trace_at
from millstream.client.admin.messages import find_message
from millstream.client.admin.topics import find_topic
from millstream.gateway.api.message import Decode, ReceivedMessage, decoded_members, held_bytes, members_of
from millstream.gateway.api.route import NoFields, Request, Route
from millstream.gateway.api.services import Services
from millstream.protocol.private.message_trace import SubscriptionTrace


class BatchDescription(msgspec.Struct, frozen=True):
    """The record batch that holds a message; members that ordinary producers do not set are null."""

    first_offset: int
    last_offset: int
    records: int
    bytes: int
    compression: str
    leader_epoch: int
    max_timestamp_ms: int
    crc: str
    transactional: bool
    control: bool
    producer_id: int | None
    producer_epoch: int | None
    first_sequence: int | None
    last_sequence: int | None


class StoredDocument(ReceivedMessage, frozen=True, kw_only=True, omit_defaults=True):
    """A message with the type of its timestamp and its batch."""

    timestamp_type: str
    batch: BatchDescription


class Show(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How to show a message."""

    decode: Annotated[Decode | None, Meta(description="`schema` adds the value as its schema decodes it.")] = None


async def show(services: Services, request: Request[Show, NoFields]) -> StoredDocument:
    """Show the message at an offset."""
    topic = await find_topic(services.client, request.path["topic"])
    partition = request.path["partition"]
    stored = await find_message(
        services.reading, topic, partition, request.path["offset"], read_record=services.reader.read_one
    )
    request.memory.resize(held_bytes(stored.record))
    return StoredDocument(
        timestamp_type=stored.timestamp_type,
        batch=msgspec.convert(stored.batch_document(), BatchDescription),
        **members_of(topic.name, topic.topic_id, partition, stored.record),
        **await decoded_members(services.client, request.query.decode, topic.name, stored.record),
    )


class TraceDocument(msgspec.Struct, frozen=True):
    """The life of a message in every subscription that the caller may describe."""

    topic: str
    topic_id: str
    partition: int
    offset: int
    id: str
    published: str | None
    published_ms: int | None
    not_in_log: str | None
    """Why the message itself cannot be read any more; null if it can."""
    subscriptions: list[SubscriptionTrace]


async def trace(services: Services, request: Request[NoFields, NoFields]) -> TraceDocument:
    """Show what became of the message at an offset."""
    at = Position(request.path["topic"], request.path["partition"], request.path["offset"])
    found = await trace_at(services.client, at, reading=services.reading, read_record=services.reader.read_one)
    return msgspec.convert(found, TraceDocument)


ROUTES: Final = (
    Route(
        method="GET",
        path="/topics/{topic}/partitions/{partition}/messages/{offset}",
        tag="messages",
        summary="Show one message and its record batch",
        handle=show,
        query=Show,
        body=NoFields,
        answer=StoredDocument,
    ),
    Route(
        method="GET",
        path="/topics/{topic}/partitions/{partition}/messages/{offset}/trace",
        tag="messages",
        summary="Show what became of a message in every subscription",
        handle=trace,
        query=NoFields,
        body=NoFields,
        answer=TraceDocument,
    ),
)
