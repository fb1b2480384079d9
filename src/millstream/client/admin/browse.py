"""Pages of topics, the totals of nodes and the client's rights. Only Millstream brokers respond to these requests."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from millstream.client.admin.cluster_status import UNREACHABLE
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import BrokerUnreachable, RequestTimedOut
from millstream.core.ids import NodeId
from millstream.core.tasks import gather_or_cancel
from millstream.protocol.private.browse_messages import (
    BY_NAME,
    BY_PARTITIONS,
    PAGE_MAX,
    RIGHTS_MAX,
    AuditReadingRequest,
    ListedTopic,
    ListRightsRequest,
    ListTopicsRequest,
    ListTopicsResponse,
    NodeSummaryRequest,
    NodeSummaryResponse,
)
from millstream.protocol.private.message import request_private
from millstream.protocol.wire.client import Client

Right = tuple[Operation, ResourceType, str]


async def topics_page(
    client: Client,
    *,
    search: str = "",
    names: list[str] | None = None,
    internal: bool = False,
    order: str = BY_NAME,
    descending: bool = False,
    offset: int = 0,
    limit: int = 100,
    partitions: bool = False,
) -> ListTopicsResponse:
    """Return a page of the topics that the client may describe, with the numbers of all nodes, on request with the size
    of each partition.

    In a cluster, an order by counts of nodes needs every topic of every node, up to `PAGE_MAX`.
    """
    nodes = sorted((await client.metadata([])).nodes)
    request = ListTopicsRequest(
        search=search,
        names=names,
        internal=internal,
        order=order,
        descending=descending,
        offset=offset,
        limit=limit,
        partitions=partitions,
    )
    if len(nodes) < 2 or order in (BY_NAME, BY_PARTITIONS):
        node, first = await _first_response(client, nodes, request)
        others = ListTopicsRequest(names=[topic.name for topic in first.topics], limit=limit, partitions=partitions)
        responses = await gather_or_cancel(list_if_reachable(client, other, others) for other in nodes if other != node)
        summed = _sum([first, *responses])
        return ListTopicsResponse(topics=[summed[topic.name] for topic in first.topics], total=first.total)
    every = msgspec.structs.replace(request, order=BY_NAME, descending=False, offset=0, limit=PAGE_MAX)
    responses = await gather_or_cancel(list_if_reachable(client, node, every) for node in nodes)
    topics = sorted(_sum(responses).values(), key=lambda topic: getattr(topic, order), reverse=descending)
    return ListTopicsResponse(
        topics=topics[offset : offset + limit], total=max(response.total for response in responses)
    )


async def existing_topics(client: Client, names: Sequence[str]) -> list[str]:
    """Return which of these topics exist and may be described by the client."""
    existing: list[str] = []
    nodes = sorted((await client.metadata([])).nodes) if names else []
    for at in range(0, len(names), PAGE_MAX):
        request = ListTopicsRequest(names=list(names[at : at + PAGE_MAX]), limit=PAGE_MAX)
        _, response = await _first_response(client, nodes, request)
        existing += [topic.name for topic in response.topics]
    return existing


async def list_if_reachable(client: Client, node: NodeId, request: ListTopicsRequest) -> ListTopicsResponse:
    """Return one node's list, empty if it does not respond, so that one dead node does not hide all others."""
    try:
        return await request_private(client, node, request)
    except (BrokerUnreachable, RequestTimedOut):
        return ListTopicsResponse()


async def _first_response(
    client: Client, nodes: Sequence[NodeId], request: ListTopicsRequest
) -> tuple[NodeId | None, ListTopicsResponse]:
    """Ask one node after the other: each knows all topics."""
    for node in nodes[:-1]:
        try:
            return node, await request_private(client, node, request)
        except (BrokerUnreachable, RequestTimedOut):
            continue
    last = nodes[-1] if nodes else None
    return last, await request_private(client, last, request)


def _sum(responses: Sequence[ListTopicsResponse]) -> dict[str, ListedTopic]:
    totals: dict[str, ListedTopic] = {}
    for response in responses:
        for topic in response.topics:
            known = totals.get(topic.name)
            if known is None:
                totals[topic.name] = topic
            else:
                counted = ("records", "bytes", "records_in", "bytes_in", "bytes_out")
                sums = {name: getattr(known, name) + getattr(topic, name) for name in counted}
                sizes = known.partition_bytes | topic.partition_bytes
                totals[topic.name] = msgspec.structs.replace(known, **sums, partition_bytes=sizes)
    return totals


async def node_summaries(client: Client) -> list[NodeSummaryResponse]:
    """Return the state of every node in a few numbers; one that does not respond is unreachable."""
    nodes = sorted((await client.metadata([])).nodes)
    return list(await gather_or_cancel(_summary_of(client, node) for node in nodes))


async def _summary_of(client: Client, node: NodeId) -> NodeSummaryResponse:
    try:
        return await request_private(client, node, NodeSummaryRequest())
    except (BrokerUnreachable, RequestTimedOut):
        return NodeSummaryResponse(node_id=node, state=UNREACHABLE)


async def allowed_rights(client: Client, asked: Sequence[Right]) -> list[bool]:
    return (await own_rights(client, asked))[0]


async def own_rights(client: Client, rights: Sequence[Right]) -> tuple[list[bool], str]:
    """Return what `allowed_rights` does, and the client's principal, empty where clients are not authorized."""
    allowed: list[bool] = []
    principal = ""
    for at in range(0, len(rights), RIGHTS_MAX):
        part = [(int(operation), int(kind), name) for operation, kind, name in rights[at : at + RIGHTS_MAX]]
        response = await request_private(client, None, ListRightsRequest(rights=part))
        allowed += response.allowed
        principal = response.principal
    return allowed, principal


async def audit_reading(client: Client, request: AuditReadingRequest) -> None:
    """Record that a user is shown messages; raise if the user may not read them."""
    await request_private(client, None, request)
