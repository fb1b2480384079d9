"""One stored message."""

from __future__ import annotations

from typing import Final

import msgspec

from millstream.client.admin.messages import find_message
from millstream.client.admin.topics import find_topic
from millstream.gateway.api.message import ReceivedMessage, held_bytes, members_of
from millstream.gateway.api.route import NoFields, Request, Route
from millstream.gateway.api.services import Services


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


async def show(services: Services, request: Request[NoFields, NoFields]) -> StoredDocument:
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
    )


ROUTES: Final = (
    Route(
        method="GET",
        path="/topics/{topic}/partitions/{partition}/messages/{offset}",
        tag="messages",
        summary="Show one message and its record batch",
        handle=show,
        query=NoFields,
        body=NoFields,
        answer=StoredDocument,
    ),
)
