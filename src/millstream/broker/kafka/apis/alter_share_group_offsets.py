"""AlterShareGroupOffsets (key 91), version 0: moves a share group to other offsets (KIP-932).

The group must have no members (NON_EMPTY_GROUP); it is created if it does not exist. A partition that does not exist is
UNKNOWN_TOPIC_OR_PARTITION; an offset outside the partition is moved to the nearest that it has.
"""

from __future__ import annotations

from kio.schema.alter_share_group_offsets.v0.request import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestTopic,
)
from kio.schema.alter_share_group_offsets.v0.response import (
    AlterShareGroupOffsetsResponse,
    AlterShareGroupOffsetsResponsePartition,
    AlterShareGroupOffsetsResponseTopic,
)
from kio.schema.errors import ErrorCode
from kio.static.primitive import i32

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.kafka.share_consumers import ShareOffsets
from millstream.broker.security.changes import offsets_changed
from millstream.core.errors import GroupNotEmpty, MillstreamError, UnknownTopic
from millstream.core.topic import Topic


class AlterShareGroupOffsets(Api[AlterShareGroupOffsetsRequest, AlterShareGroupOffsetsResponse]):
    key = 91
    versions = (0, 0)
    changes = staticmethod(offsets_changed)

    def __init__(self, groups: GroupCoordinator, offsets: ShareOffsets, topics: Topics) -> None:
        self._groups = groups
        self._offsets = offsets
        self._topics = topics

    async def handle(
        self, request: AlterShareGroupOffsetsRequest, client: ClientInfo
    ) -> AlterShareGroupOffsetsResponse:
        group = await self._groups.open_share_group(request.group_id)
        if group.members:
            raise GroupNotEmpty(f"share group {request.group_id!r} has members")
        await self._offsets.declare(request.group_id)
        return AlterShareGroupOffsetsResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            responses=tuple([await self._alter_offsets(request.group_id, topic) for topic in request.topics]),
        )

    async def _alter_offsets(
        self, group_id: str, asked: AlterShareGroupOffsetsRequestTopic
    ) -> AlterShareGroupOffsetsResponseTopic:
        topic = self._topics.get(asked.topic_name)
        responses = []
        for partition in asked.partitions:
            error = await self._move_one(group_id, topic, partition.partition_index, partition.start_offset)
            responses.append(
                AlterShareGroupOffsetsResponsePartition(
                    partition_index=i32(partition.partition_index),
                    error_code=ErrorCode.none if error is None else error_code(error),
                    error_message=None if error is None else error_message(error),
                )
            )
        return AlterShareGroupOffsetsResponseTopic(
            topic_name=asked.topic_name,
            topic_id=None if topic is None else topic.topic_id,
            partitions=tuple(responses),
        )

    async def _move_one(self, group_id: str, topic: Topic | None, index: int, offset: int) -> MillstreamError | None:
        if topic is None or not 0 <= index < topic.partitions or topic.is_internal:
            return UnknownTopic(f"there is no partition {index} that could be shared")
        try:
            await self._offsets.move(group_id, topic, index, max(0, offset))
        except MillstreamError as error:
            return error
        return None
