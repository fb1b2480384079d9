"""DeleteRecords (key 21), versions 0 to 2: deletes the records of partitions before an offset.

-1 deletes every acknowledged record. An offset beyond the last of these gets OFFSET_OUT_OF_RANGE; one below the start
changes nothing. Compacted topics (`cleanup.policy=compact`) and internal topics refuse it.

Version notes: 2 is flexible.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from kio.schema.delete_records.v2.request import DeleteRecordsPartition, DeleteRecordsRequest
from kio.schema.delete_records.v2.response import (
    DeleteRecordsPartitionResult,
    DeleteRecordsResponse,
    DeleteRecordsTopicResult,
)
from kio.schema.errors import ErrorCode
from kio.static.primitive import i64

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import DELETE, Users, carried_out, change_of
from millstream.core.errors import InvalidTopicName, MillstreamError, OffsetOutOfRange, PolicyViolation
from millstream.core.ids import NO_EPOCH, Offset

_TO_THE_END: Final = -1
_NO_LOW_WATERMARK: Final = i64(-1)


class DeleteRecords(Api[DeleteRecordsRequest, DeleteRecordsResponse]):
    key = 21
    versions = (0, 2)

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(self, request: DeleteRecordsRequest, client: ClientInfo) -> DeleteRecordsResponse:
        topics = tuple(
            DeleteRecordsTopicResult(
                name=topic.name,
                partitions=tuple(self._partition_result(topic.name, requested) for requested in topic.partitions),
            )
            for topic in request.topics
        )
        return DeleteRecordsResponse(throttle_time=NO_THROTTLE, topics=topics)

    def _partition_result(self, topic: str, requested: DeleteRecordsPartition) -> DeleteRecordsPartitionResult:
        code, low_watermark = ErrorCode.none, _NO_LOW_WATERMARK
        try:
            low_watermark = i64(self._delete(topic, requested))
        except MillstreamError as error:
            code = error_code(error)
        return DeleteRecordsPartitionResult(
            partition_index=requested.partition_index, low_watermark=low_watermark, error_code=code
        )

    def _delete(self, topic: str, requested: DeleteRecordsPartition) -> Offset:
        partition = self._topics.partition(topic, requested.partition_index)
        partition.check_leader_epoch(NO_EPOCH)
        if partition.topic.is_internal:
            raise InvalidTopicName(f"records of {topic!r} are the broker's own state and cannot be deleted")
        if not partition.log.settings.deletes:
            raise PolicyViolation(
                f"topic {topic!r} keeps the last record per key; its records are not deleted by offset"
            )
        end = partition.high_watermark
        before = end if requested.offset == _TO_THE_END else Offset(requested.offset)
        if not 0 <= before <= end:
            raise OffsetOutOfRange(
                f"{topic}-{requested.partition_index} can be deleted up to {end}, not {before}",
                start=partition.log_start,
                end=end,
            )
        if before > partition.log_start:
            partition.delete_before(before)
        return partition.log_start

    @staticmethod
    def changes(_request: DeleteRecordsRequest, response: DeleteRecordsResponse, _users: Users) -> Iterator[Change]:
        for topic in response.topics:
            for partition in carried_out(topic.partitions):
                data = {"log start offset": int(partition.low_watermark)}
                yield change_of(partition, DELETE, "records", f"{topic.name}-{partition.partition_index}", data)
