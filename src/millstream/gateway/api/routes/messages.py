"""One stored message, and its history in subscriptions."""

from __future__ import annotations

import asyncio
import logging
import sys
from asyncio.subprocess import DEVNULL, PIPE
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.browse import allowed_rights
from millstream.client.admin.message_trace import Position, lacks_history, trace_at
from millstream.client.admin.messages import find_message
from millstream.client.admin.pipelines import ledger_lake
from millstream.client.admin.topics import find_topic
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import MillstreamError
from millstream.gateway.api.message import (
    Decode,
    ReceivedMessage,
    decoded_bytes,
    decoded_members,
    held_bytes,
    members_of,
)
from millstream.gateway.api.route import NoFields, Request, Route
from millstream.gateway.api.services import Services
from millstream.protocol.private.subscriptions import SubscriptionTrace

_logger = logging.getLogger(__name__)

HISTORY_S: Final = 30.0
"""How long reading the ledger's table may take."""
_HISTORY: Final = "millstream.pipelines.jobs.ledger.history"
_READING: Final = asyncio.Semaphore(1)
"""One table is read at a time: the process takes as much memory as the gateway itself."""


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
    """The options for showing a message."""

    decode: Annotated[Decode | None, Meta(description="`schema` adds the value, decoded by its schema.")] = None


async def show(services: Services, request: Request[Show, NoFields]) -> StoredDocument:
    topic = await find_topic(services.client, request.path["topic"])
    partition = request.path["partition"]
    stored = await find_message(
        services.reading, topic, partition, request.path["offset"], read_record=services.reader.read_one
    )
    request.memory.resize(held_bytes(stored.record))
    decoded = await decoded_members(services.client, request.query.decode, topic.name, stored.record)
    request.memory.resize(held_bytes(stored.record) + decoded_bytes(decoded))
    return StoredDocument(
        timestamp_type=stored.timestamp_type,
        batch=msgspec.convert(stored.batch_document(), BatchDescription),
        **members_of(topic.name, topic.topic_id, partition, stored.record),
        **decoded,
    )


class TraceDocument(msgspec.Struct, frozen=True):
    """The history of a message in every subscription that the caller may describe."""

    topic: str
    topic_id: str
    partition: int
    offset: int
    id: str
    published: str | None
    published_ms: int | None
    not_in_log: str | None
    """The reason why the message itself can no longer be read; null if it can."""
    subscriptions: list[SubscriptionTrace]


async def trace(services: Services, request: Request[NoFields, NoFields]) -> TraceDocument:
    """Show the history of the message at an offset."""
    at = Position(request.path["topic"], request.path["partition"], request.path["offset"])
    document = await trace_at(services.client, at, reading=services.reading, read_record=services.reader.read_one)
    if lacks_history(document):
        document = await with_history(services, document)
    return msgspec.convert(document, TraceDocument)


async def with_history(services: Services, document: dict[str, Any]) -> dict[str, Any]:
    """Complete a trace from the ledger's table, if this machine has it, in a process of its own."""
    try:
        async with asyncio.timeout(HISTORY_S):
            await _READING.acquire()
    except TimeoutError:
        return document
    try:
        try:
            lake = await ledger_lake(services.client)
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", _HISTORY, lake), stdin=PIPE, stdout=PIPE, stderr=DEVNULL
            )
        except (MillstreamError, OSError) as error:
            _logger.debug("the ledger's table is not read for a trace", extra={"reason": str(error)})
            return document
        try:
            async with asyncio.timeout(HISTORY_S):
                text, _ = await process.communicate(msgspec.json.encode(document))
        except TimeoutError:
            text = b""
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    finally:
        _READING.release()
    if process.returncode != 0 or not text:
        # Without a table, or the packages to read it, the broker's response is all there is.
        return document
    return await _without_hidden_letters(services, msgspec.json.decode(text))


async def _without_hidden_letters(services: Services, document: dict[str, Any]) -> dict[str, Any]:
    """Omit letters in topics that the caller may not describe: the table is read with the rights of this process."""
    topics = sorted(
        {
            subscription["dead_letter"]["topic"]
            for subscription in document["subscriptions"]
            if subscription["dead_letter"]
        }
    )
    needed = [(Operation.DESCRIBE, ResourceType.TOPIC, topic) for topic in topics]
    allowed = await allowed_rights(services.client, needed) if needed else ()
    hidden = {topic for topic, is_allowed in zip(topics, allowed, strict=True) if not is_allowed}
    for subscription in document["subscriptions"]:
        if subscription["dead_letter"] and subscription["dead_letter"]["topic"] in hidden:
            subscription["dead_letter"] = None
    return document


ROUTES: Final = (
    Route(
        "GET",
        "/topics/{topic}/partitions/{partition}/messages/{offset}",
        "Show one message and its record batch",
        show,
        StoredDocument,
        tag="messages",
        query=Show,
    ),
    Route(
        "GET",
        "/topics/{topic}/partitions/{partition}/messages/{offset}/trace",
        "Show the history of a message in every subscription",
        trace,
        TraceDocument,
        tag="messages",
    ),
)
