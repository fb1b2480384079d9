"""AbortTransaction (key 32014), version 0: aborts a hanging transaction.

    {"transactional_id": "tx"}   answer: {"error": 0, "message": null, "state": "Ongoing"}

The producer is fenced, as after a timeout; prepared transactions of a batch are aborted too. `state` is the one before.
An id without an open transaction, and one that is being committed, get INVALID_TXN_STATE.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.core.acl import Operation, ResourceType
from millstream.protocol.private.transaction_messages import (
    ABORT_KEY,
    AbortTransactionRequest,
    AbortTransactionResponse,
)


class AbortTransaction(PrivateApi[AbortTransactionRequest, AbortTransactionResponse]):
    """Ends transactions for administrators."""

    key = ABORT_KEY
    request_type = AbortTransactionRequest
    response_type = AbortTransactionResponse

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def needs(self, request: AbortTransactionRequest) -> Sequence[Need]:
        """WRITE on the transactional id."""
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)]

    async def handle(self, request: AbortTransactionRequest) -> AbortTransactionResponse:
        """Abort the transaction."""
        return AbortTransactionResponse(state=await self._transactions.abort(request.transactional_id))
