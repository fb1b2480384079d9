"""The transitions of a group from one generation to the next, and their timers.

    Empty ──join──▶ PreparingRebalance ──all joined, or time is up──▶ CompletingRebalance ──leader syncs──▶ Stable
      ▲                    ▲  │ empty                                        │ join, leave, no sync in time    │
      └────────────────────┼──┘                                              │                                │
                           └─────────────────────────────────────────────────┴──── join, leave, no heartbeat ─┘

Every method returns the records that must be durable before any member gets a response.
"""

from __future__ import annotations

import logging

from millstream.broker.coordination.state_machine import StateRecord, Timers
from millstream.broker.groups.group import Group, GroupState, Member
from millstream.broker.groups.offsets import Registry
from millstream.broker.groups.records import group_record
from millstream.broker.groups.requests import GroupLimits
from millstream.core.clock import Clock
from millstream.core.errors import MillstreamError, RebalanceInProgress, UnknownMember

_logger = logging.getLogger(__name__)

Records = list[StateRecord]

_RECHECK_MS = 1000


class Rebalance:
    """The transitions of all groups of one shard."""

    def __init__(self, registry: Registry, timers: Timers, limits: GroupLimits, clock: Clock) -> None:
        self._registry = registry
        self._timers = timers
        self._limits = limits
        self._clock = clock

    def begin_or_complete(self, group: Group, reason: str) -> Records:
        """Start a rebalance, or complete the one in progress if possible."""
        if group.can_rebalance:
            return self.prepare(group, reason)
        return self.complete_join_if_all(group)

    def prepare(self, group: Group, reason: str) -> Records:
        """Ask every member to join again."""
        if group.is_in(GroupState.COMPLETING):
            self._refuse_syncs(group, RebalanceInProgress(f"group {group.group_id!r} rebalances: {reason}"))
        self.stop_waiting_for_syncs(group)
        first = group.is_in(GroupState.EMPTY)
        group.move_to(GroupState.PREPARING, self._clock.now_ms())
        _logger.info(
            "group rebalances",
            extra={"group": group.group_id, "generation": group.generation, "reason": reason},
        )
        if not first:
            return self._complete_join_or_wait(group)
        delay_ms = self._limits.initial_delay_ms
        # A new group waits briefly, so that consumers that start together form one generation.
        self._wait_initially(group, delay_ms, max(0, group.rebalance_timeout_ms - delay_ms))
        return []

    def complete_join_if_all(self, group: Group) -> Records:
        """Complete the join phase if all members have joined; a new group always waits for its initial delay."""
        if not group.is_in(GroupState.PREPARING) or group.previous_state is GroupState.EMPTY:
            return []
        return self.complete_join(group) if group.has_all_joined else []

    def complete_join(self, group: Group) -> Records:
        """Start the next generation with the members that have joined, and respond to them."""
        self._timers.cancel(("join", group.group_id))
        self._drop_absent(group)
        if group.members and not group.elect_joined_leader():
            # Only static members that do not respond are left; they are removed when their sessions end.
            self._schedule_join(group, max(group.rebalance_timeout_ms, _RECHECK_MS))
            return []
        group.begin_generation(self._clock.now_ms())
        if group.is_in(GroupState.EMPTY):
            return [group_record(group.group_id, group.stored({}))]
        for member in group.members.values():
            leads = member.member_id == group.leader_id
            group.respond_to_join(member, group.joined(member.member_id, with_members=leads))
            member.is_new = False
            self.keep_alive(group, member)
            group.pending_sync.add(member.member_id)
        group_id, generation = group.group_id, group.generation
        self._timers.schedule(
            ("sync", group_id), group.rebalance_timeout_ms, lambda: self._expire_syncs(group_id, generation)
        )
        return []

    def remove(self, group: Group, member_id: str, error: MillstreamError) -> None:
        self.forget_session(group, member_id)
        group.remove(member_id, error)

    def forget_session(self, group: Group, member_id: str) -> None:
        """Cancel the session timer of a member or of a pending id."""
        self._timers.cancel(("session", group.group_id, member_id))

    def rebalance_after_leaving(self, group: Group, reason: str) -> Records:
        if group.is_in(GroupState.STABLE, GroupState.COMPLETING):
            return self.prepare(group, reason)
        return self.complete_join_if_all(group)

    def keep_alive(self, group: Group, member: Member, timeout_ms: int | None = None) -> None:
        self._schedule_expiration(group.group_id, member.member_id, timeout_ms or member.session_timeout_ms)

    def keep_pending(self, group: Group, member_id: str, timeout_ms: int) -> None:
        """Hold an assigned id until a client joins with it."""
        group.pending_members.add(member_id)
        self._schedule_expiration(group.group_id, member_id, timeout_ms)

    def synced(self, group: Group, member_id: str) -> None:
        """Record that a member has sent SyncGroup."""
        group.pending_sync.discard(member_id)
        if not group.pending_sync:
            self._timers.cancel(("sync", group.group_id))

    def stop_waiting_for_syncs(self, group: Group) -> None:
        """Stop waiting for SyncGroup requests, since another rebalance starts or the group is deleted."""
        group.pending_sync.clear()
        self._timers.cancel(("sync", group.group_id))

    def forget(self, group: Group) -> None:
        self.stop_waiting_for_syncs(group)
        self._timers.cancel(("join", group.group_id))
        for member_id in (*group.members, *group.pending_members):
            self.forget_session(group, member_id)

    def restored(self, group: Group) -> None:
        """Restart the session timeout of every member of a restored group."""
        for member in group.members.values():
            self.keep_alive(group, member)
        if len(group.members) > self._limits.members_max:
            group_id = group.group_id
            self._timers.schedule(("join", group_id), 0, lambda: self._rebalance_oversized(group_id))

    def _rebalance_oversized(self, group_id: str) -> Records:
        """Rebalance a group that exceeds a lowered limit; the next generation has at most this many members."""
        group = self._registry.get(group_id)
        if group is None or not group.is_in(GroupState.STABLE):
            return []
        return self.prepare(group, "the group has more members than it may have")

    def _schedule_expiration(self, group_id: str, member_id: str, timeout_ms: int) -> None:
        self._timers.schedule(
            ("session", group_id, member_id), timeout_ms, lambda: self._expire_session(group_id, member_id)
        )

    def _expire_session(self, group_id: str, member_id: str) -> Records:
        group = self._registry.get(group_id)
        if group is None:
            return []
        error = UnknownMember(f"member {member_id!r} of group {group_id!r} sent no heartbeat in time")
        member = group.members.get(member_id)
        if member is None:
            self.remove(group, member_id, error)
            self._registry.drop_if_unused(group)
        elif member.is_alive_without_heartbeat():
            return []
        else:
            self.remove(group, member_id, error)
            if group.is_in(GroupState.STABLE, GroupState.COMPLETING):
                return self.prepare(group, f"member {member_id} sent no heartbeat in time")
        if group.is_in(GroupState.PREPARING) and group.has_all_joined:
            return self.complete_join(group)
        return []

    def _wait_initially(self, group: Group, delay_ms: int, remaining_ms: int) -> None:
        group_id = group.group_id
        self._timers.schedule(
            ("join", group_id), delay_ms, lambda: self._end_initial_delay(group_id, delay_ms, remaining_ms)
        )

    def _end_initial_delay(self, group_id: str, delay_ms: int, remaining_ms: int) -> Records:
        group = self._registry.get(group_id)
        if group is None:
            return []
        if group.member_added and remaining_ms > 0:
            group.member_added = False
            next_ms = min(self._limits.initial_delay_ms, remaining_ms)
            self._wait_initially(group, next_ms, max(0, remaining_ms - delay_ms))
            return []
        return self.complete_join(group)

    def _complete_join_or_wait(self, group: Group) -> Records:
        if group.has_all_joined:
            return self.complete_join(group)
        self._schedule_join(group, group.rebalance_timeout_ms)
        return []

    def _schedule_join(self, group: Group, delay_ms: int) -> None:
        self._timers.schedule(("join", group.group_id), delay_ms, lambda: self._expire_join(group.group_id))

    def _expire_join(self, group_id: str) -> Records:
        group = self._registry.get(group_id)
        return [] if group is None or not group.is_in(GroupState.PREPARING) else self.complete_join(group)

    def _drop_absent(self, group: Group) -> None:
        """Remove dynamic members that did not rejoin; static ones keep their place while their session lasts."""
        absent = [member for member in group.members.values() if not member.awaits_join and not member.is_static]
        for member in absent:
            self.remove(group, member.member_id, UnknownMember(f"member {member.member_id!r} did not join in time"))

    def _expire_syncs(self, group_id: str, generation: int) -> Records:
        group = self._registry.get(group_id)
        if group is None or group.generation != generation or not group.pending_sync:
            return []
        if not group.is_in(GroupState.COMPLETING, GroupState.STABLE):
            return []
        late = sorted(group.pending_sync)
        for member_id in late:
            self.remove(group, member_id, UnknownMember(f"member {member_id!r} did not sync in time"))
        return self.prepare(group, f"{len(late)} members did not sync in time")

    def _refuse_syncs(self, group: Group, error: MillstreamError) -> None:
        for member in group.members.values():
            member.assignment = b""
            if member.refuse_sync(error):
                self.keep_alive(group, member)
