"""EndTxn (key 26), versions 0 to 5: commits or aborts a transaction.

Responds when the decision is durable; the markers are written afterwards, also after a crash. Repeated requests get
the same response. While markers are being written, requests get CONCURRENT_TRANSACTIONS, from version 5 on regardless
of their producer id and epoch. An impossible request, such as to commit an aborted transaction, gets INVALID_TXN_STATE.

Version notes: up to 1 a fenced producer gets INVALID_PRODUCER_EPOCH, from 2 on PRODUCER_FENCED. 5 is the second version
of the protocol (KIP-890): each end increments the epoch, and the response holds the id and epoch for the next
transaction; a transaction without records can be aborted too.
"""

from __future__ import annotations

from typing import Final

from kio.schema.end_txn.v5.request import EndTxnRequest
from kio.schema.end_txn.v5.response import EndTxnResponse
from kio.schema.errors import ErrorCode
from kio.schema.types import ProducerId as WireProducerId
from kio.static.primitive import i16

from millstream.broker.kafka.api import NO_THROTTLE, ClientInfo, Versioned, VersionedApi, error_code, fenced_code
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION, FIRST_VERSION, ProducerRef
from millstream.core.errors import MillstreamError
from millstream.core.ids import ProducerId

_FIRST_WITH_FENCED: Final = 2
_FIRST_WITH_EPOCHS: Final = 5

Call = Versioned[EndTxnRequest]


class EndTxn(VersionedApi[EndTxnRequest, EndTxnResponse]):
    key = 26
    versions = (0, 5)
    changes = None

    def __init__(self, transactions: TransactionCoordinator) -> None:
        self._transactions = transactions

    async def handle(self, request: Call, client: ClientInfo) -> EndTxnResponse:
        message = request.message
        who = ProducerRef(message.transactional_id, ProducerId(message.producer_id), message.producer_epoch)
        version = EPOCH_PER_TRANSACTION if request.version >= _FIRST_WITH_EPOCHS else FIRST_VERSION
        following = await self._transactions.end(who, commit=message.committed, version=version)
        return EndTxnResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            producer_id=WireProducerId(following.producer_id),
            producer_epoch=i16(following.epoch),
        )

    def failure(self, error: MillstreamError, request: Call) -> EndTxnResponse:
        return self.refusal(fenced_code(error_code(error), request.version, first=_FIRST_WITH_FENCED))
