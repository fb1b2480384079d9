"""The APIs of moves of partitions between nodes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

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
from kio.schema.list_partition_reassignments.v0.request import ListPartitionReassignmentsRequest
from kio.schema.list_partition_reassignments.v0.response import (
    ListPartitionReassignmentsResponse,
    OngoingPartitionReassignment,
    OngoingTopicReassignment,
)
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i32

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import (
    NO_THROTTLE,
    Api,
    ClientInfo,
    RequestDeadline,
    check_replicas,
    error_code,
    error_message,
    error_of,
    topic_named,
)
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import UPDATE, Users, carried_out, change_of
from millstream.core.errors import InvalidReplication
from millstream.core.ids import NodeId


class ListPartitionReassignments(Api[ListPartitionReassignmentsRequest, ListPartitionReassignmentsResponse]):
    """ListPartitionReassignments (key 46), version 0: lists the partitions that are being moved between nodes.

    No list of topics means all topics. Partitions that are not being moved are left out.
    """

    key = 46
    versions = (0, 0)
    changes = None

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(
        self, request: ListPartitionReassignmentsRequest, client: ClientInfo
    ) -> ListPartitionReassignmentsResponse:
        requested = None
        if request.topics is not None:
            requested = {(str(topic.name), int(index)) for topic in request.topics for index in topic.partition_indexes}
        by_topic: dict[str, list[OngoingPartitionReassignment]] = {}
        for (topic_id, index), move in sorted(self._topics.reassignments().items()):
            topic = self._topics.by_id(topic_id)
            state = None if topic is None else self._topics.state_of(topic, index)
            if topic is None or state is None or (requested is not None and (topic.name, int(index)) not in requested):
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


class AlterPartitionReassignments(Api[AlterPartitionReassignmentsRequest, AlterPartitionReassignmentsResponse]):
    """AlterPartitionReassignments (key 45), versions 0 and 1: moves partitions to other nodes.

    Responds when a move has begun: its new replicas are added and follow, and once all of them are in sync the old ones
    are removed. A request without nodes cancels the move, or gets NO_REASSIGNMENT_IN_PROGRESS if there is none. Nodes
    that are not alive get INVALID_REPLICA_ASSIGNMENT. Moves that have not started within the timeout of the request are
    REQUEST_TIMED_OUT.

    Version notes: 1 adds whether the number of replicas may change; if not, another number is
    INVALID_REPLICATION_FACTOR.
    """

    key = 45
    versions = (0, 1)

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(
        self, request: AlterPartitionReassignmentsRequest, client: ClientInfo
    ) -> AlterPartitionReassignmentsResponse:
        responses = []
        deadline = RequestDeadline(request.timeout)
        may_change = request.allow_replication_factor_change
        for topic in request.topics:
            partitions = [
                await self._partition_response(topic.name, requested, deadline, may_change=may_change)
                for requested in topic.partitions
            ]
            responses.append(ReassignableTopicResponse(name=topic.name, partitions=tuple(partitions)))
        return AlterPartitionReassignmentsResponse(
            throttle_time=NO_THROTTLE,
            allow_replication_factor_change=request.allow_replication_factor_change,
            error_code=ErrorCode.none,
            error_message=None,
            responses=tuple(responses),
        )

    async def _partition_response(
        self, topic: str, requested: ReassignablePartition, deadline: RequestDeadline, *, may_change: bool
    ) -> ReassignablePartitionResponse:
        error = await error_of(self._reassign(topic, requested, deadline, may_change=may_change))
        return ReassignablePartitionResponse(
            partition_index=requested.partition_index, error_code=error_code(error), error_message=error_message(error)
        )

    async def _reassign(
        self, name: str, requested: ReassignablePartition, deadline: RequestDeadline, *, may_change: bool
    ) -> None:
        deadline.remaining_s(f"{name}-{requested.partition_index}")
        topic = topic_named(self._topics, name)
        target: tuple[NodeId, ...] | None = None
        if requested.replicas is not None:
            # A missing partition is reported before missing nodes.
            self._topics.state_of(topic, requested.partition_index)
            check_replicas(requested.replicas, self._membership)
            target = tuple(NodeId(node) for node in requested.replicas)
            if not may_change and len(target) != topic.replication:
                raise InvalidReplication(
                    f"topic {name!r} has {topic.replication} replicas; name as many, not {len(target)}"
                )
        await self._topics.reassign(topic, requested.partition_index, target)

    @staticmethod
    def changes(
        request: AlterPartitionReassignmentsRequest, response: AlterPartitionReassignmentsResponse, _users: Users
    ) -> Iterator[Change]:
        done = {
            (topic.name, partition.partition_index): partition
            for topic in response.responses
            for partition in carried_out(topic.partitions)
        }
        for topic in request.topics:
            for partition in topic.partitions:
                result = done.get((topic.name, partition.partition_index))
                if result is not None:
                    replicas = None if partition.replicas is None else [int(node) for node in partition.replicas]
                    name = f"{topic.name}-{partition.partition_index}"
                    yield change_of(result, UPDATE, "partition", name, {"replicas": replicas})
