"""The APIs of the offsets of share groups (KIP-932)."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from kio.schema.alter_share_group_offsets.v0.request import (
    AlterShareGroupOffsetsRequest,
    AlterShareGroupOffsetsRequestTopic,
)
from kio.schema.alter_share_group_offsets.v0.response import (
    AlterShareGroupOffsetsResponse,
    AlterShareGroupOffsetsResponsePartition,
    AlterShareGroupOffsetsResponseTopic,
)
from kio.schema.delete_share_group_offsets.v0.request import DeleteShareGroupOffsetsRequest
from kio.schema.delete_share_group_offsets.v0.response import (
    DeleteShareGroupOffsetsResponse,
    DeleteShareGroupOffsetsResponseTopic,
)
from kio.schema.describe_share_group_offsets.v1.request import (
    DescribeShareGroupOffsetsRequest,
    DescribeShareGroupOffsetsRequestGroup,
)
from kio.schema.describe_share_group_offsets.v1.response import (
    DescribeShareGroupOffsetsResponse,
    DescribeShareGroupOffsetsResponseGroup,
    DescribeShareGroupOffsetsResponsePartition,
    DescribeShareGroupOffsetsResponseTopic,
)
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32, i64

from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message, error_of
from millstream.broker.kafka.share_consumers import UNKNOWN, QueueOffset, ShareOffsets
from millstream.broker.security.changes import offsets_changed
from millstream.core.errors import GroupNotEmpty, MillstreamError, UnknownTopic
from millstream.core.topic import Topic

_NOT_BEGUN = QueueOffset(UNKNOWN, UNKNOWN)


class DescribeShareGroupOffsets(Api[DescribeShareGroupOffsetsRequest, DescribeShareGroupOffsetsResponse]):
    """DescribeShareGroupOffsets (key 90), versions 0 and 1: returns the start offsets of share groups (KIP-932).

    The start offset is that of the oldest unfinished message; -1 where the group has not started. Without topics, all
    partitions on which it has started are returned; a group that does not exist has none.

    Version notes: 1 adds the lag: the approximate number of unfinished messages.
    """

    key = 90
    versions = (0, 1)
    changes = None

    def __init__(self, offsets: ShareOffsets, topics: Topics) -> None:
        self._offsets = offsets
        self._topics = topics

    async def handle(
        self, request: DescribeShareGroupOffsetsRequest, client: ClientInfo
    ) -> DescribeShareGroupOffsetsResponse:
        groups = await asyncio.gather(*(self._describe_group(group) for group in request.groups))
        return DescribeShareGroupOffsetsResponse(throttle_time=NO_THROTTLE, groups=tuple(groups))

    async def _describe_group(
        self, group: DescribeShareGroupOffsetsRequestGroup
    ) -> DescribeShareGroupOffsetsResponseGroup:
        try:
            known = await self._offsets.of_group(group.group_id)
        except MillstreamError as error:
            return DescribeShareGroupOffsetsResponseGroup(
                group_id=group.group_id, topics=(), error_code=error_code(error), error_message=error_message(error)
            )
        if group.topics is None:
            requested: dict[str, list[int]] = {}
            for topic, partition in sorted(known):
                requested.setdefault(topic, []).append(partition)
        else:
            requested = {topic.topic_name: list(topic.partitions) for topic in group.topics}
        return DescribeShareGroupOffsetsResponseGroup(
            group_id=group.group_id,
            topics=tuple(self._build_topic(name, partitions, known) for name, partitions in requested.items()),
            error_code=ErrorCode.none,
        )

    def _build_topic(
        self, name: str, partitions: list[int], known: Mapping[tuple[str, int], QueueOffset]
    ) -> DescribeShareGroupOffsetsResponseTopic:
        topic = self._topics.get(name)
        return DescribeShareGroupOffsetsResponseTopic(
            topic_name=TopicName(name),
            topic_id=None if topic is None else topic.topic_id,
            partitions=tuple(
                _build_partition(index, known.get((name, index), _NOT_BEGUN), exists=topic is not None)
                for index in partitions
            ),
        )


def _build_partition(index: int, offset: QueueOffset, *, exists: bool) -> DescribeShareGroupOffsetsResponsePartition:
    return DescribeShareGroupOffsetsResponsePartition(
        partition_index=i32(index),
        start_offset=i64(offset.start),
        leader_epoch=i32(0),
        lag=i64(offset.backlog),
        error_code=ErrorCode.none if exists else ErrorCode.unknown_topic_or_partition,
    )


class AlterShareGroupOffsets(Api[AlterShareGroupOffsetsRequest, AlterShareGroupOffsetsResponse]):
    """AlterShareGroupOffsets (key 91), version 0: moves a share group to other offsets (KIP-932).

    The group must have no members (NON_EMPTY_GROUP); it is created if it does not exist. A partition that does not
    exist gets UNKNOWN_TOPIC_OR_PARTITION; an offset outside the partition is moved to the nearest that it has.
    """

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
        self, group_id: str, requested: AlterShareGroupOffsetsRequestTopic
    ) -> AlterShareGroupOffsetsResponseTopic:
        topic = self._topics.get(requested.topic_name)
        responses = []
        for partition in requested.partitions:
            error = await self._move_one(group_id, topic, partition.partition_index, partition.start_offset)
            responses.append(
                AlterShareGroupOffsetsResponsePartition(
                    partition_index=i32(partition.partition_index),
                    error_code=error_code(error),
                    error_message=error_message(error),
                )
            )
        return AlterShareGroupOffsetsResponseTopic(
            topic_name=requested.topic_name,
            topic_id=None if topic is None else topic.topic_id,
            partitions=tuple(responses),
        )

    async def _move_one(self, group_id: str, topic: Topic | None, index: int, offset: int) -> MillstreamError | None:
        if topic is None or not 0 <= index < topic.partitions or topic.is_internal:
            return UnknownTopic(f"there is no partition {index} that could be shared")
        return await error_of(self._offsets.move(group_id, topic, index, max(0, offset)))


class DeleteShareGroupOffsets(Api[DeleteShareGroupOffsetsRequest, DeleteShareGroupOffsetsResponse]):
    """DeleteShareGroupOffsets (key 92), version 0: deletes the offsets of a share group for some topics (KIP-932).

    The group must have no members (NON_EMPTY_GROUP). It then starts on these topics again, at the position of its
    `share.auto.offset.reset`.
    """

    key = 92
    versions = (0, 0)
    changes = staticmethod(offsets_changed)

    def __init__(self, groups: GroupCoordinator, offsets: ShareOffsets, topics: Topics) -> None:
        self._groups = groups
        self._offsets = offsets
        self._topics = topics

    async def handle(
        self, request: DeleteShareGroupOffsetsRequest, client: ClientInfo
    ) -> DeleteShareGroupOffsetsResponse:
        group = await self._groups.describe_share_group(request.group_id)
        if group.members:
            raise GroupNotEmpty(f"share group {request.group_id!r} has members")
        responses = [await self._delete_offsets(request.group_id, topic.topic_name) for topic in request.topics]
        return DeleteShareGroupOffsetsResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, responses=tuple(responses)
        )

    async def _delete_offsets(self, group_id: str, name: str) -> DeleteShareGroupOffsetsResponseTopic:
        topic = self._topics.get(name)
        if topic is None:
            error: MillstreamError | None = UnknownTopic(f"there is no topic {name!r}")
        else:
            error = await error_of(self._offsets.forget(group_id, topic))
        return DeleteShareGroupOffsetsResponseTopic(
            topic_name=TopicName(name),
            topic_id=None if topic is None else topic.topic_id,
            error_code=error_code(error),
            error_message=error_message(error),
        )
