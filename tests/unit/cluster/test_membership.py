"""The nodes that clients see."""

from __future__ import annotations

from collections.abc import Mapping

from millstream.broker.cluster.membership import NO_CONTROLLER, Membership, Node
from millstream.core.ids import NodeId

ME = Node(node_id=NodeId(1), host="one", port=9092)
OTHER = Node(node_id=NodeId(2), host="two", port=9092)


class Picture:
    """What a node knows of its cluster."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes
        self.controller: NodeId | None = NodeId(2)

    @property
    def live(self) -> Mapping[NodeId, Node]:
        return {node.node_id: node for node in self._nodes}


def test_a_node_on_its_own_is_the_cluster() -> None:
    alone = Membership("cluster", ME)
    assert (alone.nodes(), alone.controller_id) == ([ME], ME.node_id)


def test_the_nodes_that_are_alive_are_reported_in_order() -> None:
    assert Membership("cluster", ME, Picture(OTHER, ME)).nodes() == [ME, OTHER]
    assert Membership("cluster", ME, Picture(OTHER)).nodes() == [OTHER]


def test_clients_never_get_an_empty_list_of_nodes() -> None:
    starting = Membership("cluster", ME, Picture())
    assert starting.nodes() == [ME]
    assert starting.controller_id == NO_CONTROLLER
    assert starting.node(ME.node_id) is None
