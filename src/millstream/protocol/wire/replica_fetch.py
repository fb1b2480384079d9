"""The Fetch request of followers (version 17), encoded and decoded at both ends.

The layout is Kafka's. A follower sends its node id and, as its epoch, the revision of its registration; for each
partition the leader epoch it knows, where its log ends and the epoch of its last record. The response has records, or
the offset where the two histories diverge (KIP-595). Within a session (KIP-227) both name only what has changed.

There are two extensions. A response that an offset is out of range also has the log start offset. A fetch without a
session and a leader epoch asks any replica, leader or not, for records that the follower's disk has lost; if it asks
the leader, the leader's epoch replaces the epoch of the last record.

Every replicated megabyte passes here four times, so the usual messages are parsed with a few fixed layouts. All others
go through the generic reader.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from types import MappingProxyType
from typing import Final, NamedTuple
from uuid import UUID

from millstream.core.errors import ProtocolViolation
from millstream.core.ids import NO_EPOCH, Epoch, EpochEnd, NodeId, Offset, PartitionIndex
from millstream.protocol.messages.codec import response_body_at, response_head
from millstream.protocol.messages.primitives import Buffer, Reader, Writer

FETCH_KEY: Final = 1
VERSION: Final = 17
OLDEST: Final = 15
"""The first version whose requests carry the epoch of a replica."""

NO_SESSION: Final = 0
FIRST_SESSION_EPOCH: Final = 0
CLOSED_SESSION_EPOCH: Final = -1
_SESSION_EPOCH_MAX: Final = 2**31 - 1
_REPLICA_STATE_TAG: Final = 1
_DIVERGING_TAG: Final = 0
_NO_PREFERRED_REPLICA: Final = -1
_PARTITION_BYTES_MIN: Final = 33
_POSITION: Final = struct.Struct(">iiqiqi")
_POSITION_AND_TAGS: Final = struct.Struct(">iiqiqiB")
_RESPONSE: Final = struct.Struct(">ihqqq")
_RESPONSE_AND_NO_ABORTED: Final = struct.Struct(">ihqqqBi")
_FETCH_HEAD: Final = struct.Struct(">iiibii")
_FETCH_TAIL: Final = struct.Struct(">BBBBiqB")
_REPLICA_STATE: Final = (1, 1, _REPLICA_STATE_TAG, 13)
"""An empty rack, one tagged field, its number and its size: how the request of a follower ends."""
_RESPONSES_HEAD: Final = struct.Struct(">ihi")
_TOPIC_ID: Final = struct.Struct(">16s")
_TOPIC: Final = struct.Struct(">16sB")
_SHORT_MAX: Final = 0x7F
"""Lengths below it take one byte."""
_TOPIC_IDS_KEPT: Final = 4096

PartitionKey = tuple[UUID, PartitionIndex]


class ReplicaPosition(NamedTuple):
    """The end of a follower's log."""

    offset: Offset
    last_epoch: Epoch
    """The epoch of its last record; -1 if the log is empty."""
    leader_epoch: Epoch
    log_start: Offset
    max_bytes: int


class ReplicaFetch(NamedTuple):
    """A follower's request."""

    node: NodeId
    registration: int
    max_wait_ms: int
    max_bytes: int
    positions: Mapping[PartitionKey, ReplicaPosition]
    """Within a session, only those that have changed."""
    forgotten: Sequence[PartitionKey] = ()
    session_id: int = NO_SESSION
    session_epoch: int = FIRST_SESSION_EPOCH
    min_bytes: int = 1

    @property
    def is_repair(self) -> bool:
        """Return whether it requests records that a disk lost, and does not report the follower's position."""
        return self.session_epoch == CLOSED_SESSION_EPOCH and all(
            position.leader_epoch == NO_EPOCH for position in self.positions.values()
        )


class ReplicaResponse(NamedTuple):
    code: int
    high_watermark: Offset
    log_start: Offset
    diverging: EpochEnd | None
    records: Buffer


class ReplicaResponses(NamedTuple):
    """The response; a code other than 0 means that the session has ended and nothing else is reported."""

    code: int
    session_id: int
    partitions: Mapping[PartitionKey, ReplicaResponse] = MappingProxyType({})


def next_session_epoch(epoch: int) -> int:
    return 1 if epoch == _SESSION_EPOCH_MAX else epoch + 1


@lru_cache(_TOPIC_IDS_KEPT)
def _topic_id(content: bytes) -> UUID:
    """Return the id for these bytes; cached, so that it is created once."""
    return UUID(bytes=content)


def _by_topic(partitions: Iterable[PartitionKey]) -> dict[UUID, list[PartitionKey]]:
    by_topic: dict[UUID, list[PartitionKey]] = {}
    last: UUID | None = None
    keys: list[PartitionKey] = []
    for key in partitions:
        if key[0] is not last:
            last = key[0]
            keys = by_topic.setdefault(last, [])
        keys.append(key)
    return by_topic


# -- the request --------------------------------------------------------------------------------------------------


def is_replica_fetch(frame: Buffer) -> bool:
    """Return whether a request ends like a follower's; other requests may end like that too."""
    at = len(frame) - _FETCH_TAIL.size
    if at < 0:
        return False
    *state, node, _, _ = _FETCH_TAIL.unpack_from(frame, at)
    return node >= 0 and tuple(state) == _REPLICA_STATE


def write_replica_fetch(fetch: ReplicaFetch) -> bytearray:
    """Encode the body of a request."""
    writer = Writer(flexible=True)
    buffer = writer.buffer
    buffer += _FETCH_HEAD.pack(
        fetch.max_wait_ms, fetch.min_bytes, fetch.max_bytes, 0, fetch.session_id, fetch.session_epoch
    )
    by_topic = _by_topic(fetch.positions)
    writer.array_length(len(by_topic))
    for topic_id, keys in by_topic.items():
        buffer += topic_id.bytes
        writer.array_length(len(keys))
        for key in keys:
            offset, last_epoch, leader_epoch, log_start, max_bytes = fetch.positions[key]
            buffer += _POSITION_AND_TAGS.pack(key[1], leader_epoch, offset, last_epoch, log_start, max_bytes, 0)
        buffer.append(0)
    forgotten = _by_topic(fetch.forgotten)
    writer.array_length(len(forgotten))
    for topic_id, keys in forgotten.items():
        buffer += topic_id.bytes
        writer.int32_array([int(key[1]) for key in keys])
        buffer.append(0)
    buffer += _FETCH_TAIL.pack(*_REPLICA_STATE, fetch.node, fetch.registration, 0)
    return buffer


def read_replica_fetch(frame: Buffer, body_at: int) -> ReplicaFetch:
    """Decode the body of a request; the frame's memory may be reused afterwards."""
    try:
        return _read_usual_fetch(frame, body_at)
    except (struct.error, IndexError, _Unusual):
        return _read_any_fetch(frame, body_at)


class _Unusual(Exception):
    """A message does not have the usual layout."""


def _read_usual_fetch(frame: Buffer, at: int) -> ReplicaFetch:
    max_wait_ms, min_bytes, max_bytes, _, session_id, session_epoch = _FETCH_HEAD.unpack_from(frame, at)
    at += _FETCH_HEAD.size
    positions: dict[PartitionKey, ReplicaPosition] = {}
    topics = frame[at]
    at += 1
    for _ in range(topics - 1):
        content, partitions = _TOPIC.unpack_from(frame, at)
        at += _TOPIC.size
        topic_id = _topic_id(content)
        for _ in range(partitions - 1):
            index, leader_epoch, offset, last_epoch, log_start, bytes_max, tags = _POSITION_AND_TAGS.unpack_from(
                frame, at
            )
            at += _POSITION_AND_TAGS.size
            positions[topic_id, index] = ReplicaPosition(offset, last_epoch, leader_epoch, log_start, bytes_max)
            if tags:
                raise _Unusual
        if not 0 < partitions <= _SHORT_MAX or frame[at]:
            raise _Unusual
        at += 1
    tail = _FETCH_TAIL.unpack_from(frame, at + 1)
    # Partitions to forget are rare.
    if not 0 < topics <= _SHORT_MAX or frame[at] != 1 or tail[:4] != _REPLICA_STATE or tail[6] or tail[4] < 0:
        raise _Unusual
    if at + 1 + _FETCH_TAIL.size != len(frame):
        raise _Unusual
    return ReplicaFetch(
        NodeId(tail[4]), tail[5], max_wait_ms, max_bytes, positions, (), session_id, session_epoch, min_bytes
    )


def _read_any_fetch(frame: Buffer, body_at: int) -> ReplicaFetch:
    reader = Reader(frame, body_at, flexible=True)
    max_wait_ms, min_bytes, max_bytes, _, session_id, session_epoch = reader.fields(_FETCH_HEAD)
    positions: dict[PartitionKey, ReplicaPosition] = {}
    for _ in range(reader.array_length()):
        topic_id = reader.uuid()
        for _ in range(reader.array_length(item_bytes_min=_PARTITION_BYTES_MIN)):
            index, position = _read_position(reader)
            positions[topic_id, index] = position
        reader.skip_tags()
    forgotten: list[PartitionKey] = []
    for _ in range(reader.array_length()):
        topic_id = reader.uuid()
        forgotten.extend((topic_id, PartitionIndex(index)) for index in reader.int32_array())
        reader.skip_tags()
    reader.nullable_string()
    node, registration = -1, -1
    for tag, content in reader.tags():
        if tag == _REPLICA_STATE_TAG:
            node, registration = content.int32(), content.int64()
    if node < 0:
        raise ProtocolViolation("a follower's fetch does not say which node it is")
    return ReplicaFetch(
        NodeId(node), registration, max_wait_ms, max_bytes, positions, forgotten, session_id, session_epoch, min_bytes
    )


def _read_position(reader: Reader) -> tuple[PartitionIndex, ReplicaPosition]:
    index, leader_epoch, offset, last_epoch, log_start, max_bytes = reader.fields(_POSITION)
    reader.skip_tags()
    return index, ReplicaPosition(offset, last_epoch, leader_epoch, log_start, max_bytes)


# -- the response -------------------------------------------------------------------------------------------------


def write_replica_responses(version: int, correlation_id: int, responses: ReplicaResponses) -> list[Buffer]:
    """Encode the frame of a response as a list of buffers, so that records are sent from where they were read."""
    writer = Writer(flexible=True)
    writer.buffer += _RESPONSES_HEAD.pack(0, responses.code, responses.session_id)
    by_topic = _by_topic(responses.partitions)
    writer.array_length(len(by_topic))
    pieces: list[Buffer] = []
    size = 0
    for topic_id, keys in by_topic.items():
        writer.buffer += topic_id.bytes
        writer.array_length(len(keys))
        for key in keys:
            code, end, log_start, diverging, records = responses.partitions[key]
            writer.buffer += _RESPONSE_AND_NO_ABORTED.pack(key[1], code, end, end, log_start, 0, _NO_PREFERRED_REPLICA)
            writer.uvarint(len(records) + 1)
            if records:
                pieces += (writer.buffer, records)
                size += len(writer.buffer) + len(records)
                writer.buffer = bytearray()
            if diverging is None:
                writer.buffer.append(0)
            else:
                _write_diverging(writer, diverging)
        writer.buffer.append(0)
    writer.buffer.append(0)
    pieces.append(writer.buffer)
    return [response_head(FETCH_KEY, version, correlation_id, size + len(writer.buffer)), *pieces]


def _write_diverging(writer: Writer, diverging: EpochEnd) -> None:
    writer.uvarint(1)
    writer.uvarint(_DIVERGING_TAG)
    writer.uvarint(13)
    writer.int32(diverging.epoch)
    writer.int64(diverging.end_offset)
    writer.no_tags()


def read_replica_responses(frame: memoryview) -> ReplicaResponses:
    """Decode a response without the frame's size; the records are views into it."""
    reader = Reader(frame, response_body_at(FETCH_KEY, VERSION, frame), flexible=True)
    _, code, session_id = reader.fields(_RESPONSES_HEAD)
    partitions: dict[PartitionKey, ReplicaResponse] = {}
    for _ in range(reader.array_length()):
        topic_id = _topic_id(reader.fields(_TOPIC_ID)[0])
        for _ in range(reader.array_length(item_bytes_min=_PARTITION_BYTES_MIN)):
            index, response = _read_response(reader)
            partitions[topic_id, index] = response
        reader.skip_tags()
    return ReplicaResponses(code, session_id, partitions)


def _read_response(reader: Reader) -> tuple[PartitionIndex, ReplicaResponse]:
    index, code, high_watermark, _, log_start = reader.fields(_RESPONSE)
    for _ in range(max(0, reader.array_length())):
        reader.int64()
        reader.int64()
        reader.skip_tags()
    reader.int32()
    records = reader.blob()
    if reader.skip_no_tags():
        return index, ReplicaResponse(code, high_watermark, log_start, None, records if records is not None else b"")
    diverging = None
    for tag, content in reader.tags():
        if tag == _DIVERGING_TAG:
            diverging = EpochEnd(Epoch(content.int32()), Offset(content.int64()))
    return index, ReplicaResponse(code, high_watermark, log_start, diverging, records if records is not None else b"")
