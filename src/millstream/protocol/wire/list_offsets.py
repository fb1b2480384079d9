"""The ListOffsets request of a client: partitions of any number of topics that one node leads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Final, NamedTuple

from millstream.core.errors import MillstreamError, ProtocolViolation
from millstream.core.ids import NO_EPOCH, Epoch, Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import is_flexible, response_body_at
from millstream.protocol.messages.primitives import Reader, Writer
from millstream.protocol.wire.error_codes import error_from_code

LIST_OFFSETS_KEY: Final = 2
OLDEST: Final = 2
"""The first version with an isolation level."""
NEWEST: Final = 10

PARTITIONS_MAX: Final = 500
"""The maximum number of partitions in one request: a node handles it without yielding to other work."""

_CONSUMER: Final = -1


class ListedOffset(NamedTuple):
    """An offset looked up by time; both are -1 if there is no such record."""

    offset: Offset
    timestamp_ms: int
    leader_epoch: Epoch


Listed = dict[TopicPartition, ListedOffset | MillstreamError]
"""The results, with an error in place of those that failed."""


def portions(times_ms: Mapping[TopicPartition, int]) -> Iterator[dict[TopicPartition, int]]:
    """Split what is requested into single requests."""
    remaining = iter(times_ms.items())
    while portion := dict(islice(remaining, PARTITIONS_MAX)):
        yield portion


def write_listing(version: int, times_ms: Mapping[TopicPartition, int], isolation: int, timeout_s: float) -> bytearray:
    """Encode the body of a request."""
    by_topic: dict[str, list[tuple[PartitionIndex, int]]] = {}
    for where, time_ms in times_ms.items():
        by_topic.setdefault(where.topic, []).append((where.partition, time_ms))
    writer = Writer(flexible=is_flexible(LIST_OFFSETS_KEY, version))
    writer.int32(_CONSUMER)
    writer.int8(isolation)
    writer.array_length(len(by_topic))
    for topic, times in by_topic.items():
        writer.string(topic)
        writer.array_length(len(times))
        for index, time_ms in times:
            writer.int32(index)
            if version >= 4:
                writer.int32(NO_EPOCH)
            writer.int64(time_ms)
            writer.no_tags()
        writer.no_tags()
    if version >= 10:
        writer.int32(int(timeout_s * 1000))
    writer.no_tags()
    return writer.buffer


def read_listed(version: int, frame: memoryview) -> tuple[Listed, float]:
    """Decode the response, and for how many seconds the node throttles the client."""
    flexible = is_flexible(LIST_OFFSETS_KEY, version)
    reader = Reader(frame, response_body_at(LIST_OFFSETS_KEY, version, frame), flexible=flexible)
    pause_s = reader.int32() / 1000
    offsets: Listed = {}
    for _ in range(reader.array_length()):
        topic = reader.string()
        for _ in range(reader.array_length()):
            where = TopicPartition(topic, PartitionIndex(reader.int32()))
            code, timestamp_ms, offset = reader.int16(), reader.int64(), Offset(reader.int64())
            epoch = Epoch(reader.int32()) if version >= 4 else NO_EPOCH
            reader.skip_tags()
            listed = ListedOffset(offset, timestamp_ms, epoch)
            offsets[where] = error_from_code(code, None, about=f"offsets of {where}") if code else listed
        reader.skip_tags()
    return offsets, pause_s


def listed_in(listed: Listed, where: TopicPartition) -> ListedOffset:
    """Return the result for a partition, or raise its error."""
    listed_offset = listed.get(where)
    if listed_offset is None:
        raise ProtocolViolation(f"the response with offsets does not name {where}")
    if isinstance(listed_offset, MillstreamError):
        raise listed_offset
    return listed_offset
