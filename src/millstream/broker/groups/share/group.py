"""One share group: its members and their assignments. No time, no log, no timers.

Several members of a share group may be assigned the same partition: its queue delivers each message to one of them. So
partitions are never revoked first, and assignments are derived from the current members, not stored.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Final
from uuid import UUID

from millstream.broker.coordination.state_machine import StateRecord, record_key
from millstream.broker.groups.consumer.assignor import TopicView, metadata_hash, partitions_of
from millstream.broker.groups.records import begin_flexible_value, open_flexible_value
from millstream.protocol.messages.primitives import Reader

Assignment = Mapping[UUID, frozenset[int]]


def assign_partitions(
    subscriptions: Mapping[str, frozenset[UUID]], partitions: Mapping[UUID, int]
) -> dict[str, Assignment]:
    """Assign the partitions of subscribed topics to members."""
    shares: dict[str, dict[UUID, frozenset[int]]] = {member: {} for member in subscriptions}
    # Each topic starts with another member, so that single-partition topics are not all assigned to the first one.
    turn = 0
    for topic in sorted(partitions):
        members = sorted(member for member, topics in subscriptions.items() if topic in topics)
        if not members:
            continue
        for member, share in _distribute(members, partitions[topic], turn).items():
            shares[member][topic] = share
        turn += partitions[topic]
    return dict(shares.items())


def _distribute(members: list[str], partitions: int, turn: int) -> dict[str, frozenset[int]]:
    number = len(members)
    dealt: dict[str, set[int]] = {}
    for step in range(max(number, partitions)):
        dealt.setdefault(members[(step + turn) % number], set()).add(step % partitions)
    return {member: frozenset(share) for member, share in dealt.items()}


GROUP_TYPE = "share"
NO_EPOCH = -1
"""The epoch of a member restored from the log, until its next heartbeat."""


class ShareGroupState(StrEnum):
    """The state of a group; the texts are Kafka's."""

    EMPTY = "Empty"
    STABLE = "Stable"


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareMember:
    member_id: str
    rack_id: str | None
    client_id: str
    client_host: str
    topics: frozenset[str]


@dataclass(slots=True)
class ReportedState:
    """The state last sent to a member; not stored."""

    epoch: int = NO_EPOCH
    previous_epoch: int = NO_EPOCH
    assignment: Assignment | None = None


class ShareGroup:
    def __init__(self, group_id: str) -> None:
        self.group_id = group_id
        self.epoch = 0
        self.metadata_hash = 0
        self.members: dict[str, ShareMember] = {}
        # All of this is soft.
        self.checked_version: int | None = None
        self._target: dict[str, Assignment] = {}
        self._target_for: tuple[int, int] | None = None

    @property
    def is_empty(self) -> bool:
        return not self.members

    @property
    def state(self) -> ShareGroupState:
        return ShareGroupState.EMPTY if self.is_empty else ShareGroupState.STABLE

    @property
    def protocol_type(self) -> str:
        return GROUP_TYPE

    def consumes(self, topic: str) -> bool:
        return any(topic in member.topics for member in self.members.values())

    def topics(self) -> frozenset[str]:
        return frozenset().union(*(member.topics for member in self.members.values()))

    def target(self, view: TopicView) -> dict[str, Assignment]:
        current = (self.epoch, view.version)
        if self._target_for != current:
            self._target = target_of(self.members, view)
            self._target_for = current
        return self._target


def target_of(members: dict[str, ShareMember], view: TopicView) -> dict[str, Assignment]:
    names = frozenset().union(*(member.topics for member in members.values()))
    topics = {topic.name: topic.topic_id for topic in view.existing(names)}
    partitions = partitions_of(view.existing(names))
    subscriptions = {
        member.member_id: frozenset(topics[name] for name in member.topics if name in topics)
        for member in members.values()
    }
    return assign_partitions(subscriptions, partitions)


def hash_of(members: dict[str, ShareMember], view: TopicView) -> int:
    """Hash everything about the topics that an assignment depends on."""
    return metadata_hash(view, frozenset().union(*(member.topics for member in members.values())))


JOIN_EPOCH = 0
LEFT_EPOCH = -1


@dataclass(frozen=True, slots=True, kw_only=True)
class ShareHeartbeat:
    """A member joins, stays or leaves; None means unchanged."""

    group_id: str
    member_id: str
    epoch: int
    rack_id: str | None
    topics: frozenset[str] | None
    client_id: str
    client_host: str
    session_ms: int
    heartbeat_ms: int


class ShareKind(IntEnum):
    MEMBER = 10
    GROUP = 11


_KINDS: Final = frozenset(ShareKind)


@dataclass(frozen=True, slots=True)
class ShareKey:
    """Identifies a record: the group, and the member, if any.

        key 10   (group, member)   value: the metadata and subscription of a member
        key 11   (group)           value: the epoch of the group, and a hash of its topics

    Kafka also stores target assignments (12 to 14) and which partitions have a state (15); here the first follow from
    the members, and the second is stored with the states.
    """

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
    return StateRecord(_key(key), None)


def group_record(group_id: str, epoch: int, metadata_hash: int) -> StateRecord:
    writer = begin_flexible_value()
    writer.int32(epoch)
    writer.int64(metadata_hash)
    writer.no_tags()
    return StateRecord(_key(ShareKey(ShareKind.GROUP, group_id)), bytes(writer.buffer))


def read_group(record: StateRecord) -> tuple[int, int]:
    reader = open_flexible_value(record)
    return reader.int32(), reader.int64()


def member_record(group_id: str, member: ShareMember) -> StateRecord:
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
    reader = open_flexible_value(record)
    return ShareMember(
        member_id=key.member_id,
        rack_id=reader.nullable_string(),
        client_id=reader.string(),
        client_host=reader.string(),
        topics=frozenset(reader.string() for _ in range(max(0, reader.array_length()))),
    )


def _key(key: ShareKey) -> bytes:
    return record_key(key.kind, key.group_id, *([key.member_id] if key.kind is ShareKind.MEMBER else []))
