"""Several nodes in one process: admission, leadership, and the creation and deletion of topics."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from pathlib import Path
from uuid import UUID, uuid4

import pytest
from sqlalchemy import delete

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.catalog.tables import broker_settings
from millstream.broker.cluster import keys
from millstream.broker.cluster.embedded_store import EmbeddedStore
from millstream.broker.cluster.new_topics import NewTopic
from millstream.broker.cluster.store import Delete, Expect, Put
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import (
    ClusterForgotten,
    ElectionNotNeeded,
    EligibleUnavailable,
    InvalidReplication,
    InvalidRequest,
    InvalidTopicName,
    NodeIdTaken,
    NotLeader,
    PreferredUnavailable,
    TopicExists,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, encode_value
from millstream.core.quota import ANONYMOUS, CLIENT_ID, PRODUCER_BYTE_RATE, QuotaEntity
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream_testing.node_group import GroupNode, NodeGroup

ALL = (NodeId(1), NodeId(2), NodeId(3))


def states(node: GroupNode, topic: Topic) -> list[PartitionState]:
    found_states = [state for state in node.topics.states_of(topic) if state is not None]
    assert len(found_states) == topic.partitions
    return found_states


def leads(node: GroupNode, topic: Topic) -> set[int]:
    if topic.topic_id not in node.view.topics:
        return set()
    return {int(partition.index) for partition in node.topics.partitions_of(topic) if partition.is_leader}


async def test_a_topic_created_on_any_node_is_led_by_one_and_known_to_all(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[2].topics.create("orders", partitions=6, replication=2, overrides={"retention.ms": "7"})
        await group.until(lambda: all(node.topics.get("orders") == topic for node in group.nodes.values()))
        led = {number: leads(node, topic) for number, node in group.nodes.items()}
        assert sorted(index for indexes in led.values() for index in indexes) == list(range(6))
        assert all(len(indexes) == 2 for indexes in led.values())
        for state in states(group[1], topic):
            assert state.in_sync == state.replicas
            assert len(state.replicas) == 2
        for number, node in group.nodes.items():
            carried = {partition.index for partition in node.topics.partitions_of(topic)}
            assert carried == {
                index for index, state in enumerate(states(node, topic)) if NodeId(number) in state.replicas
            }
        with pytest.raises(TopicExists):
            await group[3].topics.create("orders")
        with pytest.raises(InvalidReplication, match="has 3"):
            await group[3].topics.create("more", replication=4)


async def test_topics_created_together_are_spread_over_the_nodes(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        new_topics = [NewTopic(name=f"t{number}", partitions=1, replication=2) for number in range(30)]
        placed = NewTopic(name="placed", partitions=1, replication=1, placement={0: (NodeId(2),)})
        created = await group[2].topics.create_all([*new_topics, NewTopic(name="bad name"), placed])
        topics = [entity for entity in created if isinstance(entity, Topic)]
        assert [topic.name for topic in topics] == [*(topic.name for topic in new_topics), "placed"]
        assert isinstance(created[30], InvalidTopicName)
        # On a slow machine, another replica may lead meanwhile.
        preferred = Counter(states(group[2], topic)[0].replicas[0] for topic in topics[:-1])
        assert preferred == {1: 10, 2: 10, 3: 10}
        assert states(group[2], topics[-1])[0].replicas == (2,)
        # A topic named by its id and recreated since is another topic.
        earlier = dataclasses.replace(topics[2], topic_id=uuid4())
        deleted = await group[3].topics.delete_all(["t0", "missing", topics[1], earlier])
        assert [type(entity) for entity in deleted] == [Topic, UnknownTopic, Topic, UnknownTopicId]
        await group.until(lambda: not group.service.read(keys.DELETED).entries)
        assert len(group.service.read(keys.PARTITIONS).entries) == 29


async def test_topics_are_grown_changed_and_deleted_through_any_node(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=1, replication=3)
        grown = await group[2].topics.add_partitions("orders", 4)
        assert len(states(group[2], grown)) == 4
        await group[3].topics.alter("orders", {"min.insync.replicas": "1"})
        settings = group[3].topics.partition("orders", 3).log.settings
        assert settings.min_insync_replicas == 1
        await group[1].topics.delete("orders")
        await group.until(lambda: all(node.topics.get("orders") is None for node in group.nodes.values()))
        # The deletion record stays until every node has reported that its files are removed.
        await group.until(lambda: not group.service.read(keys.DELETED).entries)
        assert not group.service.read(keys.PARTITIONS).entries
        assert await group.declarations.call(Catalog.deleted_topic_ids) == set()
        with pytest.raises(UnknownTopic):
            group[1].topics.partition("orders", 0)
        again = await group[2].topics.create("orders")
        assert again.topic_id != topic.topic_id


def retention(node: GroupNode) -> int:
    return node.topics.partition("orders", 0).log.settings.retention_ms


async def test_node_settings_apply_everywhere_and_before_a_log_is_opened(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        await group[1].topics.create("orders", partitions=1, replication=3)
        await group[2].topics.alter_broker("", {"log.retention.ms": "70000", "min.insync.replicas": "3"})
        await group.until(lambda: all(retention(node) == 70_000 for node in group.nodes.values()))
        assert all(
            node.topics.partition("orders", 0).log.settings.min_insync_replicas == 3 for node in group.nodes.values()
        )
        await group[1].topics.alter_broker("3", {"log.retention.ms": "80000"})
        await group.until(lambda: retention(group[3]) == 80_000)
        assert (retention(group[1]), retention(group[2])) == (70_000, 70_000)
        with pytest.raises(InvalidRequest, match="the nodes are 1, 2, 3"):
            await group[1].topics.alter_broker("4", {"log.retention.ms": "1"})

        # A node opens its logs with the agreed settings, without asking the catalog.
        await group[3].stop()
        opened: list[int] = []
        open_log = LogStore.open_log

        def watched(store: LogStore, topic_id: UUID, partition: TopicPartition, settings: TopicSettings) -> Log:
            opened.append(settings.retention_ms)
            return open_log(store, topic_id, partition, settings)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LogStore, "open_log", watched)
            await group[3].start()
        assert opened == [80_000]

        # A catalog that has lost a setting does not unset it; a request does.
        with group._catalog._change() as connection:
            connection.execute(delete(broker_settings))
        await group[1].topics.create("another")
        assert retention(group[3]) == 80_000
        for scope in ("3", ""):
            await group[1].topics.alter_broker(scope, {}, replace=True)
        await group.until(lambda: all(retention(node) == 7 * 24 * 3600 * 1000 for node in group.nodes.values()))


async def test_replicas_are_placed_as_requested(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        by_hand = {0: (NodeId(3), NodeId(1)), 1: (NodeId(3), NodeId(2))}
        topic = await group[1].topics.create("placed", partitions=2, replication=2, placement=by_hand)
        assert [state.replicas for state in states(group[1], topic)] == list(by_hand.values())
        grown = await group[2].topics.add_partitions("placed", 3, placement={2: (NodeId(2), NodeId(3))})
        assert states(group[2], grown)[2].replicas == (2, 3)
        assert not group.service.read(keys.PLACEMENTS).entries


async def test_when_a_node_dies_another_leads_in_a_new_epoch(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=3, replication=3)
        controller = group[1].view.controller
        assert controller is not None
        before = states(group[1], topic)
        await group[int(controller)].kill()
        alive = [node for number, node in group.nodes.items() if number != controller]
        await group.until(lambda: all(controller not in state.in_sync for state in states(alive[0], topic)))
        for old, new in zip(before, states(alive[0], topic), strict=True):
            assert new.leader != controller
            assert new.leader_epoch == old.leader_epoch + (old.leader == controller)
        assert alive[0].view.controller != controller
        await group.until(lambda: leads(alive[0], topic) | leads(alive[1], topic) == {0, 1, 2})
        await group[int(controller)].start()
        with pytest.raises(NotLeader):
            group[int(controller)].topics.partition("orders", 0).check_leader_epoch(-1)


async def test_a_node_that_stops_cleanly_has_handed_over_its_leaderships(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=3, replication=3)
        await group[2].stop()
        # The stop waited for that: no client saw a partition without a leader.
        assert all(state.leader in (1, 3) for state in states(group[1], topic))
        await group.until(lambda: 2 not in group[1].view.nodes)
        await group[2].start()
        assert not leads(group[2], topic)


async def test_nodes_that_stop_together_keep_their_leaderships(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=6, replication=1)
        await group.until(lambda: sum(len(leads(node, topic)) for node in group.nodes.values()) == 6)
        before = {key: state.revision for key, state in group[1].view.states.items()}
        await asyncio.gather(*(node.stop() for node in group.nodes.values()))
        entries = group.service.read(keys.PARTITIONS).entries
        assert {key: entry.revision for key, entry in entries.items()} == {
            keys.partition_key(key): revision for key, revision in before.items()
        }


async def test_preferred_leaders_lead_again_after_a_delay(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, leader_balance_ms=1) as group:
        topic = await group[1].topics.create("orders", partitions=3, replication=3)
        await group[2].stop()
        await group.until(lambda: 2 not in group[1].view.live)
        await group[2].start()
        moved = next(index for index, state in enumerate(states(group[1], topic)) if state.preferred == 2)
        key = (topic.topic_id, PartitionIndex(moved))
        # Nothing replicates here, so the node is put back in sync by hand.
        versioned = group[1].view.states[key]
        back = PartitionState(
            replicas=versioned.state.replicas,
            leader=versioned.state.leader,
            leader_epoch=versioned.state.leader_epoch,
            in_sync=versioned.state.replicas,
        )
        where = keys.partition_key(key)
        changed = EmbeddedStore(group.service, group.clock)
        assert await changed.change([Put(where, encode_value(back))], [Expect(where, versioned.revision)])
        await group.until(lambda: moved in leads(group[2], topic))


async def test_leaders_are_elected_on_request(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=1, replication=3, placement={0: ALL})
        with pytest.raises(ElectionNotNeeded):
            await group[2].topics.elect(topic, 0)
        with pytest.raises(ElectionNotNeeded):
            await group[2].topics.elect(topic, 0, unclean=True)
        await group[1].kill()
        await group.until(lambda: states(group[2], topic)[0].leader == 2)
        with pytest.raises(PreferredUnavailable):
            await group[2].topics.elect(topic, 0)
        await group[2].kill()
        await group[3].kill()
        # All in-sync replicas are dead, so the returning node leads only after an unclean election.
        await group[1].start()
        await group.until(lambda: states(group[1], topic)[0].leader in (-1, 1))
        if states(group[1], topic)[0].leader == -1:
            await group[1].topics.elect(topic, 0, unclean=True)
        assert states(group[1], topic)[0].in_sync == (1,)
        with pytest.raises((ElectionNotNeeded, EligibleUnavailable)):
            await group[1].topics.elect(topic, 0, unclean=True)


async def test_a_node_whose_machine_crashed_is_not_trusted_until_it_has_caught_up(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=3, replication=3)
        alone = await group[1].topics.create("alone", partitions=1, replication=1, placement={0: (NodeId(3),)})
        epochs = [state.leader_epoch for state in states(group[1], alone)]
        await group[3].crash()
        await group[3].start()
        assert all(3 not in (*state.in_sync, *state.eligible) for state in states(group[3], topic))
        # It still leads the partitions that only it holds, in a later epoch.
        await group.until(lambda: leads(group[3], alone) == {0})
        assert states(group[3], alone)[0].leader_epoch > epochs[0]


async def test_a_node_with_an_empty_folder_is_not_trusted(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=3, replication=3)
        await group[2].stop()
        group.nodes[2] = GroupNode(group, 2)
        await group[2].start()
        assert all(2 not in (*state.in_sync, *state.eligible) for state in states(group[2], topic))


async def test_a_node_whose_process_was_killed_stays_trusted(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        topic = await group[1].topics.create("orders", partitions=1, replication=1, placement={0: (NodeId(3),)})
        await group[3].kill()
        await group.until(lambda: states(group[1], topic)[0].leader == -1)
        await group[3].start()
        await group.until(lambda: leads(group[3], topic) == {0})
        assert states(group[3], topic)[0].in_sync == (3,)


async def test_a_second_node_with_the_same_id_is_refused(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=2) as group:
        controller = group.service.read(keys.CONTROLLER).entries[keys.CONTROLLER]
        twin = GroupNode(group, int(controller.value))
        with pytest.raises(NodeIdTaken, match=f"node-{controller.value}:9092"):
            await twin.start()
        await twin.kill()
        assert set(group[1].view.live) == {1, 2}
        # The node with the same id was not disturbed.
        assert group.service.read(keys.CONTROLLER).entries[keys.CONTROLLER] == controller


async def test_a_node_that_the_store_does_not_know_refuses_to_restart(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=2) as group:
        await group[2].stop()
        door = EmbeddedStore(group.service, group.clock)
        await door.change([Delete(keys.admitted_key(NodeId(2)))])
        with pytest.raises(ClusterForgotten, match="check --etcd"):
            await group[2].start()
        await group[2].kill()
        assert set(group[1].view.live) == {1}


async def test_a_deposed_controller_changes_nothing_any_more(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        first = group[1].view.controller
        door = EmbeddedStore(group.service, group.clock)
        await door.change([Delete(keys.CONTROLLER)])
        await group.until(lambda: group[1].view.controller_revision > 0 and group[1].view.controller is not None)
        assert first is not None
        topic = await group[1].topics.create("orders", partitions=3, replication=3)
        assert len(states(group[1], topic)) == 3
        assert all(node.failed is None for node in group.nodes.values())


async def test_without_a_deletion_record_files_stay(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=1) as group:
        topic = await group[1].topics.create("orders", partitions=2)
        door = EmbeddedStore(group.service, group.clock)
        await door.change([Delete(keys.topic_key(topic.topic_id))])
        await group.until(lambda: group[1].topics.get("orders") is None)
        assert any(str(topic.topic_id) in name for name in group[1].files.names("/data/partitions"))


async def test_quotas_apply_on_every_node(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=2) as group:
        entity = QuotaEntity(((CLIENT_ID, "reports"),))
        await group[1].cluster.declared.quotas.alter(entity, {PRODUCER_BYTE_RATE: 5.0})
        there = group[2].cluster.declared.quotas
        reported = asyncio.Event()
        there.on_change(reported.set)
        while there.find(PRODUCER_BYTE_RATE, ANONYMOUS, "reports") is None:
            await asyncio.wait_for(reported.wait(), 60)
            reported.clear()


def number(node: GroupNode, name: str) -> float:
    values = {metric.name: [sample.value for sample in metric.samples] for metric in node.cluster.metrics()}
    (value,) = values[name]
    assert isinstance(value, int | float)
    return value


async def test_a_node_without_its_registration_is_reported_as_fenced(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=2) as group:
        node = group[2]
        assert number(node, "millstream_node_fenced") == 0
        assert number(node, "millstream_node_losses_total") == 0
        # Fenced by the controller: registered, but not admitted.
        door = EmbeddedStore(group.service, group.clock)
        reported: list[float] = []
        node.view.listen(lambda _change: reported.append(number(node, "millstream_node_fenced")))
        await door.change([Delete(keys.admitted_key(NodeId(2)))])
        await group.until(lambda: 1 in reported and number(node, "millstream_node_fenced") == 0)
        # Its session expires: it registers again and is admitted again.
        (lease,) = [lease for lease in tuple(group.service._leases) if "nodes/2" in group.service._leases[lease].keys]
        reported.clear()
        group.service.revoke(lease)
        await group.until(lambda: number(node, "millstream_node_losses_total") == 1)
        await group.until(lambda: number(node, "millstream_node_fenced") == 0)
        assert 1 in reported


async def test_a_node_never_fetches_under_the_registration_of_another_process(tmp_path: Path) -> None:
    """The leader tracks followers by registration, so the logs of both processes would be confused."""
    async with NodeGroup(tmp_path, nodes=2) as group:
        node, key = group[2], keys.node_key(NodeId(2))
        own = node.view.nodes[NodeId(2)]
        assert node.cluster._registration_revision() == own.revision
        door = EmbeddedStore(group.service, group.clock)
        other = dataclasses.replace(own, incarnation="of another process")
        await door.change([Put(key, encode_value(other))])
        await group.until(lambda: node.view.nodes[NodeId(2)].incarnation == other.incarnation)
        assert node.view.registrations[NodeId(2)] > own.revision
        assert node.cluster._registration_revision() == own.revision
        await door.change([Delete(key)])
        await group.until(lambda: NodeId(2) not in node.view.nodes)
        assert node.cluster._registration_revision() == own.revision


async def test_a_node_that_cannot_renew_its_session_is_reported_as_fenced(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path, nodes=1) as group:
        node = group[1]
        registration = node.cluster._registration
        assert registration is not None
        session = registration._session
        assert session is not None
        session._missed = 3  # type: ignore[attr-defined]
        assert number(node, "millstream_node_fenced") == 1
        # It still counts as ready: while the whole store is unavailable, data keeps flowing.
        assert list(node.cluster.unready_reasons()) == []


async def test_health_reports_problems(tmp_path: Path) -> None:
    async with NodeGroup(tmp_path) as group:
        await group[1].topics.create("orders", replication=3, partitions=2)
        await group[1].topics.create("alone", replication=1, placement={0: (NodeId(3),)})
        assert list(group[1].cluster.unready_reasons()) == []
        assert list(group[1].cluster.warnings()) == []
        await group[2].kill()
        await group[3].kill()
        await group.until(lambda: len(group[1].view.live) == 1 and group[1].view.controller == 1)
        await group.until(lambda: group[1].topics.without_leader() == 1 and group[1].topics.under_min_in_sync() == 2)
        warnings = "; ".join(group[1].cluster.warnings())
        assert "1 partitions have no leader" in warnings
        assert "2 partitions that this node leads" in warnings
        numbers = {metric.name: [sample.value for sample in metric.samples] for metric in group[1].cluster.metrics()}
        assert numbers["millstream_nodes"] == [1]
        assert numbers["millstream_active_controller"] == [1]
