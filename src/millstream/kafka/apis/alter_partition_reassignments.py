"""AlterPartitionReassignments (key 45), versions 0 and 1: moves partitions to other nodes, of which there are none.

A request for the nodes that a partition has already is answered with success and changes nothing; other nodes are
INVALID_REPLICA_ASSIGNMENT. No nodes means to cancel a move under way: NO_REASSIGNMENT_IN_PROGRESS.

Version notes: 1 adds whether the number of replicas may change.
"""

from __future__ import annotations

from kio.schema.alter_partition_reassignments.v1.request import (
    AlterPartitionReassignmentsRequest,
    ReassignablePartition,
)
from kio.schema.alter_partition_reassignments.v1.response import (
    AlterPartitionReassignmentsResponse,
    ReassignablePartitionResponse,
    ReassignableTopicResponse,
)
from kio.schema.errors import ErrorCode

from millstream.cluster.membership import Membership
from millstream.cluster.topics import Topics
from millstream.kafka.api import Api, ClientInfo
from millstream.kafka.assignment import check_replicas
from millstream.kafka.errors import error_code, error_message
from millstream.kafka.throttle import NO_THROTTLE
from millstream.model.errors import MillstreamError


class AlterPartitionReassignments(Api[AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse]):
    """Leaves partitions where they are."""

    key = 45
    versions = (0, 1)

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(
        self, request: AlterPartitionReassignmentsRequest, client: ClientInfo
    ) -> AlterPartitionReassignmentsResponse:
        """Answer each partition on its own."""
        return AlterPartitionReassignmentsResponse(
            throttle_time=NO_THROTTLE,
            allow_replication_factor_change=request.allow_replication_factor_change,
            error_code=ErrorCode.none,
            error_message=None,
            responses=tuple(
                ReassignableTopicResponse(
                    name=topic.name, partitions=tuple(self._answer(topic.name, wanted) for wanted in topic.partitions)
                )
                for topic in request.topics
            ),
        )

    def _answer(self, topic: str, wanted: ReassignablePartition) -> ReassignablePartitionResponse:
        code, message = ErrorCode.none, None
        try:
            self._topics.partition(topic, wanted.partition_index)
            if wanted.replicas is None:
                code, message = ErrorCode.no_reassignment_in_progress, "the partition is not being moved"
            else:
                check_replicas(wanted.replicas, self._membership)
        except MillstreamError as error:
            code, message = error_code(error), error_message(error)
        return ReassignablePartitionResponse(
            partition_index=wanted.partition_index, error_code=code, error_message=message
        )
