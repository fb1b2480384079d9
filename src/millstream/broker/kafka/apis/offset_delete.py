"""OffsetDelete (key 47), version 0: deletes the committed offsets of a group for some partitions.

Offsets of a topic that the group consumes are not deleted (GROUP_SUBSCRIBED_TO_TOPIC); partitions that do not exist get
UNKNOWN_TOPIC_OR_PARTITION. Deleting an offset that was never committed succeeds.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from kio.schema.offset_delete.v0.request import OffsetDeleteRequest, OffsetDeleteRequestTopic
from kio.schema.offset_delete.v0.response import (
    OffsetDeleteResponse,
    OffsetDeleteResponsePartition,
    OffsetDeleteResponseTopic,
)

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, partition_exists
from millstream.broker.security.changes import offsets_changed


class OffsetDelete(Api[OffsetDeleteRequest, OffsetDeleteResponse]):
    key = 47
    versions = (0, 0)
    changes = staticmethod(offsets_changed)

    def __init__(self, groups: GroupCoordinator, topics: Topics) -> None:
        self._groups = groups
        self._topics = topics

    async def handle(self, request: OffsetDeleteRequest, client: ClientInfo) -> OffsetDeleteResponse:
        to_delete: dict[str, list[int]] = {}
        for topic in request.topics:
            indexes = [partition.partition_index for partition in topic.partitions]
            existing = [index for index in indexes if partition_exists(self._topics, topic.name, index)]
            to_delete.setdefault(topic.name, []).extend(existing)
        response = await self._groups.delete_offsets(request.group_id, to_delete)
        codes = {
            (name, index): error_code(error)
            for name, partitions in response.items()
            for index, error in partitions.items()
        }
        return OffsetDeleteResponse(
            error_code=ErrorCode.none,
            throttle_time=NO_THROTTLE,
            topics=tuple(_topic_response(topic, codes) for topic in request.topics),
        )


def _topic_response(
    topic: OffsetDeleteRequestTopic, codes: dict[tuple[str, int], ErrorCode]
) -> OffsetDeleteResponseTopic:
    return OffsetDeleteResponseTopic(
        name=topic.name,
        partitions=tuple(
            OffsetDeleteResponsePartition(
                partition_index=partition.partition_index,
                error_code=codes.get((topic.name, partition.partition_index), ErrorCode.unknown_topic_or_partition),
            )
            for partition in topic.partitions
        ),
    )
