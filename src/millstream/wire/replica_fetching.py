"""Fetch as followers use it (version 17): requests and answers, laid and read at both ends.

It is Kafka's own layout. A follower tells its node id and, as its epoch, the revision of its registration; for each
partition the leader epoch it knows, where its log ends and the epoch of its last record. The answer has records, or
the place where the two histories part (KIP-595). Within a session (KIP-227) both name only what has changed. One thing
Kafka leaves out is said here: an answer that an offset is out of range also tells where the log begins.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple
from uuid import UUID

from millstream.model.errors import ProtocolViolation
from millstream.model.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.replication.epochs import EpochEnd
from millstream.wire.codec import response_body_at, response_head
from millstream.wire.primitives import Buffer, Reader, Writer

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
_ANSWER: Final = struct.Struct(">ihqqq")

PartitionKey = tuple[UUID, PartitionIndex]


class ReplicaPosition(NamedTuple):
    """Where a follower's log ends."""

    offset: Offset
    last_epoch: Epoch
    """Of its last record; -1 when it has none."""
    leader_epoch: Epoch
    log_start: Offset
    max_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaFetch:
    """What a follower asks its leader."""

    node: NodeId
    registration: int
    session_id: int = NO_SESSION
    session_epoch: int = FIRST_SESSION_EPOCH
    max_wait_ms: int
    min_bytes: int = 1
    max_bytes: int
    wanted: Mapping[PartitionKey, ReplicaPosition]
    """Within a session only those that have changed."""
    forgotten: Sequence[PartitionKey] = ()


class ReplicaAnswer(NamedTuple):
    """What a leader says of one partition."""

    code: int
    high_watermark: Offset
    log_start: Offset
    diverging: EpochEnd | None
    records: Buffer


@dataclass(frozen=True, slots=True)
class ReplicaAnswers:
    """What a leader answers; a code other than 0 means that the session is over and nothing else is said."""

    code: int
    session_id: int
    partitions: Mapping[PartitionKey, ReplicaAnswer] = field(default_factory=dict)


def next_session_epoch(epoch: int) -> int:
    """The epoch of the request after one."""
    return 1 if epoch == _SESSION_EPOCH_MAX else epoch + 1


# -- the request --------------------------------------------------------------------------------------------------


def write_replica_fetch(fetch: ReplicaFetch) -> bytearray:
    """Lay the body of a request."""
    writer = Writer(flexible=True)
    writer.int32(fetch.max_wait_ms)
    writer.int32(fetch.min_bytes)
    writer.int32(fetch.max_bytes)
    writer.int8(0)
    writer.int32(fetch.session_id)
    writer.int32(fetch.session_epoch)
    wanted = _by_topic(fetch.wanted)
    writer.array_length(len(wanted))
    for topic_id, indexes in wanted.items():
        writer.uuid(topic_id)
        writer.array_length(len(indexes))
        for index in indexes:
            _write_position(writer, index, fetch.wanted[topic_id, index])
        writer.no_tags()
    forgotten = _by_topic(fetch.forgotten)
    writer.array_length(len(forgotten))
    for topic_id, indexes in forgotten.items():
        writer.uuid(topic_id)
        writer.int32_array(list(map(int, indexes)))
        writer.no_tags()
    writer.string("")
    writer.uvarint(1)
    writer.uvarint(_REPLICA_STATE_TAG)
    writer.uvarint(13)
    writer.int32(fetch.node)
    writer.int64(fetch.registration)
    writer.no_tags()
    return writer.buffer


def _write_position(writer: Writer, index: int, position: ReplicaPosition) -> None:
    offset, last_epoch, leader_epoch, log_start, max_bytes = position
    writer.buffer += _POSITION.pack(index, leader_epoch, offset, last_epoch, log_start, max_bytes)
    writer.no_tags()


def _by_topic(partitions: Iterable[PartitionKey]) -> dict[UUID, list[PartitionIndex]]:
    by_topic: dict[UUID, list[PartitionIndex]] = {}
    for topic_id, index in partitions:
        by_topic.setdefault(topic_id, []).append(index)
    return by_topic


def read_replica_fetch(frame: Buffer, body_at: int) -> ReplicaFetch:
    """Read the body of a request; the frame's memory is not needed any more after this."""
    reader = Reader(frame, body_at, flexible=True)
    max_wait_ms, min_bytes, max_bytes = reader.int32(), reader.int32(), reader.int32()
    reader.int8()
    session_id, session_epoch = reader.int32(), reader.int32()
    wanted: dict[PartitionKey, ReplicaPosition] = {}
    for _ in range(reader.array_length()):
        topic_id = reader.uuid()
        for _ in range(reader.array_length(item_bytes_min=_PARTITION_BYTES_MIN)):
            index, position = _read_position(reader)
            wanted[topic_id, index] = position
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
        node=NodeId(node),
        registration=registration,
        session_id=session_id,
        session_epoch=session_epoch,
        max_wait_ms=max_wait_ms,
        min_bytes=min_bytes,
        max_bytes=max_bytes,
        wanted=wanted,
        forgotten=forgotten,
    )


def _read_position(reader: Reader) -> tuple[PartitionIndex, ReplicaPosition]:
    index, leader_epoch, offset, last_epoch, log_start, max_bytes = reader.fields(_POSITION)
    reader.skip_tags()
    return index, ReplicaPosition(offset, last_epoch, leader_epoch, log_start, max_bytes)


# -- the answer ---------------------------------------------------------------------------------------------------


def write_replica_answers(version: int, correlation_id: int, answers: ReplicaAnswers) -> list[Buffer]:
    """Lay the whole frame of an answer as a list of buffers, so that records are sent from where they were read to."""
    writer = Writer(flexible=True)
    writer.int32(0)
    writer.int16(answers.code)
    writer.int32(answers.session_id)
    by_topic = _by_topic(answers.partitions)
    writer.array_length(len(by_topic))
    pieces: list[Buffer] = []
    for topic_id, indexes in by_topic.items():
        writer.uuid(topic_id)
        writer.array_length(len(indexes))
        for index in indexes:
            answer = answers.partitions[topic_id, index]
            _write_answer(writer, index, answer)
            if answer.records:
                pieces += (writer.buffer, answer.records)
                writer.buffer = bytearray()
            _write_diverging(writer, answer.diverging)
        writer.no_tags()
    writer.no_tags()
    pieces.append(writer.buffer)
    return [response_head(FETCH_KEY, version, correlation_id, sum(map(len, pieces))), *pieces]


def _write_answer(writer: Writer, index: int, answer: ReplicaAnswer) -> None:
    end = answer.high_watermark
    writer.buffer += _ANSWER.pack(index, answer.code, end, end, answer.log_start)
    writer.array_length(-1)
    writer.int32(_NO_PREFERRED_REPLICA)
    writer.blob_length(len(answer.records))


def _write_diverging(writer: Writer, diverging: EpochEnd | None) -> None:
    if diverging is None:
        writer.no_tags()
        return
    writer.uvarint(1)
    writer.uvarint(_DIVERGING_TAG)
    writer.uvarint(13)
    writer.int32(diverging.epoch)
    writer.int64(diverging.end_offset)
    writer.no_tags()


def read_replica_answers(frame: memoryview) -> ReplicaAnswers:
    """Read an answer; the frame comes without its size, and the records are views into it."""
    reader = Reader(frame, response_body_at(FETCH_KEY, VERSION, frame), flexible=True)
    reader.int32()
    code, session_id = reader.int16(), reader.int32()
    partitions: dict[PartitionKey, ReplicaAnswer] = {}
    for _ in range(reader.array_length()):
        topic_id = reader.uuid()
        for _ in range(reader.array_length(item_bytes_min=_PARTITION_BYTES_MIN)):
            index, answer = _read_answer(reader)
            partitions[topic_id, index] = answer
        reader.skip_tags()
    return ReplicaAnswers(code, session_id, partitions)


def _read_answer(reader: Reader) -> tuple[PartitionIndex, ReplicaAnswer]:
    index, code, high_watermark, _, log_start = reader.fields(_ANSWER)
    for _ in range(max(0, reader.array_length())):
        reader.int64()
        reader.int64()
        reader.skip_tags()
    reader.int32()
    records = reader.blob()
    diverging = None
    for tag, content in reader.tags():
        if tag == _DIVERGING_TAG:
            diverging = EpochEnd(Epoch(content.int32()), Offset(content.int64()))
    return index, ReplicaAnswer(code, high_watermark, log_start, diverging, records if records is not None else b"")
