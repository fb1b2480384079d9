"""Writes transaction markers to partitions that this node leads.

A marker for `__consumer_offsets` goes through the shard of the groups there, so that offsets which the transaction has
committed become visible or vanish in the same moment; all others are written into the partition itself.

The epoch of the coordinator is held against those that this node knows of: one that nobody has yet is refused with
`UnknownLeaderEpoch`, and tried again by a coordinator of which this node has not heard yet.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol

from millstream.broker.cluster.topics import Topics
from millstream.core.errors import CoordinatorUnavailable, NotLeader
from millstream.core.marker import ANY_COORDINATOR, Marker
from millstream.core.topic import CONSUMER_OFFSETS, TopicPartition


class OffsetTransactions(Protocol):
    """The groups of this node, as far as transactions commit offsets of theirs."""

    async def end_transaction(self, index: int, marker: Marker) -> None:
        """A transaction that may have committed offsets in one partition of the offsets topic has ended."""


class PartitionMarkers:
    """Markers for this node's partitions."""

    def __init__(
        self,
        topics: Topics,
        groups: OffsetTransactions,
        latest_coordinator: Callable[[], int] = lambda: ANY_COORDINATOR,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._latest_coordinator = latest_coordinator

    async def write(self, marker: Marker, partition: TopicPartition) -> None:
        """Write one marker and wait until it is acknowledged."""
        marker = replace(marker, latest_coordinator=self._latest_coordinator())
        if partition.topic == CONSUMER_OFFSETS:
            try:
                await self._groups.end_transaction(partition.partition, marker)
            except CoordinatorUnavailable as error:
                # Whoever asks looks for the leader again, as for any other partition.
                raise NotLeader(str(error)) from None
            return
        led = self._topics.partition(partition.topic, partition.partition)
        acknowledged = led.acknowledged(led.write_marker(marker))
        if acknowledged is not None:
            await acknowledged
