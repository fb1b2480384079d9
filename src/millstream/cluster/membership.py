"""Who belongs to the cluster. A single node is a cluster of one and its own controller."""

from __future__ import annotations

from dataclasses import dataclass

from millstream.model.ids import NodeId


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """One node, at the address that clients use."""

    node_id: NodeId
    host: str
    port: int
    rack: str | None = None


class Membership:
    """The embedded membership: this node and no other."""

    def __init__(self, cluster_id: str, me: Node) -> None:
        self.cluster_id = cluster_id
        self.me = me

    @property
    def controller_id(self) -> NodeId:
        """The node that decides for the cluster."""
        return self.me.node_id

    def nodes(self) -> list[Node]:
        """Every node that is alive."""
        return [self.me]
