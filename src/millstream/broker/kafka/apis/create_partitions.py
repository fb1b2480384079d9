"""CreatePartitions (key 37), versions 0 to 3: adds partitions to topics; partitions are never removed.

A request may place the new partitions on nodes, with one list of nodes for each of them. Topics that were not reached
within the timeout of the request get REQUEST_TIMED_OUT and stay as they are.

Version notes: 2 is flexible, 3 is the same.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from kio.schema.create_partitions.v3.request import CreatePartitionsRequest, CreatePartitionsTopic
from kio.schema.create_partitions.v3.response import CreatePartitionsResponse, CreatePartitionsTopicResult
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.keys import Placement
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
    topic_named,
)
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import UPDATE, Users, carried_out, change_of
from millstream.core.errors import (
    InvalidAssignment,
    InvalidPartitions,
    InvalidRequest,
    MillstreamError,
    MirroredTopic,
    PolicyViolation,
)
from millstream.core.ids import NodeId


class CreatePartitions(Api[CreatePartitionsRequest, CreatePartitionsResponse]):
    key = 37
    versions = (0, 3)

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(self, request: CreatePartitionsRequest, client: ClientInfo) -> CreatePartitionsResponse:
        named = Counter(topic.name for topic in request.topics)
        deadline = RequestDeadline(request.timeout)
        results: dict[str, CreatePartitionsTopicResult] = {}
        for requested in request.topics:
            code, message = ErrorCode.none, None
            try:
                if named[requested.name] > 1:
                    raise InvalidRequest(f"topic {requested.name!r} is named more than once in the request")
                await self._topics.add_partitions(
                    requested.name,
                    requested.count,
                    validate_only=request.validate_only,
                    placement=self._check_growth(requested),
                    timeout_s=deadline.remaining_s(f"topic {requested.name!r}"),
                )
            except MillstreamError as error:
                code, message = error_code(error), error_message(error)
            results[requested.name] = CreatePartitionsTopicResult(
                name=requested.name, error_code=code, error_message=message
            )
        return CreatePartitionsResponse(throttle_time=NO_THROTTLE, results=tuple(results.values()))

    def _check_growth(self, requested: CreatePartitionsTopic) -> Placement | None:
        """Check that the topic can grow; return the placement of its new partitions, if given."""
        topic = topic_named(self._topics, requested.name)
        if topic.is_internal:
            raise PolicyViolation(f"topic {requested.name!r} holds the broker's own state; its partitions are fixed")
        if topic.mirror:
            raise MirroredTopic(
                f"topic {requested.name!r} is a copy of mirror {topic.mirror!r}, which adds partitions when its source "
                "does; add them there"
            )
        if requested.count == topic.partitions:
            raise InvalidPartitions(f"topic {requested.name!r} has {topic.partitions} partitions already")
        if requested.count < topic.partitions:
            raise InvalidPartitions(
                f"topic {requested.name!r} has {topic.partitions} partitions; "
                f"{requested.count} would not be an increase"
            )
        if requested.assignments is None:
            return None
        added = requested.count - topic.partitions
        if len(requested.assignments) != added:
            raise InvalidAssignment(
                f"{added} partitions are added, but {len(requested.assignments)} assignments are given"
            )
        for assigned in requested.assignments:
            check_replicas(assigned.broker_ids, self._membership)
            if len(assigned.broker_ids) != topic.replication:
                raise InvalidAssignment(
                    f"topic {requested.name!r} has {topic.replication} replicas of each partition, "
                    f"the assignment gives {len(assigned.broker_ids)}"
                )
        return {
            index: tuple(NodeId(node) for node in assigned.broker_ids)
            for index, assigned in enumerate(requested.assignments, topic.partitions)
        }

    @staticmethod
    def changes(
        request: CreatePartitionsRequest, response: CreatePartitionsResponse, _users: Users
    ) -> Iterator[Change]:
        counts = {topic.name: int(topic.count) for topic in request.topics}
        for topic in carried_out(response.results):
            yield change_of(topic, UPDATE, "topic", topic.name, {"partitions": counts[topic.name]})
