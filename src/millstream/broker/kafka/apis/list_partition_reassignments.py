"""ListPartitionReassignments (key 46), version 0: lists the partitions that are being moved between nodes.

No list of topics means all topics. Partitions that are not being moved are left out.
"""

from __future__ import annotations

from collections.abc import Iterable

from kio.schema.errors import ErrorCode
from kio.schema.list_partition_reassignments.v0.request import ListPartitionReassignmentsRequest
from kio.schema.list_partition_reassignments.v0.response import (
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
)
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i32

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo


class ListPartitionReassignments(Api[ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse]):
    key = 46
    versions = (0, 0)
    changes = None

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(
        self, request: ListPartitionReassignmentsRequest, client: ClientInfo
    ) -> ListPartitionReassignmentsResponse:
        wanted = None
        if request.topics is not None:
            wanted = {(str(one.name), int(index)) for one in request.topics for index in one.partition_indexes}
        by_topic: dict[str, list[OngoingPartitionReassignment]] = {}
        for (topic_id, index), move in sorted(self._topics.reassignments().items()):
            topic = self._topics.by_id(topic_id)
            state = None if topic is None else self._topics.state_of(topic, index)
            if topic is None or state is None or (wanted is not None and (topic.name, int(index)) not in wanted):
                continue
            by_topic.setdefault(topic.name, []).append(
                OngoingPartitionReassignment(
                    partition_index=i32(index),
                    replicas=_brokers(state.replicas),
                    adding_replicas=_brokers(node for node in move.target if node not in move.before),
                    removing_replicas=_brokers(node for node in state.replicas if node not in move.target),
                )
            )
        topics = tuple(
            OngoingTopicReassignment(name=TopicName(name), partitions=tuple(moves)) for name, moves in by_topic.items()
        )
        return ListPartitionReassignmentsResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, error_message=None, topics=topics
        )


def _brokers(nodes: Iterable[int]) -> tuple[BrokerId, ...]:
    return tuple(BrokerId(node) for node in nodes)
