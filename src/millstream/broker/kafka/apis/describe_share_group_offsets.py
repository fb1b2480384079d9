"""DescribeShareGroupOffsets (key 90), versions 0 to 1: returns the start offsets of share groups (KIP-932).

The start offset is that of the oldest unfinished message; -1 where the group has not started. Without topics, all
partitions on which it has started are returned; a group that does not exist has none.

Version notes: 1 adds the lag: the approximate number of unfinished messages.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

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
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message
from millstream.broker.kafka.share_consumers import UNKNOWN, QueueOffset, ShareOffsets
from millstream.core.errors import MillstreamError

_NOT_BEGUN = QueueOffset(UNKNOWN, UNKNOWN)


class DescribeShareGroupOffsets(Api[DescribeShareGroupOffsetsRequest, DescribeShareGroupOffsetsResponse]):
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
        self, asked: DescribeShareGroupOffsetsRequestGroup
    ) -> DescribeShareGroupOffsetsResponseGroup:
        try:
            known = await self._offsets.of_group(asked.group_id)
        except MillstreamError as error:
            return DescribeShareGroupOffsetsResponseGroup(
                group_id=asked.group_id, topics=(), error_code=error_code(error), error_message=error_message(error)
            )
        if asked.topics is None:
            wanted: dict[str, list[int]] = {}
            for topic, partition in sorted(known):
                wanted.setdefault(topic, []).append(partition)
        else:
            wanted = {topic.topic_name: list(topic.partitions) for topic in asked.topics}
        return DescribeShareGroupOffsetsResponseGroup(
            group_id=asked.group_id,
            topics=tuple(self._build_topic(name, partitions, known) for name, partitions in wanted.items()),
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
