"""The records of share groups in `__consumer_offsets`, in Kafka's own formats.

    key 10   (group, member)   value: the metadata and subscription of a member
    key 11   (group)           value: the epoch of the group, and a hash of its topics

Kafka also stores target assignments (12 to 14) and which partitions have a state (15); here the first follow from the
members, and the second is stored with the states.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.groups.records import begin_flexible_value, open_flexible_value
from millstream.broker.groups.share.group import ShareMember
from millstream.protocol.messages.primitives import Reader, Writer


class ShareKind(IntEnum):
    """The kind of a record."""

    MEMBER = 10
    GROUP = 11


_KINDS: Final = frozenset(ShareKind)


@dataclass(frozen=True, slots=True)
class ShareKey:
    """Identifies a record: the group, and the member, if any."""

    kind: ShareKind
    group_id: str
    member_id: str = ""


def read_share_key(key: bytes) -> ShareKey | None:
    """Parse the key of a record; return None for kinds that do not belong to share groups."""
    reader = Reader(key, flexible=False)
    number = reader.int16()
    if number not in _KINDS:
        return None
    kind = ShareKind(number)
    return ShareKey(kind, reader.string(), reader.string() if kind is ShareKind.MEMBER else "")


def tombstone(key: ShareKey) -> StateRecord:
    """Build a tombstone."""
    return StateRecord(_key(key), None)


def group_record(group_id: str, epoch: int, metadata_hash: int) -> StateRecord:
    writer = begin_flexible_value()
    writer.int32(epoch)
    writer.int64(metadata_hash)
    writer.no_tags()
    return StateRecord(_key(ShareKey(ShareKind.GROUP, group_id)), bytes(writer.buffer))


def read_group(record: StateRecord) -> tuple[int, int]:
    """Read the epoch of a group and the hash of its topics."""
    reader = open_flexible_value(record)
    return reader.int32(), reader.int64()


def member_record(group_id: str, member: ShareMember) -> StateRecord:
    """Build the record of a member."""
    writer = begin_flexible_value()
    writer.string(member.rack_id)
    writer.string(member.client_id)
    writer.string(member.client_host)
    writer.array_length(len(member.topics))
    for topic in sorted(member.topics):
        writer.string(topic)
    writer.no_tags()
    return StateRecord(_key(ShareKey(ShareKind.MEMBER, group_id, member.member_id)), bytes(writer.buffer))


def read_member(key: ShareKey, record: StateRecord) -> ShareMember:
    """Read a member."""
    reader = open_flexible_value(record)
    return ShareMember(
        member_id=key.member_id,
        rack_id=reader.nullable_string(),
        client_id=reader.string(),
        client_host=reader.string(),
        topics=frozenset(reader.string() for _ in range(max(0, reader.array_length()))),
    )


def _key(key: ShareKey) -> bytes:
    writer = Writer(flexible=False)
    writer.int16(key.kind)
    writer.string(key.group_id)
    if key.kind is ShareKind.MEMBER:
        writer.string(key.member_id)
    return bytes(writer.buffer)
