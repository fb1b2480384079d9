"""OffsetForLeaderEpoch (key 23), versions 2 to 4: returns the end offset of a leader epoch.

Consumers use it to find out whether records they have read were truncated by a change of leader, followers to find
where to truncate. The response holds the largest epoch up to the requested one and its end; -1 and -1, without an
error, for an epoch that the log has never seen.

Version notes: 3 adds the id of the follower, 4 is flexible.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from kio.schema.offset_for_leader_epoch.v4.request import OffsetForLeaderEpochRequest, OffsetForLeaderPartition
from kio.schema.offset_for_leader_epoch.v4.response import (
    EpochEndOffset,
    OffsetForLeaderEpochResponse,
    OffsetForLeaderTopicResult,
)
from kio.static.primitive import i32, i64

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.core.errors import MillstreamError
from millstream.core.ids import Epoch


class OffsetForLeaderEpoch(Api[OffsetForLeaderEpochRequest, OffsetForLeaderEpochResponse]):
    key = 23
    versions = (2, 4)
    changes = None

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(self, request: OffsetForLeaderEpochRequest, client: ClientInfo) -> OffsetForLeaderEpochResponse:
        topics = tuple(
            OffsetForLeaderTopicResult(
                topic=topic.topic,
                partitions=tuple(self._partition_result(topic.topic, requested) for requested in topic.partitions),
            )
            for topic in request.topics
        )
        return OffsetForLeaderEpochResponse(throttle_time=NO_THROTTLE, topics=topics)

    def _partition_result(self, topic: str, requested: OffsetForLeaderPartition) -> EpochEndOffset:
        try:
            partition = self._topics.partition(topic, requested.partition)
            partition.check_leader_epoch(requested.current_leader_epoch)
        except MillstreamError as error:
            return EpochEndOffset(error_code=error_code(error), partition=requested.partition)
        epoch, end_offset = partition.log.end_of_epoch(Epoch(requested.leader_epoch))
        return EpochEndOffset(
            error_code=ErrorCode.none,
            partition=requested.partition,
            leader_epoch=i32(epoch),
            end_offset=i64(end_offset),
        )
