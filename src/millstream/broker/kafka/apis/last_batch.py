"""LastBatch (key 32013), version 0: returns the last committed batch of a query.

    {"query": "q"}   answer: {"error": 0, "message": null, "batch": 3}

-1 means that none was. Writers ask first: what is committed already is not written again.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.core.acl import Operation, ResourceType
from millstream.protocol.private.transaction_messages import LAST_BATCH_KEY, LastBatchRequest, LastBatchResponse


class LastBatch(PrivateApi[LastBatchRequest, LastBatchResponse]):
    """Returns the last committed batch of a query."""

    key = LAST_BATCH_KEY
    request_type = LastBatchRequest
    response_type = LastBatchResponse

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def needs(self, request: LastBatchRequest) -> Sequence[Need]:
        """DESCRIBE on the query, as a transactional id."""
        return [(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, request.query)]

    async def handle(self, request: LastBatchRequest) -> LastBatchResponse:
        """Name the last batch."""
        return LastBatchResponse(batch=await self._transactions.last_batch(request.query))
