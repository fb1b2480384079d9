"""AddPartitionsToTxn (key 24), versions 0 to 5: adds partitions to a producer's transaction.

All or nothing: when one partition does not exist (UNKNOWN_TOPIC_OR_PARTITION), the others get OPERATION_NOT_ATTEMPTED,
as in Kafka. While the previous transaction of the id is being ended, the response waits a moment for that, and is
CONCURRENT_TRANSACTIONS if it takes longer. Internal topics cannot be added.

Version notes: up to 1 a fenced producer gets INVALID_PRODUCER_EPOCH, from 2 on PRODUCER_FENCED. Up to 3 a request is
for one producer; from 4 on brokers send requests for several, and may only verify that partitions are part of the
transaction (`verify_only`): others get TRANSACTION_ABORTABLE.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, Final, NamedTuple

from kio.schema.add_partitions_to_txn.v3 import response as single
from kio.schema.add_partitions_to_txn.v5.request import (
    AddPartitionsToTxnRequest,
    AddPartitionsToTxnTopic,
    AddPartitionsToTxnTransaction,
)
from kio.schema.add_partitions_to_txn.v5.response import (
    AddPartitionsToTxnPartitionResult,
    AddPartitionsToTxnResponse,
    AddPartitionsToTxnResult,
    AddPartitionsToTxnTopicResult,
)
from kio.schema.errors import ErrorCode

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, fenced_code, log_fenced
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION, FIRST_VERSION, ProducerRef
from millstream.core.errors import MillstreamError
from millstream.core.ids import PartitionIndex, ProducerId
from millstream.core.topic import CONSUMER_OFFSETS, TopicPartition
from millstream.protocol.messages.codec import load_response_class
from millstream.protocol.messages.shape import reshape

_FIRST_WITH_FENCED: Final = 2
_FIRST_WITH_MANY: Final = 4


class AddPartitionsCall(NamedTuple):
    version: int
    transactions: tuple[AddPartitionsToTxnTransaction, ...]


class AddPartitionsToTxn(Api[AddPartitionsCall, AddPartitionsToTxnResponse]):
    key = 24
    versions = (0, 5)
    changes = None

    def __init__(self, transactions: TransactionCoordinator, topics: Topics) -> None:
        self._transactions = transactions
        self._topics = topics

    def upgrade(self, version: int, request: Any) -> AddPartitionsCall:
        """Convert the single producer of older versions to a list."""
        if version >= _FIRST_WITH_MANY:
            newest: AddPartitionsToTxnRequest = reshape(request, AddPartitionsToTxnRequest)
            return AddPartitionsCall(version, newest.transactions)
        only = AddPartitionsToTxnTransaction(
            transactional_id=request.v3_and_below_transactional_id,
            producer_id=request.v3_and_below_producer_id,
            producer_epoch=request.v3_and_below_producer_epoch,
            topics=tuple(reshape(topic, AddPartitionsToTxnTopic) for topic in request.v3_and_below_topics),
        )
        return AddPartitionsCall(version, (only,))

    def downgrade(self, version: int, response: AddPartitionsToTxnResponse) -> Any:
        """Unwrap the single response for older versions."""
        if version >= _FIRST_WITH_MANY:
            return super().downgrade(version, response)
        only = response.results_by_transaction[0]
        older = single.AddPartitionsToTxnResponse(
            throttle_time=response.throttle_time,
            results_by_topic_v3_and_below=tuple(
                reshape(topic, single.AddPartitionsToTxnTopicResult) for topic in only.topic_results
            ),
        )
        return reshape(older, load_response_class(self.key, version))

    async def handle(self, request: AddPartitionsCall, client: ClientInfo) -> AddPartitionsToTxnResponse:
        results = await asyncio.gather(
            *(self._transaction_result(request.version, transaction, client) for transaction in request.transactions)
        )
        return AddPartitionsToTxnResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, results_by_transaction=tuple(results)
        )

    async def _transaction_result(
        self, version: int, transaction: AddPartitionsToTxnTransaction, client: ClientInfo
    ) -> AddPartitionsToTxnResult:
        partitions = [
            TopicPartition(topic.name, PartitionIndex(index))
            for topic in transaction.topics
            for index in topic.partitions
        ]
        codes = await self._add_partitions(version, transaction, partitions, client)
        return AddPartitionsToTxnResult(
            transactional_id=transaction.transactional_id,
            topic_results=tuple(
                AddPartitionsToTxnTopicResult(
                    name=topic.name,
                    results_by_partition=tuple(
                        AddPartitionsToTxnPartitionResult(
                            partition_index=index,
                            partition_error_code=codes[TopicPartition(topic.name, PartitionIndex(index))],
                        )
                        for index in topic.partitions
                    ),
                )
                for topic in transaction.topics
            ),
        )

    async def _add_partitions(
        self,
        version: int,
        transaction: AddPartitionsToTxnTransaction,
        partitions: list[TopicPartition],
        client: ClientInfo,
    ) -> Mapping[TopicPartition, ErrorCode]:
        refused = {part: code for part in partitions if (code := self._check(version, part)) is not None}
        if refused:
            return {part: refused.get(part, ErrorCode.operation_not_attempted) for part in partitions}
        who = ProducerRef(transaction.transactional_id, ProducerId(transaction.producer_id), transaction.producer_epoch)
        try:
            if transaction.verify_only:
                verified = await self._transactions.verify(who, partitions)
                return {part: error_code(error) if error else ErrorCode.none for part, error in verified.items()}
            protocol = EPOCH_PER_TRANSACTION if version >= _FIRST_WITH_MANY else FIRST_VERSION
            await self._transactions.add_partitions(who, partitions, version=protocol)
        except MillstreamError as error:
            log_fenced(error_code(error), str(error), client, transactional_id=transaction.transactional_id)
            return dict.fromkeys(partitions, fenced_code(error_code(error), version, first=_FIRST_WITH_FENCED))
        return dict.fromkeys(partitions, ErrorCode.none)

    def _check(self, version: int, partition: TopicPartition) -> ErrorCode | None:
        topic = self._topics.get(partition.topic)
        if topic is None or not 0 <= partition.partition < topic.partitions:
            return ErrorCode.unknown_topic_or_partition
        if topic.is_internal and (version < _FIRST_WITH_MANY or topic.name != CONSUMER_OFFSETS):
            return ErrorCode.topic_authorization_failed
        return None
