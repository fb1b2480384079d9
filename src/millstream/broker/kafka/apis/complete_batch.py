"""CompleteBatch (key 32011), version 0: commits all parts of a batch atomically.

    {"query": "q", "batch": 3,
     "members": [{"transactional_id": "spark/q/3/0/…", "producer_id": 7, "producer_epoch": 0}, …]}
    answer: {"error": 0, "message": null, "done_now": true}

The decision, the last batch of the query and the end of every other attempt up to this batch are one append to
`__transaction_state`; markers follow, and are written again after a crash. A member that is not prepared fails the
whole (INVALID_TXN_STATE), as does one that was fenced. A batch that is committed already is a success, with `done_now`
false: nothing is committed then.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.transactions.batch import Member
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.core.acl import Operation, ResourceType
from millstream.core.ids import ProducerId
from millstream.protocol.private.transaction_messages import (
    COMPLETE_BATCH_KEY,
    CompleteBatchRequest,
    CompleteBatchResponse,
)


class CompleteBatch(PrivateApi[CompleteBatchRequest, CompleteBatchResponse]):
    """Commits batches."""

    key = COMPLETE_BATCH_KEY
    request_type = CompleteBatchRequest
    response_type = CompleteBatchResponse

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def needs(self, request: CompleteBatchRequest) -> Sequence[Need]:
        """WRITE on the query and on its members, as transactional ids."""
        ids = (request.query, *(member.transactional_id for member in request.members))
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name) for name in ids]

    async def handle(self, request: CompleteBatchRequest) -> CompleteBatchResponse:
        """Commit all members together."""
        members = tuple(
            Member(one.transactional_id, ProducerId(one.producer_id), one.producer_epoch) for one in request.members
        )
        done_now = await self._transactions.complete_batch(request.query, request.batch, members)
        return CompleteBatchResponse(done_now=done_now)
