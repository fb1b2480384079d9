"""CreateTopics (key 19), versions 2 to 7: creates topics durably; each succeeds or fails on its own.

-1 partitions or -1 replicas use the node's default. Instead of numbers, a request may place every partition on nodes;
both numbers must then be -1. A name that occurs twice in a request is refused. `validate_only` checks everything and
creates nothing. In a cluster the response waits until all nodes agree on the topic and its leaders; if that takes
longer than the request allows, the topic gets REQUEST_TIMED_OUT and is created later. The timeout applies to all topics
of the request together. 1,000 of them are created at a time; those that were not reached when it expires get
REQUEST_TIMED_OUT too, and are not created.

Version notes: 4 allows -1 for both numbers, 5 is flexible and returns the numbers and settings of the topic, 7 returns
its id.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Final

from kio.schema.create_topics.v7.request import CreatableTopic, CreateTopicsRequest
from kio.schema.create_topics.v7.response import CreatableTopicConfigs, CreatableTopicResult, CreateTopicsResponse
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8, i16, i32

from millstream.broker.cluster.keys import Placement
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.new_topics import NewTopic
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import (
    NO_THROTTLE,
    Api,
    ClientInfo,
    RequestDeadline,
    check_assignments,
    error_code,
    error_message,
)
from millstream.broker.kafka.setting_view import topic_settings
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import CREATE, Users, carried_out, change_of
from millstream.core.errors import (
    InvalidAssignment,
    InvalidPartitions,
    InvalidReplication,
    InvalidRequest,
    InvalidSetting,
    MillstreamError,
)
from millstream.core.ids import NodeId
from millstream.core.topic import Topic

_DEFAULT: Final = -1
_AT_ONCE_MAX: Final = 1000
"""Topics that are stored together: other changes of the catalog wait meanwhile."""


class CreateTopics(Api[CreateTopicsRequest, CreateTopicsResponse]):
    key = 19
    versions = (2, 7)

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(self, request: CreateTopicsRequest, client: ClientInfo) -> CreateTopicsResponse:
        named = Counter(topic.name for topic in request.topics)
        deadline = RequestDeadline(request.timeout)
        results: dict[str, CreatableTopicResult] = {}
        valid: list[tuple[CreatableTopic, NewTopic]] = []
        for requested in request.topics:
            try:
                if named[requested.name] > 1:
                    raise InvalidRequest(f"topic {requested.name!r} is named more than once in the request")
                valid.append((requested, self._new_topic(requested)))
            except MillstreamError as error:
                results[requested.name] = _error_result(requested, error)
        for at in range(0, len(valid), _AT_ONCE_MAX):
            some = valid[at : at + _AT_ONCE_MAX]
            outcomes = await self._create([new for _, new in some], deadline, validate_only=request.validate_only)
            for (requested, _), outcome in zip(some, outcomes, strict=True):
                if isinstance(outcome, MillstreamError):
                    results[requested.name] = _error_result(requested, outcome)
                    continue
                results[requested.name] = self._created_result(requested, outcome)
                # Describing the settings of thousands of topics takes a while; let other tasks run meanwhile.
                await asyncio.sleep(0)
        ordered = tuple(results[name] for name in named)
        return CreateTopicsResponse(throttle_time=NO_THROTTLE, topics=ordered)

    async def _create(
        self, requested: Sequence[NewTopic], deadline: RequestDeadline, *, validate_only: bool
    ) -> Sequence[Topic | MillstreamError]:
        try:
            timeout_s = deadline.remaining_s("the topics")
            return await self._topics.create_all(requested, validate_only=validate_only, timeout_s=timeout_s)
        except MillstreamError as error:
            return [error] * len(requested)

    def _new_topic(self, requested: CreatableTopic) -> NewTopic:
        partitions, replication, placement = self._parse_layout(requested)
        overrides: dict[str, str] = {}
        for config in requested.configs:
            if config.value is None:
                raise InvalidSetting(f"setting {config.name} of topic {requested.name!r} has no value")
            overrides[config.name] = config.value
        return NewTopic(
            name=requested.name,
            partitions=partitions,
            replication=replication,
            overrides=overrides,
            placement=placement,
        )

    def _parse_layout(self, requested: CreatableTopic) -> tuple[int, int, Placement | None]:
        """Return the requested partitions and replicas, as numbers or as a placement."""
        if not requested.assignments:
            if requested.num_partitions != _DEFAULT and requested.num_partitions < 1:
                raise InvalidPartitions(
                    f"a topic has at least 1 partition, not {requested.num_partitions} (-1 asks for the default)"
                )
            if requested.replication_factor != _DEFAULT and requested.replication_factor < 1:
                raise InvalidReplication(
                    f"a topic has at least 1 replica, not {requested.replication_factor} (-1 asks for the default)"
                )
            return requested.num_partitions, requested.replication_factor, None
        if requested.num_partitions != _DEFAULT or requested.replication_factor != _DEFAULT:
            raise InvalidRequest("with a manual assignment, the numbers of partitions and replicas must both be -1")
        indexes = sorted(assigned.partition_index for assigned in requested.assignments)
        if indexes != list(range(len(indexes))):
            raise InvalidAssignment(f"the assignment must name every partition from 0 on once, not {indexes}")
        replication = check_assignments([assigned.broker_ids for assigned in requested.assignments], self._membership)
        placement = {
            int(assigned.partition_index): tuple(NodeId(node) for node in assigned.broker_ids)
            for assigned in requested.assignments
        }
        return len(indexes), replication, placement

    def _created_result(self, requested: CreatableTopic, topic: Topic) -> CreatableTopicResult:
        return CreatableTopicResult(
            name=requested.name,
            topic_id=topic.topic_id,
            error_code=ErrorCode.none,
            error_message=None,
            num_partitions=i32(topic.partitions),
            replication_factor=i16(topic.replication),
            configs=tuple(
                CreatableTopicConfigs(
                    name=view.declared.name,
                    value=view.value,
                    read_only=view.read_only,
                    config_source=i8(view.source),
                    is_sensitive=False,
                )
                for view in topic_settings(self._topics, topic)
            ),
        )

    @staticmethod
    def changes(request: CreateTopicsRequest, response: CreateTopicsResponse, _users: Users) -> Iterator[Change]:
        requested = {topic.name: topic for topic in request.topics}
        for topic in carried_out(response.topics):
            settings = {config.name: config.value for config in requested[topic.name].configs}
            yield change_of(topic, CREATE, "topic", topic.name, settings)


def _error_result(requested: CreatableTopic, error: MillstreamError) -> CreatableTopicResult:
    return CreatableTopicResult(
        name=requested.name, topic_id=None, error_code=error_code(error), error_message=error_message(error), configs=()
    )
