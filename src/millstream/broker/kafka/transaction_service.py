"""The transactions of a node: the coordinator, its markers, and the gate."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from random import SystemRandom
from typing import Protocol

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import WirePeers
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.transactions.coordinator import ProducerIds, TransactionCoordinator
from millstream.broker.transactions.gate import CoordinatorGate
from millstream.broker.transactions.marker_sender import MarkerRoutes, MarkerSender
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import CoordinatorUnavailable, NotLeader
from millstream.core.metric import Metric, Sample, counter, gauge
from millstream.core.topic import CONSUMER_OFFSETS, TopicPartition
from millstream.protocol.records.control import ANY_COORDINATOR, Marker


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
                # The caller looks for the leader again, as for any other partition.
                raise NotLeader(str(error)) from None
            return
        led = self._topics.partition(partition.topic, partition.partition)
        acknowledged = led.acknowledged(led.write_marker(marker))
        if acknowledged is not None:
            await acknowledged


class TransactionService:
    """The transactions of one node."""

    def __init__(
        self,
        topics: Topics,
        groups: GroupCoordinator,
        membership: Membership,
        producer_ids: ProducerIds,
        *,
        config: Config,
        clock: Clock,
    ) -> None:
        me = membership.me.node_id
        self.coordinator = TransactionCoordinator(topics, config, clock, producer_ids)
        self.coordinator.mirror_of = lambda name: "" if (topic := topics.get(name)) is None else topic.mirror
        self.markers = PartitionMarkers(topics, groups, self.coordinator.latest_epoch)
        self._peers = WirePeers(membership.node, me=me)
        self._routes = MarkerRoutes(topics, self.markers, self._peers, me=me)
        self.sender = MarkerSender(
            lambda: self.coordinator.shards,
            self._routes,
            SystemRandom(),
            latest_epoch=self.coordinator.latest_epoch,
        )
        self.coordinator.on_transaction_ending(self.sender.wake)
        self.gate = CoordinatorGate(self.coordinator, self._peers, me=me)

    def metrics(self) -> Iterable[Metric]:
        """Yield transactional ids by state, and the progress of markers."""
        states = self.coordinator.status().by_state
        yield Metric(
            "millstream_transactions",
            "gauge",
            "Transactional ids that this node coordinates, by state.",
            tuple(Sample(number, (("state", state),)) for state, number in sorted(states.items()) if number),
        )
        yield gauge(
            "millstream_transactions_ending", "Transactions whose markers are being written.", self.sender.in_flight
        )
        yield counter("millstream_marker_retries_total", "Retries of writing markers.", self.sender.retries)

    async def start(self) -> None:
        """Start loading transactions from the log, and writing markers that a crash left out."""
        await self.coordinator.start()

    async def close(self) -> None:
        """Stop writing markers, which continues after the next start, and wait until appends are acknowledged."""
        await self.sender.close()
        await self._routes.close()
        await self.coordinator.close()
        await self._peers.close()
