"""Serve members of a consumer group that use the classic protocol.

A generation is an epoch. JoinGroup corresponds to a full heartbeat and gets its response immediately; no member leads,
since the coordinator assigns partitions. SyncGroup returns the current assignment. Heartbeats ask a member to rejoin
when it must revoke partitions or can get new ones.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from millstream.broker.coordination.state_machine import Deferred, Outcome, StateRecord
from millstream.broker.groups.consumer.assignor import TopicView, metadata_hash
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import (
    Assignment,
    ClassicSide,
    ConsumerMember,
    MemberState,
    Position,
    Subscription,
    assignment_of,
    partitions_in,
)
from millstream.broker.groups.consumer.reconciliation import (
    Departure,
    GroupContext,
    Reconciliation,
    check_room,
    replace_static_member,
)
from millstream.broker.groups.consumer.records import (
    ConsumerKey,
    Kind,
    group_epoch_record,
    group_tombstones,
    member_tombstones,
    position_record,
    subscription_record,
    target_epoch_record,
    target_record,
    tombstone,
)
from millstream.broker.groups.group import CONSUMER_PROTOCOL_TYPE, Group, Member
from millstream.broker.groups.records import group_record, group_tombstone
from millstream.broker.groups.requests import (
    JoinRequest,
    JoinResponse,
    LeaveResult,
    LeavingMember,
    MemberRef,
    SyncRequest,
    SyncResponse,
)
from millstream.core.errors import (
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    MillstreamError,
    ProtocolViolation,
    RebalanceInProgress,
    UnknownGroup,
    UnknownMember,
)
from millstream.protocol.messages.primitives import Reader, Writer

_logger = logging.getLogger(__name__)

NEWEST_VERSION = 3

TopicPartitions = Sequence[tuple[str, Sequence[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProtocolSubscription:
    """The subscription of a classic consumer.

    These are the schemas ConsumerProtocolSubscription and ConsumerProtocolAssignment, versions 0 to 3. A later version
    begins with the fields of the earlier ones, so the known part of a newer version is read.

    A classic group becomes a consumer group when a member of the newer protocol joins: its members stay, and are served
    with the classic protocol until they leave. A consumer group becomes a classic one when its last member of the newer
    protocol leaves and classic members remain. A group without members is not converted but recreated.
    """

    version: int
    topics: frozenset[str]
    owned: TopicPartitions = ()
    rack_id: str | None = None


def parse_subscription(metadata: bytes) -> ProtocolSubscription:
    """Parse a subscription, or raise `ProtocolViolation`."""
    reader = Reader(metadata, flexible=False)
    version = _read_version(reader)
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
    _read_version(reader)
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


def _read_version(reader: Reader) -> int:
    version = reader.int16()
    if version < 0:
        raise ProtocolViolation(f"version {version} of a consumer's message is invalid")
    return version


def _read_partitions(reader: Reader) -> TopicPartitions:
    count = max(0, reader.array_length(item_bytes_min=6))
    return [(reader.string(), reader.int32_array()) for _ in range(count)]


def upgrade(group: Group, topics: TopicView, *, members_max: int) -> tuple[ConsumerGroup, list[StateRecord]]:
    """Convert a classic group with members; return the consumer group and the records that create it."""
    if not group.uses_consumer_protocol:
        raise UnknownGroup(
            f"group {group.group_id!r} does not use the consumer protocol type and cannot become a consumer group"
        )
    if len(group.members) > members_max:
        raise UnknownGroup(f"group {group.group_id!r} has more members than a consumer group may have")
    upgraded = ConsumerGroup(group.group_id)
    upgraded.epoch = upgraded.target_epoch = group.generation
    for member in group.members.values():
        try:
            converted = _upgraded_member(group, member, upgraded, topics)
        except ProtocolViolation as error:
            raise UnknownGroup(f"the metadata of member {member.member_id!r} cannot be read: {error}") from None
        upgraded.put(converted)
        upgraded.targets[member.member_id] = converted.position.assigned
    upgraded.metadata_hash = metadata_hash(topics, {name for names, _ in upgraded.choices for name in names})
    _logger.info("a classic group becomes a consumer group", extra={"group": group.group_id})
    return upgraded, [group_tombstone(group.group_id), *_group_records(upgraded)]


def _upgraded_member(group: Group, member: Member, into: ConsumerGroup, topics: TopicView) -> ConsumerMember:
    # A group in its first rebalance has not chosen a protocol yet; subscriptions are the same in each.
    chosen = group.protocol_name or member.protocols[0][0]
    subscription = parse_subscription(member.metadata(chosen))
    partitions, has_more = parse_assignment(member.assignment)
    if has_more:
        raise UnknownGroup(f"the assignor of group {group.group_id!r} keeps data that a consumer group would lose")
    assigned = assignment_of(
        (topic_id, [number])
        for topic_id, number in partitions_in(partitions_by_id(partitions, topics))
        if not into.is_owned(topic_id, number, by_other_than=member.member_id)
    )
    return ConsumerMember(
        member_id=member.member_id,
        subscription=Subscription(
            instance_id=member.instance_id,
            rack_id=subscription.rack_id,
            client_id=member.client_id,
            client_host=member.client_host,
            topics=subscription.topics,
            rebalance_timeout_ms=member.rebalance_timeout_ms,
            classic=ClassicSide(session_timeout_ms=member.session_timeout_ms, protocols=member.protocols),
        ),
        position=Position(epoch=group.generation, previous_epoch=group.generation, assigned=assigned),
    )


def _group_records(group: ConsumerGroup) -> Iterable[StateRecord]:
    for member in group.members.values():
        yield subscription_record(group.group_id, member.member_id, member.subscription)
    yield group_epoch_record(group.group_id, group.epoch, group.metadata_hash)
    for member_id, target in group.targets.items():
        yield target_record(group.group_id, member_id, target)
    yield target_epoch_record(group.group_id, group.target_epoch)
    for member in group.members.values():
        yield position_record(group.group_id, member.member_id, member.position)


def can_downgrade(group: ConsumerGroup, without: Collection[str], *, members_max: int) -> bool:
    """Whether members remain without these, all of them classic."""
    remaining = [member for member_id, member in group.members.items() if member_id not in without]
    return 0 < len(remaining) <= members_max and all(member.speaks_classic for member in remaining)


def downgrade(group: ConsumerGroup, without: Collection[str], topics: TopicView, *, now_ms: int) -> list[StateRecord]:
    """Build the records that turn a consumer group into a classic one, without the given members; all others are
    classic.

    Members keep the partitions that they own, not their targets: others may still own those.
    """
    classic = Group(group.group_id, now_ms=now_ms)
    classic.generation = group.epoch
    for member in group.members.values():
        if member.member_id not in without:
            classic.add(_classic_member(member))
    classic.protocol_name = classic.select_protocol()
    assignments = {
        member_id: encode_assignment(
            named_partitions(group.members[member_id].position.assigned, topics),
            version=_version_of(member.metadata(classic.protocol_name)),
        )
        for member_id, member in classic.members.items()
    }
    _logger.info("a consumer group becomes a classic group", extra={"group": group.group_id})
    return [*deletion_records(group), group_record(group.group_id, classic.stored(assignments))]


def deletion_records(group: ConsumerGroup) -> list[StateRecord]:
    records: list[StateRecord] = []
    for member_id in group.members:
        records += member_tombstones(group.group_id, member_id)
    for expression in group.resolved:
        records.append(tombstone(ConsumerKey(Kind.EXPRESSION, group.group_id, expression)))
    return [*records, *group_tombstones(group.group_id)]


def _classic_member(member: ConsumerMember) -> Member:
    subscription = member.subscription
    classic = subscription.classic
    if classic is None:
        raise ValueError(f"member {member.member_id!r} does not use the classic protocol")
    return Member(
        member.member_id,
        instance_id=subscription.instance_id,
        client_id=subscription.client_id,
        client_host=subscription.client_host,
        rebalance_timeout_ms=subscription.rebalance_timeout_ms,
        session_timeout_ms=classic.session_timeout_ms,
        protocol_type=CONSUMER_PROTOCOL_TYPE,
        protocols=classic.protocols,
    )


def _version_of(metadata: bytes) -> int:
    try:
        return parse_subscription(metadata).version
    except ProtocolViolation:
        return 0


def partitions_by_id(partitions: TopicPartitions, topics: TopicView) -> Assignment:
    """Return partitions by the id of their topic, without those of deleted topics."""
    found: list[tuple[UUID, Iterable[int]]] = []
    for name, numbers in partitions:
        topic = topics.get(name)
        if topic is not None:
            found.append((topic.topic_id, [number for number in numbers if 0 <= number < topic.partitions]))
    return assignment_of(found)


def named_partitions(assignment: Assignment, topics: TopicView) -> list[tuple[str, frozenset[int]]]:
    """Return partitions by topic name, without those of deleted topics."""
    return [
        (topic.name, numbers)
        for topic_id, numbers in assignment.items()
        if (topic := topics.by_id(topic_id)) is not None
    ]


class ClassicMembers:
    """Carries out requests of the classic protocol on consumer groups."""

    def __init__(self, context: GroupContext, departure: Departure) -> None:
        self._context = context
        self._departure = departure

    def join(self, group: ConsumerGroup, request: JoinRequest) -> Outcome[JoinResponse]:
        """Add a classic member, or let it rejoin."""
        if not group.supports_classic(request.protocol_type, [name for name, _ in request.protocols]):
            raise InconsistentProtocol(f"the members of group {group.group_id!r} know none of these protocols")
        member_id = request.member_id or f"{request.instance_id or request.client_id}-{self._context.new_suffix()}"
        if not request.member_id and request.instance_id is None and request.supports_member_id_required:
            required = MemberIdRequired("join again with the assigned member id", member_id=member_id)
            return [], Deferred.refused(required)
        parsed = _parse_metadata(request)
        records: list[StateRecord] = []
        before = _find_joining(group, member_id, request, records)
        after = before.with_subscription(_to_subscription(request, parsed))
        check_room(group, after, self._context)
        reconciliation = Reconciliation(group, before=before, after=after, context=self._context, records=records)
        member = reconciliation.run(partitions_by_id(parsed.owned, self._context.topics))
        self._context.sessions.keep_alive(group.group_id, member)
        self._context.sessions.await_sync(group.group_id, member)
        joined = JoinResponse(
            member_id=member_id,
            generation=member.epoch,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            protocol_name=request.protocols[0][0],
            leader_id="",
        )
        return records, joined

    def sync(self, group: ConsumerGroup, request: SyncRequest) -> Outcome[SyncResponse]:
        member, classic = self._find_member(group, request.member)
        _check_protocol(group, classic, request)
        if group.epoch > member.epoch and member.position.state is not MemberState.UNREVOKED:
            return [], self._refuse_until_rejoined(group, member)
        self._context.sessions.synced(group.group_id, member.member_id)
        self._context.sessions.keep_alive(group.group_id, member)
        partitions = named_partitions(member.position.assigned, self._context.topics)
        version = parse_subscription(classic.protocols[0][1]).version
        return [], SyncResponse(
            request.protocol_type, request.protocol_name, encode_assignment(partitions, version=version)
        )

    def heartbeat(self, group: ConsumerGroup, who: MemberRef) -> Outcome[None]:
        """Renew a classic member's session; ask it to rejoin if its assignment changes."""
        member, _ = self._find_member(group, who)
        self._context.sessions.keep_alive(group.group_id, member)
        state = member.position.state
        others_are_done = state is MemberState.UNRELEASED and not group.awaits_release(member)
        if member.epoch < group.epoch or state is MemberState.UNREVOKED or others_are_done:
            return [], self._refuse_until_rejoined(group, member)
        return [], None

    def leave(self, group: ConsumerGroup, leavers: Iterable[LeavingMember]) -> Outcome[list[LeaveResult]]:
        going: dict[str, ConsumerMember] = {}
        results = []
        for leaver in leavers:
            try:
                member = _find_leaving(group, leaver)
            except MillstreamError as error:
                results.append(LeaveResult(leaver, error))
            else:
                going[member.member_id] = member
                results.append(LeaveResult(leaver))
        return self._departure.remove(group, list(going.values()), "left"), results

    def _find_member(self, group: ConsumerGroup, who: MemberRef) -> tuple[ConsumerMember, ClassicSide]:
        member = group.find_sender(who.member_id, who.instance_id)
        classic = member.subscription.classic
        if classic is None:
            raise UnknownMember(f"member {who.member_id!r} of group {group.group_id!r} uses the consumer protocol")
        if member.epoch != who.generation:
            raise IllegalGeneration(
                f"member {who.member_id!r} of group {group.group_id!r} is at generation {member.epoch}, "
                f"not {who.generation}"
            )
        return member, classic

    def _refuse_until_rejoined(self, group: ConsumerGroup, member: ConsumerMember) -> Deferred[Any]:
        self._context.sessions.await_join(group.group_id, member)
        return Deferred.refused(RebalanceInProgress(f"group {group.group_id!r} is rebalancing"))


def _parse_metadata(request: JoinRequest) -> ProtocolSubscription:
    try:
        return parse_subscription(request.protocols[0][1])
    except ProtocolViolation as error:
        raise InconsistentProtocol(f"the metadata of {request.client_id!r} cannot be read: {error}") from None


def _find_joining(
    group: ConsumerGroup, member_id: str, request: JoinRequest, records: list[StateRecord]
) -> ConsumerMember:
    """Return the joining member; one with an instance id but no member id replaces the static member of that id."""
    if request.instance_id is None:
        return group.members.get(member_id) or ConsumerMember(member_id=member_id)
    if request.member_id:
        return group.find_sender(member_id, request.instance_id)
    static = group.find_static(request.instance_id)
    return (
        ConsumerMember(member_id=member_id)
        if static is None
        else replace_static_member(group, static, member_id, records)
    )


def _to_subscription(request: JoinRequest, parsed: ProtocolSubscription) -> Subscription:
    # An assignment would reveal whether a topic exists, and how many partitions it has.
    topics = parsed.topics if request.may_describe is None else frozenset(filter(request.may_describe, parsed.topics))
    return Subscription(
        instance_id=request.instance_id,
        rack_id=parsed.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topics=topics,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        classic=ClassicSide(session_timeout_ms=request.session_timeout_ms, protocols=request.protocols),
    )


def _check_protocol(group: ConsumerGroup, classic: ClassicSide, request: SyncRequest) -> None:
    named = ((request.protocol_type, CONSUMER_PROTOCOL_TYPE), (request.protocol_name, classic.protocols[0][0]))
    if any(theirs is not None and theirs != ours for theirs, ours in named):
        raise InconsistentProtocol(f"a member of group {group.group_id!r} syncs with another protocol than it joined")


def _find_leaving(group: ConsumerGroup, leaver: LeavingMember) -> ConsumerMember:
    if leaver.instance_id is None:
        return group.find(leaver.member_id)
    static = group.find_static(leaver.instance_id)
    if static is not None and not leaver.member_id:
        # An operator removes a static member by its instance id; its current member id is internal.
        return static
    return group.find_sender(leaver.member_id, leaver.instance_id)
