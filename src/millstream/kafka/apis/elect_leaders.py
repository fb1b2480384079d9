"""ElectLeaders (key 43), versions 0 to 2: asks for the election of leaders, which a cluster of one node never needs.

Every partition that is there is led by its only replica and answered with ELECTION_NOT_NEEDED. No list of partitions
means all of them; then, as in Kafka, those that need no election are left out, so the answer is empty.

Version notes: 1 adds the kind of election (before, it was that of the preferred replica) and an error for the whole
answer, 2 is flexible.
"""

from __future__ import annotations

from typing import Final

from kio.schema.elect_leaders.v2.request import ElectLeadersRequest
from kio.schema.elect_leaders.v2.response import ElectLeadersResponse, PartitionResult, ReplicaElectionResult
from kio.schema.errors import ErrorCode
from kio.static.primitive import i32

from millstream.cluster.topics import Topics
from millstream.kafka.api import Api, ClientInfo
from millstream.kafka.errors import error_code, error_message
from millstream.kafka.throttle import NO_THROTTLE
from millstream.model.errors import MillstreamError

_ELECTION_TYPES: Final = (0, 1)


class ElectLeaders(Api[ElectLeadersRequest, ElectLeadersResponse]):
    """Says that partitions have their leader."""

    key = 43
    versions = (0, 2)

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(self, request: ElectLeadersRequest, client: ClientInfo) -> ElectLeadersResponse:
        """Answer each partition on its own."""
        known = request.election_type in _ELECTION_TYPES
        wanted = (request.topic_partitions or ()) if known else ()
        return ElectLeadersResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none if known else ErrorCode.invalid_request,
            replica_election_results=tuple(
                ReplicaElectionResult(
                    topic=one.topic,
                    partition_result=tuple(self._answer(one.topic, index) for index in one.partitions),
                )
                for one in wanted
            ),
        )

    def _answer(self, topic: str, index: i32) -> PartitionResult:
        try:
            self._topics.partition(topic, index)
        except MillstreamError as error:
            return PartitionResult(partition_id=index, error_code=error_code(error), error_message=error_message(error))
        return PartitionResult(
            partition_id=index,
            error_code=ErrorCode.election_not_needed,
            error_message="the partition is led by its preferred replica",
        )
