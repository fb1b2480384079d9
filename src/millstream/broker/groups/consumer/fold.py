"""How consumer groups are made of their records, and their records of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millstream.broker.coordination.state import StateRecord
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import LEFT_EPOCH, ConsumerMember, Position
from millstream.broker.groups.consumer.records import (
    ConsumerKey,
    Kind,
    expression_record,
    group_epoch_record,
    position_record,
    read_expression,
    read_group_epoch,
    read_position,
    read_subscription,
    read_target,
    read_target_epoch,
    subscription_record,
    target_epoch_record,
    target_record,
)

_GONE: Final = Position(epoch=LEFT_EPOCH, previous_epoch=LEFT_EPOCH)


def apply(group: ConsumerGroup, key: ConsumerKey, record: StateRecord) -> None:
    """Take one record in, but not the one that takes the whole group away.

    Records of a member may come in any order, since older ones of the same key are dropped from the log.
    """
    _APPLY[key.kind](group, key.name, record)


def _apply_group(group: ConsumerGroup, _: str, record: StateRecord) -> None:
    group.epoch, group.metadata_hash = read_group_epoch(record)


def _apply_old_topics(group: ConsumerGroup, _: str, record: StateRecord) -> None:
    group.has_old_topics = record.value is not None


def _apply_target_epoch(group: ConsumerGroup, _: str, record: StateRecord) -> None:
    group.target_epoch = -1 if record.value is None else read_target_epoch(record)


def _apply_subscription(group: ConsumerGroup, member_id: str, record: StateRecord) -> None:
    if record.value is None:
        group.remove(member_id)
    else:
        group.put(_member(group, member_id).saying(read_subscription(record)))


def _apply_target(group: ConsumerGroup, member_id: str, record: StateRecord) -> None:
    if record.value is None:
        group.targets.pop(member_id, None)
    else:
        group.targets[member_id] = read_target(record)


def _apply_position(group: ConsumerGroup, member_id: str, record: StateRecord) -> None:
    if record.value is not None:
        group.put(_member(group, member_id).at(read_position(record)))
    elif member_id in group.members:
        group.put(group.members[member_id].at(_GONE))


def _apply_expression(group: ConsumerGroup, expression: str, record: StateRecord) -> None:
    group.resolve(expression, None if record.value is None else read_expression(record))


def _member(group: ConsumerGroup, member_id: str) -> ConsumerMember:
    return group.members.get(member_id) or ConsumerMember(member_id=member_id)


_APPLY: Final[dict[Kind, Callable[[ConsumerGroup, str, StateRecord], None]]] = {
    Kind.GROUP: _apply_group,
    Kind.OLD_TOPICS: _apply_old_topics,
    Kind.TARGET_EPOCH: _apply_target_epoch,
    Kind.SUBSCRIPTION: _apply_subscription,
    Kind.TARGET: _apply_target,
    Kind.POSITION: _apply_position,
    Kind.EXPRESSION: _apply_expression,
}


def record_of(group: ConsumerGroup, key: ConsumerKey) -> StateRecord | None:
    """The record of this name as it stands now, or None if it has gone since."""
    if key.kind is Kind.GROUP:
        return group_epoch_record(group.group_id, group.epoch, group.metadata_hash)
    if key.kind is Kind.TARGET_EPOCH:
        return target_epoch_record(group.group_id, group.target_epoch)
    if key.kind is Kind.TARGET:
        target = group.targets.get(key.name)
        return None if target is None else target_record(group.group_id, key.name, target)
    if key.kind is Kind.EXPRESSION:
        resolved = group.resolved.get(key.name)
        return None if resolved is None else expression_record(group.group_id, key.name, resolved)
    member = group.members.get(key.name)
    if member is None:
        return None
    if key.kind is Kind.SUBSCRIPTION:
        return subscription_record(group.group_id, key.name, member.subscription)
    return position_record(group.group_id, key.name, member.position)
