"""ElectLeaders (key 43), versions 0 to 2: requests the election of leaders.

The preferred election moves the leadership to the first replica of a partition: ELECTION_NOT_NEEDED if it leads
already, PREFERRED_LEADER_NOT_AVAILABLE if it is down or not in sync. The unclean election lets any replica lead if no
in-sync one can, which may lose acknowledged records: ELIGIBLE_LEADERS_NOT_AVAILABLE if no replica is alive. No list of
partitions means all partitions; as in Kafka, those that need no election are then left out. Elections that have not
started within the timeout of the request get REQUEST_TIMED_OUT.

Version notes: 1 adds the kind of election (before, only the preferred one) and an error for the whole response, 2 is
flexible.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Final

from kio.schema.elect_leaders.v2.request import ElectLeadersRequest
from kio.schema.elect_leaders.v2.response import ElectLeadersResponse, PartitionResult, ReplicaElectionResult
from kio.schema.errors import ErrorCode
from kio.schema.types import TopicName
from kio.static.primitive import i32

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import (
    NO_THROTTLE,
    Api,
    ClientInfo,
    RequestDeadline,
    error_code,
    error_message,
    topic_named,
)
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import UPDATE, Users, carried_out, change_of
from millstream.core.errors import MillstreamError

_PREFERRED, _UNCLEAN = 0, 1
_AT_ONCE_MAX: Final = 16
_RequestedPartitions = list[tuple[TopicName, list[i32]]]


class ElectLeaders(Api[ElectLeadersRequest, ElectLeadersResponse]):
    key = 43
    versions = (0, 2)

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(self, request: ElectLeadersRequest, client: ClientInfo) -> ElectLeadersResponse:
        if request.election_type not in (_PREFERRED, _UNCLEAN):
            return self.refusal(ErrorCode.invalid_request)
        named = request.topic_partitions is not None
        room = asyncio.Semaphore(_AT_ONCE_MAX)
        deadline = RequestDeadline(request.timeout)
        unclean = request.election_type == _UNCLEAN
        results = []
        for topic, indexes in self._requested_partitions(request):
            elections = (self._elect(topic, index, unclean, room, deadline) for index in indexes)
            responses = [
                election
                for election in await asyncio.gather(*elections)
                if named or election.error_code is not ErrorCode.election_not_needed
            ]
            if responses or named:
                results.append(ReplicaElectionResult(topic=topic, partition_result=tuple(responses)))
        return ElectLeadersResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, replica_election_results=tuple(results)
        )

    def _requested_partitions(self, request: ElectLeadersRequest) -> _RequestedPartitions:
        if request.topic_partitions is not None:
            return [
                (topic_partition.topic, list(topic_partition.partitions))
                for topic_partition in request.topic_partitions
            ]
        return [
            (TopicName(topic.name), [i32(index) for index in range(topic.partitions)]) for topic in self._topics.all()
        ]

    async def _elect(
        self, topic: TopicName, index: i32, unclean: bool, room: asyncio.Semaphore, deadline: RequestDeadline
    ) -> PartitionResult:
        try:
            async with room:
                deadline.remaining_s(f"{topic}-{index}")
                await self._topics.elect(topic_named(self._topics, topic), index, unclean=unclean)
        except MillstreamError as error:
            return PartitionResult(partition_id=index, error_code=error_code(error), error_message=error_message(error))
        return PartitionResult(partition_id=index, error_code=ErrorCode.none, error_message=None)

    @staticmethod
    def changes(_request: ElectLeadersRequest, response: ElectLeadersResponse, _users: Users) -> Iterator[Change]:
        for topic in response.replica_election_results:
            for result in carried_out(topic.partition_result):
                yield change_of(result, UPDATE, "partition", f"{topic.topic}-{result.partition_id}")
