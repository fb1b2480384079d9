"""LoadQueueState (key 32020), version 0: returns the stored state of a queue to the queue's leader.

    [subscription id, topic id, partition, leader epoch]     answer: [error, message, snapshot or nil, last sequence]

Once it is answered, leaders with an older epoch can write no more (FENCED_LEADER_EPOCH). May be repeated.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.subscriptions.state_coordinator import StateCoordinator
from millstream.broker.subscriptions.state_messages import LOAD_KEY, LoadQueue, QueueLoaded
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.ids import Epoch


class LoadQueueState(PrivateApi[LoadQueue, QueueLoaded]):
    """Returns the stored state of a queue."""

    key = LOAD_KEY
    request_type = LoadQueue
    response_type = QueueLoaded

    def __init__(self, states: StateCoordinator) -> None:
        self._states = states

    async def needs(self, request: LoadQueue) -> Sequence[Need]:
        """CLUSTER_ACTION: only nodes send it."""
        return [(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME)]

    async def handle(self, request: LoadQueue) -> QueueLoaded:
        """Read a queue back for its leader."""
        stored = await self._states.load(request.key, Epoch(request.leader_epoch))
        return QueueLoaded(0, None, stored.snapshot, stored.sequence)
