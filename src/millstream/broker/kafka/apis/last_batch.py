"""LastBatch (key 32013), version 0: Millstream's private request for the last batch of a query that was committed.

    {"query": "q"}   answer: {"error": 0, "message": null, "batch": 3}

-1 means that none was. Writers ask first: what is committed already is not written again.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from typing import Any

import msgspec

from millstream.broker.kafka.api import PrivateApi
from millstream.broker.transactions.coordinator import TransactionCoordinator


class NamedQuery(msgspec.Struct, frozen=True):
    """A query."""

    query: str


class LastBatch(PrivateApi[NamedQuery]):
    """Tells how far a query is."""

    key = 32013
    asks = NamedQuery

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def handle(self, request: NamedQuery) -> dict[str, Any]:
        """Name the last batch."""
        return {"batch": await self._transactions.last_batch(request.query)}
