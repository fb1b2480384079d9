"""The state of a partition's replication: replicas, leader, epoch and in-sync replicas."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from millstream.core.errors import CorruptState
from millstream.core.ids import Epoch, NodeId

NO_LEADER = NodeId(-1)
FIRST_EPOCH = Epoch(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionState:
    """What the cluster has agreed on for one partition."""

    replicas: tuple[NodeId, ...]
    """In order of preference: the first leads if it can."""
    leader: NodeId
    leader_epoch: Epoch
    """Increases with every election, including the re-election of the same node."""
    in_sync: tuple[NodeId, ...]
    """The replicas that the high watermark waits for; each has every acknowledged record."""
    eligible: tuple[NodeId, ...] = ()
    """Replicas that were in sync when too few were left. They also have everything up to the high watermark, which does
    not advance while fewer than `min.insync.replicas` are in sync."""

    @property
    def preferred(self) -> NodeId:
        """Return the preferred leader."""
        return self.replicas[0]

    @property
    def has_leader(self) -> bool:
        return self.leader != NO_LEADER

    def elected(self, leader: NodeId) -> PartitionState:
        """Return this state with another leader, or none, in the next epoch."""
        return replace(self, leader=leader, leader_epoch=Epoch(self.leader_epoch + 1))

    def to_json(self) -> str:
        """Encode for the coordination store."""
        content = {
            "replicas": self.replicas,
            "leader": self.leader,
            "epoch": self.leader_epoch,
            "in_sync": self.in_sync,
            "eligible": self.eligible,
        }
        return json.dumps(content, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str) -> PartitionState:
        """Decode; ignore unknown fields."""
        try:
            content = json.loads(text)
            return cls(
                replicas=_nodes(content["replicas"]),
                leader=NodeId(int(content["leader"])),
                leader_epoch=Epoch(int(content["epoch"])),
                in_sync=_nodes(content["in_sync"]),
                eligible=_nodes(content.get("eligible", ())),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CorruptState(f"the state of a partition cannot be read ({error!r}): {text[:200]!r}") from error


class Versioned(NamedTuple):
    """A state and its revision in the coordination store, which the next change must name."""

    state: PartitionState
    revision: int


def sole(node: NodeId, epoch: Epoch = FIRST_EPOCH) -> PartitionState:
    """Return the state of a partition with a single replica."""
    return PartitionState(replicas=(node,), leader=node, leader_epoch=epoch, in_sync=(node,))


def _nodes(values: Any) -> tuple[NodeId, ...]:
    return tuple(NodeId(int(value)) for value in values)
