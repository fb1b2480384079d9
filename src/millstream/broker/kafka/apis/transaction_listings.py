"""The APIs that list and describe transactions."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from typing import cast

from kio.schema.describe_transactions.v0.request import DescribeTransactionsRequest
from kio.schema.describe_transactions.v0.response import DescribeTransactionsResponse, TopicData, TransactionState
from kio.schema.errors import ErrorCode
from kio.schema.list_transactions.v2 import response as listed
from kio.schema.list_transactions.v2.request import ListTransactionsRequest
from kio.schema.list_transactions.v2.response import ListTransactionsResponse
from kio.schema.types import ProducerId, TopicName, TransactionalId
from kio.static.primitive import TZAware, i16, i32, i32Timedelta

from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import Transaction, TransactionFilter
from millstream.broker.transactions.transaction import TransactionState as State
from millstream.core.errors import MillstreamError
from millstream.core.regex import compile_regex
from millstream.core.topic import by_topic

_STATES = frozenset(state.value for state in State)


class ListTransactions(Api[ListTransactionsRequest, ListTransactionsResponse]):
    """ListTransactions (key 66), versions 0 to 2: lists the transactional ids that this node coordinates.

    Filters by state, producer id, running time and, from 2 on, a regular expression for the whole id
    (INVALID_REGULAR_EXPRESSION if it is invalid); all given filters must match. Unknown states are returned. While one
    of this node's coordinators is loading, the response is COORDINATOR_LOAD_IN_PROGRESS.

    Version notes: 1 adds the filter by running time, 2 that by the id.
    """

    key = 66
    versions = (0, 2)
    changes = None

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def handle(self, request: ListTransactionsRequest, client: ClientInfo) -> ListTransactionsResponse:
        known = [state for state in request.state_filters if state in _STATES]
        unknown = tuple(state for state in request.state_filters if state not in _STATES)
        pattern = request.transactional_id_pattern
        expression = compile_regex(pattern) if pattern else None
        found = []
        if known or not unknown:
            found = await self._transactions.listing(
                TransactionFilter(
                    states=frozenset(known),
                    producer_ids=frozenset(request.producer_id_filters),
                    longer_than_ms=request.duration_filter,
                )
            )
        return ListTransactionsResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            unknown_state_filters=unknown,
            transaction_states=tuple(
                listed.TransactionState(
                    transactional_id=TransactionalId(transaction.transactional_id),
                    producer_id=ProducerId(transaction.producer_id),
                    transaction_state=transaction.state.value,
                )
                for transaction in found
                if expression is None or expression.fullmatch(transaction.transactional_id)
            ),
        )


class DescribeTransactions(Api[DescribeTransactionsRequest, DescribeTransactionsResponse]):
    """DescribeTransactions (key 65), version 0: describes transactional ids, their producers, and the partitions of
    their transactions.

    An unused id gets TRANSACTIONAL_ID_NOT_FOUND. In addition to Kafka's states, `Prepared` is the state of a member of
    an undecided batch commit.
    """

    key = 65
    versions = (0, 0)
    changes = None

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def handle(self, request: DescribeTransactionsRequest, client: ClientInfo) -> DescribeTransactionsResponse:
        states = await asyncio.gather(
            *(self._describe(transactional_id) for transactional_id in request.transactional_ids)
        )
        return DescribeTransactionsResponse(throttle_time=NO_THROTTLE, transaction_states=tuple(states))

    async def _describe(self, transactional_id: str) -> TransactionState:
        try:
            return _build_state(await self._transactions.describe(transactional_id))
        except MillstreamError as error:
            return self.refused(transactional_id, error_code(error))

    @staticmethod
    def refused(transactional_id: str, code: ErrorCode) -> TransactionState:
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


def _build_state(transaction: Transaction) -> TransactionState:
    return TransactionState(
        error_code=ErrorCode.none,
        transactional_id=TransactionalId(transaction.transactional_id),
        transaction_state=transaction.state.value,
        transaction_timeout=i32Timedelta.parse(timedelta(milliseconds=transaction.timeout_ms)),
        transaction_start_time=_to_datetime(transaction.started_ms),
        producer_id=ProducerId(transaction.producer_id),
        producer_epoch=i16(transaction.epoch),
        topics=tuple(
            TopicData(topic=TopicName(name), partitions=tuple(map(i32, indexes)))
            for name, indexes in by_topic(transaction.partitions).items()
        ),
    )


def _to_datetime(milliseconds: int) -> TZAware:
    # kio has no time before 1970, which Kafka uses for one that is not known.
    return cast("TZAware", datetime.fromtimestamp(0, tz=UTC) + timedelta(milliseconds=milliseconds))
