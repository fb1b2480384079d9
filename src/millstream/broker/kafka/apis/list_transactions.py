"""ListTransactions (key 66), versions 0 to 2: lists the transactional ids that this node coordinates.

Filters by state, producer id, running time and, from 2 on, a regular expression for the whole id
(INVALID_REGULAR_EXPRESSION if it is invalid); all given filters must match. Unknown states are returned. While one
of this node's coordinators is loading, the response is COORDINATOR_LOAD_IN_PROGRESS.

Version notes: 1 adds the filter by running time, 2 that by the id.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from kio.schema.list_transactions.v2.request import ListTransactionsRequest
from kio.schema.list_transactions.v2.response import ListTransactionsResponse, TransactionState
from kio.schema.types import ProducerId, TransactionalId

from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import TransactionFilter
from millstream.broker.transactions.transaction import TransactionState as State
from millstream.core.regex import compile_regex

_STATES = frozenset(state.value for state in State)


class ListTransactions(Api[ListTransactionsRequest, ListTransactionsResponse]):
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
                TransactionState(
                    transactional_id=TransactionalId(one.transactional_id),
                    producer_id=ProducerId(one.producer_id),
                    transaction_state=one.state,
                )
                for one in found
                if expression is None or expression.fullmatch(one.transactional_id)
            ),
        )
