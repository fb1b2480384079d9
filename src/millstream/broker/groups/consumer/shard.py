"""The consumer groups of one partition of `__consumer_offsets`, whose partitions the coordinator assigns.

`broker/groups/shard.py` owns the partition, the offsets and the classic groups, and calls this module for consumer
groups. Operations only produce records; groups change when these are replayed, so a refused append has nothing to undo.
State that an operation changes directly is soft: timers, and which version of the topics it has seen.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Final

from millstream.broker.coordination.state_machine import Outcome, StateRecord, Timers
from millstream.broker.groups.consumer.assignor import TopicView, preferred_assignor, with_names
from millstream.broker.groups.consumer.classic_member import (
    ClassicMembers,
    can_downgrade,
    deletion_records,
    downgrade,
    upgrade,
)
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import (
    LEFT_EPOCH,
    NOTHING,
    ConsumerMember,
    MemberState,
    Position,
    union,
)
from millstream.broker.groups.consumer.reconciliation import (
    Departure,
    Expressions,
    GroupContext,
    Heartbeats,
    Late,
    Sessions,
)
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
from millstream.broker.groups.group import GroupState
from millstream.broker.groups.offsets import Registry
from millstream.broker.groups.records import group_tombstone
from millstream.broker.groups.requests import (
    CommitRequest,
    ConsumerGroupDescription,
    ConsumerHeartbeat,
    ConsumerMemberDescription,
    GroupLimits,
    GroupListing,
    HeartbeatResult,
    JoinRequest,
    JoinResponse,
)
from millstream.core.clock import Clock
from millstream.core.errors import (
    IllegalGeneration,
    MillstreamError,
    StaleMemberEpoch,
    UnknownGroup,
    UnsupportedVersion,
)

_GONE: Final = Position(epoch=LEFT_EPOCH, previous_epoch=LEFT_EPOCH)


def apply(group: ConsumerGroup, key: ConsumerKey, record: StateRecord) -> None:
    """Apply one record, except the one that deletes the group.

    Records of a member may arrive in any order, since compaction removes older ones of the same key.
    """
    _APPLY[key.kind](group, key.name, record)


def _apply_group(group: ConsumerGroup, _: str, record: StateRecord) -> None:
    group.epoch, group.metadata_hash = read_group_epoch(record)


def _apply_target_epoch(group: ConsumerGroup, _: str, record: StateRecord) -> None:
    group.target_epoch = -1 if record.value is None else read_target_epoch(record)


def _apply_subscription(group: ConsumerGroup, member_id: str, record: StateRecord) -> None:
    if record.value is None:
        group.remove(member_id)
    else:
        group.put(_find_or_create_member(group, member_id).with_subscription(read_subscription(record)))


def _apply_target(group: ConsumerGroup, member_id: str, record: StateRecord) -> None:
    if record.value is None:
        group.targets.pop(member_id, None)
    else:
        group.targets[member_id] = read_target(record)


def _apply_position(group: ConsumerGroup, member_id: str, record: StateRecord) -> None:
    if record.value is not None:
        group.put(_find_or_create_member(group, member_id).at(read_position(record)))
    elif member_id in group.members:
        group.put(group.members[member_id].at(_GONE))


def _apply_expression(group: ConsumerGroup, expression: str, record: StateRecord) -> None:
    group.resolve(expression, None if record.value is None else read_expression(record))


def _find_or_create_member(group: ConsumerGroup, member_id: str) -> ConsumerMember:
    return group.members.get(member_id) or ConsumerMember(member_id=member_id)


_APPLY: Final[dict[Kind, Callable[[ConsumerGroup, str, StateRecord], None]]] = {
    Kind.GROUP: _apply_group,
    Kind.TARGET_EPOCH: _apply_target_epoch,
    Kind.SUBSCRIPTION: _apply_subscription,
    Kind.TARGET: _apply_target,
    Kind.POSITION: _apply_position,
    Kind.EXPRESSION: _apply_expression,
}


def record_of(group: ConsumerGroup, key: ConsumerKey) -> StateRecord | None:
    """Build the current record of a key; None if it was deleted."""
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


Records = list[StateRecord]

GROUP_TYPE = "consumer"

_DOWNGRADE = "consumer-downgrade"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsumerTopics:
    """The topics that consumer groups can assign, and their matched expressions."""

    topics: TopicView
    expressions: Expressions

    @classmethod
    def of(cls, topics: TopicView) -> ConsumerTopics:
        return cls(topics=topics, expressions=Expressions(topics))


class ConsumerShard:
    def __init__(
        self,
        registry: Registry,
        timers: Timers,
        *,
        limits: GroupLimits,
        clock: Clock,
        topics: ConsumerTopics,
        new_suffix: Callable[[], str],
        rebalance_classic: Callable[[str], Records],
    ) -> None:
        """`rebalance_classic` is called once a consumer group has become the classic group of this id."""
        self._registry = registry
        self._timers = timers
        self._limits = limits
        self._clock = clock
        self._topics = topics.topics
        self._rebalance_classic = rebalance_classic
        self._sessions = Sessions(timers, session_of=limits.session_of, expire=self._expire)
        context = GroupContext(
            topics=topics.topics,
            expressions=topics.expressions,
            sessions=self._sessions,
            limits=limits,
            clock=clock,
            new_suffix=new_suffix,
        )
        self._heartbeats = Heartbeats(context, self._find_or_create)
        self._departure = Departure(context, self._downgrade)
        self.classic = ClassicMembers(context, self._departure)

    def __iter__(self) -> Iterator[ConsumerGroup]:
        return iter(self._registry.consumers)

    def get(self, group_id: str) -> ConsumerGroup | None:
        return self._registry.get_consumer(group_id)

    def get_with_members(self, group_id: str) -> ConsumerGroup | None:
        """Return the consumer group with this id; None if it does not exist or is empty."""
        group = self.get(group_id)
        return None if group is None or group.is_empty else group

    # The newer protocol

    def heartbeat(self, request: ConsumerHeartbeat) -> Outcome[HeartbeatResult]:
        if request.epoch < 0:
            return self._departure.leave(self._require(request.group_id), request)
        return self._heartbeats.run(request)

    def describe(self, group_id: str) -> Outcome[ConsumerGroupDescription]:
        group = self._require(group_id)
        return [], ConsumerGroupDescription(
            group_id=group_id,
            state=group.state.value,
            epoch=group.epoch,
            target_epoch=group.target_epoch,
            assignor=preferred_assignor(group.assignors),
            members=tuple(self._describe_member(group, member) for member in group.members.values()),
        )

    def listings(self) -> Iterator[GroupListing]:
        for group in self:
            yield GroupListing(
                group_id=group.group_id,
                protocol_type=group.protocol_type,
                state=group.state.value,
                group_type=GROUP_TYPE,
            )

    # The classic protocol, on a group of this kind

    def join(self, group: ConsumerGroup, request: JoinRequest) -> Outcome[JoinResponse]:
        outcome = self.classic.join(group, request)
        others = [member for member in group.members.values() if member.instance_id != request.instance_id]
        if request.instance_id is not None and all(member.speaks_classic for member in others):
            # It may have replaced the last member of the newer protocol.
            self._downgrade_soon(group.group_id)
        return outcome

    def delete_if_empty(self, group_id: str) -> Records:
        """Build the records that delete an empty group, which a classic one replaces."""
        group = self.get(group_id)
        return [] if group is None else deletion_records(group)

    # Offsets

    def check_commit(self, group: ConsumerGroup, request: CommitRequest) -> None:
        """Raise if this member cannot commit these offsets now.

        A member that does not know its newest epoch yet may commit offsets of partitions that it has owned since the
        epoch it knows; a classic member must rejoin first.
        """
        who = request.member
        if who.generation < 0 and group.is_empty:
            return
        member = group.find(who.member_id)
        if not member.speaks_classic and not request.supports_unknown_group:
            raise UnsupportedVersion("members of consumer groups commit with version 9 of OffsetCommit or later")
        if member.speaks_classic or who.generation >= member.epoch:
            _check_epoch(member, who.generation)
        elif not all(
            self._has_since(member, topic, commit.partition, who.generation)
            for topic, commits in request.topics.items()
            for commit in commits
        ):
            raise _stale_epoch_error(member, who.generation)

    def check_fetch(self, group_id: str, member_id: str | None, epoch: int) -> None:
        """Raise if this member may not fetch offsets now; requests without a member may."""
        group = self.get(group_id)
        if group is not None and (member_id or epoch >= 0):
            _check_epoch(group.find(member_id or ""), epoch)

    def expire_if_unused(self, group: ConsumerGroup, now_ms: int, *, offsets_left: int, some_expired: bool) -> Records:
        # A group that has only just become empty may be one whose consumers restart.
        idle = some_expired or now_ms - group.empty_since_ms >= self._limits.sweep_ms
        return deletion_records(group) if group.is_empty and idle and not offsets_left else []

    # The fold

    def replay(self, key: ConsumerKey, record: StateRecord) -> None:
        group = self.get(key.group_id)
        if record.value is None:
            if group is not None:
                self._replay_removal(group, key, record)
            return
        if group is None:
            group = self._registry.put_consumer(ConsumerGroup(key.group_id))
            group.empty_since_ms = self._clock.now_ms()
        apply(group, key, record)

    def restored(self) -> None:
        """Restart the sessions of all members, and the deadlines of those that must revoke partitions."""
        for group in self:
            for member in group.members.values():
                self._sessions.keep_alive(group.group_id, member)
                if member.position.state is MemberState.UNREVOKED and not member.speaks_classic:
                    self._sessions.await_revocation(group.group_id, member)
            if group.classic_members and can_downgrade(group, (), members_max=self._limits.members_max):
                self._downgrade_soon(group.group_id)

    def durable_keys(self) -> Iterator[ConsumerKey]:
        for group in self:
            yield from group.keys()

    def durable_record(self, key: ConsumerKey) -> StateRecord | None:
        group = self.get(key.group_id)
        return None if group is None else record_of(group, key)

    # Internals

    def _has_since(self, member: ConsumerMember, topic: str, partition: int, epoch: int) -> bool:
        known = self._topics.get(topic)
        since = None if known is None else member.position.has_since(known.topic_id, partition)
        return since is not None and since <= epoch

    def _require(self, group_id: str) -> ConsumerGroup:
        group = self.get(group_id)
        if group is None:
            raise UnknownGroup(f"there is no consumer group {group_id!r}")
        return group

    def _find_or_create(self, group_id: str, may_make: bool) -> tuple[ConsumerGroup, Records]:
        group = self.get(group_id)
        if group is not None:
            return group, []
        if not may_make:
            raise UnknownGroup(f"there is no consumer group {group_id!r}")
        classic = self._registry.get(group_id)
        if classic is None:
            self._registry.check_room()
            return ConsumerGroup(group_id), []
        if classic.is_in(GroupState.EMPTY):
            return ConsumerGroup(group_id), [group_tombstone(group_id)]
        upgraded, records = upgrade(classic, self._topics, members_max=self._limits.members_max)
        for member in upgraded.members.values():
            self._sessions.keep_alive(group_id, member)
        return upgraded, records

    def _replay_removal(self, group: ConsumerGroup, key: ConsumerKey, record: StateRecord) -> None:
        if key.kind is Kind.GROUP:
            for member_id in group.members:
                self._sessions.forget(group.group_id, member_id)
            self._registry.drop_consumer(group.group_id)
            return
        apply(group, key, record)
        if key.kind is Kind.SUBSCRIPTION:
            self._sessions.forget(group.group_id, key.name)
            if group.is_empty:
                group.empty_since_ms = self._clock.now_ms()

    def _expire(self, group_id: str, member_id: str, reason: str, late: Late) -> Records:
        group = self.get(group_id)
        member = None if group is None else group.members.get(member_id)
        if group is None or member is None or not late(member):
            return []
        return self._departure.remove(group, [member], reason)

    def _downgrade(self, group: ConsumerGroup, without: Collection[str]) -> Records:
        if not can_downgrade(group, without, members_max=self._limits.members_max):
            return []
        group_id = group.group_id
        # The classic group exists once the records are replayed.
        self._timers.schedule((_DOWNGRADE, group_id), 0, lambda: self._rebalance_classic(group_id))
        return downgrade(group, without, self._topics, now_ms=self._clock.now_ms())

    def _downgrade_soon(self, group_id: str) -> None:
        self._timers.schedule((_DOWNGRADE, group_id), 0, lambda: self._downgrade_if_possible(group_id), pure=True)

    def _downgrade_if_possible(self, group_id: str) -> Records:
        group = self.get(group_id)
        return [] if group is None else self._downgrade(group, ())

    def _describe_member(self, group: ConsumerGroup, member: ConsumerMember) -> ConsumerMemberDescription:
        subscription = member.subscription
        return ConsumerMemberDescription(
            member_id=member.member_id,
            instance_id=subscription.instance_id,
            rack_id=subscription.rack_id,
            epoch=member.epoch,
            client_id=subscription.client_id,
            client_host=subscription.client_host,
            topics=subscription.topics,
            expression=subscription.expression,
            # A member owns revoked partitions until it confirms the revocation.
            assigned=with_names(self._topics, union(member.position.assigned, member.position.pending)),
            target=with_names(self._topics, group.targets.get(member.member_id, NOTHING)),
            speaks_classic=member.speaks_classic,
        )


def _check_epoch(member: ConsumerMember, epoch: int) -> None:
    if member.epoch != epoch:
        raise _stale_epoch_error(member, epoch)


def _stale_epoch_error(member: ConsumerMember, epoch: int) -> MillstreamError:
    message = f"member {member.member_id!r} is in epoch {member.epoch}, not {epoch}"
    return IllegalGeneration(message) if member.speaks_classic else StaleMemberEpoch(message)
