"""What a handler raises to say what becomes of its message; any other error means: try again later."""

from __future__ import annotations

import math
from typing import Final

from millstream.core.errors import InvalidRequest

SECONDS_MAX: Final = 10 * 365 * 86400
"""Nothing is put off for longer."""


def milliseconds(seconds: float) -> int:
    """A time from now as it is told to the broker; one that is past is now."""
    is_number = isinstance(seconds, int | float) and not isinstance(seconds, bool)
    if not is_number or not math.isfinite(seconds) or seconds > SECONDS_MAX:
        raise InvalidRequest(f"{seconds!r} is no number of seconds up to ten years")
    return max(0, int(seconds * 1000))


class Reject(Exception):
    """The message can never be handled: to the dead letter topic with it, for the reason given."""


class RetryLater(Exception):
    """Not now: deliver it again after so many seconds. `InvalidRequest` if that is no number."""

    def __init__(self, seconds: float, reason: str = "") -> None:
        milliseconds(seconds)
        super().__init__(reason or f"again in {seconds:g} s")
        self.seconds = seconds
        self.reason = reason
