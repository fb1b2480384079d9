"""Private requests between nodes that read and write the stored states of queues."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

from millstream.broker.coordination.shard import complete
from millstream.broker.kafka.api import Need, PrivateApi, RequestT, ResponseT, error_code, error_message
from millstream.broker.subscriptions.state_shard import (
    LOAD_KEY,
    WRITE_KEY,
    LoadQueue,
    QueueLoaded,
    QueuesWritten,
    StateCoordinator,
    WriteQueues,
    WriteResult,
)
from millstream.core.acl import CLUSTER_NAME, Operation, ResourceType
from millstream.core.ids import Epoch, PartitionIndex


class _QueueStateApi(PrivateApi[RequestT, ResponseT]):
    def __init__(self, states: StateCoordinator) -> None:
        self._states = states

    async def needs(self, request: RequestT) -> Sequence[Need]:
        """CLUSTER_ACTION: only nodes send it."""
        return [(Operation.CLUSTER_ACTION, ResourceType.CLUSTER, CLUSTER_NAME)]


class LoadQueueState(_QueueStateApi[LoadQueue, QueueLoaded]):
    """Returns the stored state of a queue to the queue's leader.

        [subscription id, topic id, partition, leader epoch]   answer: [error, message, snapshot or nil, last sequence]

    Once it is answered, leaders with an older epoch can write no more (FENCED_LEADER_EPOCH). May be repeated.
    """

    key = LOAD_KEY
    changes = None

    async def handle(self, request: LoadQueue) -> QueueLoaded:
        stored = await self._states.load(request.key, Epoch(request.leader_epoch))
        return QueueLoaded(0, None, stored.snapshot, stored.sequence)


class WriteQueueStates(_QueueStateApi[WriteQueues, QueuesWritten]):
    """Stores the changes of queues, for the node that leads them.

        [state partition, [[subscription id, topic id, partition, leader epoch, sequence, deltas], …]]
        answer, when all of it is durable: [error, message, [[error, message], …]]

    Writes of one queue are numbered without gaps; one that is repeated counts once, one that leaves a gap is
    OUT_OF_ORDER_SEQUENCE_NUMBER, and one of a leader that was replaced is FENCED_LEADER_EPOCH.
    """

    key = WRITE_KEY
    changes = None

    async def handle(self, request: WriteQueues) -> QueuesWritten:
        writes = [write.read() for write in request.writes]
        written: asyncio.Future[list[WriteResult]] = asyncio.get_running_loop().create_future()
        self._states.write(PartitionIndex(request.state_partition), writes, partial(complete, written))
        results = await written
        outcomes = [(0, None) if error is None else (int(error_code(error)), error_message(error)) for error in results]
        return QueuesWritten(0, None, outcomes)
