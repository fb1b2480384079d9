"""Decisions of the controller: which replica leads a partition, how reassignments proceed, and its fenced writes.

Only a replica that has everything that was acknowledged may lead: one that is in sync or, if none of these is alive,
one that is still eligible. All functions return None if the state need not change.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import NamedTuple

from millstream.broker.cluster import keys
from millstream.broker.cluster.keys import PartitionKey, partition_key
from millstream.broker.cluster.store import CHANGES_MAX, Change, CoordinationStore, Delete, Expect, Put
from millstream.core.ids import NodeId
from millstream.core.partition_state import NO_LEADER, PartitionState, decode_value, encode_value
from millstream.core.tasks import gather_or_cancel

_AT_ONCE_MAX = 8
"""Concurrent changes, so that ten thousand elections do not wait for each other's disk."""


class Proposal(NamedTuple):
    """A new state for a partition, if it still has the one that this was computed from."""

    partition: PartitionKey
    state: PartitionState
    revision: int
    """The revision of the state to replace; 0 if there must be none."""


class Term:
    """Changes of the coordination store that apply only while this node is the controller."""

    def __init__(self, store: CoordinationStore, revision: int) -> None:
        self.store = store
        self.revision = revision
        self.last_revision = revision

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> bool:
        """Carry out changes; return False if an expectation failed, or another node is the controller."""
        revision = await self.store.change(changes, [Expect(keys.CONTROLLER, self.revision), *expect])
        if revision is None:
            return False
        self.last_revision = max(self.last_revision, revision)
        return True

    async def propose(self, proposals: Iterable[Proposal]) -> list[Proposal]:
        """Change the states of many partitions concurrently; return those that lost a race against another change."""
        remaining = iter(proposals)
        superseded: list[Proposal] = []

        async def work() -> None:
            while batch := list(islice(remaining, CHANGES_MAX)):
                superseded.extend(await self._propose(batch))

        await gather_or_cancel(work() for _ in range(_AT_ONCE_MAX))
        return superseded

    async def _propose(self, batch: list[Proposal]) -> list[Proposal]:
        if await self._write(batch):
            return []
        if len(batch) == 1:
            return batch
        # A proposal that lost a race must not delay the others.
        return [proposal for proposal in batch if not await self._write([proposal])]

    async def _write(self, batch: list[Proposal]) -> bool:
        return await self.change(
            [Put(partition_key(proposal.partition), encode_value(proposal.state)) for proposal in batch],
            [Expect(partition_key(proposal.partition), proposal.revision) for proposal in batch],
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Reassignment:
    """A move under way.

    First the new replicas are added to the old ones and follow. When all of them are in sync, the others are removed; a
    leader among those hands over first. Replicas with everything that was acknowledged are in sync at every step, so an
    interrupted move loses nothing. Files of removed replicas are deleted only by a record that names them.
    """

    target: tuple[NodeId, ...]
    """The nodes of the target, the preferred leader first."""
    before: tuple[NodeId, ...]
    """The replicas before the move, which are restored if it is cancelled."""

    @classmethod
    def from_json(cls, text: str) -> Reassignment:
        return decode_value(text, cls, "a move of a partition")


def widened(state: PartitionState, target: tuple[NodeId, ...]) -> PartitionState:
    """Return the state with the new replicas added to the old ones; they are not in sync yet."""
    staying = tuple(node for node in state.replicas if node not in target)
    return replace(state, replicas=(*target, *staying))


def narrowed(state: PartitionState, target: tuple[NodeId, ...], alive: Collection[NodeId]) -> PartitionState | None:
    """Return the state with only the target's replicas, led by one of them; None if none of them can lead now."""
    in_sync = tuple(node for node in target if node in state.in_sync)
    eligible = tuple(node for node in target if node in state.eligible)
    leaders = [state.leader] if state.leader in in_sync else [node for node in in_sync if node in alive]
    if not leaders:
        return None
    fewer = replace(state, replicas=target, in_sync=in_sync, eligible=eligible)
    return fewer if leaders[0] == state.leader else fewer.elected(leaders[0])


def finished(state: PartitionState, move: Reassignment, alive: Collection[NodeId]) -> PartitionState | None:
    """Return the state after the move, if every new replica is in sync; None while it must continue."""
    if not set(move.target) <= set(state.in_sync):
        return None
    return narrowed(state, move.target, alive)


def begin_changes(
    partition: PartitionKey, state: PartitionState, move: Reassignment, removed: Collection[NodeId]
) -> list[Change]:
    """Return the changes that begin a move; nodes of the target that were to remove files keep them now.

    A target of the nodes before only changes their order of preference, and is then complete. A move that only adds
    nodes is not: they have to catch up.
    """
    wide = widened(state, move.target)
    changes: list[Change] = [Put(keys.partition_key(partition), encode_value(wide))]
    if set(wide.replicas) == set(move.target) == set(move.before):
        changes.append(Delete(keys.reassignment_key(partition)))
    else:
        changes.append(Put(keys.reassignment_key(partition), encode_value(move)))
    return [*changes, *(Delete(keys.removed_key(partition, node)) for node in move.target if node in removed)]


def end_changes(partition: PartitionKey, before: PartitionState, after: PartitionState) -> list[Change]:
    """Return the changes that end a move, or its cancellation: removed nodes may delete their files."""
    removed_nodes = [node for node in before.replicas if node not in after.replicas]
    return [
        Put(keys.partition_key(partition), encode_value(after)),
        Delete(keys.reassignment_key(partition)),
        *(Put(keys.removed_key(partition, node), "") for node in removed_nodes),
    ]


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
        return shrunk.elected(_first_replica(state, staying))
    eligible = [node for node in state.eligible if node in alive]
    if eligible:
        leader = _first_replica(state, eligible)
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
    return state.elected(_first_replica(state, others)) if others else None


def exclude_untrusted(state: PartitionState, node: NodeId) -> PartitionState | None:
    """Remove a node whose log may have a hole from those that may lead; the last one stays."""
    in_sync = tuple(replica for replica in state.in_sync if replica != node)
    eligible = tuple(replica for replica in state.eligible if replica != node)
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
    members = _in_replica_order(state, in_sync)
    if len(members) >= required_in_sync(state, min_in_sync):
        return replace(state, in_sync=members, eligible=())
    # The high watermark does not move from here on, so a replica that leaves the set keeps everything below it.
    others = {*state.in_sync, *state.eligible} - set(members)
    return replace(state, in_sync=members, eligible=_in_replica_order(state, others))


def _in_replica_order(state: PartitionState, nodes: Collection[NodeId]) -> tuple[NodeId, ...]:
    return tuple(node for node in state.replicas if node in nodes)


def _first_replica(state: PartitionState, nodes: Iterable[NodeId]) -> NodeId:
    preferred = set(nodes)
    return next(node for node in state.replicas if node in preferred)
