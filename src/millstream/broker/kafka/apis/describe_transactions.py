"""DescribeTransactions (key 65), version 0: describes transactional ids, their producers, and the partitions of their
transactions.

An unused id gets TRANSACTIONAL_ID_NOT_FOUND. In addition to Kafka's states, `Prepared` is the state of a member of an
undecided batch commit.
"""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import cast

from kio.schema.describe_transactions.v0.request import DescribeTransactionsRequest
from kio.schema.describe_transactions.v0.response import DescribeTransactionsResponse, TopicData, TransactionState
from kio.schema.errors import ErrorCode
from kio.schema.types import ProducerId, TopicName, TransactionalId
from kio.static.primitive import TZAware, i16, i32, i32Timedelta

from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import TransactionDescription
from millstream.core.errors import MillstreamError
from millstream.core.topic import by_topic


class DescribeTransactions(Api[DescribeTransactionsRequest, DescribeTransactionsResponse]):
    key = 65
    versions = (0, 0)
    changes = None

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def handle(self, request: DescribeTransactionsRequest, client: ClientInfo) -> DescribeTransactionsResponse:
        states = await asyncio.gather(*(self._describe(one) for one in request.transactional_ids))
        return DescribeTransactionsResponse(throttle_time=NO_THROTTLE, transaction_states=tuple(states))

    async def _describe(self, transactional_id: str) -> TransactionState:
        try:
            return _build_state(await self._transactions.describe(transactional_id))
        except MillstreamError as error:
            return self.refused(transactional_id, error_code(error))

    @staticmethod
    def refused(transactional_id: str, code: ErrorCode) -> TransactionState:
        """Refuse to describe one of the transactional ids."""
        return TransactionState(
            error_code=code,
            transactional_id=TransactionalId(transactional_id),
            transaction_state="",
            transaction_timeout=i32Timedelta.parse(timedelta(0)),
            transaction_start_time=_to_datetime(0),
            producer_id=ProducerId(0),
            producer_epoch=i16(0),
            topics=(),
        )


def _build_state(found: TransactionDescription) -> TransactionState:
    return TransactionState(
        error_code=ErrorCode.none,
        transactional_id=TransactionalId(found.transactional_id),
        transaction_state=found.state,
        transaction_timeout=i32Timedelta.parse(timedelta(milliseconds=found.timeout_ms)),
        transaction_start_time=_to_datetime(found.started_ms),
        producer_id=ProducerId(found.producer_id),
        producer_epoch=i16(found.epoch),
        topics=tuple(
            TopicData(topic=TopicName(name), partitions=tuple(map(i32, indexes)))
            for name, indexes in by_topic(found.partitions).items()
        ),
    )


def _to_datetime(milliseconds: int) -> TZAware:
    # kio has no time before 1970, which Kafka uses for one that is not known.
    return cast("TZAware", datetime.fromtimestamp(0, tz=UTC) + timedelta(milliseconds=milliseconds))
