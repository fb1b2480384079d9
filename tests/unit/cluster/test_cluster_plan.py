"""Plans for random clusters: the invariants that every plan keeps, and the goals that it reaches."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.cluster_plan import (
    ClusterLoad,
    NodeLoad,
    PartitionLoad,
    Plan,
    plan_balance,
    plan_drain,
    plan_remove,
    plan_replicate,
)
from millstream.core.errors import InvalidRequest, NotFound
from millstream.core.ids import NodeId, PartitionIndex

TOPIC = UUID(int=7)


@st.composite
def loads(draw: st.DrawFn) -> ClusterLoad:
    racks = draw(st.lists(st.sampled_from([None, "a", "b", "c"]), min_size=1, max_size=7))
    machines = draw(st.lists(st.sampled_from([None, NodeId(101), NodeId(102)]), min_size=7, max_size=7))
    nodes = {
        NodeId(number): NodeLoad(
            node_id=NodeId(number),
            # All nodes of a machine are in one rack.
            rack=rack if machines[number - 1] is None else "d",
            machine=machines[number - 1],
            is_live=draw(st.integers(0, 9)) > 0,
            is_drained=draw(st.integers(0, 9)) == 0,
        )
        for number, rack in enumerate(racks, 1)
    }
    partitions = []
    for index in range(draw(st.integers(0, 25))):
        replicas = tuple(draw(st.permutations(sorted(nodes))))[: draw(st.integers(1, min(3, len(nodes))))]
        partitions.append(
            PartitionLoad(
                topic="orders",
                topic_id=TOPIC,
                index=PartitionIndex(index),
                replicas=replicas,
                in_sync=tuple(node for node in replicas if nodes[node].is_live),
                size_bytes=draw(st.integers(0, 1 << 34)),
                bytes_per_s=draw(st.integers(0, 1 << 20)),
            )
        )
    return ClusterLoad(nodes=nodes, partitions=partitions)


def check(load: ClusterLoad, plan: Plan) -> None:
    """Check the invariants of every plan: legal moves, none twice, and no partition in fewer racks than before."""
    by_index = {partition.index: partition for partition in load.partitions}
    assert len({move.index for move in plan.moves}) == len(plan.moves)
    for move in plan.moves:
        assert move.before == by_index[move.index].replicas
        assert move.target != move.before
        assert len(set(move.target)) == len(move.target) > 0
        for node in move.receivers:
            assert load.nodes[node].is_live
            assert not load.nodes[node].is_drained
            machine = load.nodes[node].failure_domain
            assert not any(load.nodes[replica].failure_domain == machine for replica in move.target if replica != node)
        if len(move.target) >= len(move.before) and plan.kind == "balance":
            assert racks_of(load, move.target) >= racks_of(load, move.before)


def racks_of(load: ClusterLoad, replicas: tuple[NodeId, ...]) -> int:
    return len({load.nodes[node].place for node in replicas})


def replicas_after(load: ClusterLoad, plan: Plan) -> dict[PartitionIndex, tuple[NodeId, ...]]:
    return {partition.index: partition.replicas for partition in load.partitions} | {
        move.index: move.target for move in plan.moves
    }


@given(loads(), st.integers(1, 7))
def test_a_drained_node_keeps_only_replicas_without_another_place(load: ClusterLoad, number: int) -> None:
    node = NodeId(number)
    if node not in load.nodes:
        with pytest.raises(NotFound, match=f"no node {number}"):
            plan_drain(load, node)
        return
    plan = plan_drain(load, node)
    check(load, plan)
    after = replicas_after(load, plan)
    indexes = [index for index, replicas in after.items() if node in replicas]
    assert len(indexes) == len(plan.staying)
    takers = [
        other for other in load.nodes.values() if other.is_live and not other.is_drained and other.node_id != node
    ]
    for index in indexes:
        used = {load.nodes[replica].failure_domain for replica in after[index] if replica != node}
        assert all(taker.failure_domain in used for taker in takers)
    assert all(len(after[partition.index]) == len(partition.replicas) for partition in load.partitions)
    if plan.staying:
        with pytest.raises(InvalidRequest, match="cannot be removed"):
            plan_remove(load, node)
    else:
        assert plan_remove(load, node).moves == plan.moves


def spread(load: ClusterLoad, replicas: dict[PartitionIndex, tuple[NodeId, ...]]) -> float:
    """How uneven bytes and rates are: the quantity that balancing reduces."""
    takers = [node.node_id for node in load.nodes.values() if node.is_live and not node.is_drained]
    size: Counter[NodeId] = Counter()
    rate: Counter[NodeId] = Counter()
    for partition in load.partitions:
        for node in replicas[partition.index]:
            size[node] += partition.size_bytes
            rate[node] += int(partition.bytes_per_s)
    totals = sum(size[node] for node in takers) or 1, sum(rate[node] for node in takers) or 1
    return sum((size[node] / totals[0]) ** 2 + (rate[node] / totals[1]) ** 2 for node in takers)


@given(loads())
def test_balancing_reduces_the_spread_and_then_stops(load: ClusterLoad) -> None:
    plan = plan_balance(load)
    check(load, plan)
    after = replicas_after(load, plan)
    assert all(len(after[partition.index]) == len(partition.replicas) for partition in load.partitions)
    if all(node.rack is None for node in load.nodes.values()):
        assert spread(load, after) <= spread(load, replicas_after(load, plan_nothing())) + 0.06
        if all(node.machine is None for node in load.nodes.values()):
            again = [dataclasses.replace(partition, replicas=after[partition.index]) for partition in load.partitions]
            assert plan_balance(ClusterLoad(nodes=load.nodes, partitions=again)).moves == ()


def plan_nothing() -> Plan:
    return Plan(kind="balance", subject="", moves=())


@given(loads(), st.integers(1, 4))
def test_replication_is_raised_and_lowered(load: ClusterLoad, to: int) -> None:
    machines = {node.failure_domain for node in load.nodes.values() if node.is_live and not node.is_drained}
    if to > len(machines):
        with pytest.raises(InvalidRequest, match="machine"):
            plan_replicate(load, {"orders"}, to)
        return
    plan = plan_replicate(load, {"orders"}, to)
    check(load, plan)
    assert {len(replicas) for replicas in replicas_after(load, plan).values()} <= {to}
    for move in plan.moves:
        # The leader stays where it is.
        assert move.target[0] == move.before[0] or len(move.before) == 1 or move.before[0] not in move.target
    assert plan_replicate(load, {"others"}, to).moves == ()


def even(nodes: int, partitions: int, replicas: int, *, size: int = 1000) -> ClusterLoad:
    """A cluster whose first nodes hold everything."""
    return ClusterLoad(
        nodes={NodeId(number): NodeLoad(node_id=NodeId(number)) for number in range(1, nodes + 1)},
        partitions=[
            PartitionLoad(
                topic="orders",
                topic_id=TOPIC,
                index=PartitionIndex(index),
                replicas=tuple(map(NodeId, range(1, replicas + 1))),
                in_sync=tuple(map(NodeId, range(1, replicas + 1))),
                size_bytes=size,
                bytes_per_s=10.0,
            )
            for index in range(partitions)
        ],
    )


def test_replicas_stay_on_different_machines_with_several_processes() -> None:
    load = even(4, 4, 2)
    machines = {1: 1, 2: 2, 3: 1, 4: 2}
    shared = {node: NodeLoad(node_id=node, rack="room", machine=NodeId(machines[node])) for node in load.nodes}
    load = ClusterLoad(nodes=shared, partitions=load.partitions)
    assert {move.target for move in plan_drain(load, NodeId(1)).moves} == {(3, 2), (2, 3)}
    with pytest.raises(InvalidRequest, match="3 replicas need as many machines, and 2 can take one"):
        plan_replicate(load, {"orders"}, 3)
    # With a machine down, its replicas have no other place, although the other machine has two nodes.
    away = {node: dataclasses.replace(node_load, is_live=node_load.machine == 2) for node, node_load in shared.items()}
    assert len(plan_drain(ClusterLoad(nodes=away, partitions=load.partitions), NodeId(1)).staying) == 4


def test_more_replicas_than_racks_are_a_risk_and_not_refused() -> None:
    load = even(3, 2, 1)
    racks = {node: NodeLoad(node_id=node, rack="a" if node < 3 else "b") for node in load.nodes}
    plan = plan_replicate(ClusterLoad(nodes=racks, partitions=load.partitions), {"orders"}, 3)
    assert [len(move.target) for move in plan.moves] == [3, 3]
    assert any("2 partitions share a rack" in risk for risk in plan.risks)


def test_a_new_node_gets_its_share_of_bytes_and_leaders() -> None:
    load = even(4, 40, 3)
    after = replicas_after(load, plan_balance(load))
    held = Counter(node for replicas in after.values() for node in replicas)
    led = Counter(replicas[0] for replicas in after.values())
    assert max(held.values()) - min(held.values()) <= 2
    assert len(held) == 4
    # A leader moves to another replica of its partition, and not every two nodes share one.
    assert max(led.values()) - min(led.values()) <= 2
    assert len(led) == 4


def led_after_balance(*partitions: tuple[int, int]) -> Counter[NodeId]:
    """Balance three processes of a machine with single-replica partitions, each given by its node and its size."""
    nodes = {NodeId(number): NodeLoad(node_id=NodeId(number), machine=NodeId(1)) for number in (1, 2, 3)}
    partition = even(1, 1, 1).partitions[0]
    load = ClusterLoad(
        nodes=nodes,
        partitions=[
            dataclasses.replace(
                partition, index=PartitionIndex(index), replicas=(NodeId(node),), size_bytes=size, bytes_per_s=0.0
            )
            for index, (node, size) in enumerate(partitions)
        ],
    )
    return Counter(replicas[0] for replicas in replicas_after(load, plan_balance(load)).values())


def test_small_partitions_are_spread_even_if_the_fullest_node_has_none() -> None:
    large, small = 40_000_000, 1_000
    led = led_after_balance((3, 2 * large), (1, large), (2, large), *[(1, small)] * 14, *[(2, small)] * 11)
    assert max(led.values()) - min(led.values()) <= 1


def test_many_small_partitions_end_up_within_a_twentieth_of_the_average() -> None:
    large = 1 << 40
    led = led_after_balance((1, large), (2, large), (3, large), *[(1, 0)] * 500, *[(2, 0)] * 500)
    assert max(led.values()) - min(led.values()) <= 1 + 0.05 * 1003 / 3


def test_a_balanced_cluster_is_left_unchanged() -> None:
    load = even(3, 30, 3)
    plan = plan_balance(load)
    # Only the preferred leaders differ, which costs nothing.
    assert plan.moved_bytes == 0
    assert plan.seconds(1) == 0


@pytest.mark.parametrize("seed", range(20))
def test_a_light_load_is_balanced_once(seed: int) -> None:
    """Rates that are measured over one second vary, which is no reason to move partitions again."""
    random = Random(seed)
    load = even(3, 20, 1)
    means = [random.choice((0, 0, 200, 1_000, 4_000)) for _ in load.partitions]
    sizes = [random.choice((0, 20_000, random.randrange(30_000_000))) for _ in load.partitions]
    moves = []
    for _ in range(4):
        partitions = []
        for partition, mean, size in zip(load.partitions, means, sizes, strict=True):
            rate = mean * random.uniform(0, 3)
            partitions.append(dataclasses.replace(partition, size_bytes=size, bytes_per_s=rate))
        load = dataclasses.replace(load, partitions=partitions)
        plan = plan_balance(load)
        moves.append(len(plan.moves))
        after = replicas_after(load, plan)
        partitions = [dataclasses.replace(partition, replicas=after[partition.index]) for partition in load.partitions]
        load = dataclasses.replace(load, partitions=partitions)
        sizes = [size + 30 * mean for size, mean in zip(sizes, means, strict=True)]
    assert moves[0] > 0
    assert moves[1:] == [0, 0, 0]


def test_the_estimate_is_that_of_the_busiest_receiver() -> None:
    plan = plan_drain(even(3, 4, 1), NodeId(1))
    assert plan.moved_bytes == 4000
    assert plan.seconds(100) == 20.0
    assert "single replica in sync" in plan.risks[0]


def test_a_full_disk_is_a_risk() -> None:
    load = even(2, 1, 1, size=95)
    nodes = {**load.nodes, NodeId(2): NodeLoad(node_id=NodeId(2), disk_bytes=100, disk_free_bytes=98)}
    plan = plan_drain(ClusterLoad(nodes=nodes, partitions=load.partitions), NodeId(1))
    assert "the disk of node 2 would be 97 % full" in plan.risks
