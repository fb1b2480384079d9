"""PrepareTransaction (key 32010), version 0: prepares the transaction of a writer that has written its part of a batch.

    {"transactional_id": "spark/…", "producer_id": 7, "producer_epoch": 0}   answer: {"error": 0, "message": null}

From here on the transaction has no timeout, nothing can be added to it, and only CompleteBatch, AbortBatch or
AbortTransaction end it. May be repeated. A writer whose batch is committed already, by others, is PRODUCER_FENCED.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.requests import ProducerRef
from millstream.core.acl import Operation, ResourceType
from millstream.core.ids import ProducerId
from millstream.protocol.private.message import Response
from millstream.protocol.private.transaction_messages import PREPARE_KEY, BatchMember


class PrepareTransaction(PrivateApi[BatchMember, Response]):
    """Makes a part of a batch ready to be decided about."""

    key = PREPARE_KEY
    request_type = BatchMember
    response_type = Response

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def needs(self, request: BatchMember) -> Sequence[Need]:
        """WRITE on the transactional id."""
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)]

    async def handle(self, request: BatchMember) -> Response:
        """Prepare the transaction."""
        who = ProducerRef(request.transactional_id, ProducerId(request.producer_id), request.producer_epoch)
        await self._transactions.prepare(who)
        return Response()
