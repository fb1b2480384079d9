"""Publishing one message or many, in the forms that HTTP clients use."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from http import HTTPStatus
from typing import Annotated, Any, Final, TypeVar

import msgspec
from msgspec import Meta

from millstream.client.admin.messages import utc
from millstream.client.admin.topics import find_topic
from millstream.client.message import Receipt
from millstream.client.schemas import codecs_of
from millstream.core.errors import BatchTooLarge, MillstreamError, PublishFailed
from millstream.core.headers import CONTENT_TYPE
from millstream.core.topic import SCHEMA_SUBJECT_LENGTH_MAX, check_topic_name
from millstream.gateway.api.dispatch import read_json
from millstream.gateway.api.new_message import (
    BATCHED,
    SPEC_HEADER,
    STRUCTURED,
    CloudEvent,
    CloudEvents,
    MessageBatch,
    MessageHeaders,
    RecordToPublish,
    batch_decoder,
    from_batch,
    from_headers,
    from_members,
    from_request,
    structured_decoder,
    with_request,
)
from millstream.gateway.api.problem import Refused, invalid, retry_after, status_of
from millstream.gateway.api.route import Lane, Request, Response, Route
from millstream.gateway.api.services import Services
from millstream.gateway.pressure import PAUSE_S_MAX, RequestMemory
from millstream.protocol.private.publish_once import PublishOnceResult as PlacedOnce
from millstream.protocol.private.publish_once import partition_of, publish_once
from millstream.protocol.records.record import NewRecord

PARTITIONS_AT_ONCE: Final = 16
"""The number of partitions to which one request publishes concurrently."""
K = TypeVar("K")

MESSAGES: Final = "application/vnd.millstream.messages+json"
_any_decoder: Final = msgspec.json.Decoder()
_batch_decoder: Final = msgspec.json.Decoder(MessageBatch)


class PublishQuery(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options for publishing."""

    deduplicate: Annotated[
        bool,
        Meta(
            description="Skip messages whose id was published within the topic's `deduplication.window.ms`; the "
            "response contains the position of the original. Every message needs an id."
        ),
    ] = False
    schema: Annotated[
        Annotated[str, Meta(min_length=1, max_length=SCHEMA_SUBJECT_LENGTH_MAX)] | None,
        Meta(
            description="A subject of the schema registry: the values are JSON documents, which are encoded with its "
            "latest schema.",
        ),
    ] = None


class Published(msgspec.Struct, frozen=True, omit_defaults=True):
    """The position of a stored message."""

    id: str
    topic: str
    partition: int
    offset: int
    timestamp: str
    duplicate: bool = False
    """Whether it had been stored before."""


class PublishedBatch(msgspec.Struct, frozen=True):
    """The positions of the stored messages of a batch, in order."""

    messages: list[Published]


async def publish(services: Services, request: Request[PublishQuery, bytes]) -> Any:
    """Publish the messages of a request; respond once they are as durable as the topic's settings demand."""
    topic = request.path["topic"]
    headers = request.headers
    services.pressure.check_pause(services.publishing.throttle_of(topic))
    media = headers.get(b"content-type", b"").partition(b";")[0].strip().lower()
    reader = _FORMS.get(media)
    if reader is None:
        if media.startswith(_EVENT_FORMATS):
            # An event in XML or Avro, stored unparsed, would not be recognized as an event.
            raise Refused(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, f"send events as {STRUCTURED} or {BATCHED}")
        placed = from_request(headers, request.body)
        if SPEC_HEADER in headers:
            placed = from_headers(headers, placed)
        if not (request.query.deduplicate or request.query.schema):
            check_topic_name(topic)
            key, value, stored, _ = placed.record
            return _to_published(await services.publisher.send(topic, key, value, stored, partition=placed.partition))
        placed_messages = [placed]
    else:
        placed_messages = [with_request(placed, headers) for placed in reader(request.body)]
    check_topic_name(topic)
    if request.query.schema:
        placed_messages = [
            await _encode(services, request.query.schema, placed, request.memory) for placed in placed_messages
        ]
    if request.query.deduplicate:
        published = await _publish_once(services, topic, placed_messages)
    else:
        published = await publish_messages(services, topic, placed_messages)
    is_old = all(receipt.duplicate for receipt in published)
    content: Any = published[0] if reader is None or reader is _read_event else PublishedBatch(published)
    return Response(HTTPStatus.OK, content) if is_old else content


async def _encode(services: Services, subject: str, placed: RecordToPublish, memory: RequestMemory) -> RecordToPublish:
    """Encode the JSON document of a message with the latest schema of a subject."""
    value = placed.record.value
    if value is None:
        return placed
    document = read_json(_any_decoder, value)
    content = await codecs_of(services.publishing).encode(subject, document, is_json=True)
    # With defaults of its schema, a value may be longer than its document.
    memory.reserve(len(content))
    # The content type of the request no longer applies.
    headers = tuple(pair for pair in placed.record.headers if pair[0] != CONTENT_TYPE)
    return placed._replace(record=placed.record._replace(value=content, headers=headers))


async def publish_messages(
    services: Services, topic: str, placed_messages: Sequence[RecordToPublish]
) -> list[Published]:
    outcomes: list[Any] = [None] * len(placed_messages)
    by_partition: dict[int | None, list[int]] = {}
    for at, placed in enumerate(placed_messages):
        by_partition.setdefault(placed.partition, []).append(at)

    async def publish_some(partition: int | None, places: list[int]) -> None:
        records = [placed_messages[at].record for at in places]
        try:
            receipts: Sequence[Any] = await services.publisher.publish_many(topic, records, partition=partition)
        except PublishFailed as error:
            receipts = error.outcomes
        except MillstreamError as error:
            receipts = [error] * len(places)
        for at, receipt in zip(places, receipts, strict=True):
            outcomes[at] = receipt

    await _publish_concurrently(publish_some, by_partition)
    return _all_published(
        [outcome if isinstance(outcome, MillstreamError) else _to_published(outcome) for outcome in outcomes]
    )


async def _publish_once(services: Services, topic: str, placed_messages: Sequence[RecordToPublish]) -> list[Published]:
    """Publish messages that may have been published before."""
    partitions = len((await _topic(services, topic)).partitions)
    now_ms = int(time.time() * 1000)
    by_partition: dict[int, list[int]] = {}
    for at, placed in enumerate(placed_messages):
        if placed.id is None:
            raise invalid("deduplication needs a message id; set Message-Id or `id`")
        chosen = placed.partition
        if chosen is None:
            chosen = partition_of(placed.record.key, placed.id, partitions)
        by_partition.setdefault(chosen, []).append(at)
    outcomes: list[Published | MillstreamError] = []
    outcomes += [MillstreamError("not published")] * len(placed_messages)

    async def publish_some(partition: int, places: list[int]) -> None:
        records = [placed_messages[at].record._replace(timestamp_ms=now_ms) for at in places]
        for at, receipt in zip(places, await _publish_to(services, topic, partition, records), strict=True):
            if isinstance(receipt, MillstreamError):
                outcomes[at] = receipt
                continue
            name = (placed_messages[at].id or b"").decode(errors="replace")
            outcomes[at] = Published(
                name, topic, partition, receipt.offset, utc(receipt.timestamp_ms) or "", duplicate=not receipt.is_new
            )

    await _publish_concurrently(publish_some, by_partition)
    return _all_published(outcomes)


async def _publish_to(
    services: Services, topic: str, partition: int, records: Sequence[NewRecord]
) -> list[PlacedOnce | MillstreamError]:
    """Publish to one partition; what is too large for one batch is halved, in order."""
    try:
        return [*await publish_once(services.publishing, topic, partition, records, patience_s=PAUSE_S_MAX)]
    except BatchTooLarge as error:
        if len(records) == 1:
            return [error]
        half = len(records) // 2
        return [
            *await _publish_to(services, topic, partition, records[:half]),
            *await _publish_to(services, topic, partition, records[half:]),
        ]
    except MillstreamError as error:
        return [error] * len(records)


async def _publish_concurrently(
    publish_some: Callable[[K, list[int]], Awaitable[None]], shares: Mapping[K, list[int]]
) -> None:
    """Publish to several partitions concurrently, within a limit."""
    room = asyncio.Semaphore(PARTITIONS_AT_ONCE)

    async def publish_share(partition: K, places: list[int]) -> None:
        async with room:
            await publish_some(partition, places)

    async with asyncio.TaskGroup() as group:
        for partition, places in shares.items():
            group.create_task(publish_share(partition, places))


def _all_published(outcomes: Sequence[Published | MillstreamError]) -> list[Published]:
    """Return the receipts if everything was stored; otherwise raise a problem that lists both."""
    failed = [(at, outcome) for at, outcome in enumerate(outcomes) if isinstance(outcome, MillstreamError)]
    stored = [outcome for outcome in outcomes if isinstance(outcome, Published)]
    if not failed:
        return stored
    at, first = failed[0]
    if len(outcomes) == 1:
        raise first
    raise Refused(
        status_of(first),
        f"{len(failed)} of {len(outcomes)} messages were not published; number {at}: {first}",
        headers=retry_after(first),
        messages=[outcome if isinstance(outcome, Published) else {"error": str(outcome)} for outcome in outcomes],
    )


def _to_published(receipt: Receipt) -> Published:
    return Published(receipt.id, receipt.topic, receipt.partition, receipt.offset, utc(receipt.timestamp_ms) or "")


async def _topic(services: Services, topic: str) -> Any:
    metadata = await services.client.metadata([topic], create=True)
    return metadata.topics[topic] if topic in metadata.topics else await find_topic(services.client, topic)


def _read_batch(body: bytes) -> list[RecordToPublish]:
    batch: MessageBatch = read_json(_batch_decoder, body)
    return [from_batch(message) for message in batch.messages]


def _read_event(body: bytes) -> list[RecordToPublish]:
    return [from_members(read_json(structured_decoder, body))]


def _read_events(body: bytes) -> list[RecordToPublish]:
    return [from_members(members) for members in read_json(batch_decoder, body)]


_FORMS: Final[dict[bytes, Callable[[bytes], list[RecordToPublish]]]] = {
    MESSAGES.encode(): _read_batch,
    STRUCTURED.encode(): _read_event,
    BATCHED.encode(): _read_events,
}
_EVENT_FORMATS: Final = (b"application/cloudevents+", b"application/cloudevents-batch+")

ROUTES: Final = (
    Route(
        "POST",
        "/topics/{topic}/messages",
        "Publish one message or many",
        publish,
        Published,
        tag="messages",
        query=PublishQuery,
        body=bytes,
        forms={MESSAGES: MessageBatch, STRUCTURED: CloudEvent, BATCHED: CloudEvents, "*/*": bytes},
        headers=MessageHeaders,
        other_response=PublishedBatch,
        status=HTTPStatus.CREATED,
        more={HTTPStatus.OK: "All messages were already stored."},
        lane=Lane.PUBLISH,
    ),
)
