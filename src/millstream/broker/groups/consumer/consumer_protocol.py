"""The messages that classic consumers embed in group requests: their subscription and their assignment.

These are the schemas ConsumerProtocolSubscription and ConsumerProtocolAssignment, versions 0 to 3. A later version
begins with the fields of the earlier ones, so the known part of a newer version is read.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages.primitives import Reader, Writer

NEWEST_VERSION = 3

TopicPartitions = Sequence[tuple[str, Sequence[int]]]
"""Partitions by topic name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolSubscription:
    """The subscription of a classic consumer."""

    version: int
    topics: frozenset[str]
    owned: TopicPartitions = ()
    rack_id: str | None = None


def parse_subscription(metadata: bytes) -> ProtocolSubscription:
    """Parse a subscription, or raise `ProtocolViolation`."""
    reader = Reader(metadata, flexible=False)
    version = _version(reader)
    topics = frozenset([reader.string() for _ in range(max(0, reader.array_length(item_bytes_min=2)))])
    reader.blob()
    owned = _read_partitions(reader) if version >= 1 else ()
    if version >= 2:
        reader.int32()
    rack_id = reader.nullable_string() if version >= 3 else None
    return ProtocolSubscription(version=version, topics=topics, owned=owned, rack_id=rack_id or None)


def parse_assignment(assignment: bytes) -> tuple[TopicPartitions, bool]:
    """Return the partitions of an assignment, and whether it has user data for its assignor."""
    if not assignment:
        return (), False
    reader = Reader(assignment, flexible=False)
    _version(reader)
    return _read_partitions(reader), bool(reader.blob())


def encode_assignment(partitions: Iterable[tuple[str, Iterable[int]]], *, version: int) -> bytes:
    """Encode an assignment in the version of the member's subscription."""
    writer = Writer(flexible=False)
    writer.int16(min(version, NEWEST_VERSION))
    listed = sorted((topic, sorted(numbers)) for topic, numbers in partitions)
    writer.array_length(len(listed))
    for topic, numbers in listed:
        writer.string(topic)
        writer.int32_array(numbers)
    writer.blob(None)
    return bytes(writer.buffer)


def _version(reader: Reader) -> int:
    version = reader.int16()
    if version < 0:
        raise ProtocolViolation(f"version {version} of a consumer's message is invalid")
    return version


def _read_partitions(reader: Reader) -> TopicPartitions:
    count = max(0, reader.array_length(item_bytes_min=6))
    return [(reader.string(), reader.int32_array()) for _ in range(count)]
