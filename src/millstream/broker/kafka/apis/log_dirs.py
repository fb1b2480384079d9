"""The APIs of the folder of a node."""

from __future__ import annotations

import asyncio
import shutil

from kio.schema.alter_replica_log_dirs.v2.request import AlterReplicaLogDirsRequest
from kio.schema.alter_replica_log_dirs.v2.response import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)
from kio.schema.describe_log_dirs.v5.request import DescribableLogDirTopic, DescribeLogDirsRequest
from kio.schema.describe_log_dirs.v5.response import (
    DescribeLogDirsPartition,
    DescribeLogDirsResponse,
    DescribeLogDirsResult,
    DescribeLogDirsTopic,
)
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32, i64

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.replication.partition import Partition


class DescribeLogDirs(Api[DescribeLogDirsRequest, DescribeLogDirsResponse]):
    """DescribeLogDirs (key 35), versions 1 to 5: returns the folder of partitions, their size, and the size of the
    disk.

    A node has one folder. Partitions that do not exist are left out, as in Kafka; no list of topics means all topics.

    Version notes: 2 is flexible, 3 adds an error for the whole response, 4 the size and the free space of the disk, 5
    whether the folder is closed to new partitions, which it never is.
    """

    key = 35
    versions = (1, 5)
    changes = None

    def __init__(self, topics: Topics, *, folder: str) -> None:
        self._topics = topics
        self._folder = folder

    async def handle(self, request: DescribeLogDirsRequest, client: ClientInfo) -> DescribeLogDirsResponse:
        try:
            # A disk that hangs must not block the loop.
            usage = await asyncio.to_thread(shutil.disk_usage, self._folder)
        except OSError:
            result = DescribeLogDirsResult(error_code=ErrorCode.kafka_storage_error, log_dir=self._folder, topics=())
        else:
            result = DescribeLogDirsResult(
                error_code=ErrorCode.none,
                log_dir=self._folder,
                topics=self._build_topics(request.topics),
                total_bytes=i64(usage.total),
                usable_bytes=i64(usage.free),
            )
        return DescribeLogDirsResponse(throttle_time=NO_THROTTLE, error_code=ErrorCode.none, results=(result,))

    def _build_topics(self, requested: tuple[DescribableLogDirTopic, ...] | None) -> tuple[DescribeLogDirsTopic, ...]:
        if requested is None:
            by_topic = {topic.name: self._topics.partitions_of(topic) for topic in self._topics.all()}
        else:
            by_topic = {topic.topic: self._find_partitions(topic) for topic in requested}
        return tuple(
            DescribeLogDirsTopic(
                name=TopicName(name), partitions=tuple(_build_partition(partition) for partition in partitions)
            )
            for name, partitions in by_topic.items()
            if partitions
        )

    def _find_partitions(self, requested: DescribableLogDirTopic) -> list[Partition]:
        topic = self._topics.get(requested.topic)
        if topic is None:
            return []
        carried = {int(partition.index): partition for partition in self._topics.partitions_of(topic)}
        return [carried[index] for index in dict.fromkeys(requested.partitions) if index in carried]


def _build_partition(partition: Partition) -> DescribeLogDirsPartition:
    return DescribeLogDirsPartition(
        partition_index=i32(partition.index),
        partition_size=i64(partition.size_bytes),
        # Written but not acknowledged yet.
        offset_lag=i64(max(0, partition.log.end_offset - partition.high_watermark)),
        is_future_key=False,
    )


class AlterReplicaLogDirs(Api[AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse]):
    """AlterReplicaLogDirs (key 34), versions 1 and 2: moves replicas between the folders of a node. A node has one.

    Moving a replica to its own folder succeeds. As in Kafka, any other folder gets LOG_DIR_NOT_FOUND, a partition that
    does not exist UNKNOWN_TOPIC_OR_PARTITION, and a partition without a replica on this node REPLICA_NOT_AVAILABLE.

    Version notes: 2 is flexible.
    """

    key = 34
    versions = (1, 2)
    changes = None

    def __init__(self, topics: Topics, *, folder: str) -> None:
        self._topics = topics
        self._folder = folder

    async def handle(self, request: AlterReplicaLogDirsRequest, client: ClientInfo) -> AlterReplicaLogDirsResponse:
        results: dict[TopicName, list[AlterReplicaLogDirPartitionResult]] = {}
        for requested in request.dirs:
            for topic in requested.topics:
                results.setdefault(topic.name, []).extend(
                    AlterReplicaLogDirPartitionResult(
                        partition_index=index, error_code=self._check_move(requested.path, topic.name, index)
                    )
                    for index in topic.partitions
                )
        return AlterReplicaLogDirsResponse(
            throttle_time=NO_THROTTLE,
            results=tuple(
                AlterReplicaLogDirTopicResult(topic_name=name, partitions=tuple(partitions))
                for name, partitions in results.items()
            ),
        )

    def _check_move(self, path: str, name: str, index: int) -> ErrorCode:
        if path.rstrip("/") != self._folder.rstrip("/"):
            return ErrorCode.log_dir_not_found
        topic = self._topics.get(name)
        if topic is None or not 0 <= index < topic.partitions:
            return ErrorCode.unknown_topic_or_partition
        is_here = any(partition.index == index for partition in self._topics.partitions_of(topic))
        return ErrorCode.none if is_here else ErrorCode.replica_not_available
