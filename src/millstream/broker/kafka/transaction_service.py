"""Everything about transactions on this node, put together: the coordinator, who writes its markers, and the gate."""

from __future__ import annotations

from collections.abc import Iterable
from random import SystemRandom

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.local_markers import PartitionMarkers
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.gate import CoordinatorGate
from millstream.broker.transactions.marker_routes import MarkerRoutes
from millstream.broker.transactions.marker_sender import MarkerSender
from millstream.broker.transactions.peers import WirePeers
from millstream.broker.transactions.spare_ids import ProducerIds
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.metric import Metric, Sample, counter, gauge


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
        self.markers = PartitionMarkers(topics, groups, self.coordinator.latest_epoch)
        self._peers = WirePeers(membership.node, me=me)
        self._routes = MarkerRoutes(topics, self.markers, self._peers, me=me)
        self.sender = MarkerSender(
            lambda: self.coordinator.shards,
            self._routes,
            SystemRandom(),
            latest_epoch=self.coordinator.latest_epoch,
        )
        self.coordinator.when_ending(self.sender.wake)
        self.gate = CoordinatorGate(self.coordinator, self._peers, me=me)

    def metrics(self) -> Iterable[Metric]:
        """Transactional ids by state, and how the writing of markers goes."""
        states = self.coordinator.status().by_state
        yield Metric(
            "millstream_transactions",
            "gauge",
            "Transactional ids that this node coordinates, by state.",
            tuple(Sample(number, (("state", state),)) for state, number in sorted(states.items()) if number),
        )
        yield gauge("millstream_transactions_ending", "Transactions whose markers are written.", self.sender.under_way)
        yield counter("millstream_marker_retries_total", "Times that markers were written again.", self.sender.retries)

    async def start(self) -> None:
        """Begin to load what the log has, and to write the markers that a crash left out."""
        await self.coordinator.start()

    async def close(self) -> None:
        """Stop writing markers, which goes on after the next start, and let what was appended be acknowledged."""
        await self.sender.close()
        await self._routes.close()
        await self.coordinator.close()
        await self._peers.close()
