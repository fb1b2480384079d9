"""Placement: replicas on different nodes and racks, leaders spread evenly."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.reconciliation import Load, first_state, place
from millstream.core.errors import InvalidReplication
from millstream.core.ids import NodeId
from millstream.core.partition_state import NO_LEADER

racks_of_clusters = st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=8).map(
    lambda racks: {NodeId(number): rack for number, rack in enumerate(racks, 1)}
)


def nodes(racks: dict[NodeId, str | None]) -> list[Node]:
    return [Node(node_id=node, host="h", port=1, rack=rack) for node, rack in racks.items()]


def used_racks(replicas: tuple[NodeId, ...], racks: dict[NodeId, str | None]) -> Counter[object]:
    return Counter(racks[node] or node for node in replicas)


@given(racks_of_clusters, st.integers(1, 60), st.data())
def test_replicas_are_on_different_nodes_and_on_as_many_racks_as_possible(
    racks: dict[NodeId, str | None], partitions: int, data: st.DataObject
) -> None:
    replication = data.draw(st.integers(1, len(racks)))
    placed = place(partitions, replication, nodes(racks), Load())
    assert len(placed) == partitions
    all_racks = len({rack or node for node, rack in racks.items()})
    for replicas in placed:
        assert len(set(replicas)) == len(replicas) == replication
        assert len(used_racks(replicas, racks)) == min(replication, all_racks)


@given(racks_of_clusters, st.integers(1, 60), st.integers(1, 60), st.data())
def test_leaders_are_spread_evenly_also_when_topics_grow(
    racks: dict[NodeId, str | None], first: int, later: int, data: st.DataObject
) -> None:
    replication = data.draw(st.integers(1, len(racks)))
    load = Load()
    placed = [*place(first, replication, nodes(racks), load), *place(later, replication, nodes(racks), load)]
    leaders = Counter(dict.fromkeys(racks, 0))
    leaders.update(replicas[0] for replicas in placed)
    assert max(leaders.values()) - min(leaders.values()) <= 1


def test_replicas_are_spread_evenly_in_one_rack() -> None:
    racks: dict[NodeId, str | None] = {NodeId(number): "one" for number in range(1, 6)}
    load = Load()
    place(50, 3, nodes(racks), load)
    assert set(load.replicas.values()) == {30}
    assert set(load.leaders.values()) == {10}


def test_more_replicas_than_nodes_are_refused() -> None:
    with pytest.raises(InvalidReplication, match="3"):
        place(1, 3, nodes({NodeId(1): None, NodeId(2): None}), Load())


def test_two_replicas_are_never_on_one_machine() -> None:
    machines = [
        Node(node_id=NodeId(first + 1000 * core), host="h", port=1, machine=NodeId(first))
        for first in (1, 2)
        for core in range(3)
    ]
    load = Load()
    for replicas in place(60, 2, machines, load):
        assert {node % 1000 for node in replicas} == {1, 2}
    assert set(load.leaders.values()) == {10}
    with pytest.raises(InvalidReplication, match="machines"):
        place(1, 3, machines, Load())


def test_all_replicas_of_a_new_partition_are_in_sync() -> None:
    one, two, three = NodeId(1), NodeId(2), NodeId(3)
    state = first_state((two, one, three), [one, three])
    assert (state.leader, state.in_sync) == (one, (one, three))
    no_one = first_state((two,), [one])
    assert (no_one.leader, no_one.in_sync) == (NO_LEADER, (two,))
