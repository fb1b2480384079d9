"""The nodes that clients see."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest

from millstream.broker.cluster import keys
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.keys import NodeRegistration
from millstream.broker.cluster.membership import NO_CONTROLLER, Membership, Node
from millstream.broker.cluster.store import Put
from millstream.broker.cluster.view import ClusterView
from millstream.core.backoff import Backoff
from millstream.core.ids import NodeId
from millstream.core.partition_state import encode_value
from millstream_testing.clock import ManualClock

ME = Node(node_id=NodeId(1), host="one", port=9092)
OTHER = Node(node_id=NodeId(2), host="two", port=9092)


class ClusterSnapshot:
    """A node's view of its cluster."""

    def __init__(self, *nodes: Node) -> None:
        self._nodes = nodes
        self.controller: NodeId | None = NodeId(2)

    @property
    def live(self) -> Mapping[NodeId, Node]:
        return {node.node_id: node for node in self._nodes}


def test_a_standalone_node_is_the_whole_cluster() -> None:
    alone = Membership("cluster", ME)
    assert (alone.nodes(), alone.controller_id) == ([ME], ME.node_id)


def test_live_nodes_are_reported_in_order() -> None:
    assert Membership("cluster", ME, ClusterSnapshot(OTHER, ME)).nodes() == [ME, OTHER]
    assert Membership("cluster", ME, ClusterSnapshot(OTHER)).nodes() == [OTHER]


def test_clients_never_get_an_empty_list_of_nodes() -> None:
    starting = Membership("cluster", ME, ClusterSnapshot())
    assert starting.nodes() == [ME]
    assert starting.controller_id == NO_CONTROLLER
    assert starting.node(ME.node_id) is None


@pytest.mark.parametrize(("listener", "port"), [("default", 9092), ("secure", 9093), ("unknown", 9092)])
async def test_each_node_reaches_others_at_its_own_node_listener(listener: str, port: int) -> None:
    """While a cluster migrates to another listener, migrated and other nodes reach each other."""
    clock = ManualClock()
    store = EmbeddedStore(EmbeddedService(clock), clock)
    other = replace(OTHER, endpoints={"default": ("two", 9092), "secure": ("two", 9093)})
    registered = NodeRegistration(node=other, http="", incarnation="x", version="", unclean=False)
    await store.change([Put(keys.node_key(OTHER.node_id), encode_value(registered))])
    view = ClusterView(store, Backoff(first_s=1, max_s=1), node_listener=listener)
    view.apply_snapshot(await store.read(""))
    node = view.nodes[OTHER.node_id].node
    assert (node.host, node.port) == ("two", port)
    assert node.endpoints == other.endpoints
