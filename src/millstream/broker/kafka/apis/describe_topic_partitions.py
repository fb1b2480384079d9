"""DescribeTopicPartitions (key 75), version 0: describes topics and their partitions, page by page (KIP-966).

Topics are sorted by name; no topics means all topics. A response holds at most `response_partition_limit` partitions,
but at least one and never more than 2,000; if there are more, the next request sends `next_cursor` back. A cursor whose
topic was deleted continues with the next topic. A partition without a leader has LEADER_NOT_AVAILABLE; replicas that
may lead it although they are not in sync are listed as eligible.

There is no error for the whole request, so each topic of an invalid request gets its error, as in Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final, cast

from kio.schema.describe_topic_partitions.v0.request import DescribeTopicPartitionsRequest
from kio.schema.describe_topic_partitions.v0.response import (
    Cursor,
    DescribeTopicPartitionsResponse,
    DescribeTopicPartitionsResponsePartition,
    DescribeTopicPartitionsResponseTopic,
)
from kio.schema.errors import ErrorCode
from kio.schema.types import BrokerId, TopicName
from kio.static.primitive import i32

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import (
    NO_THROTTLE,
    NOT_REQUESTED,
    TOPIC_OPERATIONS,
    Api,
    ClientInfo,
    error_code,
    topic_named,
)
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.ids import NodeId
from millstream.core.partition_state import PartitionState
from millstream.core.topic import INTERNAL_TOPICS, Topic, check_topic_name

PARTITIONS_MAX: Final = 2000
_NO_LEADER: Final = BrokerId(-1)


class DescribeTopicPartitions(Api[DescribeTopicPartitionsRequest, DescribeTopicPartitionsResponse]):
    key = 75
    versions = (0, 0)
    changes = None

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(
        self, request: DescribeTopicPartitionsRequest, client: ClientInfo
    ) -> DescribeTopicPartitionsResponse:
        names = self._remaining_names(request, client.rights)
        remaining = max(1, min(request.response_partition_limit, PARTITIONS_MAX))
        described: list[DescribeTopicPartitionsResponseTopic] = []
        for name in names:
            first = request.cursor.partition_index if request.cursor and request.cursor.topic_name == name else 0
            try:
                check_topic_name(name)
                topic = topic_named(self._topics, name)
            except MillstreamError as error:
                described.append(_error_topic(name, error, TOPIC_OPERATIONS))
                continue
            if remaining == 0:
                return _response(described, Cursor(topic_name=TopicName(name), partition_index=i32(0)))
            described.append(self._describe(topic, first, remaining))
            after = first + remaining
            if after < topic.partitions:
                return _response(described, Cursor(topic_name=TopicName(name), partition_index=i32(after)))
            remaining -= len(described[-1].partitions)
        return _response(described, None)

    def failure(
        self, error: MillstreamError, request: DescribeTopicPartitionsRequest
    ) -> DescribeTopicPartitionsResponse:
        return _response([_error_topic(topic.name, error, NOT_REQUESTED) for topic in request.topics], None)

    def _remaining_names(self, request: DescribeTopicPartitionsRequest, rights: Rights | None) -> list[str]:
        """Return the topics of this page and of those behind it, in order; of all topics, those that are visible."""
        cursor = request.cursor
        if cursor is not None and cursor.partition_index < 0:
            raise InvalidRequest(f"the cursor has partition {cursor.partition_index}")
        if request.topics:
            names = sorted({str(topic.name) for topic in request.topics})
            if cursor is not None and cursor.topic_name not in names:
                raise InvalidRequest(f"the cursor's topic {cursor.topic_name!r} is not among the requested ones")
        else:
            # Not by the guard, since the cursor names the topic that follows.
            names = [
                topic.name
                for topic in self._topics.all()
                if rights is None or rights.topic(Operation.DESCRIBE, topic.name)
            ]
        return names if cursor is None else [name for name in names if name >= cursor.topic_name]

    def _describe(self, topic: Topic, first: int, number: int) -> DescribeTopicPartitionsResponseTopic:
        alive = frozenset(node.node_id for node in self._membership.nodes())
        states = self._topics.states_of(topic)[first : first + number]
        return DescribeTopicPartitionsResponseTopic(
            error_code=ErrorCode.none,
            name=TopicName(topic.name),
            topic_id=topic.topic_id,
            is_internal=topic.is_internal,
            partitions=tuple(_build_partition(index, state, alive) for index, state in enumerate(states, first)),
            topic_authorized_operations=TOPIC_OPERATIONS,
        )


def _build_partition(
    index: int, state: PartitionState | None, alive: frozenset[int]
) -> DescribeTopicPartitionsResponsePartition:
    # Plain casts, as in Metadata: the checked conversions of kio's types would double the cost.
    led = state is not None and state.leader in alive
    return DescribeTopicPartitionsResponsePartition(
        error_code=ErrorCode.none if led else ErrorCode.leader_not_available,
        partition_index=cast("i32", index),
        leader_id=BrokerId(state.leader) if state is not None and led else _NO_LEADER,
        leader_epoch=cast("i32", state.leader_epoch if state is not None else -1),
        replica_nodes=_brokers(state.replicas if state is not None else ()),
        isr_nodes=_brokers(state.in_sync if state is not None else ()),
        eligible_leader_replicas=_brokers(state.eligible if state is not None else ()),
        last_known_elr=(),
        offline_replicas=_brokers(node for node in (state.replicas if state is not None else ()) if node not in alive),
    )


def _brokers(nodes: Iterable[NodeId]) -> tuple[BrokerId, ...]:
    return tuple(cast("Iterable[BrokerId]", nodes))


def _error_topic(name: str, error: MillstreamError, operations: i32) -> DescribeTopicPartitionsResponseTopic:
    return DescribeTopicPartitionsResponseTopic(
        error_code=error_code(error),
        name=TopicName(name),
        topic_id=None,
        is_internal=name in INTERNAL_TOPICS,
        partitions=(),
        topic_authorized_operations=operations,
    )


def _response(
    topics: list[DescribeTopicPartitionsResponseTopic], next_cursor: Cursor | None
) -> DescribeTopicPartitionsResponse:
    return DescribeTopicPartitionsResponse(throttle_time=NO_THROTTLE, topics=tuple(topics), next_cursor=next_cursor)
