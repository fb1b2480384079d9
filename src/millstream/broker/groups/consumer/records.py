"""The records of consumer groups in `__consumer_offsets`, in Kafka's own formats.

    key 3   (group)               value: the epoch of the group, and a hash of its topics
    key 5   (group, member)       value: the metadata and subscription of a member
    key 6   (group)               value: the epoch of the target assignment
    key 7   (group, member)       value: the target of a member
    key 8   (group, member)       value: the partitions that a member owns, and in which epoch
    key 16  (group, expression)   value: the topics that a regular expression matches

Values are of version 0, written as Kafka 4.3 writes them. `broker/groups/records.py` has the other kinds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Final
from uuid import UUID

from millstream.broker.coordination.state_machine import StateRecord, record_key
from millstream.broker.groups.consumer.member import (
    Assignment,
    ClassicSide,
    MemberState,
    Position,
    Subscription,
    assignment_of,
)
from millstream.broker.groups.records import begin_flexible_value, open_flexible_value
from millstream.protocol.messages.primitives import Reader, Writer

_METADATA_HASH_TAG: Final = 0
_CLASSIC_TAG: Final = 0
_EPOCHS_TAG: Final = 0
_PRESENT: Final = 1
_TOPIC_BYTES_MIN: Final = 18

Since = Mapping[UUID, Mapping[int, int]]
"""Epochs by topic and partition."""


class Kind(IntEnum):
    GROUP = 3
    SUBSCRIPTION = 5
    TARGET_EPOCH = 6
    TARGET = 7
    POSITION = 8
    EXPRESSION = 16


_WITH_NAME: Final = frozenset({Kind.SUBSCRIPTION, Kind.TARGET, Kind.POSITION, Kind.EXPRESSION})
_KINDS: Final = frozenset(Kind)


@dataclass(frozen=True, slots=True)
class ConsumerKey:
    """Identifies a record: the group, and the member or expression, if any."""

    kind: Kind
    group_id: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Resolved:
    """The topics that an expression matches, as of a version of the topics and a time."""

    topics: frozenset[str]
    version: int
    time_ms: int


def read_consumer_key(key: bytes) -> ConsumerKey | None:
    """Parse the key of a record; return None for kinds that do not belong to consumer groups."""
    reader = Reader(key, flexible=False)
    number = reader.int16()
    if number not in _KINDS:
        return None
    kind = Kind(number)
    return ConsumerKey(kind, reader.string(), reader.string() if kind in _WITH_NAME else "")


def tombstone(key: ConsumerKey) -> StateRecord:
    return StateRecord(_key(key), None)


def member_tombstones(group_id: str, member_id: str) -> list[StateRecord]:
    """Build the tombstones of a member, in an order that never leaves a dangling reference."""
    kinds = (Kind.POSITION, Kind.TARGET, Kind.SUBSCRIPTION)
    return [tombstone(ConsumerKey(kind, group_id, member_id)) for kind in kinds]


def group_tombstones(group_id: str) -> list[StateRecord]:
    """Build the tombstones of a group without members and expressions."""
    return [tombstone(ConsumerKey(kind, group_id)) for kind in (Kind.TARGET_EPOCH, Kind.GROUP)]


# Values


def group_epoch_record(group_id: str, epoch: int, metadata_hash: int) -> StateRecord:
    writer = begin_flexible_value()
    writer.int32(epoch)
    writer.tags({_METADATA_HASH_TAG: metadata_hash.to_bytes(8, "big", signed=True)} if metadata_hash else {})
    return _record(ConsumerKey(Kind.GROUP, group_id), writer)


def read_group_epoch(record: StateRecord) -> tuple[int, int]:
    reader = open_flexible_value(record)
    epoch, metadata_hash = reader.int32(), 0
    for tag, content in reader.tags():
        if tag == _METADATA_HASH_TAG:
            metadata_hash = content.int64()
    return epoch, metadata_hash


def target_epoch_record(group_id: str, epoch: int) -> StateRecord:
    writer = begin_flexible_value()
    writer.int32(epoch)
    writer.no_tags()
    return _record(ConsumerKey(Kind.TARGET_EPOCH, group_id), writer)


def read_target_epoch(record: StateRecord) -> int:
    return open_flexible_value(record).int32()


def target_record(group_id: str, member_id: str, target: Assignment) -> StateRecord:
    writer = begin_flexible_value()
    _write_assignment(writer, target)
    writer.no_tags()
    return _record(ConsumerKey(Kind.TARGET, group_id, member_id), writer)


def read_target(record: StateRecord) -> Assignment:
    return _read_assignment(open_flexible_value(record))


def position_record(group_id: str, member_id: str, position: Position) -> StateRecord:
    writer = begin_flexible_value()
    writer.int32(position.epoch)
    writer.int32(position.previous_epoch)
    writer.int8(position.state)
    for assignment in (position.assigned, position.pending):
        _write_assignment(writer, assignment, position.since)
    writer.no_tags()
    return _record(ConsumerKey(Kind.POSITION, group_id, member_id), writer)


def read_position(record: StateRecord) -> Position:
    """Read a member's position; a state of a newer version is preserved."""
    reader = open_flexible_value(record)
    epoch, previous_epoch, state = reader.int32(), reader.int32(), reader.int8()
    since: dict[UUID, dict[int, int]] = {}
    return Position(
        epoch=epoch,
        previous_epoch=previous_epoch,
        state=MemberState(state) if state in set(MemberState) else MemberState.UNKNOWN,
        assigned=_read_assignment(reader, since),
        pending=_read_assignment(reader, since),
        since=since,
    )


def expression_record(group_id: str, expression: str, resolved: Resolved) -> StateRecord:
    writer = begin_flexible_value()
    _write_strings(writer, sorted(resolved.topics))
    writer.int64(resolved.version)
    writer.int64(resolved.time_ms)
    writer.no_tags()
    return _record(ConsumerKey(Kind.EXPRESSION, group_id, expression), writer)


def read_expression(record: StateRecord) -> Resolved:
    reader = open_flexible_value(record)
    return Resolved(frozenset(_read_strings(reader)), reader.int64(), reader.int64())


def subscription_record(group_id: str, member_id: str, subscription: Subscription) -> StateRecord:
    writer = begin_flexible_value()
    writer.string(subscription.instance_id)
    writer.string(subscription.rack_id)
    writer.string(subscription.client_id)
    writer.string(subscription.client_host)
    _write_strings(writer, sorted(subscription.topics))
    writer.string(subscription.expression)
    writer.int32(subscription.rebalance_timeout_ms)
    writer.string(subscription.assignor)
    classic = subscription.classic
    writer.tags({} if classic is None else {_CLASSIC_TAG: _classic_bytes(classic)})
    return _record(ConsumerKey(Kind.SUBSCRIPTION, group_id, member_id), writer)


def read_subscription(record: StateRecord) -> Subscription:
    reader = open_flexible_value(record)
    instance_id, rack_id = reader.nullable_string(), reader.nullable_string()
    client_id, client_host = reader.string(), reader.string()
    topics = frozenset(_read_strings(reader))
    expression = reader.nullable_string() or ""
    rebalance_timeout_ms, assignor = reader.int32(), reader.nullable_string()
    classic = None
    for tag, content in reader.tags():
        if tag == _CLASSIC_TAG and content.int8() == _PRESENT:
            classic = _read_classic(content)
    return Subscription(
        instance_id=instance_id,
        rack_id=rack_id,
        client_id=client_id,
        client_host=client_host,
        topics=topics,
        expression=expression,
        rebalance_timeout_ms=rebalance_timeout_ms,
        assignor=assignor,
        classic=classic,
    )


def _classic_bytes(classic: ClassicSide) -> bytearray:
    writer = Writer(flexible=True)
    writer.int8(_PRESENT)
    writer.int32(classic.session_timeout_ms)
    writer.array_length(len(classic.protocols))
    for name, metadata in classic.protocols:
        writer.string(name)
        writer.blob(metadata)
        writer.no_tags()
    writer.no_tags()
    return writer.buffer


def _read_classic(reader: Reader) -> ClassicSide:
    session_timeout_ms = reader.int32()
    protocols = []
    for _ in range(max(0, reader.array_length())):
        protocols.append((reader.string(), bytes(reader.blob() or b"")))
        reader.skip_tags()
    return ClassicSide(session_timeout_ms=session_timeout_ms, protocols=tuple(protocols))


def _write_assignment(writer: Writer, assignment: Assignment, since: Since | None = None) -> None:
    """Write partitions by topic, with the epochs in which they were assigned if these are known, as Kafka 4.3 does."""
    writer.array_length(len(assignment))
    for topic_id, partitions in sorted(assignment.items()):
        ordered = sorted(partitions)
        writer.uuid(topic_id)
        writer.int32_array(ordered)
        known = {} if since is None else since.get(topic_id, {})
        if all(number in known for number in ordered):
            epochs = Writer(flexible=True)
            epochs.int32_array([known[number] for number in ordered])
            writer.tags({_EPOCHS_TAG: epochs.buffer})
        else:
            writer.no_tags()


def _read_assignment(reader: Reader, since: dict[UUID, dict[int, int]] | None = None) -> Assignment:
    pairs = []
    for _ in range(max(0, reader.array_length(item_bytes_min=_TOPIC_BYTES_MIN))):
        topic_id, partitions = reader.uuid(), reader.int32_array()
        pairs.append((topic_id, partitions))
        for tag, content in reader.tags():
            if tag == _EPOCHS_TAG and since is not None:
                epochs = dict(zip(partitions, content.int32_array(), strict=False))
                since.setdefault(topic_id, {}).update(epochs)
    return assignment_of(pairs)


def _write_strings(writer: Writer, texts: Iterable[str]) -> None:
    listed = list(texts)
    writer.array_length(len(listed))
    for text in listed:
        writer.string(text)


def _read_strings(reader: Reader) -> list[str]:
    return [reader.string() for _ in range(max(0, reader.array_length()))]


def _record(key: ConsumerKey, writer: Writer) -> StateRecord:
    return StateRecord(_key(key), bytes(writer.buffer))


def _key(key: ConsumerKey) -> bytes:
    return record_key(key.kind, key.group_id, *([key.name] if key.kind in _WITH_NAME else []))
