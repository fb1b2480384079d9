"""AbortBatch (key 32012), version 0: aborts every attempt at a batch.

    {"query": "q", "batch": 3, "run": "4f2a"}   answer: {"error": 0, "message": null, "aborted": 2}

A batch that is committed cannot be aborted (INVALID_TXN_STATE). The same batch may be tried again afterwards, but not
by the run that is named, if one is: its transactional ids, `spark/q/3/{partition}/4f2a-{random}`, are fenced from here
on, so that a task that is still running cannot open a transaction that would never end.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.core.acl import Operation, ResourceType
from millstream.protocol.private.transaction_messages import ABORT_BATCH_KEY, AbortBatchRequest, AbortBatchResponse


class AbortBatch(PrivateApi[AbortBatchRequest, AbortBatchResponse]):
    """Aborts the attempts at a batch."""

    key = ABORT_BATCH_KEY
    request_type = AbortBatchRequest
    response_type = AbortBatchResponse

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def needs(self, request: AbortBatchRequest) -> Sequence[Need]:
        """WRITE on the query, as a transactional id."""
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.query)]

    async def handle(self, request: AbortBatchRequest) -> AbortBatchResponse:
        """Abort every attempt."""
        aborted = await self._transactions.abort_batch(request.query, request.batch, request.run)
        return AbortBatchResponse(aborted=aborted)
