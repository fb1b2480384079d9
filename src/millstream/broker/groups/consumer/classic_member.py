"""Serve members of a consumer group that use the classic protocol.

A generation is an epoch. JoinGroup corresponds to a full heartbeat and is answered immediately; no member leads, since
the coordinator assigns partitions. SyncGroup returns the current assignment. Heartbeats ask a member to rejoin when it
must revoke partitions or can get new ones.
"""

from __future__ import annotations

from typing import Any

from millstream.broker.coordination.state_machine import Deferred, Outcome, StateRecord
from millstream.broker.groups.consumer.group import ConsumerGroup
from millstream.broker.groups.consumer.member import ClassicSide, ConsumerMember, MemberState, Subscription
from millstream.broker.groups.consumer.migration import (
    ProtocolSubscription,
    encode_assignment,
    named_partitions,
    parse_subscription,
    partitions_by_id,
)
from millstream.broker.groups.consumer.reconciliation import (
    Departure,
    GroupContext,
    Reconciliation,
    check_room,
    replace_static_member,
)
from millstream.broker.groups.group import CONSUMER_PROTOCOL_TYPE
from millstream.broker.groups.requests import Joined, JoinRequest, Leaver, Left, MemberRef, Synced, SyncRequest
from millstream.core.errors import (
    IllegalGeneration,
    InconsistentProtocol,
    MemberIdRequired,
    MillstreamError,
    ProtocolViolation,
    RebalanceInProgress,
    UnknownMember,
)


class ClassicMembers:
    """Carries out requests of the classic protocol on consumer groups."""

    def __init__(self, context: GroupContext, departure: Departure) -> None:
        self._context = context
        self._departure = departure

    def join(self, group: ConsumerGroup, request: JoinRequest) -> Outcome[Joined]:
        """Add a classic member, or let it rejoin."""
        if not group.supports_classic(request.protocol_type, [name for name, _ in request.protocols]):
            raise InconsistentProtocol(f"the members of group {group.group_id!r} know none of these protocols")
        member_id = request.member_id or f"{request.instance_id or request.client_id}-{self._context.new_suffix()}"
        if not request.member_id and request.instance_id is None and request.knows_member_id_required:
            later: Deferred[Joined] = Deferred()
            later.refuse(MemberIdRequired("join again with the member id given", member_id=member_id))
            return [], later
        parsed = _parse_metadata(request)
        records: list[StateRecord] = []
        before = _find_joining(group, member_id, request, records)
        after = before.saying(_subscription_of(request, parsed))
        check_room(group, after, self._context)
        reconciliation = Reconciliation(group, before=before, after=after, context=self._context, records=records)
        member = reconciliation.run(partitions_by_id(parsed.owned, self._context.topics))
        self._context.sessions.keep_alive(group.group_id, member)
        self._context.sessions.await_sync(group.group_id, member)
        joined = Joined(
            member_id=member_id,
            generation=member.epoch,
            protocol_type=CONSUMER_PROTOCOL_TYPE,
            protocol_name=request.protocols[0][0],
            leader_id="",
        )
        return records, joined

    def sync(self, group: ConsumerGroup, request: SyncRequest) -> Outcome[Synced]:
        """Return the assignment of a classic member."""
        member, classic = self._find_member(group, request.member)
        _check_protocol(group, classic, request)
        if group.epoch > member.epoch and member.position.state is not MemberState.UNREVOKED:
            return [], self._ask_to_rejoin(group, member)
        self._context.sessions.synced(group.group_id, member.member_id)
        self._context.sessions.keep_alive(group.group_id, member)
        partitions = named_partitions(member.position.assigned, self._context.topics)
        version = parse_subscription(classic.protocols[0][1]).version
        return [], Synced(request.protocol_type, request.protocol_name, encode_assignment(partitions, version=version))

    def heartbeat(self, group: ConsumerGroup, who: MemberRef) -> Outcome[None]:
        """Renew a classic member's session; ask it to rejoin if its assignment changes."""
        member, _ = self._find_member(group, who)
        self._context.sessions.keep_alive(group.group_id, member)
        state = member.position.state
        others_are_done = state is MemberState.UNRELEASED and not group.awaits_release(member)
        if member.epoch < group.epoch or state is MemberState.UNREVOKED or others_are_done:
            return [], self._ask_to_rejoin(group, member)
        return [], None

    def leave(self, group: ConsumerGroup, leavers: list[Leaver]) -> Outcome[list[Left]]:
        """Remove members."""
        going: dict[str, ConsumerMember] = {}
        results = []
        for leaver in leavers:
            try:
                member = _find_leaving(group, leaver)
            except MillstreamError as error:
                results.append(Left(leaver, error))
            else:
                going[member.member_id] = member
                results.append(Left(leaver))
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

    def _ask_to_rejoin(self, group: ConsumerGroup, member: ConsumerMember) -> Deferred[Any]:
        self._context.sessions.await_join(group.group_id, member)
        later: Deferred[Any] = Deferred()
        later.refuse(RebalanceInProgress(f"group {group.group_id!r} is rebalancing"))
        return later


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


def _subscription_of(request: JoinRequest, parsed: ProtocolSubscription) -> Subscription:
    return Subscription(
        instance_id=request.instance_id,
        rack_id=parsed.rack_id,
        client_id=request.client_id,
        client_host=request.client_host,
        topics=parsed.topics,
        rebalance_timeout_ms=request.rebalance_timeout_ms,
        classic=ClassicSide(session_timeout_ms=request.session_timeout_ms, protocols=request.protocols),
    )


def _check_protocol(group: ConsumerGroup, classic: ClassicSide, request: SyncRequest) -> None:
    named = ((request.protocol_type, CONSUMER_PROTOCOL_TYPE), (request.protocol_name, classic.protocols[0][0]))
    if any(theirs is not None and theirs != ours for theirs, ours in named):
        raise InconsistentProtocol(f"a member of group {group.group_id!r} syncs with another protocol than it joined")


def _find_leaving(group: ConsumerGroup, leaver: Leaver) -> ConsumerMember:
    if leaver.instance_id is None:
        return group.find(leaver.member_id)
    static = group.find_static(leaver.instance_id)
    if static is not None and not leaver.member_id:
        # An operator removes a static member, whose current id is not known outside.
        return static
    return group.find_sender(leaver.member_id, leaver.instance_id)
