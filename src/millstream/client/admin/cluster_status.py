"""The state of a cluster: metadata that every Kafka broker has, and Millstream's own node status."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from millstream.client.admin.node_status import node_status

if TYPE_CHECKING:
    from millstream.core.ids import NodeId
    from millstream.protocol.wire.client import Client
    from millstream.protocol.wire.cluster_metadata import ClusterMetadata

UNREACHABLE = "unreachable"
"""In the cluster, but it does not answer this command."""

AWAY = "away"
"""It has replicas, but is not part of the cluster now."""

_REPLICA_FIELDS = ("topic", "partition", "replica", "records")


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeView:
    """One node. `state` and `version` are its own report; `reasons` say why it should get no traffic."""

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
class PartitionView:
    """A partition without a leader, or with a replica out of sync."""

    topic: str
    partition: int
    leader: int | None
    replicas: tuple[int, ...]
    in_sync: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaView:
    """A replica that lacks records, according to its leader; it is in sync if it lacks only a few."""

    topic: str
    partition: int
    replica: int
    records: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterStatus:
    """The cluster at one moment."""

    cluster_id: str
    controller: int | None
    nodes: list[NodeView]
    partitions: int
    troubled: list[PartitionView]
    behind: list[ReplicaView]
    warnings: list[str]
    """Problems of the cluster as a whole, such as an unreachable store."""

    @property
    def silent(self) -> tuple[int, ...]:
        """Return the nodes that do not answer."""
        return tuple(node.id for node in self.nodes if node.state in (AWAY, UNREACHABLE))

    def described(self) -> dict[str, Any]:
        """Return a JSON document."""
        return {
            "cluster": self.cluster_id,
            "controller": self.controller,
            "nodes": [asdict(node) for node in self.nodes],
            "partitions": self.partitions,
            "without_leader": [asdict(one) for one in self.troubled if one.leader is None],
            "under_replicated": [asdict(one) for one in self.troubled if len(one.in_sync) < len(one.replicas)],
            "behind": [asdict(one) for one in self.behind],
            "warnings": self.warnings,
        }


async def cluster_status(client: Client) -> ClusterStatus:
    """Ask for the cluster's metadata, then each node for its status."""
    metadata = await client.metadata()
    answers = await asyncio.gather(*(node_status(client, node) for node in metadata.nodes))
    by_node = dict(zip(metadata.nodes, answers, strict=True))
    behind = [one for answer in answers if answer is not None for one in _behind(answer)]
    leads, replicas = _counted(metadata)
    lacking: Counter[int] = Counter()
    for one in behind:
        lacking[one.replica] += one.records
    return ClusterStatus(
        cluster_id=metadata.cluster_id,
        controller=metadata.controller_id if metadata.controller_id >= 0 else None,
        nodes=[
            _node(node, metadata, by_node.get(node), leads=leads[node], replicas=replicas[node], behind=lacking[node])
            # A node with replicas belongs to the cluster even while it is away.
            for node in sorted({*metadata.nodes, *replicas})
        ],
        partitions=sum(len(topic.partitions) for topic in metadata.topics.values()),
        troubled=_troubled(metadata),
        behind=behind,
        warnings=sorted({text for answer in answers if answer is not None for text in answer.get("warnings", [])}),
    )


def _counted(metadata: ClusterMetadata) -> tuple[Counter[NodeId], Counter[NodeId]]:
    """Count the partitions that each node leads, and those that it replicates."""
    every = [one for topic in metadata.topics.values() for one in topic.partitions.values()]
    return Counter(one.leader_id for one in every), Counter(node for one in every for node in one.replicas)


def _node(
    node_id: NodeId,
    metadata: ClusterMetadata,
    answer: dict[str, Any] | None,
    *,
    leads: int,
    replicas: int,
    behind: int,
) -> NodeView:
    node = metadata.nodes.get(node_id)
    silent = AWAY if node is None else UNREACHABLE
    return NodeView(
        id=node_id,
        address=None if node is None else f"{node.host}:{node.port}",
        rack=None if node is None else node.rack,
        state=silent if answer is None else answer["state"],
        version=None if answer is None else answer["version"],
        leads=leads,
        replicas=replicas,
        behind=behind,
        reasons=() if answer is None else tuple(answer["reasons"]),
    )


def _behind(answer: dict[str, Any]) -> list[ReplicaView]:
    """Return what replicas lack of the partitions that a node leads."""
    return [ReplicaView(**{field: one[field] for field in _REPLICA_FIELDS}) for one in answer.get("behind", ())]


def _troubled(metadata: ClusterMetadata) -> list[PartitionView]:
    views = (
        PartitionView(
            topic=name,
            partition=index,
            leader=partition.leader_id if partition.leader_id >= 0 else None,
            replicas=partition.replicas,
            in_sync=partition.in_sync,
        )
        for name, topic in sorted(metadata.topics.items())
        for index, partition in sorted(topic.partitions.items())
    )
    return [one for one in views if one.leader is None or len(one.in_sync) < len(one.replicas)]
