"""The replicas in sync with the leader of a partition, and the high watermark that follows from them.

A leader has one of these for each epoch in which it leads with followers. It holds no clock, no log and no connection:
from the positions of followers and the states of the coordination store, it computes how far the high watermark may
advance and which change of the in-sync set to request.

The rules, each verified by a mutation in the simulation:

- The high watermark needs every replica that the store may consider in sync. While the outcome of a change is unknown,
  these are the members of the old set and of the new one.
- Only fetches in the current leader epoch count, so all positions are unknown when an epoch begins.
- The high watermark does not move while fewer replicas are in sync than `min.insync.replicas` requires, and while the
  store names replicas that are eligible because of that. Those therefore have everything that was ever acknowledged.
- A replica joins only when it has everything below the high watermark and below the start of this leader's epoch. One
  that turns out to have less has lost something: it leaves at once, and is not eligible either.
- A change ends only when the store shows a later revision than the one it was based on, or definitely refuses it. A
  change that was abandoned may otherwise still arrive there and be carried out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

from millstream.core.ids import NodeId, Offset
from millstream.core.partition_state import PartitionState, Versioned

UNKNOWN_POSITION = Offset(-1)
_NOTHING_YET = Offset(0)
NOT_REGISTERED = -1
"""Sent by a follower that does not know the revision of its registration; it is not checked then."""

MayJoin = Callable[[NodeId, int], bool]
"""Whether a node may join that fetched under this registration."""


def any_replica(_node: NodeId, _registration: int) -> bool:
    """Allow every replica to join."""
    return True


@dataclass(slots=True)
class Follower:
    """A follower, as its fetches show it."""

    node: NodeId
    caught_up_at: float
    """When it last had the whole log; it is in sync as of then."""
    offset: Offset = UNKNOWN_POSITION
    """Everything below it is in the follower's log, as durably as the topic's `flush` requires."""
    registration: int = NOT_REGISTERED
    fetched_at: float = 0.0
    end_at_fetch: Offset = _NOTHING_YET

    def fetched(self, offset: Offset, *, end: Offset, now: float) -> None:
        """Record a fetch: the follower has everything before the offset."""
        if offset >= end:
            self.caught_up_at = now
        elif self.offset != UNKNOWN_POSITION and offset >= self.end_at_fetch:
            # It has what the log held at its previous fetch, so it was caught up then.
            self.caught_up_at = max(self.caught_up_at, self.fetched_at)
        self.offset = offset
        self.end_at_fetch = end
        self.fetched_at = now

    def lags(self, *, end: Offset, now: float, lag_s: float) -> bool:
        """Whether it has been behind for too long to be waited for."""
        return self.offset < end and now - self.caught_up_at > lag_s


class InSyncChange(NamedTuple):
    """A change of the in-sync set to request from the coordination store."""

    state: PartitionState
    revision: int
    """The revision of the state that it changes."""
    registrations: Mapping[NodeId, int]
    """The joining nodes, each with the registration it fetched under: it must still be the same process."""


class InSync:
    """The followers of one partition in one epoch of its leader."""

    __slots__ = ("_epoch_start", "_followers", "_me", "_min_setting", "_waited_for", "pending", "revision", "state")

    def __init__(self, me: NodeId, versioned: Versioned, *, epoch_start: Offset, min_in_sync: int, now: float) -> None:
        self.state, self.revision = versioned
        self.pending: PartitionState | None = None
        """The requested change, which may be in effect or take effect later."""
        self._me = me
        self._epoch_start = epoch_start
        self._min_setting = min_in_sync
        self._followers: dict[NodeId, Follower] = {}
        self._waited_for: tuple[Follower, ...] = ()
        self._update_followers(now)

    # -- properties -----------------------------------------------------------------------------------------

    @property
    def min_in_sync(self) -> int:
        """How many have to be in sync: at most as many as there are replicas."""
        return min(self._min_setting, len(self.state.replicas))

    @property
    def is_enough(self) -> bool:
        """Whether enough replicas are in sync for `acks=all`."""
        return len(self.state.in_sync) >= self.min_in_sync

    @property
    def epoch_start(self) -> Offset:
        """The end of the leader's log when its epoch began."""
        return self._epoch_start

    @property
    def followers(self) -> Iterable[Follower]:
        return self._followers.values()

    @property
    def follower_count(self) -> int:
        return len(self._followers)

    def follower(self, node: NodeId) -> Follower | None:
        return self._followers.get(node)

    def acknowledged(self, own: Offset) -> Offset:
        """Return the offset up to which all counted replicas have the log, given the leader's end; -1: no advance."""
        if self.state.eligible or len(self.state.in_sync) < self.min_in_sync:
            return UNKNOWN_POSITION
        least = own
        for follower in self._waited_for:
            if follower.offset < least:
                least = follower.offset
        return least

    def is_caught_up(self, end: Offset) -> bool:
        """Whether every replica that is waited for has all of the log."""
        return all(follower.offset >= end for follower in self._waited_for)

    # -- events ---------------------------------------------------------------------------------------------

    def fetched(self, node: NodeId, offset: Offset, *, end: Offset, now: float, registration: int) -> bool:
        """Record that a follower, whose history agrees, has everything below an offset; False if it is unknown."""
        follower = self._followers.get(node)
        if follower is None:
            return False
        follower.fetched(offset, end=end, now=now)
        follower.registration = registration
        return True

    def record_log_growth(self, *, end_before: Offset, now: float) -> None:
        """Record that the log has grown: replicas that had all of it are behind from now on."""
        for follower in self._followers.values():
            if follower.offset >= end_before:
                follower.caught_up_at = now

    def change_min(self, min_in_sync: int) -> None:
        """Apply another `min.insync.replicas`."""
        self._min_setting = min_in_sync

    # -- changes of the set ---------------------------------------------------------------------------------

    def may_want_change(self, node: NodeId, high_watermark: Offset) -> bool:
        """Whether a follower's fetch may call for a change."""
        if self.pending is not None:
            return False
        if self.state.eligible:
            return True
        if node in self.state.in_sync:
            return self._has_lost(node, high_watermark)
        return self._has_caught_up(node, high_watermark, any_replica)

    def next_change(
        self, *, end: Offset, high_watermark: Offset, now: float, lag_s: float, may_join: MayJoin = any_replica
    ) -> InSyncChange | None:
        """Return the change to request: drop lagging replicas, add those that caught up; None while one is pending."""
        if self.pending is not None:
            return None
        state = self.state

        def keeps_up(node: NodeId) -> bool:
            return not self._lags(node, end=end, now=now, lag_s=lag_s)

        remaining = {node for node in state.in_sync if keeps_up(node) and not self._has_lost(node, high_watermark)}
        remaining.add(self._me)
        joined = {
            node
            for node in state.replicas
            # Also behind by no more than a member may be, or it would leave again at once.
            if node not in state.in_sync and keeps_up(node) and self._has_caught_up(node, high_watermark, may_join)
        }
        members = remaining | joined
        in_sync = tuple(node for node in state.replicas if node in members)
        eligible: tuple[NodeId, ...] = ()
        if len(in_sync) < self.min_in_sync:
            left = {*state.eligible, *state.in_sync} - members
            eligible = tuple(
                node for node in state.replicas if node in left and not self._has_lost(node, high_watermark)
            )
        if set(in_sync) == set(state.in_sync) and eligible == state.eligible:
            return None
        registrations = {node: self._followers[node].registration for node in joined if node != self._me}
        return InSyncChange(replace(state, in_sync=in_sync, eligible=eligible), self.revision, registrations)

    def handover_change(self, *, high_watermark: Offset, may_join: MayJoin = any_replica) -> InSyncChange | None:
        """Return the change that makes an in-sync follower with everything the leader; None if there is none.

        It is what a controller does, over the same revision, so only one of two elections succeeds.
        """
        if self.pending is not None:
            return None
        for node in self.state.in_sync:
            if node != self._me and self._has_caught_up(node, high_watermark, may_join):
                joining = {node: self._followers[node].registration}
                return InSyncChange(self.state.elected(node), self.revision, joining)
        return None

    def begin_change(self, change: InSyncChange) -> None:
        """Count both sets from now on: a change is requested."""
        self.pending = change.state
        self._update_waited_for()

    def refused(self, change: InSyncChange) -> None:
        """End a change that was certainly not carried out and never will be."""
        if self.pending is change.state:
            self.pending = None
            self._update_waited_for()

    def apply_state(self, versioned: Versioned, *, now: float) -> None:
        """Apply a later state of the same epoch, which settles a pending change."""
        if versioned.revision <= self.revision:
            return
        self.state, self.revision = versioned
        self.pending = None
        self._update_followers(now)

    # -- internals ------------------------------------------------------------------------------------------

    def _has_lost(self, node: NodeId, high_watermark: Offset) -> bool:
        follower = self._followers.get(node)
        return follower is not None and UNKNOWN_POSITION < follower.offset < high_watermark

    def _lags(self, node: NodeId, *, end: Offset, now: float, lag_s: float) -> bool:
        follower = self._followers.get(node)
        return follower is not None and follower.lags(end=end, now=now, lag_s=lag_s)

    def _has_caught_up(self, node: NodeId, high_watermark: Offset, may_join: MayJoin) -> bool:
        follower = self._followers.get(node)
        if follower is None:
            return node == self._me
        return follower.offset >= max(high_watermark, self._epoch_start) and may_join(node, follower.registration)

    def _update_followers(self, now: float) -> None:
        """Follow the replicas that the state names; known ones keep their positions."""
        members = (*self.state.replicas, *self.state.in_sync)
        self._followers = {
            node: self._followers.get(node) or Follower(node, now) for node in members if node != self._me
        }
        self._update_waited_for()

    def _update_waited_for(self) -> None:
        counted = {*self.state.in_sync, *(self.pending.in_sync if self.pending is not None else ())}
        self._waited_for = tuple(follower for node, follower in self._followers.items() if node in counted)
