"""Private requests about transactions: the parts of a batch that are committed together, and hanging transactions."""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi, RequestT, ResponseT
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import ProducerRef
from millstream.core.acl import Operation, ResourceType
from millstream.core.ids import ProducerId
from millstream.protocol.private.message import Response
from millstream.protocol.private.transactions import (
    AbortBatchRequest,
    AbortBatchResponse,
    AbortTransactionRequest,
    AbortTransactionResponse,
    BatchMember,
    CompleteBatchRequest,
    CompleteBatchResponse,
    LastBatchRequest,
    LastBatchResponse,
)


class _TransactionApi(PrivateApi[RequestT, ResponseT]):
    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions


class PrepareTransaction(_TransactionApi[BatchMember, Response]):
    """Prepares the transaction of a writer that has written its part of a batch.

    From here on the transaction has no timeout, nothing can be added to it, and only CompleteBatch, AbortBatch or
    AbortTransaction end it. May be repeated. A writer whose batch was already committed by others gets PRODUCER_FENCED.
    """

    changes = None

    async def needs(self, request: BatchMember) -> Sequence[Need]:
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)]

    async def handle(self, request: BatchMember) -> Response:
        who = ProducerRef(request.transactional_id, ProducerId(request.producer_id), request.producer_epoch)
        await self._transactions.prepare(who)
        return Response()


class CompleteBatch(_TransactionApi[CompleteBatchRequest, CompleteBatchResponse]):
    """Commits all parts of a batch atomically.

    The decision, the last batch of the query and the end of every other attempt up to this batch are one append to
    `__transaction_state`; markers follow, and are written again after a crash. A member that is not prepared fails the
    whole (INVALID_TXN_STATE), as does one that was fenced. A batch that is committed already is a success, with
    `done_now` false: nothing is committed then.
    """

    changes = None

    async def needs(self, request: CompleteBatchRequest) -> Sequence[Need]:
        ids = (request.query, *(member.transactional_id for member in request.members))
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, name) for name in ids]

    async def handle(self, request: CompleteBatchRequest) -> CompleteBatchResponse:
        members = tuple(
            ProducerRef(member.transactional_id, ProducerId(member.producer_id), member.producer_epoch)
            for member in request.members
        )
        done_now = await self._transactions.complete_batch(request.query, request.batch, members)
        return CompleteBatchResponse(done_now=done_now)


class AbortBatch(_TransactionApi[AbortBatchRequest, AbortBatchResponse]):
    """Aborts every attempt at a batch.

    A batch that is committed cannot be aborted (INVALID_TXN_STATE). The same batch may be tried again afterwards, but
    not by the run that is named, if one is: its transactional ids, `spark/q/3/{partition}/4f2a-{random}`, are fenced
    from here on, so that a task that is still running cannot open a transaction that would never end.
    """

    changes = None

    async def needs(self, request: AbortBatchRequest) -> Sequence[Need]:
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.query)]

    async def handle(self, request: AbortBatchRequest) -> AbortBatchResponse:
        aborted = await self._transactions.abort_batch(request.query, request.batch, request.run)
        return AbortBatchResponse(aborted=aborted)


class LastBatch(_TransactionApi[LastBatchRequest, LastBatchResponse]):
    """Returns the last committed batch of a query.

    -1 means none. Writers ask first, and do not write a committed batch again.
    """

    changes = None

    async def needs(self, request: LastBatchRequest) -> Sequence[Need]:
        return [(Operation.DESCRIBE, ResourceType.TRANSACTIONAL_ID, request.query)]

    async def handle(self, request: LastBatchRequest) -> LastBatchResponse:
        return LastBatchResponse(batch=await self._transactions.last_batch(request.query))


class AbortTransaction(_TransactionApi[AbortTransactionRequest, AbortTransactionResponse]):
    """Aborts a hanging transaction.

    The producer is fenced, as after a timeout; prepared transactions of a batch are aborted too. `state` is the one
    before. An id without an open transaction, and one that is being committed, get INVALID_TXN_STATE.
    """

    changes = None

    async def needs(self, request: AbortTransactionRequest) -> Sequence[Need]:
        return [(Operation.WRITE, ResourceType.TRANSACTIONAL_ID, request.transactional_id)]

    async def handle(self, request: AbortTransactionRequest) -> AbortTransactionResponse:
        return AbortTransactionResponse(state=await self._transactions.abort(request.transactional_id))
