"""ConsumerGroupHeartbeat: a member joins or stays, and receives its assignment."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from millstream.broker.coordination.state_machine import Outcome, StateRecord
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import AWAY_EPOCH, Assignment, ConsumerMember, Subscription, is_within
from millstream.broker.groups.consumer.reconciliation import GroupContext, Reconciliation
from millstream.broker.groups.consumer.records import member_tombstones, target_record
from millstream.broker.groups.consumer.requests import ConsumerHeartbeat, HeartbeatAnswer
from millstream.core.errors import FencedMemberEpoch, GroupFull, UnreleasedInstance

FindGroup = Callable[[str, bool], tuple[ConsumerGroup, list[StateRecord]]]
"""Returns the group with an id and the records that create it; it is created only if the flag is set."""


class Heartbeats:
    """Handles heartbeats."""

    def __init__(self, context: GroupContext, find_group: FindGroup) -> None:
        self._context = context
        self._find_group = find_group

    def run(self, request: ConsumerHeartbeat) -> Outcome[HeartbeatAnswer]:
        """Handle a heartbeat; the records contain everything that it changes."""
        joins = request.epoch == 0
        group, records = self._find_group(request.group_id, joins)
        member_id = request.member_id or self._context.new_suffix()
        before = self._member(group, member_id, request, records)
        after = before.saying(_updated_subscription(before.subscription, request))
        check_room(group, after, self._context)
        reconciliation = Reconciliation(group, before=before, after=after, context=self._context, records=records)
        member = reconciliation.run(request.owned)
        self._context.sessions.keep_alive(group.group_id, member)
        # A member that joins, or sends everything, may not know its assignment.
        include_assignment = joins or request.is_full or member.position.assigned != before.position.assigned
        answer = HeartbeatAnswer(
            member_id=member_id,
            epoch=member.epoch,
            heartbeat_ms=self._context.limits.heartbeat_of(group.group_id),
            assignment=member.position.assigned if include_assignment else None,
        )
        return records, answer

    def _member(
        self, group: ConsumerGroup, member_id: str, request: ConsumerHeartbeat, records: list[StateRecord]
    ) -> ConsumerMember:
        """Return the member that sent the heartbeat; a new one if it joins."""
        if request.epoch != 0:
            member = group.find_sender(member_id, request.instance_id)
            _check_epoch(member, request.epoch, request.owned)
            return member
        known = group.members.get(member_id) or ConsumerMember(member_id=member_id)
        if request.instance_id is None:
            return known
        static = group.find_static(request.instance_id)
        if static is None or static.member_id == member_id:
            return known
        if not static.speaks_classic and static.epoch != AWAY_EPOCH:
            raise UnreleasedInstance(
                f"instance {request.instance_id!r} of group {group.group_id!r} belongs to member {static.member_id!r}"
            )
        return replace_static_member(group, static, member_id, records)


def replace_static_member(
    group: ConsumerGroup, static: ConsumerMember, member_id: str, records: list[StateRecord]
) -> ConsumerMember:
    """Replace a static member by a new process, which inherits its assignment."""
    records += member_tombstones(group.group_id, static.member_id)
    records.append(target_record(group.group_id, member_id, group.target_of(static)))
    position = dataclasses.replace(static.position, epoch=0, previous_epoch=0)
    return ConsumerMember(member_id=member_id, subscription=static.subscription, position=position)


def check_room(group: ConsumerGroup, member: ConsumerMember, context: GroupContext) -> None:
    """Raise `GroupFull` if there is no room for a member or its metadata."""
    limits = context.limits
    known = group.members.get(member.member_id)
    if known is None and member.instance_id is not None:
        known = group.find_static(member.instance_id)
    if known is None and len(group.members) >= limits.members_max:
        raise GroupFull(f"group {group.group_id!r} has {limits.members_max} members, which is the maximum")
    added_bytes = member.subscription.size_bytes - (0 if known is None else known.subscription.size_bytes)
    if added_bytes > 0 and group.members_bytes + added_bytes > limits.members_bytes_max:
        raise GroupFull(f"the members of group {group.group_id!r} send more metadata than is stored")


def _updated_subscription(before: Subscription, request: ConsumerHeartbeat) -> Subscription:
    """Return the updated subscription; fields that are left out stay as they were."""
    updated = dataclasses.replace(
        before,
        instance_id=before.instance_id if request.instance_id is None else request.instance_id,
        rack_id=before.rack_id if request.rack_id is None else request.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topics=before.topics if request.topics is None else request.topics,
        expression=before.expression if request.expression is None else request.expression,
        rebalance_timeout_ms=(
            before.rebalance_timeout_ms if request.rebalance_timeout_ms is None else request.rebalance_timeout_ms
        ),
        assignor=before.assignor if request.assignor is None else request.assignor,
        classic=None,
    )
    return before if updated == before else updated


def _check_epoch(member: ConsumerMember, epoch: int, owned: Assignment | None) -> None:
    known = member.position
    if epoch == known.epoch:
        return
    # The response with the newer epoch may have been lost; the member then has no partition of another member.
    missed = epoch == known.previous_epoch and owned is not None and is_within(owned, known.assigned)
    if epoch > known.epoch or not missed:
        raise FencedMemberEpoch(
            f"member {member.member_id!r} is in epoch {known.epoch}, not {epoch}; it has to join again"
        )
