"""Which nodes carry a partition: spread over racks first, then over nodes, with leaders shared out evenly."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from millstream.core.errors import InvalidReplication
from millstream.core.ids import NodeId
from millstream.core.partition_state import FIRST_EPOCH, NO_LEADER, PartitionState


@dataclass(slots=True)
class Load:
    """How much each node carries already."""

    leaders: Counter[NodeId] = field(default_factory=Counter)
    """Partitions that prefer this node as their leader."""
    replicas: Counter[NodeId] = field(default_factory=Counter)

    @classmethod
    def of(cls, states: Iterable[PartitionState]) -> Load:
        """The load that these partitions are."""
        load = cls()
        for state in states:
            load.add(state.replicas)
        return load

    def add(self, replicas: tuple[NodeId, ...]) -> None:
        """Count one more partition."""
        self.leaders[replicas[0]] += 1
        self.replicas.update(replicas)


def place(
    partitions: int, replication: int, racks: Mapping[NodeId, str | None], load: Load
) -> list[tuple[NodeId, ...]]:
    """Choose the replicas of so many new partitions, the preferred leader first; `load` is brought up to date.

    A node without a rack is a rack of its own. No two replicas of a partition are on one node, nor in one rack while
    there is another.
    """
    if replication > len(racks):
        raise InvalidReplication(
            f"replication factor {replication} needs as many nodes, this cluster has {len(racks)} now"
        )
    placed = []
    for _ in range(partitions):
        replicas = _choose(replication, racks, load)
        load.add(replicas)
        placed.append(replicas)
    return placed


def first_state(replicas: tuple[NodeId, ...], alive: Iterable[NodeId]) -> PartitionState:
    """The state of a partition that has just been placed: empty, so every replica that lives has everything."""
    living = set(alive)
    in_sync = tuple(node for node in replicas if node in living)
    leader = in_sync[0] if in_sync else NO_LEADER
    return PartitionState(replicas=replicas, leader=leader, leader_epoch=FIRST_EPOCH, in_sync=in_sync or replicas)


def _choose(replication: int, racks: Mapping[NodeId, str | None], load: Load) -> tuple[NodeId, ...]:
    leader = min(racks, key=lambda node: (load.leaders[node], load.replicas[node], node))
    chosen = [leader]
    used = Counter([_rack(leader, racks)])
    while len(chosen) < replication:
        node = min(
            (one for one in racks if one not in chosen),
            # Of equals, those behind the leader come first, so that its followers differ from partition to partition.
            key=lambda one: (used[_rack(one, racks)], load.replicas[one], one < leader, one),
        )
        chosen.append(node)
        used[_rack(node, racks)] += 1
    return tuple(chosen)


def _rack(node: NodeId, racks: Mapping[NodeId, str | None]) -> str | tuple[NodeId]:
    # A tuple never equals the name of a rack.
    return racks[node] or (node,)
