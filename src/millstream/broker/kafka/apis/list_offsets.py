"""ListOffsets (key 2), versions 1 to 11: returns offsets by timestamp.

Instead of a time in milliseconds (the first record that is not older), a request can contain one of these:

    -1  latest: the end that the client may read to         -2  earliest: the first offset that can still be read
    -3  the record with the largest timestamp (7 and later) -4  earliest on local disk (8 and later): the same as -2
    -5  latest in tiered storage (9 and later): none        -6  earliest to be uploaded there (11 and later): none

"None", and a time after the last record, is offset -1 without an error, as in Kafka. A negative time that the version
does not know gets UNSUPPORTED_VERSION. A partition named twice is reported once, with INVALID_REQUEST. A leader that
has just been elected and does not yet know the high watermark of its predecessor returns OFFSET_NOT_AVAILABLE, so that
no client sees the end move back; before version 5, which has that code, LEADER_NOT_AVAILABLE.

Version notes: 2 adds the isolation level, 4 the leader epochs, 6 is flexible, 10 adds a timeout that only tiered
storage needs.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections import Counter
from typing import Any, Final, NamedTuple

from kio.schema.errors import ErrorCode
from kio.schema.list_offsets.v11.request import ListOffsetsPartition, ListOffsetsRequest
from kio.schema.list_offsets.v11.response import (
    ListOffsetsPartitionResponse,
    ListOffsetsResponse,
    ListOffsetsTopicResponse,
)
from kio.schema.types import TopicName
from kio.static.primitive import i32, i64

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.broker.replication.partition import Partition
from millstream.core.errors import MillstreamError
from millstream.core.ids import NO_EPOCH, NO_OFFSET, NO_TIMESTAMP_MS, Epoch, Offset

LATEST: Final = -1
EARLIEST: Final = -2
MAX_TIMESTAMP: Final = -3
EARLIEST_LOCAL: Final = -4
LATEST_TIERED: Final = -5
EARLIEST_PENDING_UPLOAD: Final = -6
_UNSUPPORTED: Final = i64(-(2**63))
"""Stands for a negative time that the request's version does not know."""

_FIRST_VERSION_OF: Final = {
    LATEST: 1,
    EARLIEST: 1,
    MAX_TIMESTAMP: 7,
    EARLIEST_LOCAL: 8,
    LATEST_TIERED: 9,
    EARLIEST_PENDING_UPLOAD: 11,
}
_FIRST_WITH_NOT_AVAILABLE: Final = 5
_CONSUMER: Final = -1
_READ_COMMITTED: Final = 1


class _LookupResult(NamedTuple):
    offset: Offset
    timestamp_ms: int
    epoch: Epoch


_NONE: Final = _LookupResult(NO_OFFSET, NO_TIMESTAMP_MS, NO_EPOCH)


class ListOffsets(Api[ListOffsetsRequest, ListOffsetsResponse]):
    key = 2
    versions = (1, 11)
    changes = None

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(self, request: ListOffsetsRequest, client: ClientInfo) -> ListOffsetsResponse:
        named = Counter(
            (topic.name, partition.partition_index) for topic in request.topics for partition in topic.partitions
        )
        responses: dict[TopicName, dict[int, ListOffsetsPartitionResponse]] = {}
        for topic in request.topics:
            of_topic = responses.setdefault(topic.name, {})
            for partition in topic.partitions:
                if named[topic.name, partition.partition_index] > 1:
                    of_topic[partition.partition_index] = _error_partition(partition, ErrorCode.invalid_request)
                else:
                    of_topic[partition.partition_index] = await self._partition_response(topic.name, partition, request)
        topics = tuple(
            ListOffsetsTopicResponse(name=name, partitions=tuple(of_topic.values()))
            for name, of_topic in responses.items()
        )
        return ListOffsetsResponse(throttle_time=NO_THROTTLE, topics=topics)

    def downgrade(self, version: int, response: ListOffsetsResponse) -> Any:
        """Use LEADER_NOT_AVAILABLE for older clients while an offset is not known yet."""
        if version < _FIRST_WITH_NOT_AVAILABLE:
            topics = tuple(
                dataclasses.replace(topic, partitions=tuple(map(_as_no_leader, topic.partitions)))
                for topic in response.topics
            )
            response = dataclasses.replace(response, topics=topics)
        return super().downgrade(version, response)

    def upgrade(self, version: int, request: Any) -> ListOffsetsRequest:
        """Mark the times that the version does not know, since `handle` does not see the version."""
        upgraded = super().upgrade(version, request)
        topics = tuple(
            dataclasses.replace(
                topic, partitions=tuple(_mark_unsupported(version, partition) for partition in topic.partitions)
            )
            for topic in upgraded.topics
        )
        return dataclasses.replace(upgraded, topics=topics)

    async def _partition_response(
        self, topic: str, requested: ListOffsetsPartition, request: ListOffsetsRequest
    ) -> ListOffsetsPartitionResponse:
        if requested.timestamp == _UNSUPPORTED:
            return _error_partition(requested, ErrorCode.unsupported_version)
        try:
            partition = self._topics.partition(topic, requested.partition_index)
            partition.check_leader_epoch(requested.current_leader_epoch)
            end = _readable_end(partition, request)
            result = await _look_up(partition, requested.timestamp, end)
            if _is_uncertain(partition, requested.timestamp, result, request):
                return _error_partition(requested, ErrorCode.offset_not_available)
        except MillstreamError as error:
            return _error_partition(requested, error_code(error))
        return ListOffsetsPartitionResponse(
            partition_index=requested.partition_index,
            error_code=ErrorCode.none,
            timestamp=i64(result.timestamp_ms),
            offset=i64(result.offset),
            leader_epoch=i32(result.epoch),
        )


def _as_no_leader(response: ListOffsetsPartitionResponse) -> ListOffsetsPartitionResponse:
    if response.error_code is not ErrorCode.offset_not_available:
        return response
    return dataclasses.replace(response, error_code=ErrorCode.leader_not_available)


def _mark_unsupported(version: int, requested: ListOffsetsPartition) -> ListOffsetsPartition:
    if requested.timestamp >= 0 or version >= _FIRST_VERSION_OF.get(requested.timestamp, version + 1):
        return requested
    return dataclasses.replace(requested, timestamp=_UNSUPPORTED)


def _readable_end(partition: Partition, request: ListOffsetsRequest) -> Offset:
    """Return the end that the client may read to: the log's for followers, else what is acknowledged or committed."""
    if request.replica_id != _CONSUMER:
        return partition.log.end_offset
    if request.isolation_level == _READ_COMMITTED:
        return partition.last_stable_offset
    return partition.high_watermark


def _is_uncertain(partition: Partition, timestamp_ms: int, result: _LookupResult, request: ListOffsetsRequest) -> bool:
    """Whether the response depends on the end of the log for consumers, which the leader does not know yet."""
    if request.replica_id != _CONSUMER or partition.is_settled:
        return False
    return timestamp_ms in (LATEST, MAX_TIMESTAMP) or (timestamp_ms >= 0 and result is _NONE)


async def _look_up(partition: Partition, timestamp_ms: int, end: Offset) -> _LookupResult:
    if timestamp_ms == LATEST:
        return _LookupResult(end, NO_TIMESTAMP_MS, partition.leader_epoch)
    if timestamp_ms in (EARLIEST, EARLIEST_LOCAL):
        return _LookupResult(partition.log_start, NO_TIMESTAMP_MS, _epoch_at_start(partition))
    if timestamp_ms in (LATEST_TIERED, EARLIEST_PENDING_UPLOAD):
        return _NONE
    if timestamp_ms == MAX_TIMESTAMP:
        result = await partition.log.find_max_timestamp(up_to=end)
    else:
        result = await partition.log.find_time(timestamp_ms, up_to=end)
    return _NONE if result is None else _LookupResult(*result)


def _epoch_at_start(partition: Partition) -> Epoch:
    """The epoch of the first record, or the current one when there is none: the first whose end is beyond the start."""
    log = partition.log
    first = bisect_right(range(log.latest_epoch + 1), log.start_offset, key=lambda epoch: log.end_of_epoch(epoch)[1])
    return Epoch(first) if first <= log.latest_epoch else partition.leader_epoch


def _error_partition(requested: ListOffsetsPartition, code: ErrorCode) -> ListOffsetsPartitionResponse:
    return ListOffsetsPartitionResponse(partition_index=requested.partition_index, error_code=code)
