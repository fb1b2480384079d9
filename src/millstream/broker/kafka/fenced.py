"""What a fenced producer is answered, and the line in the log about it."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Final

from kio.schema.errors import ErrorCode

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
