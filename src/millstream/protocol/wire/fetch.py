"""The Fetch request of a client: some partitions of one leader, and their records as stored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final, NamedTuple
from uuid import UUID

from millstream.core.errors import MillstreamError, OffsetOutOfRange, ProtocolViolation
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import is_flexible, response_body_at
from millstream.protocol.messages.primitives import Reader, Writer
from millstream.protocol.wire.error_codes import OFFSET_OUT_OF_RANGE, error_from_code

FETCH_KEY: Final = 1
OLDEST: Final = 4
NEWEST: Final = 12
"""From 13 on topics are named by id; a client that reads by name stays below."""
BY_ID: Final = 13

READ_UNCOMMITTED: Final = 0
READ_COMMITTED: Final = 1
_CONSUMER: Final = -1
_NO_SESSION: Final = (0, -1)
_UNKNOWN: Final = -1


class FetchedPartition(NamedTuple):
    """The response for one partition: whole batches (the last may be incomplete) and the bounds of the log."""

    records: memoryview
    high_watermark: Offset
    log_start: Offset
    last_stable: Offset
    aborted: tuple[tuple[int, int], ...] = ()
    """The aborted transactions among the records, each as producer id and first offset; only with `READ_COMMITTED`."""


class FetchLimits(NamedTuple):
    """The size and time limits of a fetch."""

    max_bytes: int
    max_wait_ms: int
    min_bytes: int = 1
    isolation: int = READ_UNCOMMITTED


def write_fetch(
    version: int,
    positions: Mapping[TopicPartition, Offset],
    limits: FetchLimits,
    topic_ids: Mapping[str, UUID] | None = None,
) -> bytearray:
    """Encode the body of a request without a session; version `BY_ID` needs the ids of the topics."""
    writer = Writer(flexible=is_flexible(FETCH_KEY, version))
    writer.int32(_CONSUMER)
    writer.int32(limits.max_wait_ms)
    writer.int32(limits.min_bytes)
    writer.int32(limits.max_bytes)
    writer.int8(limits.isolation)
    if version >= 7:
        writer.int32(_NO_SESSION[0])
        writer.int32(_NO_SESSION[1])
    by_topic: dict[str, list[tuple[PartitionIndex, Offset]]] = {}
    for partition, offset in positions.items():
        by_topic.setdefault(partition.topic, []).append((partition.partition, offset))
    writer.array_length(len(by_topic))
    for topic, offsets in by_topic.items():
        if topic_ids is None:
            writer.string(topic)
        else:
            writer.uuid(topic_ids[topic])
        writer.array_length(len(offsets))
        for index, offset in offsets:
            _write_position(writer, version, index, offset, limits.max_bytes)
        writer.no_tags()
    if version >= 7:
        writer.array_length(0)
    if version >= 11:
        writer.string("")
    writer.no_tags()
    return writer.buffer


def _write_position(writer: Writer, version: int, index: int, offset: int, max_bytes: int) -> None:
    writer.int32(index)
    if version >= 9:
        writer.int32(_UNKNOWN)
    writer.int64(offset)
    if version >= 12:
        writer.int32(_UNKNOWN)
    if version >= 5:
        writer.int64(_UNKNOWN)
    writer.int32(max_bytes)
    writer.no_tags()


def read_throttle_ms(version: int, frame: memoryview) -> int:
    """Return for how long the broker throttles the client."""
    return Reader(frame, response_body_at(FETCH_KEY, version, frame), flexible=is_flexible(FETCH_KEY, version)).int32()


def read_fetched(
    version: int, frame: memoryview, topic_ids: Mapping[str, UUID] | None = None
) -> dict[TopicPartition, FetchedPartition | MillstreamError]:
    """Decode the response to a request that may have named topics by id; the records are views into the frame."""
    names = {topic_id: name for name, topic_id in (topic_ids or {}).items()}
    reader = Reader(frame, response_body_at(FETCH_KEY, version, frame), flexible=is_flexible(FETCH_KEY, version))
    reader.int32()
    if version >= 7:
        code = reader.int16()
        reader.int32()
        if code:
            raise error_from_code(code, None, about="fetch")
    responses: dict[TopicPartition, FetchedPartition | MillstreamError] = {}
    for _ in range(reader.array_length()):
        topic = reader.string() if topic_ids is None else names.get(reader.uuid(), "")
        for _ in range(reader.array_length()):
            index, response = _read_partition(version, reader, topic)
            responses[TopicPartition(topic, index)] = response
        reader.skip_tags()
    return responses


def _read_partition(
    version: int, reader: Reader, topic: str
) -> tuple[PartitionIndex, FetchedPartition | MillstreamError]:
    index = PartitionIndex(reader.int32())
    code = reader.int16()
    high_watermark = Offset(reader.int64())
    last_stable = Offset(reader.int64())
    log_start = Offset(reader.int64()) if version >= 5 else Offset(0)
    aborted = []
    for _ in range(reader.array_length()):
        aborted.append((reader.int64(), reader.int64()))
        reader.skip_tags()
    if version >= 11:
        reader.int32()
    records = reader.blob()
    reader.skip_tags()
    if code == OFFSET_OUT_OF_RANGE:
        reason = f"fetch from {topic}-{index}: the log reaches from {log_start} to {high_watermark}"
        return index, OffsetOutOfRange(reason, start=log_start, end=high_watermark)
    if code:
        return index, error_from_code(code, None, about=f"fetch from {topic}-{index}", needs=f"READ on topic {topic!r}")
    if records is None:
        records = memoryview(b"")
    return index, FetchedPartition(records, high_watermark, log_start, last_stable, tuple(aborted))


def single_partition(
    responses: Mapping[TopicPartition, FetchedPartition | MillstreamError], partition: TopicPartition
) -> FetchedPartition:
    """Return the result for the one requested partition, or raise its error."""
    response = responses.get(partition)
    if response is None:
        raise ProtocolViolation(f"the response to a fetch does not name {partition}")
    if isinstance(response, MillstreamError):
        raise response
    return response
