"""What an endpoint's answer means for the message, and for the endpoint."""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple

RETRY_AFTER_S_MAX: Final = 24 * 3600.0
BACKOFF_MS_MIN: Final = 1000
"""How long a message waits after its first failure when the subscription declares no backoff."""

_OF_MESSAGE: Final = frozenset({400, 406, 409, 411, 412, 413, 414, 415, 416, 421, 422, 424, 428, 431})
"""Answers that are about the message that was sent. All others would be the same for any message."""


class Verdict(Enum):
    """What became of a request."""

    ACCEPTED = "accepted"
    """The message is done."""
    REFUSED = "refused"
    """The endpoint is well, but does not want this message."""
    FAILED = "failed"
    """The endpoint has answered, but it is not well, or asks for patience."""
    UNREACHABLE = "unreachable"
    """There was no answer."""


class Answer(NamedTuple):
    """What came back: the status, or 0 and the reason why there is none."""

    status: int
    text: str = ""
    retry_after_s: float | None = None
    is_unsent: bool = False
    """Whether there was no connection, so that nothing of the message can have come to the endpoint."""

    @property
    def verdict(self) -> Verdict:
        """What it means."""
        if 200 <= self.status < 300:
            return Verdict.ACCEPTED
        if not self.status:
            return Verdict.UNREACHABLE
        return Verdict.REFUSED if self.status in _OF_MESSAGE else Verdict.FAILED

    @property
    def reason(self) -> str:
        """Why the message was not accepted, in a line."""
        said = f"the endpoint answered {self.status}" if self.status else "the endpoint did not answer"
        return f"{said}: {self.text}" if self.text else said

    def delay_ms(self, attempt: int, *, backoff_min_ms: int, backoff_max_ms: int) -> int | None:
        """How long the message waits before it is sent again; None for what the subscription declares."""
        if self.retry_after_s is not None:
            return int(self.retry_after_s * 1000)
        if backoff_min_ms:
            return None
        return min(BACKOFF_MS_MIN << min(max(attempt - 1, 0), 32), max(backoff_max_ms, BACKOFF_MS_MIN))


def retry_after(value: str | None) -> float | None:
    """The seconds that a Retry-After header asks for: a number, or a time of day."""
    if not value:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) <= 10:
        return min(float(text), RETRY_AFTER_S_MAX)
    try:
        wanted = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, wanted - time.time()), RETRY_AFTER_S_MAX)
