"""CreatePartitions (key 37), versions 0 to 3: adds partitions to topics; partitions are never removed.

A request may place the new partitions on nodes, with one list of nodes for each of them. Topics that have not been
begun within the time of the request are REQUEST_TIMED_OUT and stay as they are.

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
    """Grows topics."""

    key = 37
    versions = (0, 3)

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(self, request: CreatePartitionsRequest, client: ClientInfo) -> CreatePartitionsResponse:
        named = Counter(topic.name for topic in request.topics)
        deadline = RequestDeadline(request.timeout)
        results: dict[str, CreatePartitionsTopicResult] = {}
        for wanted in request.topics:
            code, message = ErrorCode.none, None
            try:
                if named[wanted.name] > 1:
                    raise InvalidRequest(f"topic {wanted.name!r} is named more than once in the request")
                await self._topics.add_partitions(
                    wanted.name,
                    wanted.count,
                    validate_only=request.validate_only,
                    placement=self._check_growth(wanted),
                    timeout_s=deadline.remaining_s(f"topic {wanted.name!r}"),
                )
            except MillstreamError as error:
                code, message = error_code(error), error_message(error)
            results[wanted.name] = CreatePartitionsTopicResult(name=wanted.name, error_code=code, error_message=message)
        return CreatePartitionsResponse(throttle_time=NO_THROTTLE, results=tuple(results.values()))

    def _check_growth(self, wanted: CreatePartitionsTopic) -> Placement | None:
        """Check that the topic can grow; return the placement of its new partitions, if given."""
        topic = topic_named(self._topics, wanted.name)
        if topic.is_internal:
            raise PolicyViolation(f"topic {wanted.name!r} holds the broker's own state; its partitions are fixed")
        if topic.mirror:
            raise MirroredTopic(
                f"topic {wanted.name!r} is a copy of mirror {topic.mirror!r}, which adds the partitions that are added "
                "at the source"
            )
        if wanted.count == topic.partitions:
            raise InvalidPartitions(f"topic {wanted.name!r} has {topic.partitions} partitions already")
        if wanted.count < topic.partitions:
            raise InvalidPartitions(
                f"topic {wanted.name!r} has {topic.partitions} partitions; {wanted.count} would not be an increase"
            )
        if wanted.assignments is None:
            return None
        added = wanted.count - topic.partitions
        if len(wanted.assignments) != added:
            raise InvalidAssignment(
                f"{added} partitions are added, but {len(wanted.assignments)} assignments are given"
            )
        for assigned in wanted.assignments:
            check_replicas(assigned.broker_ids, self._membership)
            if len(assigned.broker_ids) != topic.replication:
                raise InvalidAssignment(
                    f"topic {wanted.name!r} has {topic.replication} replicas of each partition, "
                    f"the assignment gives {len(assigned.broker_ids)}"
                )
        return {
            index: tuple(NodeId(node) for node in assigned.broker_ids)
            for index, assigned in enumerate(wanted.assignments, topic.partitions)
        }

    @staticmethod
    def changes(
        request: CreatePartitionsRequest, response: CreatePartitionsResponse, _users: Users
    ) -> Iterator[Change]:
        counts = {topic.name: int(topic.count) for topic in request.topics}
        for topic in carried_out(response.results):
            yield change_of(topic, UPDATE, "topic", topic.name, {"partitions": counts[topic.name]})
