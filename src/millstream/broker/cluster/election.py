"""Which replica leads a partition: pure functions from one agreed state to the next.

Only a replica that has everything that was acknowledged may lead: one that is in sync or, if none of these is alive,
one that is still eligible. All functions return None if the state is right as it is.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import replace

from millstream.core.ids import NodeId
from millstream.core.partition_state import NO_LEADER, PartitionState

UNKNOWN_MINIMUM = 2**31
"""Used when the minimum is unknown: more than there are, so that a replica that leaves stays eligible."""


def elect(
    state: PartitionState, alive: Collection[NodeId], *, min_in_sync: int = UNKNOWN_MINIMUM, unclean: bool = False
) -> PartitionState | None:
    """Remove dead nodes from the in-sync set, and elect a leader if there is no live one.

    The in-sync set is never emptied: if no member lives, it stays, because only its members may lead later. `unclean`
    then allows any replica, at the price of acknowledged records.
    """
    staying = [node for node in state.in_sync if node in alive]
    if staying:
        shrunk = _with_in_sync(state, staying, min_in_sync)
        if state.leader in staying:
            return None if shrunk == state else shrunk
        return shrunk.elected(_first(state, staying))
    eligible = [node for node in state.eligible if node in alive]
    if eligible:
        leader = _first(state, eligible)
        return _with_in_sync(state, [leader], min_in_sync).elected(leader)
    live = [node for node in state.replicas if node in alive]
    if unclean and live:
        return replace(state, in_sync=(live[0],), eligible=()).elected(live[0])
    return state.elected(NO_LEADER) if state.has_leader else None


def elect_preferred(state: PartitionState, alive: Collection[NodeId]) -> PartitionState | None:
    """Return the leadership to the preferred replica, if it is alive and in sync."""
    preferred = state.preferred
    if not state.has_leader or state.leader == preferred or preferred not in alive or preferred not in state.in_sync:
        return None
    return state.elected(preferred)


def move_from_leaving(
    state: PartitionState, alive: Collection[NodeId], leaving: Collection[NodeId]
) -> PartitionState | None:
    """Move the leadership away from a node that is about to stop, if another replica is eligible."""
    if state.leader not in leaving:
        return None
    others = [node for node in state.in_sync if node in alive and node not in leaving]
    return state.elected(_first(state, others)) if others else None


def exclude_untrusted(state: PartitionState, node: NodeId) -> PartitionState | None:
    """Remove a node whose log may have a hole from those that may lead; the last one stays."""
    in_sync = tuple(one for one in state.in_sync if one != node)
    eligible = tuple(one for one in state.eligible if one != node)
    if not in_sync:
        # Eligible replicas have everything up to the high watermark too.
        in_sync, eligible = (eligible, ()) if eligible else (state.in_sync, ())
    trusted = replace(state, in_sync=in_sync, eligible=eligible)
    if trusted.leader == node or trusted.leader not in (*in_sync, NO_LEADER):
        trusted = trusted.elected(NO_LEADER)
    return None if trusted == state else trusted


def required_in_sync(state: PartitionState, min_in_sync: int) -> int:
    """Return how many replicas must be in sync: at most the number of replicas."""
    return min(min_in_sync, len(state.replicas))


def _with_in_sync(state: PartitionState, in_sync: Collection[NodeId], min_in_sync: int) -> PartitionState:
    kept = _in_order(state, in_sync)
    if len(kept) >= required_in_sync(state, min_in_sync):
        return replace(state, in_sync=kept, eligible=())
    # The high watermark does not move from here on, so a replica that leaves the set keeps everything below it.
    others = {*state.in_sync, *state.eligible} - set(kept)
    return replace(state, in_sync=kept, eligible=_in_order(state, others))


def _in_order(state: PartitionState, nodes: Collection[NodeId]) -> tuple[NodeId, ...]:
    return tuple(node for node in state.replicas if node in nodes)


def _first(state: PartitionState, nodes: Iterable[NodeId]) -> NodeId:
    wanted = set(nodes)
    return next(node for node in state.replicas if node in wanted)
