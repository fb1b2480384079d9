"""ListPartitionReassignments (key 46), version 0: the partitions that are being moved between nodes.

A cluster of one node moves none, so the list is always empty.

Version notes: version 0 is the only one.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from kio.schema.list_partition_reassignments.v0.request import ListPartitionReassignmentsRequest
from kio.schema.list_partition_reassignments.v0.response import ListPartitionReassignmentsResponse

from millstream.kafka.api import Api, ClientInfo
from millstream.kafka.throttle import NO_THROTTLE


class ListPartitionReassignments(Api[ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse]):
    """Lists what is being moved."""

    key = 46
    versions = (0, 0)

    async def handle(
        self, request: ListPartitionReassignmentsRequest, client: ClientInfo
    ) -> ListPartitionReassignmentsResponse:
        """List nothing."""
        return ListPartitionReassignmentsResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, error_message=None, topics=()
        )
