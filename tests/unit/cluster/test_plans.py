"""Plans in the coordination store: proposed, carried out by the current controller, cancelled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.cluster.plans import MoveThrottle, Plans
from millstream.core.cluster_plan import Move
from millstream.core.errors import Conflict, InvalidRequest, NotFound
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.topic import Topic
from millstream_testing.clock import ManualClock
from millstream_testing.node_group import GroupNode, NodeGroup


def move(node: GroupNode, topic: Topic, index: int, *target: int) -> Move:
    state = node.topics.states_of(topic)[index]
    assert state is not None
    return Move(
        topic=topic.name,
        topic_id=topic.topic_id,
        index=PartitionIndex(index),
        before=state.replicas,
        target=tuple(map(NodeId, target)),
        size_bytes=1000,
    )


def away_from(node: GroupNode, topic: Topic, index: int) -> Move:
    """Plan to move one replica to a node that has none."""
    state = node.topics.states_of(topic)[index]
    assert state is not None
    other = next(number for number in (1, 2, 3) if number not in state.replicas)
    return move(node, topic, index, other, *state.replicas[1:])


def state_of(plans: Plans) -> str | None:
    return None if plans.current is None else plans.current.state


async def test_a_plan_is_carried_out_by_the_next_controller(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=2, replication=3)
        await group.until(lambda: all(node.topics.get("orders") == topic for node in group.nodes.values()))
        orders = [move(group[1], topic, 0, 3, 2, 1), move(group[1], topic, 1, 3, 1, 2)]
        proposed = await group[1].cluster.plans.propose("balance", "", orders, 1 << 20)
        assert proposed.state == "proposed"
        with pytest.raises(NotFound, match="the last one is"):
            await group[2].cluster.plans.apply("nonsense")
        controller = group[1].view.controller
        assert controller is not None
        await group[controller].kill()
        rest = [node for number, node in group.nodes.items() if number != controller]
        await group.until(
            lambda: proposed.plan_id in {plan.plan_id for plan in [rest[0].cluster.plans.current] if plan}
        )
        await rest[0].cluster.plans.apply(proposed.plan_id)
        await group.until(lambda: state_of(rest[1].cluster.plans) == "done")
        replicas = [state.replicas for state in rest[0].topics.states_of(topic) if state is not None]
        assert replicas == [(3, 2, 1), (3, 1, 2)]
        assert [state for _, state in rest[0].cluster.plans.moves()] == ["moved", "moved"]
        with pytest.raises(Conflict, match="is done"):
            await rest[0].cluster.plans.apply(proposed.plan_id)


async def test_a_finished_plan_has_set_its_leaders(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=3, replication=3)
        plans = group[1].cluster.plans
        turned = [state.replicas[::-1] for state in group[1].topics.states_of(topic) if state is not None]
        moves = [move(group[1], topic, index, *target) for index, target in enumerate(turned)]
        await plans.propose("balance", "", moves, 1 << 20)
        await plans.apply("")
        await group.until(lambda: state_of(plans) == "done")
        states = [state for state in group[1].topics.states_of(topic) if state is not None]
        assert [(state.replicas, state.leader) for state in states] == [(target, target[0]) for target in turned]


async def test_a_cancelled_plan_is_reverted_and_undrains(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=1, replication=2)
        await group.until(lambda: all(node.topics.get("orders") == topic for node in group.nodes.values()))
        before = group[1].topics.states_of(topic)[0]
        assert before is not None
        leaving = before.replicas[0]
        plans = group[2].cluster.plans
        # Nothing replicates here, so the move stays in progress until it is cancelled.
        await plans.propose("drain", str(leaving), [away_from(group[1], topic, 0)], 1 << 20)
        await plans.apply("")
        await group.until(lambda: [state for _, state in plans.moves()] == ["moving"])
        assert plans.drained == {leaving}
        assert [text for text in group[1].cluster.warnings() if f"node {leaving} is drained" in text]
        # Leadership moves at once where another replica is in sync.
        await group.until(
            lambda: all(state is not None and state.leader != leaving for state in group[1].topics.states_of(topic))
        )
        for wrong in (plans.propose("balance", "", [], 1 << 20), plans.undrain(leaving)):
            with pytest.raises(Conflict, match="millstream cluster cancel"):
                await wrong
        await plans.cancel("")
        await group.until(lambda: state_of(plans) == "cancelled")
        after = group[1].topics.states_of(topic)[0]
        assert after is not None
        assert after.replicas == before.replicas
        assert plans.drained == frozenset()
        assert group[1].view.reassignments == {}


async def test_a_cancelled_plan_leaves_a_node_drained_that_it_did_not_drain(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        plans = group[1].cluster.plans
        await plans.propose("drain", "3", [], 1 << 20)
        await plans.apply("")
        await group.until(lambda: state_of(plans) == "done")
        await plans.propose("drain", "3", [], 1 << 20)
        await plans.cancel("")
        assert plans.drained == {3}
        topic = await group[1].topics.create("orders", partitions=1, replication=2)
        moves = [move(group[1], topic, 0, 1, 2, 3)]
        await plans.propose("remove", "3", moves, 1 << 20)
        await plans.apply("")
        # Nothing replicates here, so the plan runs until it is cancelled.
        await plans.apply("", 1 << 21)
        await plans.cancel("")
        assert plans.drained == {3}
        await group.until(lambda: state_of(plans) == "cancelled")
        await plans.undrain(NodeId(3))
        assert plans.drained == frozenset()


async def test_a_drained_node_gets_replicas_if_there_are_too_few_others_and_is_forgotten_when_it_has_left(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with NodeGroup(tmp_path) as group:
        plans = group[1].cluster.plans
        await plans.propose("drain", "3", [], 1 << 20)
        await plans.apply("")
        await group.until(lambda: state_of(plans) == "done")
        await group[1].topics.create("two", partitions=2, replication=2)
        assert not [record for record in caplog.records if "drained nodes" in record.getMessage()]
        await group[1].topics.create("three", partitions=2, replication=3)
        (warned,) = [record for record in caplog.records if "drained nodes" in record.getMessage()]
        assert (warned.topic, warned.nodes) == ("three", "[3]")  # type: ignore[attr-defined]
        await group[3].stop()
        await group.until(lambda: 3 not in group[1].view.nodes)
        # It still has replicas.
        assert plans.drained == {3}
        await group[1].topics.delete("three")
        await group.until(lambda: plans.drained == frozenset())
        await plans.undrain(NodeId(3))


async def test_a_plan_that_only_adds_replicas_waits_for_them(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        by_hand = {index: (NodeId(1),) for index in range(6)}
        topic = await group[1].topics.create("orders", partitions=6, replication=1, placement=by_hand)
        plans = group[1].cluster.plans
        moves = [move(group[1], topic, index, 1, 2, 3) for index in by_hand]
        await plans.propose("replicate", "orders to 3", moves, 1 << 20)
        await plans.apply("")
        # Nothing replicates here, so the first moves stay in progress and the others wait for them.
        await group.until(lambda: [state for _, state in plans.moves()] == ["moving"] * 4 + ["waiting"] * 2)
        assert state_of(plans) == "running"
        throttle = MoveThrottle(NodeId(2), group[1].view, group.clock)
        assert throttle.pause_after((topic.topic_id, PartitionIndex(0)), 1 << 20) > 0
        await plans.cancel("")
        await group.until(lambda: state_of(plans) == "cancelled")
        assert {len(state.replicas) for state in group[1].topics.states_of(topic) if state is not None} == {1}


async def test_invalid_moves_are_refused(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=1, replication=2)
        plans = group[1].cluster.plans
        valid = away_from(group[1], topic, 0)
        elsewhere = Move(**{**_fields(valid), "target": (NodeId(9),)})
        stale = Move(**{**_fields(valid), "before": (NodeId(3),)})
        nowhere = Move(**{**_fields(valid), "target": ()})
        unknown = Move(**{**_fields(valid), "index": PartitionIndex(4)})
        for wrong, error, text in (
            ([elsewhere], InvalidRequest, "node 9, which is not running"),
            ([stale], Conflict, "compute it again"),
            ([nowhere], InvalidRequest, "not valid"),
            ([valid, valid], InvalidRequest, "each partition once"),
            ([unknown], NotFound, "no partition orders-4"),
        ):
            with pytest.raises(error, match=text):
                await plans.propose("balance", "", wrong, 1 << 20)
        with pytest.raises(InvalidRequest, match="at least 1024"):
            await plans.propose("balance", "", [valid], 10)
        with pytest.raises(NotFound, match="no node 9"):
            await plans.propose("drain", "9", [], 1 << 20)
        with pytest.raises(NotFound, match="there is no plan"):
            await plans.cancel("")


async def test_an_unavailable_node_stays_on_its_machine(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, rack="here") as group:
        for number in (2, 3):
            await group[number].stop()
            group[number].machine = NodeId(2)
            await group[number].start()
        topic = await group[1].topics.create("orders", partitions=1, replication=2)
        await group.until(lambda: group[1].topics.states_of(topic)[0] is not None)
        state = group[1].topics.states_of(topic)[0]
        assert state is not None
        away = next(node for node in state.replicas if node != 1)
        await group[away].stop()
        await group.until(lambda: away not in group[1].view.live)
        plans = group[1].cluster.plans
        assert plans.machines == {2: 2, 3: 2}
        assert plans.racks == dict.fromkeys((1, 2, 3), "here")
        with pytest.raises(InvalidRequest, match="whose machine has another replica"):
            await plans.propose("balance", "", [move(group[1], topic, 0, 5 - away, away)], 1 << 20)
        # It moves to its own machine, which is known once it is back.
        group[away].machine = None
        await group[away].start()
        await group.until(lambda: plans.machines == {5 - away: 2})


async def movable(group: NodeGroup) -> tuple[Move, PartitionKey]:
    """A move of the only partition of a topic that all nodes know."""
    topic = await group[1].topics.create("orders", partitions=1, replication=2)
    await group.until(lambda: all(node.topics.get("orders") == topic for node in group.nodes.values()))
    return away_from(group[1], topic, 0), (topic.topic_id, PartitionIndex(0))


async def test_only_moves_to_this_node_are_throttled(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        planned, key = await movable(group)
        plans = group[1].cluster.plans
        await plans.propose("balance", "", [planned], 1 << 20)
        clock = ManualClock()
        receiver = MoveThrottle(planned.receivers[0], group[1].view, clock)
        assert (receiver.bytes_max(key, 4 << 20), receiver.pause_after(key, 1 << 20)) == (4 << 20, 0.0)
        await plans.apply("")
        await group.until(lambda: key in group[1].view.reassignments)
        # Four moves at once ask for one second of the throttle.
        assert receiver.bytes_max(key, 4 << 20) == 1 << 18
        assert receiver.pause_after(key, 1 << 20) == 1.0
        # The partitions of a node share the limit.
        clock.advance_ms(500)
        assert receiver.pause_after(key, 1 << 20) == 1.5
        # Of the time in which nothing was fetched, one second is made up for.
        clock.advance_ms(60_000)
        assert [receiver.pause_after(key, 1 << 19) for _ in range(3)] == [0.0, 0.0, 0.5]
        other = MoveThrottle(planned.before[0], group[1].view, clock)
        assert (other.bytes_max(key, 4 << 20), other.pause_after(key, 1 << 20)) == (4 << 20, 0.0)


async def test_a_pause_ends_with_the_throttle_or_the_plan_that_caused_it(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        planned, key = await movable(group)
        plans = group[1].cluster.plans
        await plans.propose("balance", "", [planned], 1024)
        await plans.apply("")
        await group.until(lambda: key in group[1].view.reassignments)
        receiver = MoveThrottle(planned.receivers[0], group[1].view, ManualClock())
        assert receiver.pause_after(key, 8 << 20) == 8192.0
        await plans.apply("", 32 << 20)
        assert receiver.pause_after(key, 0) == 0.25
        await plans.cancel("")
        assert receiver.pause_after(key, 0) == 0.0
        await group.until(lambda: state_of(plans) == "cancelled" and key not in group[1].view.reassignments)
        await plans.propose("balance", "", [planned], 1024)
        await plans.apply("")
        await group.until(lambda: key in group[1].view.reassignments)
        assert receiver.pause_after(key, 0) == 0.0


def _fields(planned_move: Move) -> dict[str, Any]:
    return {name: getattr(planned_move, name) for name in planned_move.__slots__}
