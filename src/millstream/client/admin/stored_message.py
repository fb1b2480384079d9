"""One message where it lies: the record, and the batch that it was stored in."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from millstream.core.errors import CorruptBatch, NotFound, OffsetOutOfRange, UnknownTopic
from millstream.protocol.records.batch import TIMESTAMP_TYPE_FLAG, BatchHeader, Buffer, check_crc, iterate_whole_headers
from millstream.protocol.records.record import Record, decode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.cluster_metadata import TopicMetadata

COMPRESSIONS = ("none", "gzip", "snappy", "lz4", "zstd")
_ONE_BATCH = 1

ReadRecord = Callable[[Buffer, BatchHeader, int], Awaitable[Record | None]]
"""Reads the record of a batch at an offset, on whatever bounds its user sets."""


@dataclass(frozen=True, slots=True)
class StoredMessage:
    """A record and the header of its batch."""

    record: Record
    batch: BatchHeader

    @property
    def timestamp_type(self) -> str:
        """Whose time the message carries, as Kafka's setting names it."""
        return "LogAppendTime" if self.batch.attributes & TIMESTAMP_TYPE_FLAG else "CreateTime"

    def batch_document(self) -> dict[str, Any]:
        """The batch for programs. What an ordinary producer does not set is null."""
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
    """Read the record at an offset, or None if the batch has none there."""
    return next(decode_batch(batches, header, first=offset, last=offset), None)


async def find_message(
    client: Client, topic: TopicMetadata, partition: int, offset: int, *, read_record: ReadRecord = read_record
) -> StoredMessage:
    """The message at an offset, its batch's checksum checked; `NotFound` says what is there instead."""
    if partition not in topic.partitions:
        raise UnknownTopic(f"topic {topic.name!r} has no partition {partition}; the last is {max(topic.partitions)}")
    where = f"{topic.name}/{partition}"
    try:
        answer = await client.fetch(topic.name, partition, offset, max_bytes=_ONE_BATCH, max_wait_ms=0)
    except OffsetOutOfRange:
        from millstream.client.admin.topics import offset_bounds

        start, end = (await offset_bounds(client, topic.name, [partition]))[partition]
        raise NotFound(_nothing(where, offset, start, end)) from None
    except CorruptBatch:
        from millstream.client.admin.damage import ask_lost

        for lost in await ask_lost(client, topic, [partition]) or ():
            if lost.first <= offset < lost.next_offset:
                raise NotFound(f"{lost}; {lost.advice}") from None
        raise
    for header in iterate_whole_headers(answer.records):
        if not header.base_offset <= offset <= header.last_offset:
            continue
        check_crc(answer.records, header)
        record = await read_record(answer.records, header, offset)
        if record is not None:
            return StoredMessage(record, header)
    if offset >= answer.high_watermark:
        raise NotFound(_nothing(where, offset, answer.log_start, answer.high_watermark))
    raise NotFound(f"there is no message at {where}@{offset} any more: compaction has taken it away")


def _nothing(where: str, offset: int, start: int, end: int) -> str:
    if start == end:
        return f"there is no message at {where}@{offset}: the partition is empty, the next offset is {end}"
    return f"there is no message at {where}@{offset}: the partition holds offsets {start} to {end - 1}"
