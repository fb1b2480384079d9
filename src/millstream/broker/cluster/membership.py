"""The nodes that belong to the cluster. A single node is a cluster of one and its own controller."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from ipaddress import ip_address
from typing import Final, Protocol

from millstream.core.ids import NodeId

NO_CONTROLLER = NodeId(-1)


def is_any_address(host: str) -> bool:
    """Whether a host means every address of a machine, so that clients cannot connect to it."""
    try:
        return ip_address(host).is_unspecified
    except ValueError:
        return False


@dataclass(frozen=True, slots=True, kw_only=True)
class Location:
    """The machine and rack of a node, by which replicas of a partition are kept apart; recorded for when it is away."""

    machine: NodeId | None = None
    """The first of the nodes that share its machine; None if it has its own machine."""
    rack: str | None = None


NO_LOCATION: Final = Location()


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """A node, at the addresses that others use."""

    node_id: NodeId
    host: str
    port: int
    rack: str | None = None
    endpoints: Mapping[str, tuple[str, int]] = field(default_factory=dict, hash=False)
    """The addresses for the clients of each listener; `host` and `port` are for other nodes."""
    assertion_key: str = ""
    """The public key that verifies this node's assertions; empty if it makes none."""
    machine: NodeId | None = None
    """The first of the nodes that share its machine; None if it has its own machine."""
    secret: str = field(default="", repr=False)
    """Proves to other nodes that a request comes from this node, even without authentication; new with each start."""

    @property
    def location(self) -> Location:
        return Location(machine=self.machine, rack=self.rack)

    @property
    def failure_domain(self) -> NodeId:
        """Return the failure domain of this node; two replicas of a partition are never in the same one."""
        return self.node_id if self.machine is None else self.machine

    def reached_at(self, listener: str) -> Node:
        """Return the node with the address at which nodes that use a listener reach it.

        While a cluster moves its nodes to another listener, each node uses the listener of its own settings.
        """
        host, port = self.endpoints.get(listener, (self.host, self.port))
        return replace(self, host=host, port=port)

    def address_for(self, listener: str, reached_at: str) -> tuple[str, int] | None:
        """Return the address that clients of a listener connect to; None if this node has no listener with that name.

        If the node listens on every address, it is the one that the client reached.
        """
        host, port = self.endpoints.get(listener, ("", 0)) if self.endpoints else (self.host, self.port)
        if not host:
            return None
        return (reached_at if is_any_address(host) else host), port


class LiveNodes(Protocol):
    """Knows which nodes are alive, and which of them is the controller."""

    @property
    def live(self) -> Mapping[NodeId, Node]:
        """Every node that is alive."""

    @property
    def controller(self) -> NodeId | None:
        """Return the current controller, if any."""


class Membership:
    """The nodes of the cluster; without a view of one, only this node."""

    def __init__(self, cluster_id: str, me: Node, cluster: LiveNodes | None = None) -> None:
        self.cluster_id = cluster_id
        self.me = me
        self._cluster = cluster

    @property
    def controller_id(self) -> NodeId:
        """Return the id of the current controller; -1 if there is none."""
        if self._cluster is None:
            return self.me.node_id
        controller = self._cluster.controller
        return NO_CONTROLLER if controller is None or controller not in self._cluster.live else controller

    def nodes(self) -> list[Node]:
        """Return every live node, or only this one: a client that gets an empty list forgets all nodes permanently."""
        live = {} if self._cluster is None else self._cluster.live
        return [live[node] for node in sorted(live)] or [self.me]

    def addresses(self) -> str:
        """Return the addresses of live nodes for other nodes, in the form that clients take."""
        return ",".join(f"{node.host}:{node.port}" for node in self.nodes())

    def nodes_of(self, listener: str, reached_at: str) -> list[tuple[Node, str, int]]:
        """Return every node with the address that clients of a listener connect to."""
        addresses = ((node, node.address_for(listener, reached_at)) for node in self.nodes())
        return [(node, *address) for node, address in addresses if address is not None]

    def node(self, node_id: NodeId) -> Node | None:
        """Return one node, if it is alive."""
        if self._cluster is None:
            return self.me if node_id == self.me.node_id else None
        return self._cluster.live.get(node_id)
