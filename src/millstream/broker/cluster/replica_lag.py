"""Which replicas lack records of the partitions that this node leads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from millstream.broker.replication.partition import Partition
from millstream.core.ids import NodeId
from millstream.core.topic import TopicPartition


class ReplicaLag(NamedTuple):
    """A replica and how many records of the leader's log it lacks, according to its last fetch."""

    partition: TopicPartition
    replica: NodeId
    records: int


def lagging_replicas(hosted: Iterable[Partition]) -> Iterator[ReplicaLag]:
    """Yield every replica that lacks part of a partition that this node leads."""
    for partition in hosted:
        if partition.in_sync is None:
            continue
        end, start = partition.log.end_offset, partition.log.start_offset
        for follower in partition.in_sync.followers:
            # One that has not fetched yet may lack everything.
            lacking = end - max(follower.offset, start)
            if lacking > 0:
                yield ReplicaLag(TopicPartition(partition.topic.name, partition.index), follower.node, lacking)
