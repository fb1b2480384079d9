"""A client's view of the cluster: its nodes, and the leader of each partition."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from millstream.core.ids import Epoch, NodeId, PartitionIndex


@dataclass(frozen=True, slots=True, kw_only=True)
class PartitionMetadata:
    """The leader and the replicas of one partition."""

    partition: PartitionIndex
    leader_id: NodeId
    leader_epoch: Epoch
    replicas: tuple[NodeId, ...]
    in_sync: tuple[NodeId, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicMetadata:
    """A topic and its partitions, by number."""

    name: str
    topic_id: UUID
    is_internal: bool
    partitions: Mapping[PartitionIndex, PartitionMetadata]

    @property
    def replication(self) -> int:
        return max((len(partition.replicas) for partition in self.partitions.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeMetadata:
    node_id: NodeId
    host: str
    port: int
    rack: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterMetadata:
    """The cluster at one moment. `errors` holds the error code and text of each topic that could not be described."""

    cluster_id: str
    controller_id: NodeId
    nodes: Mapping[NodeId, NodeMetadata]
    topics: Mapping[str, TopicMetadata]
    errors: Mapping[str, int]


def from_response(response: Any) -> ClusterMetadata:
    """Read a Metadata response of the newest version."""
    nodes = {
        NodeId(broker.node_id): NodeMetadata(
            node_id=NodeId(broker.node_id), host=broker.host, port=broker.port, rack=broker.rack
        )
        for broker in response.brokers
    }
    return ClusterMetadata(
        cluster_id=response.cluster_id or "",
        controller_id=NodeId(response.controller_id),
        nodes=nodes,
        topics={topic.name: _topic(topic) for topic in response.topics if not topic.error_code},
        errors={topic.name or "": int(topic.error_code) for topic in response.topics if topic.error_code},
    )


def _topic(topic: Any) -> TopicMetadata:
    return TopicMetadata(
        name=topic.name,
        topic_id=topic.topic_id or UUID(int=0),
        is_internal=topic.is_internal,
        partitions={PartitionIndex(partition.partition_index): _partition(partition) for partition in topic.partitions},
    )


def _partition(partition: Any) -> PartitionMetadata:
    return PartitionMetadata(
        partition=PartitionIndex(partition.partition_index),
        leader_id=NodeId(partition.leader_id),
        leader_epoch=Epoch(partition.leader_epoch),
        replicas=tuple(map(NodeId, partition.replica_nodes)),
        in_sync=tuple(map(NodeId, partition.isr_nodes)),
    )
