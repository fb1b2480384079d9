"""InitProducerId (key 22), versions 0 to 5: the number that makes a producer idempotent.

Every call without a transactional id gets a new producer id at epoch 0, also one that names the id it has (version 3
and later), as in Kafka: the client begins anew and its old numbers are never used again. An id without its epoch, or
an epoch without its id, is INVALID_REQUEST.

Transactions are not available yet. Only a few error codes make both the Java client and librdkafka give up at once
instead of asking again for ever; TRANSACTIONAL_ID_AUTHORIZATION_FAILED is the one that names the transactional id, and
the broker's log says what it means. Version 6 (two-phase commit) is not stable in Kafka and not served.
"""

from __future__ import annotations

import logging
from typing import Protocol

from kio.schema.errors import ErrorCode
from kio.schema.init_producer_id.v5.request import InitProducerIdRequest
from kio.schema.init_producer_id.v5.response import InitProducerIdResponse
from kio.schema.types import ProducerId as WireProducerId
from kio.static.primitive import i16

from millstream.kafka.api import Api, ClientInfo
from millstream.kafka.errors import error_code
from millstream.kafka.throttle import NO_THROTTLE
from millstream.model.errors import MillstreamError
from millstream.model.ids import NO_PRODUCER_ID, ProducerId

_logger = logging.getLogger(__name__)


class ProducerIds(Protocol):
    """Where producer ids come from: unique for ever, across restarts and crashes."""

    async def next(self) -> ProducerId:
        """Give out an id that nobody has had before."""


class InitProducerId(Api[InitProducerIdRequest, InitProducerIdResponse]):
    """Hands out producer ids."""

    key = 22
    versions = (0, 5)

    def __init__(self, producer_ids: ProducerIds) -> None:
        self._producer_ids = producer_ids

    async def handle(self, request: InitProducerIdRequest, client: ClientInfo) -> InitProducerIdResponse:
        """Give an idempotent producer its id; refuse a transactional one."""
        if (request.producer_id < 0) != (request.producer_epoch < 0):
            return _response(ErrorCode.invalid_request)
        if request.transactional_id is None:
            return _response(ErrorCode.none, await self._producer_ids.next(), epoch=0)
        if not request.transactional_id:
            return _response(ErrorCode.invalid_request)
        _logger.warning(
            "a transactional producer was refused: transactions are not available yet",
            extra={"transactional_id": request.transactional_id, "client": client.client_id, "host": client.host},
        )
        return _response(ErrorCode.transactional_id_authorization_failed)

    def failure(self, error: MillstreamError, request: InitProducerIdRequest) -> InitProducerIdResponse:
        """No id could be allocated."""
        return _response(error_code(error))


def _response(code: ErrorCode, producer_id: ProducerId = NO_PRODUCER_ID, *, epoch: int = -1) -> InitProducerIdResponse:
    return InitProducerIdResponse(
        throttle_time=NO_THROTTLE,
        error_code=code,
        producer_id=WireProducerId(producer_id),
        producer_epoch=i16(epoch),
    )
