"""AlterReplicaLogDirs (key 34), versions 1 and 2: moves replicas between the folders of a node. A node has one.

Moving a replica to its own folder succeeds. As in Kafka, any other folder is LOG_DIR_NOT_FOUND, a partition that does
not exist is UNKNOWN_TOPIC_OR_PARTITION, and one without a replica on this node is REPLICA_NOT_AVAILABLE.

Version notes: 2 is flexible.
"""

from __future__ import annotations

from kio.schema.alter_replica_log_dirs.v2.request import AlterReplicaLogDirsRequest
from kio.schema.alter_replica_log_dirs.v2.response import (
    AlterReplicaLogDirPartitionResult,
    AlterReplicaLogDirsResponse,
    AlterReplicaLogDirTopicResult,
)
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo


class AlterReplicaLogDirs(Api[AlterReplicaLogDirsRequest, AlterReplicaLogDirsResponse]):
    """Leaves replicas in the only folder."""

    key = 34
    versions = (1, 2)
    changes = None

    def __init__(self, topics: Topics, *, folder: str) -> None:
        self._topics = topics
        self._folder = folder

    async def handle(self, request: AlterReplicaLogDirsRequest, client: ClientInfo) -> AlterReplicaLogDirsResponse:
        results: dict[TopicName, list[AlterReplicaLogDirPartitionResult]] = {}
        for wanted in request.dirs:
            for topic in wanted.topics:
                results.setdefault(topic.name, []).extend(
                    AlterReplicaLogDirPartitionResult(
                        partition_index=index, error_code=self._check_move(wanted.path, topic.name, index)
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
