"""JoinGroup: which clients can become or stay members, and when that starts a rebalance."""

from __future__ import annotations

import uuid
from collections.abc import Callable

from millstream.broker.coordination.state_machine import Deferred, Outcome
from millstream.broker.groups.group import Group, GroupState
from millstream.broker.groups.member import Member, estimated_bytes
from millstream.broker.groups.rebalance import Rebalance, Records
from millstream.broker.groups.records import group_record
from millstream.broker.groups.requests import GroupLimits, Joined, JoinRequest
from millstream.core.errors import GroupFull, InconsistentProtocol, MemberIdRequired, UnknownMember

JoinOutcome = Outcome[Joined]


def random_suffix() -> str:
    """Return a unique suffix for a member id."""
    return str(uuid.uuid4())


class Join:
    """Handles join requests."""

    def __init__(
        self, rebalance: Rebalance, limits: GroupLimits, *, new_suffix: Callable[[], str] = random_suffix
    ) -> None:
        self._rebalance = rebalance
        self._limits = limits
        self._new_suffix = new_suffix

    def run(self, group: Group, request: JoinRequest) -> JoinOutcome:
        """Handle a join request; the response is usually sent later, with the next generation."""
        if not self._has_room(group, request):
            return self._refuse_full(group, request)
        if not group.supports(request.protocol_type, {name for name, _ in request.protocols}):
            raise InconsistentProtocol(
                f"the members of group {group.group_id!r} know none of the protocols that {request.client_id!r} offers"
            )
        if not request.member_id:
            return self._new_member(group, request)
        if request.member_id in group.pending_members and request.instance_id is None:
            return self._add(group, request.member_id, request)
        member = group.check_member(request.member_id, request.instance_id)
        return self._rejoin(group, member, request)

    def _has_room(self, group: Group, request: JoinRequest) -> bool:
        member = group.members.get(request.member_id)
        added_bytes = estimated_bytes(request.client_id, request.instance_id, request.protocols)
        known_bytes = 0 if member is None else member.size_bytes
        if group.members_bytes - known_bytes + added_bytes > self._limits.members_bytes_max:
            return False
        if not request.member_id and len(group.pending_members) >= self._limits.members_max:
            return False
        if member is None and len(group.members) >= 2 * self._limits.members_max:
            # Static members that do not return keep their places for a while, but not forever.
            return False
        if group.is_in(GroupState.PREPARING):
            # Parked requests are counted, not members: if the limit was lowered, the last to rejoin are refused.
            waits = member is not None and member.awaits_join
            return waits or group.awaiting_join < self._limits.members_max
        if group.is_in(GroupState.STABLE, GroupState.COMPLETING):
            known = member is not None or self._replaces_static(group, request)
            return known or len(group.members) < self._limits.members_max
        return True

    def _refuse_full(self, group: Group, request: JoinRequest) -> JoinOutcome:
        """Refuse a member that does not fit into the group; if it was a member, the others need not wait for it."""
        later: Deferred[Joined] = Deferred()
        later.refuse(GroupFull(f"group {group.group_id!r} has as many members as it may have"))
        if request.member_id not in group.members:
            return [], later
        self._rebalance.remove(group, request.member_id, UnknownMember("the group has reached its maximum size"))
        return self._rebalance.rebalance_after_leaving(group, f"no room for member {request.member_id}"), later

    def _replaces_static(self, group: Group, request: JoinRequest) -> bool:
        return not request.member_id and request.instance_id in group.static_members

    def _new_member(self, group: Group, request: JoinRequest) -> JoinOutcome:
        if request.instance_id is not None:
            new_id = f"{request.instance_id}-{self._new_suffix()}"
            old_id = group.static_members.get(request.instance_id)
            if old_id is not None:
                return self._replace_static(group, old_id, new_id, request)
            return self._add(group, new_id, request)
        new_id = f"{request.client_id}-{self._new_suffix()}"
        if request.knows_member_id_required:
            # The id is assigned before the member counts, so that a client that gives up leaves no ghost behind.
            self._rebalance.keep_pending(group, new_id, request.session_timeout_ms)
            later: Deferred[Joined] = Deferred()
            later.refuse(MemberIdRequired("join again with the member id given", member_id=new_id))
            return [], later
        return self._add(group, new_id, request)

    def _add(self, group: Group, member_id: str, request: JoinRequest) -> JoinOutcome:
        if group.is_in(GroupState.PREPARING) and group.previous_state is GroupState.EMPTY:
            group.member_added = True
        member = Member.joining(member_id, request)
        later: Deferred[Joined] = Deferred()
        group.add(member, later)
        # A new member sends no heartbeats while it waits, and a client that gave up looks the same: it has to repeat
        # its request from time to time.
        self._rebalance.keep_alive(group, member, self._limits.new_member_ms)
        return self._rebalance.begin_or_complete(group, f"member {member_id} joins"), later

    def _rejoin(self, group: Group, member: Member, request: JoinRequest) -> JoinOutcome:
        unchanged = member.protocols == request.protocols
        leads = member.member_id == group.leader_id
        if group.is_in(GroupState.COMPLETING) and unchanged:
            # The member did not receive its response, so it is sent again.
            return [], group.joined(member.member_id, with_members=leads)
        if group.is_in(GroupState.STABLE) and unchanged and not leads:
            return [], group.joined(member.member_id)
        if group.is_in(GroupState.EMPTY, GroupState.DEAD):
            raise UnknownMember(f"group {group.group_id!r} has no member {member.member_id!r}")
        # A leader that joins again wants a rebalance: partitions may have been added, which its metadata does not show.
        later = self._update(group, member, request)
        return self._rebalance.begin_or_complete(group, f"member {member.member_id} joins again"), later

    def _update(self, group: Group, member: Member, request: JoinRequest) -> Deferred[Joined]:
        group.update(member, request.protocols)
        member.rebalance_timeout_ms = request.rebalance_timeout_ms
        member.session_timeout_ms = request.session_timeout_ms
        later: Deferred[Joined] = Deferred()
        group.park_join(member, later)
        return later

    def _replace_static(self, group: Group, old_id: str, new_id: str, request: JoinRequest) -> JoinOutcome:
        old_leader_id = group.leader_id
        self._rebalance.forget_session(group, old_id)
        member = group.replace_static(old_id, new_id)
        later = self._update(group, member, request)
        self._rebalance.keep_alive(group, member)
        if group.is_in(GroupState.STABLE):
            if group.select_protocol() == group.protocol_name:
                return self._keep_generation(group, member, request, old_leader_id), later
            reason = f"static member {new_id} changed the protocol"
            return self._rebalance.begin_or_complete(group, reason), later
        if group.is_in(GroupState.COMPLETING):
            # The leader may be assigning partitions to the old id right now, which would leave the new one without any.
            return self._rebalance.prepare(group, f"static member {new_id} took the place of {old_id}"), later
        return self._rebalance.complete_join_if_all(group), later

    def _keep_generation(
        self, group: Group, member: Member, request: JoinRequest, old_leader_id: str | None
    ) -> Records:
        """Keep the generation of a static member that returned unchanged; only its new id is written."""
        leads = member.member_id == group.leader_id
        if request.knows_skip_assignment:
            answer = group.joined(member.member_id, with_members=leads, skip_assignment=leads)
        else:
            # An older client must not believe that it leads, or it would assign partitions again.
            answer = group.joined(member.member_id, leader_id=old_leader_id)
        group.answer_join(member, answer)
        assignments = {known.member_id: known.assignment for known in group.members.values()}
        return [group_record(group.group_id, group.stored(assignments))]
