"""InitProducerId (key 22), versions 0 to 5: assigns the producer id of an idempotent or transactional producer.

Without a transactional id every request gets a new producer id at epoch 0, also one that sends its current id (version
3 and later), as in Kafka. An id without its epoch, or an epoch without its id, gets INVALID_REQUEST.

With a transactional id the coordinator responds: the previous owner of the id is fenced, and a transaction it left open
is aborted first (CONCURRENT_TRANSACTIONS if that takes longer than a moment). A timeout beyond
`transaction-timeout-max-ms` gets INVALID_TRANSACTION_TIMEOUT.

Version notes: 3 lets a producer continue after an error with its id and epoch; up to 3 a fenced producer gets
INVALID_PRODUCER_EPOCH, from 4 on PRODUCER_FENCED; 5 is the same. Version 6 (two-phase commit) is not stable in Kafka
and not served.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5.request import InitProducerIdRequest
from kio.schema.init_producer_id.v5.response import InitProducerIdResponse
from kio.schema.types import ProducerId as WireProducerId
from kio.static.primitive import i16

from millstream.broker.kafka.api import NO_THROTTLE, ClientInfo, Versioned, VersionedApi, error_code, fenced_code
from millstream.broker.transactions.coordinator import ProducerIds, TransactionCoordinator
from millstream.broker.transactions.transaction import InitRequest
from millstream.core.errors import MillstreamError
from millstream.core.ids import NO_PRODUCER_ID, ProducerId

_FIRST_WITH_FENCED: Final = 4
_MILLISECOND: Final = timedelta(milliseconds=1)

Call = Versioned[InitProducerIdRequest]


class InitProducerId(VersionedApi[InitProducerIdRequest, InitProducerIdResponse]):
    key = 22
    versions = (0, 5)
    changes = None

    def __init__(self, producer_ids: ProducerIds, transactions: TransactionCoordinator) -> None:
        self._producer_ids = producer_ids
        self._transactions = transactions

    async def handle(self, request: Call, client: ClientInfo) -> InitProducerIdResponse:
        message = request.message
        if (message.producer_id < 0) != (message.producer_epoch < 0):
            return _response(ErrorCode.invalid_request)
        if message.transactional_id is None:
            return _response(ErrorCode.none, await self._producer_ids.next(), epoch=0)
        expected = None
        if message.producer_id >= 0:
            expected = (ProducerId(message.producer_id), int(message.producer_epoch))
        begun = await self._transactions.init(
            InitRequest(
                transactional_id=message.transactional_id,
                timeout_ms=message.transaction_timeout // _MILLISECOND,
                expected=expected,
            )
        )
        return _response(ErrorCode.none, begun.producer_id, epoch=begun.epoch)

    def failure(self, error: MillstreamError, request: Call) -> InitProducerIdResponse:
        return _response(fenced_code(error_code(error), request.version, first=_FIRST_WITH_FENCED))


def _response(code: ErrorCode, producer_id: ProducerId = NO_PRODUCER_ID, *, epoch: int = -1) -> InitProducerIdResponse:
    return InitProducerIdResponse(
        throttle_time=NO_THROTTLE,
        error_code=code,
        producer_id=WireProducerId(producer_id),
        producer_epoch=i16(epoch),
    )
