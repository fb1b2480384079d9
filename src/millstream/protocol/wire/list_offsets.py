"""The ListOffsets request as a client lays it: partitions of any number of topics that one node leads."""

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
"""The first that asks for what is committed."""
NEWEST: Final = 10

PARTITIONS_MAX: Final = 500
"""So many are asked for with one request: a node answers it at one go, and does nothing else meanwhile."""

_CONSUMER: Final = -1


class ListedOffset(NamedTuple):
    """An offset looked up by time; -1 in both when no record is that young."""

    offset: Offset
    timestamp_ms: int
    leader_epoch: Epoch


Listed = dict[TopicPartition, ListedOffset | MillstreamError]
"""What was found, with an error in the place of what could not be."""


def portions(times_ms: Mapping[TopicPartition, int]) -> Iterator[dict[TopicPartition, int]]:
    """What is asked for, cut into what one request takes."""
    left = iter(times_ms.items())
    while portion := dict(islice(left, PARTITIONS_MAX)):
        yield portion


def write_listing(version: int, times_ms: Mapping[TopicPartition, int], isolation: int, timeout_s: float) -> bytearray:
    """Lay the body of a request."""
    by_topic: dict[str, list[tuple[PartitionIndex, int]]] = {}
    for where, time_ms in times_ms.items():
        by_topic.setdefault(where.topic, []).append((where.partition, time_ms))
    writer = Writer(flexible=is_flexible(LIST_OFFSETS_KEY, version))
    writer.int32(_CONSUMER)
    writer.int8(isolation)
    writer.array_length(len(by_topic))
    for topic, wanted in by_topic.items():
        writer.string(topic)
        writer.array_length(len(wanted))
        for index, time_ms in wanted:
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
    """Read the answer, and for how many seconds the node asks to be left alone."""
    flexible = is_flexible(LIST_OFFSETS_KEY, version)
    reader = Reader(frame, response_body_at(LIST_OFFSETS_KEY, version, frame), flexible=flexible)
    pause_s = reader.int32() / 1000
    found: Listed = {}
    for _ in range(reader.array_length()):
        topic = reader.string()
        for _ in range(reader.array_length()):
            where = TopicPartition(topic, PartitionIndex(reader.int32()))
            code, timestamp_ms, offset = reader.int16(), reader.int64(), Offset(reader.int64())
            epoch = Epoch(reader.int32()) if version >= 4 else NO_EPOCH
            reader.skip_tags()
            listed = ListedOffset(offset, timestamp_ms, epoch)
            found[where] = error_from_code(code, None, about=f"offsets of {where}") if code else listed
        reader.skip_tags()
    return found, pause_s


def listed_in(found: Listed, where: TopicPartition) -> ListedOffset:
    """What was found for a partition, or the error in its place is raised."""
    one = found.get(where)
    if one is None:
        raise ProtocolViolation(f"the answer with offsets does not name {where}")
    if isinstance(one, MillstreamError):
        raise one
    return one
