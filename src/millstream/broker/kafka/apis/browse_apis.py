"""Private requests of the console: pages of topics, the rights of a client, reads to audit, and summaries of nodes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi
from millstream.broker.kafka.apis.node_status import NodeStatus
from millstream.broker.security.audit import Activity, Change
from millstream.broker.security.changes import Users
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest
from millstream.core.ids import NodeId
from millstream.core.topic import Topic
from millstream.protocol.private.browse_messages import (
    BY_BYTES,
    BY_NAME,
    BY_PARTITIONS,
    BY_RECORDS,
    ORDERS,
    PAGE_MAX,
    RIGHTS_MAX,
    AuditReadingRequest,
    ListedTopic,
    ListRightsRequest,
    ListRightsResponse,
    ListTopicsRequest,
    ListTopicsResponse,
    NodeSummaryRequest,
    NodeSummaryResponse,
)
from millstream.protocol.private.message import Response

_FILTER_CHARACTERS_MAX: Final = 1000
_TURN: Final = 250
"""The number of topics that are processed before other tasks run."""


class TopicList(PrivateApi[ListTopicsRequest, ListTopicsResponse]):
    """Lists a page of topics.

    `total` counts the topics on all pages. Numbers of records and bytes are those of the partitions that this node
    leads, so a client that needs them for the cluster asks every node; `records_in` and the two after it count from the
    start of the node.
    """

    changes = None

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def needs(self, request: ListTopicsRequest) -> Sequence[Need]:
        """Require no right: topics that the client may not describe are omitted."""
        return []

    async def handle(self, request: ListTopicsRequest) -> ListTopicsResponse:
        return await self._list(request, lambda _name: True)

    async def handle_from(self, client: ClientInfo, request: ListTopicsRequest) -> ListTopicsResponse:
        rights = client.rights
        if rights is None:
            return await self.handle(request)
        return await self._list(request, lambda name: rights.topic(Operation.DESCRIBE, name))

    async def _list(self, request: ListTopicsRequest, may_see: Callable[[str], bool]) -> ListTopicsResponse:
        if request.order not in ORDERS:
            raise InvalidRequest(f"there is no order {request.order!r}; topics are listed by {', '.join(ORDERS)}")
        if not 0 <= request.limit <= PAGE_MAX or request.offset < 0:
            raise InvalidRequest(f"a page has 0 to {PAGE_MAX} topics, and begins at 0 or later")
        topics: list[Topic] = []
        for at, topic in enumerate(self._candidates(request)):
            if at % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            if may_see(topic.name):
                topics.append(topic)
        page = slice(request.offset, request.offset + request.limit)
        if request.order in (BY_NAME, BY_PARTITIONS):
            if request.order == BY_PARTITIONS:
                topics.sort(key=lambda topic: topic.partitions, reverse=request.descending)
            elif request.descending:
                topics.reverse()
            listed = [await self._describe_topic(at, topic, request) for at, topic in enumerate(topics[page])]
        else:
            every = [await self._describe_topic(at, topic, request) for at, topic in enumerate(topics)]
            every.sort(key=_ORDERED[request.order], reverse=request.descending)
            listed = every[page]
        return ListTopicsResponse(topics=listed, total=len(topics))

    def _candidates(self, request: ListTopicsRequest) -> Iterable[Topic]:
        if request.names is not None:
            named = (self._topics.get(name) for name in request.names[:PAGE_MAX])
            return [topic for topic in named if topic is not None]
        text = request.search.strip().lower()
        return [
            topic
            for topic in self._topics.all()
            if (request.internal or not topic.is_internal) and text in topic.name.lower()
        ]

    async def _describe_topic(self, at: int, topic: Topic, request: ListTopicsRequest) -> ListedTopic:
        if at % _TURN == _TURN - 1:
            await asyncio.sleep(0)
        sizes: dict[int, int] = {}
        records = size = records_in = bytes_in = bytes_out = 0
        # It may have been changed or deleted while other tasks ran.
        for partition in self._topics.partitions_of(topic) if self._topics.get(topic.name) is topic else ():
            if partition.is_leader:
                records += max(0, partition.high_watermark - partition.log.start_offset)
                size += partition.size_bytes
                records_in += partition.records_in
                bytes_in += partition.bytes_in
                bytes_out += partition.bytes_out
                if request.partitions:
                    sizes[partition.index] = partition.size_bytes
        return ListedTopic(
            topic.name,
            str(topic.topic_id),
            topic.partitions,
            topic.replication,
            topic.is_internal,
            records,
            size,
            records_in,
            bytes_in,
            bytes_out,
            sizes,
        )


_ORDERED: Final[dict[str, Callable[[ListedTopic], Any]]] = {
    BY_RECORDS: lambda topic: topic.records,
    BY_BYTES: lambda topic: topic.bytes,
}


class _Partitions(NamedTuple):
    """Partitions of the whole cluster."""

    known: int
    without_leader: int
    lacking: int
    """The number of partitions with replicas that are not in sync."""


_NEVER: Final = (-1, -1, frozenset[NodeId]())


class NodeSummary(PrivateApi[NodeSummaryRequest, NodeSummaryResponse]):
    """Reports the state of a node in a few numbers.

    Unlike NodeStatus, the response does not grow with the number of partitions, and they are counted in turns with
    other work. `without_leader` and `under_replicated` count the partitions of the whole cluster, as this node knows
    them.
    """

    changes = None
    cluster_operation = Operation.DESCRIBE

    def __init__(self, topics: Topics, membership: Membership, status: NodeStatus, *, folder: str) -> None:
        self._topics = topics
        self._membership = membership
        self._status = status
        self._folder = folder
        self._partition_counts = (_NEVER, _Partitions(0, 0, 0))

    async def handle(self, request: NodeSummaryRequest) -> NodeSummaryResponse:
        records_in = bytes_in = bytes_out = stored = leads = replicas = 0
        for at, partition in enumerate(list(self._topics.hosted())):
            if at % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            replicas += 1
            stored += partition.size_bytes
            if partition.is_leader:
                leads += 1
                records_in += partition.records_in
                bytes_in += partition.bytes_in
                bytes_out += partition.bytes_out
        counted = await self._partitions()
        disk_bytes = disk_free_bytes = 0
        with suppress(OSError):
            # A disk that hangs must not block the loop.
            disk_bytes, _, disk_free_bytes = await asyncio.to_thread(shutil.disk_usage, self._folder)
        health = self._status.health()
        return NodeSummaryResponse(
            node_id=health["node_id"],
            version=health["version"],
            state=self._status.state,
            started_ms=self._status.started_ms,
            reasons=health["reasons"],
            warnings=health["warnings"],
            records_in=records_in,
            bytes_in=bytes_in,
            bytes_out=bytes_out,
            stored_bytes=stored,
            disk_bytes=disk_bytes,
            disk_free_bytes=disk_free_bytes,
            leads=leads,
            replicas=replicas,
            partitions=counted.known,
            without_leader=counted.without_leader,
            under_replicated=counted.lacking,
        )

    async def _partitions(self) -> _Partitions:
        """Count the partitions of the cluster by their states, unless nothing has changed since that was done."""
        alive = frozenset(node.node_id for node in self._membership.nodes())
        version = (self._topics.version, self._topics.states_revision, alive)
        if self._partition_counts[0] == version:
            return self._partition_counts[1]
        known = without_leader = lacking = 0
        for at, topic in enumerate(self._topics.all()):
            if at % _TURN == _TURN - 1:
                await asyncio.sleep(0)
            if self._topics.get(topic.name) is not topic:
                continue
            for state in self._topics.states_of(topic):
                known += 1
                if state is None or state.leader not in alive:
                    without_leader += 1
                elif len(state.in_sync) < len(state.replicas):
                    lacking += 1
        partitions = _Partitions(known, without_leader, lacking)
        # Stored with the version from before the count: later changes are counted by the next request.
        self._partition_counts = (version, partitions)
        return partitions


class RightsList(PrivateApi[ListRightsRequest, ListRightsResponse]):
    """Returns the rights of the client itself.

    `principal` is empty where clients are not authorized, and everything is allowed.
    """

    changes = None

    async def needs(self, request: ListRightsRequest) -> Sequence[Need]:
        """Require no right: everyone may know their own rights."""
        return []

    async def handle(self, request: ListRightsRequest) -> ListRightsResponse:
        return ListRightsResponse(allowed=[True] * len(_parse_needs(request)))

    async def handle_from(self, client: ClientInfo, request: ListRightsRequest) -> ListRightsResponse:
        """Look up each right; this is a query, so denials are not audited."""
        rights = client.rights
        if rights is None:
            return await self.handle(request)
        allowed = [rights.allows(operation, kind, name) for operation, kind, name in _parse_needs(request)]
        return ListRightsResponse(allowed=allowed, principal=rights.principal)


class AuditReading(PrivateApi[AuditReadingRequest, Response]):
    """Records in the audit log that a user views messages; the console sends it before it shows them."""

    async def needs(self, request: AuditReadingRequest) -> Sequence[Need]:
        return [(Operation.READ, ResourceType.TOPIC, request.topic)]

    async def handle(self, request: AuditReadingRequest) -> Response:
        """Do nothing: `changes` records the request."""
        return Response()

    @staticmethod
    def changes(request: AuditReadingRequest, response: Response, _users: Users) -> Iterator[Change]:
        if response.error == 0:
            data: dict[str, Any] = {"how": request.how}
            if request.offset >= 0:
                data |= {"partition": request.partition, "offset": request.offset}
            if request.filter:
                data["filter"] = request.filter[:_FILTER_CHARACTERS_MAX]
            yield Change(activity=Activity.READ, kind="messages", name=request.topic, data=data)


def _parse_needs(request: ListRightsRequest) -> list[Need]:
    if len(request.rights) > RIGHTS_MAX:
        raise InvalidRequest(f"a request asks for {RIGHTS_MAX} rights at most")
    try:
        return [(Operation(operation), ResourceType(kind), name) for operation, kind, name in request.rights]
    except ValueError as error:
        raise InvalidRequest(str(error)) from None
