"""The records of `__consumer_offsets`, in Kafka's own formats, so that tools which read that topic understand it.

    key 1  (group, topic, partition)   value: a committed offset
    key 2  (group)                     value: a generation of a group, with its members and their assignments

Keys and values begin with a 16-bit number: the kind of record in a key, the version in a value. Versions are those that
Kafka 4 writes (offsets: 3, or 1 if the client set a retention; groups: 3).
An offset also carries the id of its topic in the header `topic-id`: a name can be reused after a topic was deleted, and
offsets of the old topic must not apply to the new one. The empty header `transactional` marks an offset that a
transaction has committed, now or before. Kafka's tools ignore headers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from millstream.broker.coordination.state_machine import StateRecord, record_key
from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages.primitives import Reader, Writer

TOPIC_ID_HEADER: Final = "topic-id"
TRANSACTIONAL_HEADER: Final = "transactional"

_OFFSET_KEY: Final = 1
_GROUP_KEY: Final = 2
_OFFSET_VERSION: Final = 3
_OFFSET_VERSION_WITH_EXPIRY: Final = 1
_GROUP_VERSION: Final = 3

NO_TIME_MS: Final = -1


@dataclass(frozen=True, slots=True)
class OffsetKey:
    group_id: str
    topic: str
    partition: int


@dataclass(frozen=True, slots=True)
class GroupKey:
    group_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class CommittedOffset:
    """The committed offset of a group in one partition. `expire_ms` is set only by clients that request a retention."""

    offset: int
    leader_epoch: int = -1
    metadata: str = ""
    commit_ms: int
    expire_ms: int = NO_TIME_MS
    topic_id: UUID | None = None
    is_transactional: bool = False
    """Whether a transaction has committed it, or an earlier offset of the group in the partition."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredMember:
    """A member as it is stored in a generation."""

    member_id: str
    instance_id: str | None
    client_id: str
    client_host: str
    rebalance_timeout_ms: int
    session_timeout_ms: int
    subscription: bytes
    assignment: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGroup:
    """A generation of a group; one without members marks the group as empty."""

    protocol_type: str
    generation: int
    protocol_name: str | None
    leader_id: str | None
    state_since_ms: int
    members: tuple[StoredMember, ...]


def offset_record(key: OffsetKey, committed: CommittedOffset) -> StateRecord:
    expires = committed.expire_ms != NO_TIME_MS
    writer = Writer(flexible=False)
    writer.int16(_OFFSET_VERSION_WITH_EXPIRY if expires else _OFFSET_VERSION)
    writer.int64(committed.offset)
    if not expires:
        writer.int32(committed.leader_epoch)
    writer.string(committed.metadata)
    writer.int64(committed.commit_ms)
    if expires:
        writer.int64(committed.expire_ms)
    headers = [] if committed.topic_id is None else [(TOPIC_ID_HEADER, committed.topic_id.bytes)]
    if committed.is_transactional:
        headers.append((TRANSACTIONAL_HEADER, b""))
    return StateRecord(_offset_key(key), bytes(writer.buffer), tuple(headers))


def offset_tombstone(key: OffsetKey) -> StateRecord:
    return StateRecord(_offset_key(key), None)


def group_record(group_id: str, group: StoredGroup) -> StateRecord:
    writer = Writer(flexible=False)
    writer.int16(_GROUP_VERSION)
    writer.string(group.protocol_type)
    writer.int32(group.generation)
    writer.string(group.protocol_name)
    writer.string(group.leader_id)
    writer.int64(group.state_since_ms)
    writer.array_length(len(group.members))
    for member in group.members:
        writer.string(member.member_id)
        writer.string(member.instance_id)
        writer.string(member.client_id)
        writer.string(member.client_host)
        writer.int32(member.rebalance_timeout_ms)
        writer.int32(member.session_timeout_ms)
        writer.blob(member.subscription)
        writer.blob(member.assignment)
    return stored_group_record(group_id, bytes(writer.buffer))


def stored_group_record(group_id: str, value: bytes) -> StateRecord:
    """Build the record of a generation from its stored value."""
    return StateRecord(record_key(_GROUP_KEY, group_id), value)


def group_tombstone(group_id: str) -> StateRecord:
    return StateRecord(record_key(_GROUP_KEY, group_id), None)


def read_key(key: bytes) -> OffsetKey | GroupKey | None:
    """Parse the key of a record; return None for kinds that this broker does not store."""
    reader = Reader(key, flexible=False)
    kind = reader.int16()
    if kind == _OFFSET_KEY:
        return OffsetKey(reader.string(), reader.string(), reader.int32())
    if kind == _GROUP_KEY:
        return GroupKey(reader.string())
    return None


def read_offset(record: StateRecord) -> CommittedOffset:
    reader = Reader(record.value or b"", flexible=False)
    expires = _check_version(reader, _OFFSET_VERSION, _OFFSET_VERSION_WITH_EXPIRY) == _OFFSET_VERSION_WITH_EXPIRY
    return CommittedOffset(
        offset=reader.int64(),
        leader_epoch=-1 if expires else reader.int32(),
        metadata=reader.string(),
        commit_ms=reader.int64(),
        expire_ms=reader.int64() if expires else NO_TIME_MS,
        topic_id=_topic_id(record),
        is_transactional=any(name == TRANSACTIONAL_HEADER for name, _ in record.headers),
    )


def read_group(record: StateRecord) -> StoredGroup:
    reader = Reader(record.value or b"", flexible=False)
    _check_version(reader, _GROUP_VERSION)
    return StoredGroup(
        protocol_type=reader.string(),
        generation=reader.int32(),
        protocol_name=reader.nullable_string(),
        leader_id=reader.nullable_string(),
        state_since_ms=reader.int64(),
        members=tuple([_read_member(reader) for _ in range(max(0, reader.array_length()))]),
    )


def _read_member(reader: Reader) -> StoredMember:
    return StoredMember(
        member_id=reader.string(),
        instance_id=reader.nullable_string(),
        client_id=reader.string(),
        client_host=reader.string(),
        rebalance_timeout_ms=reader.int32(),
        session_timeout_ms=reader.int32(),
        subscription=bytes(reader.blob() or b""),
        assignment=bytes(reader.blob() or b""),
    )


def _check_version(reader: Reader, *known: int) -> int:
    version = reader.int16()
    if version not in known:
        raise ProtocolViolation(f"a record in the offsets topic has unknown version {version}")
    return version


def _topic_id(record: StateRecord) -> UUID | None:
    for name, content in record.headers:
        if name == TOPIC_ID_HEADER and content is not None and len(content) == 16:
            return UUID(bytes=content)
    return None


def _offset_key(key: OffsetKey) -> bytes:
    return record_key(_OFFSET_KEY, key.group_id, key.topic) + key.partition.to_bytes(4, "big", signed=True)


FLEXIBLE_VALUE_VERSION: Final = 0


def begin_flexible_value() -> Writer:
    """Start the value of a consumer or share group's record."""
    writer = Writer(flexible=True)
    writer.int16(FLEXIBLE_VALUE_VERSION)
    return writer


def open_flexible_value(record: StateRecord) -> Reader:
    """Read the value of a consumer or share group's record from its first field on."""
    reader = Reader(record.value or b"", flexible=True)
    _check_version(reader, FLEXIBLE_VALUE_VERSION)
    return reader
