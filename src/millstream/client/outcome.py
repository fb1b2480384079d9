"""Errors that a handler raises to settle its message; any other error releases it."""

from __future__ import annotations

import math
from typing import Final

from millstream.core.errors import InvalidRequest

SECONDS_MAX: Final = 10 * 365 * 86400
"""No delay is longer."""


def milliseconds(seconds: float) -> int:
    """Convert a delay to milliseconds; a negative one is 0."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds > SECONDS_MAX:
        raise InvalidRequest(f"{seconds!r} is not a number of seconds up to ten years")
    return max(0, int(seconds * 1000))


class Reject(Exception):
    """The message can never be handled: dead-letter it, for the reason given."""


class RetryLater(Exception):
    """Deliver the message again after this many seconds; raises `InvalidRequest` if that is not a number."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        milliseconds(seconds)
        super().__init__(reason or f"again in {seconds:g} s")
        self.seconds = seconds
        self.reason = reason
