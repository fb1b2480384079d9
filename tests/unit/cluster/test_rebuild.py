"""Rebuilding the cluster state from the logs of the nodes after etcd has lost it."""

from __future__ import annotations

from pathlib import Path
from uuid import UUID

import pytest

from millstream.broker.cluster import keys, rebuild
from millstream.broker.cluster.election import elect
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.last_run import FolderOwner, LastRun
from millstream.broker.cluster.membership import Location
from millstream.broker.cluster.rebuild import (
    EPOCHS_SKIPPED,
    NOT_WHOLE,
    Inventory,
    ReplicaSummary,
    derive_states,
    state_of,
    take_inventory,
)
from millstream.broker.cluster.store import Put
from millstream.broker.log.files import DiskFiles
from millstream.core.clock import SystemClock
from millstream.core.errors import ClusterMismatch, CorruptState, DataFolderInvalid
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, decode_value
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store
from millstream_testing.node_group import single_node

ORDERS = UUID(int=1)


def log(epoch: int, end: int, *, partition: int = 0, topic: UUID = ORDERS, damaged: bool = False) -> ReplicaSummary:
    return ReplicaSummary(topic_id=str(topic), partition=partition, end=end, epoch=epoch, damaged=damaged)


PLACE = Location(machine=NodeId(7), rack="a")


def node(number: int, *replicas: ReplicaSummary, whole: str = "whole", cluster_id: str = "id") -> Inventory:
    return Inventory(
        node_id=number, cluster="c", cluster_id=cluster_id, whole=whole, replicas=list(replicas), location=PLACE
    )


def topic(partitions: int = 1, replication: int = 3, topic_id: UUID = ORDERS) -> Topic:
    return Topic(
        name="orders", topic_id=topic_id, partitions=partitions, replication=replication, overrides={}, created_ms=0
    )


def found(*logs: ReplicaSummary) -> dict[NodeId, ReplicaSummary]:
    return {NodeId(number): log for number, log in enumerate(logs, 1)}


@pytest.mark.parametrize(
    ("logs", "in_sync"),
    [
        ((log(3, 10), log(3, 10), log(3, 10)), {1, 2, 3}),
        ((log(3, 10), log(3, 12), log(3, 12)), {2, 3}),
        # Records that the last leader never had were not acknowledged, however long the log is.
        ((log(2, 99), log(3, 12), log(2, 12)), {2}),
        ((log(-1, 0), log(-1, 0)), {1, 2}),
        # A gap could be repaired from the other log, not the other way round.
        ((log(3, 10, damaged=True), log(3, 10)), {2}),
        ((log(3, 10, damaged=True), log(3, 9)), {1}),
    ],
)
def test_the_best_log_decides_and_only_equal_logs_start_in_sync(
    logs: tuple[ReplicaSummary, ...], in_sync: set[int]
) -> None:
    state = state_of(found(*logs), 0, len(logs))
    assert set(state.in_sync) == in_sync
    assert sorted(state.replicas) == list(range(1, len(logs) + 1))
    assert not state.has_leader
    assert state.leader_epoch >= max(log.epoch for log in logs) + EPOCHS_SKIPPED
    elected = elect(state, state.replicas)
    assert elected is not None
    assert elected.leader in in_sync
    # The others alone may not lead.
    others = [replica for replica in state.replicas if replica not in in_sync]
    assert elect(state, others) is None


def test_leftover_files_of_moved_replicas_are_ignored() -> None:
    state = state_of(found(log(1, 5), log(3, 12), log(3, 11), log(3, 12)), 0, 3)
    assert set(state.replicas) == {2, 3, 4}


def test_preferred_leaders_are_spread_over_the_nodes() -> None:
    logs = found(log(0, 1), log(0, 1), log(0, 1))
    assert [state_of(logs, index, 3).preferred for index in range(4)] == [1, 2, 3, 1]


def test_everything_in_the_catalog_is_rebuilt() -> None:
    gone, strange = UUID(int=2), UUID(int=3)
    logs = [log(0, 5), log(0, 5, topic=gone), log(0, 5, topic=strange)]
    rebuilt = derive_states([node(1, *logs), node(2, *logs, whole="")], [topic(replication=2)], {gone})
    assert rebuilt.is_safe
    assert set(rebuilt.states) == {(ORDERS, 0), (gone, 0)}
    assert rebuilt.unknown_topics == {strange}
    assert rebuilt.admitted == {1: "whole", 2: NOT_WHOLE}
    assert rebuilt.topics == [topic(replication=2)]


def test_missing_logs_are_reported() -> None:
    rebuilt = derive_states([node(1, log(0, 5)), node(2, log(0, 5))], [topic(partitions=2)], set())
    assert (rebuilt.short, rebuilt.missing, rebuilt.is_safe) == (["orders-0"], ["orders-1"], False)
    # The controller creates the missing partition and then announces the topic.
    assert rebuilt.topics == []


def test_replacement_nodes_get_replicas_that_are_out_of_sync() -> None:
    gone, also_gone = NodeId(3), NodeId(4)
    survivors = [node(node_id, *(log(0, 5, partition=index) for index in range(4))) for node_id in (1, 2)]
    fewer = derive_states(survivors, [topic(partitions=4)], set())
    assert fewer.fewer == fewer.short == [f"orders-{index}" for index in range(4)]
    rebuilt = derive_states(survivors, [topic(partitions=4)], set(), [gone])
    assert (rebuilt.short, rebuilt.fewer, rebuilt.is_safe) == (fewer.short, [], False)
    # It is not admitted as a node with data.
    assert set(rebuilt.admitted) == {1, 2}
    states = list(rebuilt.states.values())
    assert all((sorted(state.replicas), sorted(state.in_sync)) == ([1, 2, 3], [1, 2]) for state in states)
    assert [state.preferred for state in states] == [1, 2, 3, 1]
    shared = derive_states(survivors, [topic(partitions=4)], set(), [gone, also_gone])
    assert [gone in state.replicas for state in shared.states.values()] == [True, False, True, False]
    with pytest.raises(ClusterMismatch, match="node 2 is to be replaced"):
        derive_states(survivors, [topic(partitions=4)], set(), [NodeId(2)])


def test_folders_must_belong_to_one_cluster_and_be_given_once() -> None:
    with pytest.raises(ClusterMismatch, match="node 1 is given twice"):
        derive_states([node(1), node(1)], [], set())
    with pytest.raises(ClusterMismatch, match="several clusters"):
        derive_states([node(1), node(2, cluster_id="other")], [], set())


async def test_the_state_is_written_once_and_only_into_an_empty_store() -> None:
    clock = SystemClock()
    store = EmbeddedStore(EmbeddedService(clock), clock)
    # Left by an interrupted attempt.
    await store.change([Put(keys.partition_key((UUID(int=9), PartitionIndex(0))), "{}")])
    logs = [log(4, 5, partition=index) for index in range(200)]
    rebuilt = derive_states([node(1, *logs)], [topic(partitions=200, replication=1)], set())
    await rebuild.write(store, rebuilt, "id")
    entries = (await store.read("")).entries
    assert entries[keys.CLUSTER_ID].value == "id"
    assert entries[keys.admitted_key(NodeId(1))].value == "whole"
    # Its location is known even if it stays down.
    assert decode_value(entries[keys.location_key(NodeId(1))].value, Location, "") == PLACE
    states = [entry for key, entry in entries.items() if key.startswith(keys.PARTITIONS)]
    assert {PartitionState.from_json(entry.value).in_sync for entry in states} == {(1,)}
    assert (len(states), keys.topic_key(ORDERS) in entries) == (200, True)
    # An admitted node finds the complete state.
    assert entries[keys.admitted_key(NodeId(1))].revision == max(entry.revision for entry in entries.values())
    with pytest.raises(ClusterMismatch, match="nothing to rebuild"):
        await rebuild.write(store, rebuilt, "id")


@pytest.mark.parametrize(("boot_id", "whole"), [("a", "mine"), ("b", "")])
async def test_an_inventory_lists_the_ends_of_all_logs_and_whether_they_can_be_trusted(
    boot_id: str, whole: str
) -> None:
    files, clock = MemoryFiles(1), SystemClock()
    with pytest.raises(DataFolderInvalid, match="part of a cluster"):
        await take_inventory("/data", files, clock, boot_id="a")
    store = memory_store(files, clock, journal_bytes=1 << 20)
    run = LastRun(files, "/data", boot_id="a", stopped_clean=True)
    run.set_owner(FolderOwner(node_id=7, cluster="c", cluster_id="id", location=PLACE))
    run.begin("mine")
    written = store.open_log(ORDERS, TopicPartition("orders", PartitionIndex(0)), TopicSettings())
    for number in range(3):
        written.append(encode_batch([NewRecord(None, b"x", (), 1000)]), leader_epoch=Epoch(number))
    store.sync_soon(written)
    assert store.commit_once()
    files.kill()
    for _ in range(2):
        reported = await take_inventory("/data", files, clock, boot_id=boot_id)
        assert reported == node(7, log(2, 3), whole=whole)
    assert Inventory.from_json(reported.to_json().encode()) == reported
    with pytest.raises(CorruptState):
        Inventory.from_json(b"{}")


async def test_a_folder_records_where_its_node_was(tmp_path: Path) -> None:
    async with single_node(tmp_path, rack="b"):
        pass
    assert FolderOwner.read(DiskFiles(), str(tmp_path)).location == Location(rack="b")
