"""PrepareTransaction (key 32010), version 0: Millstream's private request of a writer whose part of a batch is written.

    {"transactional_id": "spark/…", "producer_id": 7, "producer_epoch": 0}   answer: {"error": 0, "message": null}

From here on the transaction has no timeout, nothing can be added to it, and only CompleteBatch, AbortBatch or
AbortTransaction end it. May be repeated. A writer whose batch is committed already, by others, is PRODUCER_FENCED.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.broker.kafka.api import PrivateApi
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.requests import ProducerRef
from millstream.core.ids import ProducerId


class PreparedBy(msgspec.Struct, frozen=True):
    """Who has written its part."""

    transactional_id: str
    producer_id: int
    producer_epoch: int


class PrepareTransaction(PrivateApi[PreparedBy]):
    """Makes a part of a batch ready to be decided about."""

    key = 32010
    asks = PreparedBy

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def handle(self, request: PreparedBy) -> dict[str, Any]:
        """Prepare the transaction."""
        who = ProducerRef(request.transactional_id, ProducerId(request.producer_id), request.producer_epoch)
        await self._transactions.prepare(who)
        return {}
