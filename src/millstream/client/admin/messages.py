"""Stored messages: finding one, decoding it by its schema, and presenting it as JSON."""

from __future__ import annotations

import base64
import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import lru_cache
from typing import Any, NamedTuple

from millstream.core.errors import (
    CorruptBatch,
    MillstreamError,
    NotFound,
    OffsetOutOfRange,
    QuotaExceeded,
    UnknownTopic,
)
from millstream.core.ids import OffsetRange, message_id
from millstream.protocol.records.batch import TIMESTAMP_TYPE_FLAG, BatchHeader, Buffer, check_crc, iterate_whole_headers
from millstream.protocol.records.record import Record, decode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata


class DecodedRecord(NamedTuple):
    """The value of a record as JSON, and the schema that it names."""

    named: str
    """An id or a guid."""
    value: bytes

    def document(self) -> dict[str, Any]:
        """Return the fields that are added to the JSON document of a message."""
        return {"schema": self.named, "decoded": json.loads(self.value)}


async def decode_record(client: Client, topic: str, record: Record) -> DecodedRecord | None:
    """Decode the value of a record; None if it names no schema, one that is unknown, or does not fit it.

    `QuotaExceeded` says nothing about the value: it can be decoded later.
    """
    if record.value is None:
        return None
    # Loaded when it is needed: most topics have no schemas.
    from millstream.protocol.schemas.framing import ID_MAGIC, VALUE_HEADER, schema_header, unframe

    if record.value[:1] != bytes([ID_MAGIC]) and all(name != VALUE_HEADER for name, _ in record.headers):
        return None
    from millstream.client.schemas import codecs_of

    try:
        framed = unframe(record.value, schema_header(record.headers, "value"))
        schema, value = await codecs_of(client).decode_json(framed, f"{topic}-value")
        return DecodedRecord(str(schema.id or schema.guid), value)
    except QuotaExceeded:
        raise
    except MillstreamError:
        return None


def as_document(topic: str, topic_id: object, partition: int, record: Record) -> dict[str, Any]:
    """Return a message as JSON; bytes that are not UTF-8 become `{"base64": …}`."""
    return {
        "topic": topic,
        "partition": partition,
        "offset": record.offset,
        "id": message_id(topic_id, partition, record.offset, record.headers),
        "timestamp": utc(record.timestamp_ms),
        "timestamp_ms": record.timestamp_ms,
        "key": _as_json(record.key),
        "value": _as_json(record.value),
        "headers": [[name, _as_json(value)] for name, value in record.headers],
    }


def datetime_of(timestamp_ms: int) -> datetime | None:
    """Return a message's time; None if it has none, or one outside the calendar."""
    if timestamp_ms < 0:
        return None
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC)
    except (OverflowError, ValueError, OSError):
        return None


def _as_json(value: bytes | None) -> Any:
    if value is None:
        return None
    try:
        return value.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(value).decode()}


# Messages that are published together share few timestamps.
@lru_cache(maxsize=1024)
def utc(timestamp_ms: int) -> str | None:
    """Return a message's time as RFC 3339."""
    moment = datetime_of(timestamp_ms)
    return None if moment is None else moment.isoformat(timespec="milliseconds").replace("+00:00", "Z")


COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
_ONE_BATCH = 1

ReadRecord = Callable[[Buffer, BatchHeader, int], Awaitable[Record | None]]
"""Reads the record of a batch at an offset, within its caller's bounds."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    record: Record
    batch: BatchHeader

    @property
    def timestamp_type(self) -> str:
        """Return the timestamp type of the message, by the name in Kafka's setting."""
        return "LogAppendTime" if self.batch.attributes & TIMESTAMP_TYPE_FLAG else "CreateTime"

    def batch_document(self) -> dict[str, Any]:
        """Return the batch as JSON; fields that an ordinary producer does not set are null."""
        header = self.batch
        idempotent = header.producer_id >= 0
        return {
            "first_offset": header.base_offset,
            "last_offset": header.last_offset,
            "records": header.record_count,
            "bytes": header.size_bytes,
            "compression": COMPRESSIONS[header.compression],
            "leader_epoch": header.leader_epoch,
            "max_timestamp_ms": header.max_timestamp_ms,
            "crc": f"{header.crc:08x}",
            "transactional": header.is_transactional,
            "control": header.is_control,
            "producer_id": header.producer_id if idempotent else None,
            "producer_epoch": header.producer_epoch if idempotent else None,
            "first_sequence": header.base_sequence if idempotent else None,
            "last_sequence": header.last_sequence if idempotent else None,
        }


async def read_record(batches: Buffer, header: BatchHeader, offset: int) -> Record | None:
    return next(decode_batch(batches, header, ranges=(OffsetRange(offset, offset + 1),)), None)


async def find_message(
    client: Client, topic: TopicMetadata, partition: int, offset: int, *, read_record: ReadRecord = read_record
) -> StoredMessage:
    """Find the message at an offset and check its batch's CRC; `NotFound` describes the offset if it has none."""
    if partition not in topic.partitions:
        raise UnknownTopic(f"topic {topic.name!r} has no partition {partition}; the last is {max(topic.partitions)}")
    where = f"{topic.name}/{partition}"
    try:
        response = await client.fetch(topic.name, partition, offset, max_bytes=_ONE_BATCH, max_wait_ms=0)
    except OffsetOutOfRange:
        from millstream.client.admin.topics import offset_bounds

        start, end = (await offset_bounds(client, topic.name, [partition]))[partition]
        raise NotFound(_no_message(where, offset, start, end)) from None
    except CorruptBatch:
        from millstream.client.admin.cluster_status import find_lost

        lost = await find_lost(client, topic.name, partition, offset)
        if lost is not None:
            raise NotFound(f"{lost}; {lost.advice}") from None
        raise
    for header in iterate_whole_headers(response.records):
        if not header.base_offset <= offset <= header.last_offset:
            continue
        check_crc(response.records, header)
        record = await read_record(response.records, header, offset)
        if record is not None:
            return StoredMessage(record, header)
    if offset >= response.high_watermark:
        raise NotFound(_no_message(where, offset, response.log_start, response.high_watermark))
    raise NotFound(f"there is no message at {where}@{offset} any more: compaction has removed it")


def _no_message(where: str, offset: int, start: int, end: int) -> str:
    if start == end:
        return f"there is no message at {where}@{offset}: the partition is empty, the next offset is {end}"
    return f"there is no message at {where}@{offset}: the partition holds offsets {start} to {end - 1}"
