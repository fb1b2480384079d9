"""The state of a cluster: metadata that every Kafka broker has, and the status of nodes by a private request."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from millstream.core.errors import MillstreamError, NotAuthorized, NotFound, RequestTimedOut
from millstream.core.tasks import gather_or_cancel
from millstream.core.topic import TRANSACTION_STATE
from millstream.protocol.private.message import NODE_STATUS_KEY, request_document

if TYPE_CHECKING:
    from millstream.core.ids import NodeId
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import ClusterMetadata, TopicMetadata


RESPONSE_S = 5.0
"""A node that has not responded by then hangs, and is skipped."""
T = TypeVar("T")


class DamagedOffsets(NamedTuple):
    """Offsets of a partition that the disk lost; others are intact."""

    topic: str
    partition: int
    start: int
    end: int
    is_repaired: bool = False
    """Whether they are being fetched from other replicas."""

    def __str__(self) -> str:
        return f"{self.topic}-{self.partition}: the disk lost the offsets {self.start} to {self.end - 1}"

    @property
    def advice(self) -> str:
        if self.is_repaired:
            return (
                "nothing while the replicas run: the offsets are fetched from another replica; "
                "if this persists, see the log of this node"
            )
        if self.topic == TRANSACTION_STATE:
            # No group reads this topic; what it lost are decisions about transactions.
            return (
                "the other offsets are intact and in use; transactions whose state was lost may never end by "
                "themselves: find them with millstream transaction list --hanging, and end them with "
                "millstream transaction abort"
            )
        return (
            "the other offsets are intact and served; restore these from a copy, if you have one, and move a group "
            f"past them with: millstream group reset GROUP --topic {self.topic} --partition {self.partition} "
            f"--to {self.end}"
        )


async def ask_all_nodes(client: Client, ask: Callable[[NodeId], Awaitable[T]]) -> tuple[list[T], list[MillstreamError]]:
    """Ask every node at once; return the responses, and an error for each node without one.

    Only `NotFound` is raised: it comes from the catalog, which is the same for all nodes.
    """

    async def ask_node(node: NodeId) -> T | MillstreamError:
        try:
            async with asyncio.timeout(RESPONSE_S):
                return await ask(node)
        except TimeoutError:
            return RequestTimedOut(f"node {node} did not respond within {RESPONSE_S:g} s")
        except NotFound:
            raise
        except MillstreamError as error:
            return error

    responses = await gather_or_cancel(map(ask_node, sorted((await client.metadata(())).nodes)))
    failed = [response for response in responses if isinstance(response, MillstreamError)]
    return [response for response in responses if not isinstance(response, MillstreamError)], failed


async def node_status(client: Client, node: NodeId | None = None) -> dict[str, Any] | None:
    """Return a node's status; None if it does not respond to this request, like brokers other than Millstream.

    Raise `NotAuthorized` if this client may not ask.
    """
    try:
        return await request_document(client, node, NODE_STATUS_KEY)
    except NotAuthorized:
        raise
    except MillstreamError:
        return None


async def _find_status(client: Client, node: NodeId | None = None) -> dict[str, Any] | None:
    try:
        return await node_status(client, node)
    except NotAuthorized:
        return None


def damage_in(status: dict[str, Any]) -> list[DamagedOffsets]:
    return [
        DamagedOffsets(
            damaged_range["topic"],
            damaged_range["partition"],
            damaged_range["start"],
            damaged_range["end"],
            damaged_range["repair"],
        )
        for damaged_range in status["damage"]
    ]


async def find_damage(client: Client, topic: TopicMetadata, partitions: Iterable[int]) -> list[DamagedOffsets] | None:
    """Return the damage of some partitions on their leaders; None if a leader does not report it."""
    selected = set(partitions)
    leaders = {
        partition.leader_id
        for partition in topic.partitions.values()
        if partition.partition in selected and partition.leader_id >= 0
    }
    lost: list[DamagedOffsets] = []
    for leader in sorted(leaders):
        status = await _find_status(client, leader)
        if status is None or "damage" not in status:
            return None
        lost += [
            damaged_range
            for damaged_range in damage_in(status)
            if damaged_range.topic == topic.name and damaged_range.partition in selected
        ]
    return sorted(lost)


async def find_lost(client: Client, topic: str, partition: int, offset: int) -> DamagedOffsets | None:
    """Return the damage at an offset that readers skip; None if there is none, or a replica may restore it."""
    from millstream.client.admin.topics import find_topic

    for damaged_range in await find_damage(client, await find_topic(client, topic), [partition]) or ():
        if damaged_range.start <= offset < damaged_range.end and not damaged_range.is_repaired:
            return damaged_range
    return None


async def timeout_with_reasons(client: Client, attempted: str) -> RequestTimedOut:
    """Build an error that says what could not be done, with the reasons that the node reports, if any."""
    status = await _find_status(client)
    reasons = [] if status is None else [*status.get("reasons", ()), *status.get("warnings", ())]
    text = ": ".join([attempted, *(["; ".join(reasons)] if reasons else [])])
    return RequestTimedOut(f"{text}; try again, and check the cluster with millstream cluster status")


UNREACHABLE = "unreachable"
"""In the cluster, but it does not respond to this command."""

AWAY = "away"
"""It has replicas, but is not part of the cluster now."""

_REPLICA_FIELDS = ("topic", "partition", "replica", "records")


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterNode:
    """A node. `state` and `version` are its own report; `reasons` say why it should get no traffic."""

    id: int
    address: str | None
    rack: str | None
    state: str
    version: str | None
    leads: int
    replicas: int
    behind: int
    """Records that its replicas lack, according to the leaders."""
    reasons: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class UnhealthyPartition:
    """A partition without a leader, or with a replica out of sync."""

    topic: str
    partition: int
    leader: int | None
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaBehind:
    """A replica that lacks records, according to its leader; it is in sync if it lacks only a few."""

    topic: str
    partition: int
    replica: int
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    cluster_id: str
    controller: int | None
    nodes: list[ClusterNode]
    partitions: int
    troubled: list[UnhealthyPartition]
    behind: list[ReplicaBehind]
    warnings: list[str]
    """Problems of the cluster as a whole, such as an unreachable store."""

    @property
    def silent(self) -> tuple[int, ...]:
        return tuple(node.id for node in self.nodes if node.state in (AWAY, UNREACHABLE))

    def described(self) -> dict[str, Any]:
        return {
            "cluster": self.cluster_id,
            "controller": self.controller,
            "nodes": [asdict(node) for node in self.nodes],
            "partitions": self.partitions,
            "without_leader": [asdict(partition) for partition in self.troubled if partition.leader is None],
            "under_replicated": [
                asdict(partition) for partition in self.troubled if len(partition.in_sync) < len(partition.replicas)
            ],
            "behind": [asdict(partition) for partition in self.behind],
            "warnings": self.warnings,
        }


async def cluster_status(client: Client) -> ClusterStatus:
    """Ask for the cluster's metadata, then each node for its status."""
    metadata = await client.metadata()
    responses = await asyncio.gather(*(node_status(client, node) for node in metadata.nodes))
    by_node = dict(zip(metadata.nodes, responses, strict=True))
    behind = [partition for response in responses if response is not None for partition in _behind(response)]
    leads, replicas = _counted(metadata)
    lacking: Counter[int] = Counter()
    for replica_lag in behind:
        lacking[replica_lag.replica] += replica_lag.records
    return ClusterStatus(
        cluster_id=metadata.cluster_id,
        controller=metadata.controller_id if metadata.controller_id >= 0 else None,
        nodes=[
            _node(node, metadata, by_node.get(node), leads=leads[node], replicas=replicas[node], behind=lacking[node])
            # A node with replicas belongs to the cluster even while it is away.
            for node in sorted({*metadata.nodes, *replicas})
        ],
        partitions=sum(len(topic.partitions) for topic in metadata.topics.values()),
        troubled=_unhealthy_partitions(metadata),
        behind=behind,
        warnings=sorted(
            {text for response in responses if response is not None for text in response.get("warnings", [])}
        ),
    )


def _counted(metadata: ClusterMetadata) -> tuple[Counter[NodeId], Counter[NodeId]]:
    """Count the partitions that each node leads, and those that it replicates."""
    every = [partition for topic in metadata.topics.values() for partition in topic.partitions.values()]
    return Counter(partition.leader_id for partition in every), Counter(
        node for partition in every for node in partition.replicas
    )


def _node(
    node_id: NodeId,
    metadata: ClusterMetadata,
    response: dict[str, Any] | None,
    *,
    leads: int,
    replicas: int,
    behind: int,
) -> ClusterNode:
    node = metadata.nodes.get(node_id)
    silent = AWAY if node is None else UNREACHABLE
    return ClusterNode(
        id=node_id,
        address=None if node is None else f"{node.host}:{node.port}",
        rack=None if node is None else node.rack,
        state=silent if response is None else response["state"],
        version=None if response is None else response["version"],
        leads=leads,
        replicas=replicas,
        behind=behind,
        reasons=() if response is None else tuple(response["reasons"]),
    )


def _behind(response: dict[str, Any]) -> list[ReplicaBehind]:
    """Return the replicas that lag behind a node, and by how much."""
    return [
        ReplicaBehind(**{field: partition[field] for field in _REPLICA_FIELDS})
        for partition in response.get("behind", ())
    ]


def _unhealthy_partitions(metadata: ClusterMetadata) -> list[UnhealthyPartition]:
    views = (
        UnhealthyPartition(
            topic=name,
            partition=index,
            leader=partition.leader_id if partition.leader_id >= 0 else None,
            replicas=partition.replicas,
            in_sync=partition.in_sync,
        )
        for name, topic in sorted(metadata.topics.items())
        for index, partition in sorted(topic.partitions.items())
    )
    return [view for view in views if view.leader is None or len(view.in_sync) < len(view.replicas)]
