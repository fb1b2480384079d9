"""Metadata (key 3), versions 0 to 13: returns the nodes of the cluster, and topics with the leaders of their
partitions.

No list of topics means all topics; an empty list means none, but all in version 0, which has no null list. A topic
without name and id is ignored. A missing topic is created if both the request and the node's `auto-create-topics` allow
it, and is then described like any other; if the cluster does not agree on it in time, it gets LEADER_NOT_AVAILABLE, so
that clients retry. A partition without a leader has that error too, and replicas on unavailable nodes are listed as
offline.

Version notes: 4 adds `allow_auto_topic_creation` (older clients always allow it), 8 to 10 can ask for what the client
may do with the cluster, 10 adds topic ids, and from 12 on a topic can be asked for by its id. 10 and 11 have the field,
but a client that fills it in gets INVALID_REQUEST, as in Kafka. 13 adds an error for the whole response.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final, cast

from kio.schema.errors import ErrorCode
from kio.schema.metadata.v13.request import MetadataRequest, MetadataRequestTopic
from kio.schema.metadata.v13.response import (
    MetadataResponse,
    MetadataResponseBroker,
    MetadataResponsePartition,
    MetadataResponseTopic,
)
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
    cluster_operations,
    error_code,
    topic_named,
    topic_with_id,
)
from millstream.core.config import DEFAULT_LISTENER
from millstream.core.errors import (
    CatalogUnavailable,
    InvalidRequest,
    MillstreamError,
    RequestTimedOut,
    StoreUnavailable,
)
from millstream.core.partition_state import PartitionState
from millstream.core.topic import INTERNAL_TOPICS, Topic, check_topic_name

_FIRST_BY_ID: Final = 12
_CLUSTER_OPERATIONS_IN: Final = (8, 10)
_NO_LEADER: Final = BrokerId(-1)
_TRANSIENT: Final = (RequestTimedOut, StoreUnavailable, CatalogUnavailable)


class Metadata(Api[MetadataRequest, MetadataResponse]):
    key = 3
    versions = (0, 13)
    changes = None

    def __init__(self, topics: Topics, membership: Membership) -> None:
        self._topics = topics
        self._membership = membership

    async def handle(self, request: MetadataRequest, client: ClientInfo) -> MetadataResponse:
        operations = TOPIC_OPERATIONS if request.include_topic_authorized_operations else NOT_REQUESTED
        if request.topics is None:
            alive = self._live_nodes()
            described = [self._describe(topic, operations, alive) for topic in self._topics.all()]
        else:
            described = [
                await self._look_up(requested, create=request.allow_auto_topic_creation, operations=operations)
                for requested in dict.fromkeys(request.topics)
                if requested.name is not None or requested.topic_id is not None
            ]
        return self._response(tuple(described), client)

    def upgrade(self, version: int, request: Any) -> MetadataRequest:
        """Turn version 0's empty list into "all"."""
        if version == 0 and not request.topics:
            return MetadataRequest(topics=None, include_topic_authorized_operations=False)
        return super().upgrade(version, request)

    async def respond(self, version: int, request: Any, client: ClientInfo) -> Any:
        """Respond, with what only some versions have: refused topic ids and authorized operations."""
        if version < _FIRST_BY_ID and _names_ids(request):
            error = InvalidRequest(f"version {version} cannot request topics by id, only {_FIRST_BY_ID} and later")
            return self.downgrade(version, self.failure(error, self.upgrade(version, request)))
        response = await super().respond(version, request, client)
        oldest, newest = _CLUSTER_OPERATIONS_IN
        if oldest <= version <= newest and request.include_cluster_authorized_operations:
            return dataclasses.replace(response, cluster_authorized_operations=cluster_operations(client))
        return response

    def failure(self, error: MillstreamError, request: MetadataRequest) -> MetadataResponse:
        """Return the error for every requested topic, since older versions have no other field for it."""
        refused = tuple(_error_topic(error_code(error), requested) for requested in request.topics or ())
        return self._response(refused, None, error=error_code(error))

    def _response(
        self,
        topics: tuple[MetadataResponseTopic, ...],
        client: ClientInfo | None,
        error: ErrorCode = ErrorCode.none,
    ) -> MetadataResponse:
        listener, reached_at = (DEFAULT_LISTENER, "") if client is None else (client.listener, client.reached_at)
        nodes = self._membership.nodes_of(listener, reached_at)
        return MetadataResponse(
            throttle_time=NO_THROTTLE,
            brokers=tuple(
                MetadataResponseBroker(
                    node_id=BrokerId(node.node_id),
                    host=host,
                    port=i32(port),
                    rack=node.rack,
                )
                for node, host, port in nodes
            ),
            cluster_id=self._membership.cluster_id,
            controller_id=BrokerId(self._membership.controller_id),
            topics=topics,
            error_code=error,
        )

    async def _look_up(
        self, requested: MetadataRequestTopic, *, create: bool, operations: i32
    ) -> MetadataResponseTopic:
        try:
            topic = await self._find(requested, create=create)
        except MillstreamError as error:
            code = ErrorCode.leader_not_available if isinstance(error, _TRANSIENT) else error_code(error)
            return _error_topic(code, requested, operations)
        return self._describe(topic, operations, self._live_nodes())

    def _live_nodes(self) -> frozenset[int]:
        return frozenset(node.node_id for node in self._membership.nodes())

    async def _find(self, requested: MetadataRequestTopic, *, create: bool) -> Topic:
        if requested.topic_id is not None:
            return topic_with_id(self._topics, requested.topic_id)
        name = requested.name or ""
        if create:
            return await self._topics.ensure(name)
        check_topic_name(name)
        return topic_named(self._topics, name)

    def _describe(self, topic: Topic, operations: i32, alive: frozenset[int]) -> MetadataResponseTopic:
        return MetadataResponseTopic(
            error_code=ErrorCode.none,
            name=cast("TopicName", topic.name),
            topic_id=topic.topic_id,
            is_internal=topic.is_internal,
            partitions=tuple(
                [_build_partition(index, state, alive) for index, state in enumerate(self._topics.states_of(topic))]
            ),
            topic_authorized_operations=operations,
        )


def _build_partition(index: int, state: PartitionState | None, alive: frozenset[int]) -> MetadataResponsePartition:
    # Plain casts: the checked conversions of kio's types would double the cost of a long list.
    if state is None:
        return MetadataResponsePartition(
            error_code=ErrorCode.leader_not_available,
            partition_index=cast("i32", index),
            leader_id=_NO_LEADER,
            replica_nodes=(),
            isr_nodes=(),
        )
    led = state.leader in alive
    return MetadataResponsePartition(
        error_code=ErrorCode.none if led else ErrorCode.leader_not_available,
        partition_index=cast("i32", index),
        leader_id=cast("BrokerId", state.leader) if led else _NO_LEADER,
        leader_epoch=cast("i32", state.leader_epoch),
        replica_nodes=cast("tuple[BrokerId, ...]", state.replicas),
        isr_nodes=cast("tuple[BrokerId, ...]", state.in_sync),
        offline_replicas=() if alive.issuperset(state.replicas) else _offline_replicas(state, alive),
    )


def _offline_replicas(state: PartitionState, alive: frozenset[int]) -> tuple[BrokerId, ...]:
    return tuple(BrokerId(node) for node in state.replicas if node not in alive)


def _names_ids(request: Any) -> bool:
    return any(topic.name is None or getattr(topic, "topic_id", None) is not None for topic in request.topics or ())


def _error_topic(
    code: ErrorCode, requested: MetadataRequestTopic, operations: i32 = NOT_REQUESTED
) -> MetadataResponseTopic:
    return MetadataResponseTopic(
        error_code=code,
        name=requested.name,
        topic_id=requested.topic_id,
        is_internal=requested.name in INTERNAL_TOPICS,
        partitions=(),
        topic_authorized_operations=operations,
    )
