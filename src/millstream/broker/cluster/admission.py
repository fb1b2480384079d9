"""Letting a node in: only when nothing in the cluster counts on what it was before.

The states are read anew for this, since the picture of the cluster may be behind. A node that leads anything loses it,
in a new epoch. One whose log may have a hole is taken out of every set that promises a whole one, and every state of
its partitions is written again, so that no change that was worked out before can put it back.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection
from uuid import UUID

from millstream.broker.cluster import keys
from millstream.broker.cluster.election import distrust, elect
from millstream.broker.cluster.keys import PartitionKey, parse_partition
from millstream.broker.cluster.store import Expect, Put
from millstream.broker.cluster.term import Proposal, Term
from millstream.broker.cluster.told import Registered
from millstream.core.errors import CorruptState
from millstream.core.ids import NodeId
from millstream.core.partition_state import PartitionState

_logger = logging.getLogger(__name__)


MinInSync = Callable[[UUID], int]
"""How many replicas of a topic's partitions have to be in sync."""


async def admit(registered: Registered, term: Term, alive: Collection[NodeId], min_in_sync: MinInSync) -> None:
    """Let a node in; does nothing when it registered anew meanwhile."""
    node = registered.node.node_id
    rewritten: set[PartitionKey] = set()
    while proposals := await _needed(registered, term, alive, rewritten, min_in_sync):
        overtaken = {one.partition for one in await term.propose(proposals)}
        rewritten |= {one.partition for one in proposals} - overtaken
    admitted = await term.change(
        [Put(keys.admitted_key(node), registered.incarnation)], [Expect(keys.node_key(node), registered.revision)]
    )
    if admitted:
        _logger.info("node let in", extra={"node": node, "unclean": registered.unclean, "rewritten": len(rewritten)})


async def _needed(
    registered: Registered,
    term: Term,
    alive: Collection[NodeId],
    rewritten: Collection[PartitionKey],
    min_in_sync: MinInSync,
) -> list[Proposal]:
    node = registered.node.node_id
    snapshot = await term.store.read(keys.PARTITIONS)
    proposals = []
    for key, entry in snapshot.entries.items():
        try:
            partition = parse_partition(key.removeprefix(keys.PARTITIONS))
            state = PartitionState.from_json(entry.value)
        except (CorruptState, ValueError) as error:
            # Nobody can read it, so nobody leads by it.
            _logger.error("a key cannot be read", extra={"key": key, "error": str(error)})
            continue
        if node not in state.replicas:
            continue
        changed = _without(state, registered, alive, min_in_sync(partition[0]))
        if changed is None and registered.unclean and partition not in rewritten:
            changed = state
        if changed is not None:
            proposals.append(Proposal(partition, changed, entry.revision))
    return proposals


def _without(
    state: PartitionState, registered: Registered, alive: Collection[NodeId], min_in_sync: int
) -> PartitionState | None:
    """The state in which the node neither leads nor, if it cannot be trusted, may; None when it is so already."""
    node = registered.node.node_id
    trusted = distrust(state, node) if registered.unclean else None
    if (trusted or state).leader != node:
        return trusted
    return elect(trusted or state, [one for one in alive if one != node], min_in_sync=min_in_sync)
