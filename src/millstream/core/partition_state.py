"""Who carries a partition: its replicas, their leader, and those that have everything that was acknowledged."""

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
    """In order of preference: the first leads when it can."""
    leader: NodeId
    leader_epoch: Epoch
    """Goes up with every election, also when the same node is elected again; never back."""
    in_sync: tuple[NodeId, ...]
    """The replicas that the high watermark waits for, so each of them has everything that was acknowledged."""
    eligible: tuple[NodeId, ...] = ()
    """Replicas that were in sync when too few were left: they too have everything up to the high watermark, since it
    does not move while there are fewer in sync than `min.insync.replicas` asks for.
    """

    @property
    def preferred(self) -> NodeId:
        """The node that leads when everything is well."""
        return self.replicas[0]

    @property
    def has_leader(self) -> bool:
        """Whether anybody leads."""
        return self.leader != NO_LEADER

    def elected(self, leader: NodeId) -> PartitionState:
        """The same with another leader, or with none, in the next epoch."""
        return replace(self, leader=leader, leader_epoch=Epoch(self.leader_epoch + 1))

    def to_json(self) -> str:
        """As it is kept in the coordination store."""
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
        """Read it back; fields that are not known here are passed over."""
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
    """A state and the revision in which the coordination store took it, which the next change must name."""

    state: PartitionState
    revision: int


def sole(node: NodeId, epoch: Epoch = FIRST_EPOCH) -> PartitionState:
    """The state of a partition that one node carries alone."""
    return PartitionState(replicas=(node,), leader=node, leader_epoch=epoch, in_sync=(node,))


def _nodes(values: Any) -> tuple[NodeId, ...]:
    return tuple(NodeId(int(value)) for value in values)
