"""What a fenced producer is told: older versions of the transaction APIs know only another code for it."""

from __future__ import annotations

from kio.schema.errors import ErrorCode


def fenced_code(code: ErrorCode, version: int, *, first: int) -> ErrorCode:
    """PRODUCER_FENCED from version `first` on, INVALID_PRODUCER_EPOCH before; all other codes as they are."""
    if code is ErrorCode.producer_fenced and version < first:
        return ErrorCode.invalid_producer_epoch
    return code
