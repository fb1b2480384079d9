"""Partition administration: log directories, producers, leader elections and reassignments."""

from __future__ import annotations

import importlib
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.apis.describe_producers import DescribeProducers
from millstream.broker.kafka.apis.elect_leaders import ElectLeaders
from millstream.broker.kafka.apis.log_dirs import AlterReplicaLogDirs, DescribeLogDirs
from millstream.broker.kafka.apis.partition_reassignments import AlterPartitionReassignments, ListPartitionReassignments
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.api_requests import send_in_version, send_request

FOLDERS: Any = importlib.import_module("kio.schema.alter_replica_log_dirs.v2.request")
LOG_DIRS: Any = importlib.import_module("kio.schema.describe_log_dirs.v5.request")
PRODUCERS: Any = importlib.import_module("kio.schema.describe_producers.v0.request")
ELECT: Any = importlib.import_module("kio.schema.elect_leaders.v2.request")
MOVE: Any = importlib.import_module("kio.schema.alter_partition_reassignments.v1.request")
MOVES: Any = importlib.import_module("kio.schema.list_partition_reassignments.v0.request")


def batch(value: bytes, *, producer_id: int = -1, epoch: int = -1, sequence: int = -1) -> bytearray:
    records = [NewRecord(None, value, (), 1000), NewRecord(None, value, (), 1000)]
    return encode_batch(records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence)


class TestDescribeLogDirs:
    @pytest.fixture
    async def api(self, topics: Topics, tmp_path: Path) -> DescribeLogDirs:
        await topics.create("a", partitions=2)
        await topics.create("b", partitions=1)
        await topics.partition("a", 1).append(batch(b"x" * 100))
        return DescribeLogDirs(topics, folder=str(tmp_path))

    def request(self, **requested: tuple[int, ...]) -> Any:
        named = tuple(
            LOG_DIRS.DescribableLogDirTopic(topic=name, partitions=partitions) for name, partitions in requested.items()
        )
        return LOG_DIRS.DescribeLogDirsRequest(topics=named or None)

    @pytest.mark.parametrize("version", range(1, 6))
    async def test_sizes_are_reported(self, api: DescribeLogDirs, topics: Topics, tmp_path: Path, version: int) -> None:
        response = await send_in_version(api, version, self.request())
        (folder,) = response.results
        assert (response.error_code, folder.error_code, folder.log_dir) == (
            ErrorCode.none,
            ErrorCode.none,
            str(tmp_path),
        )
        sizes = {
            (topic.name, partition.partition_index): partition.partition_size
            for topic in folder.topics
            for partition in topic.partitions
        }
        written = topics.partition("a", 1).size_bytes
        assert written > 200
        assert sizes == {("a", 0): 0, ("a", 1): written, ("b", 0): 0}
        assert not any(
            partition.is_future_key or partition.offset_lag for topic in folder.topics for partition in topic.partitions
        )
        if version >= 4:
            assert folder.total_bytes == shutil.disk_usage(tmp_path).total
            assert 0 < folder.usable_bytes <= folder.total_bytes
        assert not folder.is_cordoned

    async def test_only_requested_partitions_that_exist_are_reported(self, api: DescribeLogDirs) -> None:
        response = await send_request(api, self.request(a=(1, 1, 7, -1), nope=(0,), b=()))
        (folder,) = response.results
        assert [
            (topic.name, [partition.partition_index for partition in topic.partitions]) for topic in folder.topics
        ] == [("a", [1])]

    async def test_a_missing_folder_is_an_error(self, topics: Topics, tmp_path: Path) -> None:
        api = DescribeLogDirs(topics, folder=str(tmp_path / "nope"))
        (folder,) = (await send_request(api, self.request())).results
        assert (folder.error_code, folder.topics) == (ErrorCode.kafka_storage_error, ())


@pytest.mark.parametrize("version", [1, 2])
async def test_replicas_stay_in_the_one_folder(topics: Topics, tmp_path: Path, version: int) -> None:
    await topics.create("orders", partitions=2)
    topic = FOLDERS.AlterReplicaLogDirTopic(name="orders", partitions=(0, 7))
    folders = [FOLDERS.AlterReplicaLogDir(path=path, topics=(topic,)) for path in (str(tmp_path), "/elsewhere")]
    api = AlterReplicaLogDirs(topics, folder=str(tmp_path))
    (reported,) = (await send_in_version(api, version, FOLDERS.AlterReplicaLogDirsRequest(dirs=tuple(folders)))).results
    codes = [(partition.partition_index, partition.error_code.name) for partition in reported.partitions]
    away = [(0, "log_dir_not_found"), (7, "log_dir_not_found")]
    assert codes == [(0, "none"), (7, "unknown_topic_or_partition"), *away]


class TestDescribeProducers:
    async def test_producers_are_reported_until_forgotten(self, topics: Topics) -> None:
        await topics.create("orders", partitions=2)
        log = topics.partition("orders", 0)
        await log.append(batch(b"x", producer_id=7, epoch=1, sequence=0))
        await log.append(batch(b"y", producer_id=7, epoch=1, sequence=2))
        await log.append(batch(b"z", producer_id=9, epoch=0, sequence=5))
        await log.append(batch(b"nobody"))
        versioned = PRODUCERS.DescribeProducersRequest(
            topics=(
                PRODUCERS.TopicRequest(name="orders", partition_indexes=(0, 1, 2)),
                PRODUCERS.TopicRequest(name="bad name", partition_indexes=(0,)),
            )
        )
        response = await send_request(DescribeProducers(topics, cast("Any", None)), versioned)
        orders, bad = response.topics
        first, second, third = orders.partitions
        assert [
            (producer.producer_id, producer.producer_epoch, producer.last_sequence)
            for producer in first.active_producers
        ] == [
            (7, 1, 3),
            (9, 0, 6),
        ]
        assert all(producer.last_timestamp > 0 for producer in first.active_producers)
        unknown = {
            (producer.coordinator_epoch, producer.current_txn_start_offset) for producer in first.active_producers
        }
        assert unknown == {(-1, -1)}
        assert (second.error_code, second.active_producers) == (ErrorCode.none, ())
        assert (third.error_code, third.active_producers) == (ErrorCode.unknown_topic_or_partition, ())
        assert bad.partitions[0].error_code is ErrorCode.invalid_topic_exception


class TestElectLeaders:
    def request(self, kind: int = 0, **requested: tuple[int, ...]) -> Any:
        named = tuple(
            ELECT.TopicPartitions(topic=name, partitions=partitions) for name, partitions in requested.items()
        )
        return ELECT.ElectLeadersRequest(election_type=kind, topic_partitions=named or None)

    @pytest.mark.parametrize("version", range(3))
    @pytest.mark.parametrize("kind", [0, 1])
    async def test_no_election_is_needed(self, topics: Topics, version: int, kind: int) -> None:
        await topics.create("orders", partitions=1)
        response = await send_in_version(ElectLeaders(topics), version, self.request(kind, orders=(0, 3), nope=(0,)))
        assert response.error_code is ErrorCode.none
        codes = {
            (topic.topic, partition.partition_id): partition.error_code
            for topic in response.replica_election_results
            for partition in topic.partition_result
        }
        assert codes == {
            ("orders", 0): ErrorCode.election_not_needed,
            ("orders", 3): ErrorCode.unknown_topic_or_partition,
            ("nope", 0): ErrorCode.unknown_topic_or_partition,
        }
        everything = await send_in_version(ElectLeaders(topics), version, self.request(kind))
        assert (everything.error_code, everything.replica_election_results) == (ErrorCode.none, ())

    async def test_an_unknown_kind_is_refused(self, topics: Topics) -> None:
        response = await send_request(ElectLeaders(topics), self.request(7, orders=(0,)))
        assert (response.error_code, response.replica_election_results) == (ErrorCode.invalid_request, ())


class TestReassignments:
    @pytest.mark.parametrize("version", [0, 1])
    async def test_partitions_stay_where_they_are(self, topics: Topics, membership: Membership, version: int) -> None:
        await topics.create("orders", partitions=9)
        requested: list[tuple[int, tuple[int, ...] | None]] = [
            (0, (5,)),
            (1, (6,)),
            (2, (5, 5)),
            (3, ()),
            (4, None),
            (9, (5,)),
        ]
        partitions = tuple(MOVE.ReassignablePartition(partition_index=at, replicas=nodes) for at, nodes in requested)
        versioned = MOVE.AlterPartitionReassignmentsRequest(
            topics=(MOVE.ReassignableTopic(name="orders", partitions=partitions),)
        )
        response = await send_in_version(AlterPartitionReassignments(topics, membership), version, versioned)
        assert (response.error_code, response.allow_replication_factor_change) == (ErrorCode.none, True)
        (topic,) = response.responses
        assert [partition.error_code for partition in topic.partitions] == [
            ErrorCode.none,
            ErrorCode.invalid_replica_assignment,
            ErrorCode.invalid_replica_assignment,
            ErrorCode.invalid_replica_assignment,
            ErrorCode.no_reassignment_in_progress,
            ErrorCode.unknown_topic_or_partition,
        ]

    async def test_nothing_is_being_moved(self, topics: Topics) -> None:
        response = await send_request(
            ListPartitionReassignments(topics), MOVES.ListPartitionReassignmentsRequest(topics=None)
        )
        assert (response.error_code, response.error_message, response.topics) == (ErrorCode.none, None, ())
