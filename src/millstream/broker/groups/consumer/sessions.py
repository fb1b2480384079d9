"""The deadlines of members: for the next heartbeat, for revoking partitions, and for classic members to join and to
sync.

A member that misses a deadline is removed. If the log refuses the record, as with a full disk, the deadline is set
again, so that no member stays forever because of one refused append.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.coordination.timers import Timers
from millstream.broker.groups.consumer.member import ConsumerMember, MemberState

Late = Callable[[ConsumerMember], bool]
"""Returns whether a member has still not met its deadline."""

Expire = Callable[[str, str, str, Late], list[StateRecord]]
"""Removes a member of a group that missed a deadline, for a reason; returns the records."""

_KINDS = ("consumer-session", "consumer-rebalance", "consumer-join", "consumer-sync")
_SESSION, _REBALANCE, _JOIN, _SYNC = _KINDS
_RETRY_MS = 1000


class Sessions:
    """The timers of all members of one shard's consumer groups."""

    def __init__(self, timers: Timers, *, session_of: Callable[[str], int]) -> None:
        self._timers = timers
        self._session_of = session_of
        self._expire: Expire = lambda group_id, member_id, reason, late: []

    def on_expiry(self, expire: Expire) -> None:
        """Set the function that removes a member that missed a deadline."""
        self._expire = expire

    def keep_alive(self, group_id: str, member: ConsumerMember) -> None:
        """Restart the member's session."""
        classic = member.subscription.classic
        delay_ms = self._session_of(group_id) if classic is None else classic.session_timeout_ms
        self._schedule(_SESSION, group_id, member.member_id, delay_ms, "sent no heartbeat in time")

    def await_revocation(self, group_id: str, member: ConsumerMember) -> None:
        """Start the rebalance timeout of a member that must revoke partitions."""
        epoch = member.epoch
        reason = "did not revoke its partitions in time"
        delay_ms = max(0, member.subscription.rebalance_timeout_ms)

        def late(now: ConsumerMember) -> bool:
            return now.epoch == epoch and now.position.state is MemberState.UNREVOKED

        self._schedule(_REBALANCE, group_id, member.member_id, delay_ms, reason, late)

    def await_join(self, group_id: str, member: ConsumerMember) -> None:
        """Start the rebalance timeout of a classic member that was asked to rejoin, unless it is running."""
        if (_JOIN, group_id, member.member_id) not in self._timers:
            delay_ms = max(0, member.subscription.rebalance_timeout_ms)
            self._schedule(_JOIN, group_id, member.member_id, delay_ms, "did not join in time")

    def await_sync(self, group_id: str, member: ConsumerMember) -> None:
        """Start the timeout in which a classic member that has joined must send SyncGroup."""
        self._timers.cancel((_JOIN, group_id, member.member_id))
        delay_ms = max(0, member.subscription.rebalance_timeout_ms)
        self._schedule(_SYNC, group_id, member.member_id, delay_ms, "did not sync in time")

    def synced(self, group_id: str, member_id: str) -> None:
        """Cancel that timeout: the member has sent SyncGroup."""
        self._timers.cancel((_SYNC, group_id, member_id))

    def forget(self, group_id: str, member_id: str) -> None:
        """Cancel every deadline of a member."""
        for kind in _KINDS:
            self._timers.cancel((kind, group_id, member_id))

    def _schedule(
        self, kind: str, group_id: str, member_id: str, delay_ms: int, reason: str, late: Late = lambda _: True
    ) -> None:
        def due() -> list[StateRecord]:
            records = self._expire(group_id, member_id, reason, late)
            if records:
                self._schedule(kind, group_id, member_id, max(delay_ms, _RETRY_MS), reason, late)
            return records

        self._timers.schedule((kind, group_id, member_id), delay_ms, due, pure=True)
