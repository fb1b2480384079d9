"""Error codes and messages of responses; `protocol/wire/error_codes.py` has the table.

Anything outside the error tree is a defect of the broker, and clients get UNKNOWN_SERVER_ERROR.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

from millstream.core import errors
from millstream.protocol.wire.error_codes import CODES

_MESSAGE_LENGTH_MAX: Final = 2000
"""A message may quote the client's data; at this length it fits into every version's response."""


def error_code(error: BaseException) -> ErrorCode:
    """Find the Kafka code for an error."""
    for ancestor in type(error).__mro__:
        if ancestor in CODES:
            return ErrorCode(CODES[ancestor])
    return ErrorCode.unknown_server_error


def error_message(error: BaseException) -> str:
    """Return the message for clients; errors outside the tree are not exposed, since they may name internals."""
    if isinstance(error, errors.MillstreamError):
        return str(error)[:_MESSAGE_LENGTH_MAX]
    return "the broker failed to carry out the request; see its log"


if TYPE_CHECKING:
    from millstream.broker.kafka.api import ClientInfo

_logger = logging.getLogger(__name__)

_FENCED: Final = frozenset({ErrorCode.producer_fenced, ErrorCode.invalid_producer_epoch})


def fenced_code(code: ErrorCode, version: int, *, first: int) -> ErrorCode:
    """PRODUCER_FENCED from version `first` on, INVALID_PRODUCER_EPOCH before; all other codes as they are."""
    if code is ErrorCode.producer_fenced and version < first:
        return ErrorCode.invalid_producer_epoch
    return code


def log_fenced(code: ErrorCode, reason: str, client: ClientInfo, *, transactional_id: str | None = None) -> None:
    """Log a refusal that ends a producer; the reason holds its ids and epochs. Other codes leave no line."""
    if code in _FENCED:
        named = {"client": client.address, "client_id": client.client_id, "reason": reason}
        if transactional_id is not None:
            named["transactional_id"] = transactional_id
        _logger.info("a producer is fenced", extra=named)
