"""The transactions of a node: the coordinator, its markers, and the gate that verifies transactions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from random import SystemRandom
from typing import Any

from kio.schema.add_partitions_to_txn.v5.request import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from kio.schema.types import ProducerId as WireProducerId
from kio.schema.types import TopicName, TransactionalId
from kio.static.primitive import i16, i32

from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.topics import Topics
from millstream.broker.coordination.peers import Peers, WirePeers
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.transactions.coordinator import ProducerIds, TransactionCoordinator
from millstream.broker.transactions.marker_sender import MarkerRoutes, MarkerSender
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION, ProducerRef
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import (
    BrokerUnreachable,
    CoordinatorUnavailable,
    FencedProducer,
    MillstreamError,
    NotEnoughReplicas,
    NotLeader,
    ProducerFenced,
    RequestTimedOut,
)
from millstream.core.ids import NodeId, PartitionIndex, ProducerId
from millstream.core.metric import Metric, Sample, counter, gauge
from millstream.core.topic import CONSUMER_OFFSETS, TopicPartition, by_topic
from millstream.protocol.records.control import ANY_COORDINATOR, Marker
from millstream.protocol.wire.error_codes import error_from_code

PartitionErrors = Mapping[TopicPartition, MillstreamError | None]

_UNREACHABLE = (CoordinatorUnavailable, BrokerUnreachable, RequestTimedOut)


class CoordinatorGate:
    """Asks the coordinator of a transaction, on any node, whether a partition belongs to it.

    The responses are those that a producer can handle, as in Kafka: if the coordinator cannot be reached, the producer
    gets NOT_ENOUGH_REPLICAS, which every client retries, and a fenced producer gets INVALID_PRODUCER_EPOCH.
    """

    def __init__(self, coordinator: TransactionCoordinator, peers: Peers, *, me: NodeId) -> None:
        self._coordinator = coordinator
        self._peers = peers
        self._me = me

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        *,
        add: bool,
    ) -> PartitionErrors:
        """Return for each partition None if the transaction is open and contains it, else why nothing may be written to
        it.
        """
        who = ProducerRef(transactional_id, ProducerId(producer_id), producer_epoch)
        try:
            errors = await self._send_to_coordinator(who, partitions, add=add)
        except MillstreamError as error:
            errors = dict.fromkeys(partitions, error)
        return {partition: _client_error(error) for partition, error in errors.items()}

    async def _send_to_coordinator(
        self, who: ProducerRef, partitions: Sequence[TopicPartition], *, add: bool
    ) -> PartitionErrors:
        leader = self._coordinator.leader_of(who.transactional_id)
        if leader is None:
            raise CoordinatorUnavailable(f"the coordinator of {who.transactional_id!r} is not available")
        if leader != self._me:
            response = await self._peers.send(leader, _request(who, partitions, add=add))
            return _partition_errors(response)
        if not add:
            return await self._coordinator.verify(who, partitions)
        await self._coordinator.add_partitions(who, partitions, version=EPOCH_PER_TRANSACTION)
        return dict.fromkeys(partitions)


def _client_error(error: MillstreamError | None) -> MillstreamError | None:
    if isinstance(error, _UNREACHABLE):
        return NotEnoughReplicas(f"the coordinator of the transaction could not confirm it: {error}")
    if isinstance(error, ProducerFenced):
        return FencedProducer(str(error))
    return error


def _request(who: ProducerRef, partitions: Sequence[TopicPartition], *, add: bool) -> AddPartitionsToTxnRequest:
    transaction = AddPartitionsToTxnTransaction(
        transactional_id=TransactionalId(who.transactional_id),
        producer_id=WireProducerId(who.producer_id),
        producer_epoch=i16(who.epoch),
        verify_only=not add,
        topics=tuple(
            AddPartitionsToTxnTopic(name=TopicName(name), partitions=tuple(map(i32, indexes)))
            for name, indexes in by_topic(partitions).items()
        ),
    )
    return AddPartitionsToTxnRequest(transactions=(transaction,))


def _partition_errors(response: Any) -> PartitionErrors:
    if response.error_code:
        raise error_from_code(response.error_code, None, about="the coordinator of a transaction")
    errors: dict[TopicPartition, MillstreamError | None] = {}
    for transaction in response.results_by_transaction:
        for topic in transaction.topic_results:
            for result in topic.results_by_partition:
                partition = TopicPartition(topic.name, PartitionIndex(result.partition_index))
                code = result.partition_error_code
                errors[partition] = error_from_code(code, None, about=f"{partition}") if code else None
    return errors


class PartitionMarkers:
    def __init__(
        self,
        topics: Topics,
        groups: GroupCoordinator,
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
        states = self.coordinator.counts()
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
