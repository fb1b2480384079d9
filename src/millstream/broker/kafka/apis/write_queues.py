"""WriteQueueStates (key 32021), version 0: stores the changes of queues, for the node that leads them.

    [state partition, [[subscription id, topic id, partition, leader epoch, sequence, deltas], …]]
    answer, when all of it is durable: [error, message, [[error, message], …]]

Writes of one queue are numbered without gaps; one that is repeated counts once, one that leaves a gap is
OUT_OF_ORDER_SEQUENCE_NUMBER, and one of a leader that was replaced is FENCED_LEADER_EPOCH.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.errors import error_code, error_message
from millstream.broker.subscriptions.state_coordinator import StateCoordinator
from millstream.broker.subscriptions.state_messages import WRITE_KEY, QueuesWritten, WriteQueues
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.ids import PartitionIndex


class WriteQueueStates(PrivateApi[WriteQueues, QueuesWritten]):
    """Stores changes of other nodes' queues."""

    key = WRITE_KEY
    request_type = WriteQueues
    response_type = QueuesWritten

    def __init__(self, states: StateCoordinator) -> None:
        self._states = states

    async def needs(self, request: WriteQueues) -> Sequence[Need]:
        """CLUSTER_ACTION: only nodes send it."""
        return [(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: WriteQueues) -> QueuesWritten:
        """Write the changes durably."""
        writes = [write.read() for write in request.writes]
        results = await self._states.write(PartitionIndex(request.state_partition), writes)
        outcomes = [(0, None) if error is None else (int(error_code(error)), error_message(error)) for error in results]
        return QueuesWritten(0, None, outcomes)
