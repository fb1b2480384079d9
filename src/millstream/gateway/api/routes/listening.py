"""Streams of server-sent events: the messages of a topic as they are published, of a subscription as they are
leased.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing, suppress
from types import MappingProxyType
from typing import Annotated, Any, Final

import msgspec
from msgspec import Meta

from millstream.client.admin.position import POSITION_HELP, parse_position
from millstream.client.admin.tailer import Fetched, Tailer
from millstream.client.admin.topics import find_topic, offsets_at
from millstream.core.errors import CorruptBatch, MillstreamError, QuotaExceeded
from millstream.core.ids import OffsetRange
from millstream.gateway.api.event_stream import event
from millstream.gateway.api.message import Decode, decoded_bytes, decoded_members, held_bytes, in_one_line, received
from millstream.gateway.api.problem import RETRY_S, Refused, invalid, problem_document, refusal_of
from millstream.gateway.api.record_reader import Slice
from millstream.gateway.api.route import Lane, NoFields, Request, Route, StreamResponse
from millstream.gateway.api.routes.pulling import DECODE_S_MAX, WorkerName, leased, receive_until
from millstream.gateway.api.services import Services
from millstream.gateway.pressure import RequestMemory
from millstream.protocol.private.subscription_messages import ReceiveRequest
from millstream.protocol.records.batch import check_crc, iterate_whole_headers
from millstream.protocol.records.record import AbortedBatches, Record
from millstream.protocol.wire.cluster_metadata import TopicMetadata
from millstream.protocol.wire.fetch import READ_COMMITTED

READ_BYTES: Final = 256 * 1024
"""The bytes that one stream reads at once."""

SLICE_BYTES: Final = 4 * 1024 * 1024
"""The bytes that one stream takes at once from a batch that decompresses to more."""

PIECE_BYTES: Final = 32 * 1024
PATIENCE_S: Final = 30.0
WAIT_MS: Final = 30_000
PARTITIONS_NAMED_MAX: Final = 16
"""With more partitions, only the last of the events that are sent together has an id."""
DECODE_TRIES: Final = 30
"""How often a stream tries to decode a value while others use all that may; ending it frees what it holds."""

_PLACES: Final = re.compile(r"\d{1,9}:\d{1,18}(,\d{1,9}:\d{1,18})*\Z")
DecodeValues = Annotated[Decode | None, Meta(description="`schema` adds the value, decoded by its schema.")]
_encode = msgspec.json.Encoder().encode
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Listen(msgspec.Struct, frozen=True, forbid_unknown_fields=True, rename={"start": "from"}):
    """The start position; `Last-Event-ID` takes precedence."""

    start: Annotated[str, Meta(min_length=1, max_length=100, description=f"Where to start: {POSITION_HELP}.")] = "end"
    decode: DecodeValues = None


class Consume(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The options for leasing messages for a stream."""

    max: Annotated[int, Meta(ge=1, le=1000, description="The number of messages to lease at once.")] = 100
    worker: WorkerName | None = None
    decode: DecodeValues = None


class ListenHeaders(msgspec.Struct, frozen=True, rename="kebab"):
    """The header that resumes a stream where another one ended."""

    last_event_id: Annotated[
        str | None, Meta(description="The id of the last event received; the stream resumes after it.")
    ] = None


async def listen(services: Services, request: Request[Listen, NoFields]) -> StreamResponse:
    """Stream the messages of a topic from a position on, until the client disconnects."""
    request.memory.reserve(READ_BYTES)
    topic = await find_topic(services.client, request.path["topic"])
    places = request.headers.get(b"last-event-id")
    if places:
        starts = _read_places(places.decode("latin-1"), topic)
    else:
        position = parse_position(request.query.start)
        starts = await offsets_at(
            services.client, topic.name, list(topic.partitions), position, isolation=READ_COMMITTED
        )
    pieces = _published(services, topic, starts, request.memory, request.query.decode)
    return StreamResponse(_reporting_errors(pieces, f"/v1/topics/{topic.name}/events"))


async def consume(services: Services, request: Request[Consume, NoFields]) -> StreamResponse:
    """Stream the messages of a subscription, leased to the client, which settles them like pulled ones."""
    name, worker = request.path["subscription"], services.new_worker(request.query.worker)
    request.memory.reserve(READ_BYTES)
    receive = ReceiveRequest(name, worker, request.query.max, READ_BYTES, WAIT_MS, address=request.address)
    # Asked before the stream starts, so that an unknown subscription gets a problem document.
    await services.subscriptions.describe([name])
    pieces = _leased(services, receive, request.disconnected, request.memory, request.query.decode)
    return StreamResponse(_reporting_errors(pieces, f"/v1/subscriptions/{name}/events"))


async def _published(
    services: Services, topic: TopicMetadata, starts: Mapping[int, int], memory: RequestMemory, decode: Decode | None
) -> AsyncGenerator[bytes, None]:
    notes: list[str] = []
    tailer = Tailer(
        services.reading,
        topic.name,
        starts,
        patience_s=PATIENCE_S,
        isolation=READ_COMMITTED,
        is_whole=True,
        note=notes.append,
    )
    places = dict(starts)
    async with aclosing(tailer.follow_fetched(READ_BYTES)) as following:
        async for fetched in following:
            for response in fetched:
                async with aclosing(_records(services, topic, response, memory, notes)) as reading:
                    async for records in reading:
                        for note in notes:
                            yield event("note", _encode({"detail": note}))
                        notes.clear()
                        async for piece in _sent(services, topic, response.partition, records, places, memory, decode):
                            yield piece


async def _sent(
    services: Services,
    topic: TopicMetadata,
    partition: int,
    records: list[Record],
    places: dict[int, int],
    memory: RequestMemory,
    decode: Decode | None,
) -> AsyncGenerator[bytes, None]:
    if decode is None:
        for piece in _pieces(_events(topic, partition, records, places)):
            yield piece
        return
    held = READ_BYTES + sum(map(held_bytes, records))
    # One at a time: a decoded value may be a hundred times as long as the stored one.
    for count, record in enumerate(records, 1):
        for _ in range(DECODE_TRIES):
            with suppress(Refused, QuotaExceeded):
                more = await _decoded(services, decode, topic.name, record, memory, held)
                break
            # Decoded again once others need less of the memory, or of the processes that decode.
            await asyncio.sleep(RETRY_S)
        else:
            raise QuotaExceeded("other requests use all that may decode values; resume the stream later")
        for piece in _pieces(_events(topic, partition, [record], places, more, is_end=count == len(records))):
            yield piece


async def _records(
    services: Services, topic: TopicMetadata, fetched: Fetched, memory: RequestMemory, notes: list[str]
) -> AsyncGenerator[list[Record], None]:
    """Yield the records of one partition in slices, each once there is memory for it."""
    batches, aborted = fetched.response.records, AbortedBatches(fetched.response.aborted)
    for header in iterate_whole_headers(batches):
        start = max(fetched.start, header.base_offset)
        if aborted.holds(header.last_offset, header.attributes, header.producer_id) or header.is_control:
            continue
        while start <= header.last_offset:
            try:
                check_crc(batches, header)
                read = await services.reader.read(
                    batches,
                    header,
                    [OffsetRange(start, header.next_offset)],
                    READ_BYTES,
                    large_bytes_max=SLICE_BYTES,
                )
            except CorruptBatch as error:
                read = Slice([], header.next_offset, str(error))
            try:
                memory.resize(READ_BYTES + sum(map(held_bytes, read.records)))
            except Refused:
                # Read again once the memory that other streams hold is free.
                del read
                await asyncio.sleep(RETRY_S)
                continue
            if read.oversized:
                notes.append(f"{topic.name}-{fetched.partition} from offset {start}: {read.oversized}; skipped")
            yield read.records
            start = read.next_offset
            memory.resize(READ_BYTES)


def _events(
    topic: TopicMetadata,
    partition: int,
    records: list[Record],
    places: dict[int, int],
    more: Mapping[str, Any] = _NOTHING,
    *,
    is_end: bool = True,
) -> Iterable[bytes]:
    """Yield the events of records; `is_end` marks the last ones that are sent together."""
    for at, record in enumerate(records, 1):
        places[partition] = record.offset + 1
        has_event_id = (is_end and at == len(records)) or len(places) <= PARTITIONS_NAMED_MAX
        event_id = ",".join(f"{index}:{offset}" for index, offset in places.items()) if has_event_id else None
        document = _encode(received(topic.name, topic.topic_id, partition, record, **more))
        yield event("message", in_one_line(document), event_id)


async def _leased(
    services: Services,
    receive: ReceiveRequest,
    disconnected: asyncio.Future[None] | None,
    memory: RequestMemory,
    decode: Decode | None,
) -> AsyncGenerator[bytes, None]:
    while not services.stopping.done() and (disconnected is None or not disconnected.done()):
        try:
            unsent = await receive_until(services, receive, disconnected)
        except QuotaExceeded:
            # The broker let the request wait for as long as it could.
            continue
        is_refused = False
        try:
            # A client that reads slowly keeps messages here, possibly for longer than their leases last.
            while unsent := await services.subscriptions.confirmed(receive.subscription, receive.worker, unsent):
                held = READ_BYTES + sum(held_bytes(held_message.record) for held_message in unsent)
                memory.resize(held)
                piece, count = b"", 0
                until = time.monotonic() + DECODE_S_MAX
                while count < len(unsent) and len(piece) < PIECE_BYTES and (not count or time.monotonic() < until):
                    message = unsent[count]
                    more = _NOTHING
                    if decode:
                        more = await _decoded(services, decode, message.topic, message.record, memory, held)
                    piece += event("message", in_one_line(_encode(leased(message, receive.worker, **more))))
                    count += 1
                yield piece
                if disconnected is not None and disconnected.done():
                    # The connection was lost before the piece was written.
                    break
                del unsent[:count]
        except (Refused, QuotaExceeded):
            is_refused = True
        finally:
            await services.leasing.return_messages(receive.subscription, receive.worker, unsent)
        memory.resize(READ_BYTES)
        if is_refused:
            # Leased again once others need less of the memory, or of the processes that decode.
            await asyncio.sleep(RETRY_S)


async def _decoded(
    services: Services, decode: Decode | None, topic: str, record: Record, memory: RequestMemory, held: int
) -> Mapping[str, Any]:
    """Return the decoded value if there is memory for it besides what is held, or raise `Refused` and drop it."""
    more = await decoded_members(services.client, decode, topic, record)
    memory.resize(held + decoded_bytes(more))
    return more


async def _reporting_errors(pieces: AsyncGenerator[bytes, None], path: str) -> AsyncGenerator[bytes, None]:
    """Pass pieces on, and report an error as the last event."""
    try:
        async for piece in pieces:
            yield piece
    except MillstreamError as error:
        refused = refusal_of(error)
        yield event("error", _encode(problem_document(path, refused.status, refused.detail, {})))
    finally:
        await pieces.aclose()


def _pieces(events: Iterable[bytes]) -> Iterable[bytes]:
    """Join events, so that many small ones are sent together."""
    gathered: list[bytes] = []
    size = 0
    for encoded in events:
        gathered.append(encoded)
        size += len(encoded)
        if size >= PIECE_BYTES:
            yield b"".join(gathered)
            gathered, size = [], 0
    if gathered:
        yield b"".join(gathered)


def _read_places(text: str, topic: TopicMetadata) -> dict[int, int]:
    if not _PLACES.match(text):
        raise invalid(f"{text[:100]!r} is not the id of an event of this stream")
    named = {int(index): int(offset) for index, _, offset in (place.partition(":") for place in text.split(","))}
    if set(named) - set(topic.partitions):
        raise invalid(
            f"the Last-Event-ID does not belong to topic {topic.name!r}, which has {len(topic.partitions)} partitions"
        )
    # Partitions added since then are read from their start.
    return {index: named.get(index, 0) for index in topic.partitions}


ROUTES: Final = (
    Route(
        "GET",
        "/topics/{topic}/events",
        "Listen to a topic",
        listen,
        None,
        tag="messages",
        query=Listen,
        headers=ListenHeaders,
        lane=Lane.WAIT,
        streams=True,
    ),
    Route(
        "GET",
        "/subscriptions/{subscription}/events",
        "Lease messages as they arrive",
        consume,
        None,
        tag="messages",
        query=Consume,
        lane=Lane.WAIT,
        streams=True,
        leases=True,
    ),
)
