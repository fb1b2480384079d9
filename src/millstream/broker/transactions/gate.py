"""Asks the coordinator of a transaction whether a partition belongs to it, on this node or on another one.

The answers are those that a producer can handle, as in Kafka: if the coordinator cannot be reached, the producer gets
NOT_ENOUGH_REPLICAS, which every client retries, and a fenced producer gets INVALID_PRODUCER_EPOCH.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from kio.schema.add_partitions_to_txn.v5.request import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from kio.schema.types import ProducerId as WireProducerId
from kio.schema.types import TopicName, TransactionalId
from kio.static.primitive import i16, i32

from millstream.broker.coordination.peers import Peers
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION, ProducerRef
from millstream.core.errors import (
    BrokerUnreachable,
    CoordinatorUnavailable,
    FencedProducer,
    MillstreamError,
    NotEnoughReplicas,
    ProducerFenced,
    RequestTimedOut,
)
from millstream.core.ids import NodeId, PartitionIndex, ProducerId
from millstream.core.topic import TopicPartition, by_topic
from millstream.protocol.wire.error_codes import error_from_code

Answers = Mapping[TopicPartition, MillstreamError | None]

_UNREACHABLE = (CoordinatorUnavailable, BrokerUnreachable, RequestTimedOut)


class CoordinatorGate:
    """Asks coordinators on behalf of partitions."""

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
    ) -> Answers:
        """Return for each partition None if the transaction is open and contains it, else why nothing may be written to
        it.
        """
        who = ProducerRef(transactional_id, ProducerId(producer_id), producer_epoch)
        try:
            answers = await self._ask(who, partitions, add=add)
        except MillstreamError as error:
            answers = dict.fromkeys(partitions, error)
        return {partition: _client_error(error) for partition, error in answers.items()}

    async def _ask(self, who: ProducerRef, partitions: Sequence[TopicPartition], *, add: bool) -> Answers:
        leader = self._coordinator.leader_of(who.transactional_id)
        if leader is None:
            raise CoordinatorUnavailable(f"the coordinator of {who.transactional_id!r} is not available")
        if leader != self._me:
            answer = await self._peers.send(leader, _request(who, partitions, add=add))
            return _answers(answer)
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


def _answers(response: Any) -> Answers:
    if response.error_code:
        raise error_from_code(response.error_code, None, about="the coordinator of a transaction")
    answers: dict[TopicPartition, MillstreamError | None] = {}
    for transaction in response.results_by_transaction:
        for topic in transaction.topic_results:
            for one in topic.results_by_partition:
                partition = TopicPartition(topic.name, PartitionIndex(one.partition_index))
                code = one.partition_error_code
                answers[partition] = error_from_code(code, None, about=f"{partition}") if code else None
    return answers
