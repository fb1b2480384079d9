"""Moves of partitions to other nodes: at every step the leader holds every acknowledged record."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.cluster import keys
from millstream.broker.cluster.election import Reassignment, finished, narrowed, widened
from millstream.broker.cluster.embedded_store import EmbeddedStore
from millstream.broker.cluster.store import Expect, Put
from millstream.core.errors import NoReassignment
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, encode_value
from millstream.core.topic import Topic
from millstream_testing.node_group import NodeGroup

NODES = [NodeId(number) for number in range(1, 7)]
targets = st.lists(st.sampled_from(NODES), min_size=1, max_size=4, unique=True).map(tuple)


@st.composite
def states(draw: st.DrawFn) -> PartitionState:
    replicas = draw(targets)
    in_sync = tuple(draw(st.lists(st.sampled_from(replicas), min_size=1, unique=True)))
    leader = draw(st.sampled_from(in_sync))
    return PartitionState(replicas=replicas, leader=leader, leader_epoch=Epoch(2), in_sync=in_sync)


@given(states(), targets, st.sets(st.sampled_from(NODES)), st.data())
def test_a_move_ends_at_its_target_with_in_sync_replicas_only(
    before: PartitionState, target: tuple[NodeId, ...], alive: set[NodeId], data: st.DataObject
) -> None:
    wide = widened(before, target)
    assert set(wide.replicas) == {*before.replicas, *target}
    assert (wide.leader, wide.leader_epoch, wide.in_sync) == (before.leader, before.leader_epoch, before.in_sync)
    move = Reassignment(target=target, before=before.replicas)
    assert Reassignment.from_json(encode_value(move)) == move
    caught_up = data.draw(st.lists(st.sampled_from(wide.replicas), unique=True))
    later = PartitionState(
        replicas=wide.replicas,
        leader=wide.leader,
        leader_epoch=wide.leader_epoch,
        in_sync=tuple(node for node in wide.replicas if node in {*wide.in_sync, *caught_up}),
    )
    after = finished(later, move, alive)
    if after is None:
        # A replica is not in sync yet, or no replica of the target can lead.
        assert not set(target) <= set(later.in_sync) or not set(target) & alive
    else:
        assert after.replicas == after.in_sync == target
        assert after.leader in target
        assert after.leader_epoch == later.leader_epoch + (after.leader != later.leader)
    back = narrowed(later, before.replicas, alive)
    if back is not None:
        assert set(back.in_sync) == set(later.in_sync) & set(before.replicas)
        assert back.leader in back.in_sync


def state(group: NodeGroup, topic: Topic, node: int = 1) -> PartitionState:
    found_state = group[node].topics.state_of(topic, 0)
    assert found_state is not None
    return found_state


async def catch_up(group: NodeGroup, topic: Topic) -> None:
    """Put every replica in sync, since nothing replicates here."""
    key = keys.partition_key((topic.topic_id, PartitionIndex(0)))
    entry = group.service.read(key).entries[key]
    now = PartitionState.from_json(entry.value)
    whole = PartitionState(
        replicas=now.replicas, leader=now.leader, leader_epoch=now.leader_epoch, in_sync=now.replicas
    )
    door = EmbeddedStore(group.service, group.clock)
    assert await door.change([Put(key, encode_value(whole))], [Expect(key, entry.revision)])


async def test_a_partition_moves_and_its_old_files_are_removed(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", replication=1, placement={0: (NodeId(1),)})
        with pytest.raises(NoReassignment):
            await group[2].topics.reassign(topic, 0, None)
        await group[2].topics.reassign(topic, 0, (NodeId(2), NodeId(3)))
        assert state(group, topic, 2).replicas == (2, 3, 1)
        assert list(group[2].topics.reassignments()) == [(topic.topic_id, 0)]
        await catch_up(group, topic)
        await group.until(lambda: state(group, topic).replicas == (2, 3))
        assert state(group, topic).leader == 2
        await group.until(lambda: not group.service.read(keys.REMOVED).entries)
        assert not group.service.read(keys.REASSIGNMENTS).entries
        assert group[1].topics.partitions_of(topic) == []
        assert not group[1].files.exists(f"/data/partitions/{topic.topic_id}/0")
        # The topic's replication factor has changed, for partitions that are added later.
        await group.until(lambda: group[1].topics.get("orders") is not None and _replication(group) == 2)


def _replication(group: NodeGroup) -> int:
    topic = group[1].topics.get("orders")
    return 0 if topic is None else topic.replication


async def test_a_move_is_cancelled(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", replication=1, placement={0: (NodeId(1),)})
        await group[1].topics.reassign(topic, 0, (NodeId(3),))
        await group.until(lambda: len(group[3].topics.partitions_of(topic)) == 1)
        await group[2].topics.reassign(topic, 0, None)
        assert state(group, topic, 2).replicas == (1,)
        await group.until(lambda: not group.service.read(keys.REMOVED).entries)
        assert group[3].topics.partitions_of(topic) == []
        assert state(group, topic).leader == 1


async def test_added_replicas_are_a_move_until_they_are_in_sync(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", replication=1, placement={0: (NodeId(1),)})
        await group[1].topics.reassign(topic, 0, (NodeId(1), NodeId(2)))
        assert list(group[1].topics.reassignments()) == [(topic.topic_id, 0)]
        # The replicas added by the last move are not in sync yet, although another move has the same target.
        await group[1].topics.reassign(topic, 0, (NodeId(2), NodeId(1)))
        assert list(group[1].topics.reassignments()) == [(topic.topic_id, 0)]
        await catch_up(group, topic)
        await group.until(lambda: not group.service.read(keys.REASSIGNMENTS).entries)
        assert state(group, topic).replicas == (2, 1)
        await group.until(lambda: _replication(group) == 2)


async def test_another_order_of_the_same_nodes_is_not_a_move(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        by_hand = (NodeId(1), NodeId(2), NodeId(3))
        topic = await group[1].topics.create("orders", replication=3, placement={0: by_hand})
        await group[1].topics.reassign(topic, 0, (NodeId(3), NodeId(1), NodeId(2)))
        assert state(group, topic).replicas == (3, 1, 2)
        assert group[1].topics.reassignments() == {}
        await group[1].topics.elect(topic, 0)
        assert state(group, topic).leader == 3
