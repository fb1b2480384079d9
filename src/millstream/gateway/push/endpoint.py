"""The capacity of an endpoint, estimated from its responses as TCP estimates the capacity of a network.

It starts with one request at a time. While requests succeed the limit grows, first by one per response, later by one
per round; a failure halves it. When everything in flight fails, and at least three requests, the endpoint counts as
down: no requests are sent for a while, and then it is probed with one message until it responds. An endpoint that
refuses connections is down at once. When five different messages have failed in a row, the endpoint is to blame rather
than the messages, and further failures use no attempts; so an endpoint that is down does not exhaust the attempts of
waiting messages.
"""

from __future__ import annotations

import time
from email.utils import parsedate_to_datetime
from enum import Enum
from typing import Final, NamedTuple

RETRY_AFTER_S_MAX: Final = 24 * 3600.0

BACKOFF_MS_MIN: Final = 1000
"""The delay after a message's first failure if the subscription declares no backoff."""

_OF_MESSAGE: Final = frozenset({400, 406, 409, 411, 412, 413, 414, 415, 416, 421, 422, 424, 428, 431})
"""Statuses that concern the message. All others would be the same for any message."""


class Verdict(Enum):
    ACCEPTED = "accepted"
    """The message is done."""
    REFUSED = "refused"
    """The endpoint works but does not want this message."""
    FAILED = "failed"
    """The endpoint reported that it cannot work now."""
    UNREACHABLE = "unreachable"
    """There was no response."""


class EndpointResponse(NamedTuple):
    """An endpoint's response: the status, or 0 and the reason why there is none."""

    status: int
    text: str = ""
    retry_after_s: float | None = None
    is_unsent: bool = False
    """Whether no connection was made, so that the endpoint cannot have received the message."""
    is_refused: bool = False
    """Whether this node does not push to the address, so that the endpoint was not contacted."""

    @property
    def verdict(self) -> Verdict:
        if 200 <= self.status < 300:
            return Verdict.ACCEPTED
        if not self.status:
            return Verdict.UNREACHABLE
        return Verdict.REFUSED if self.status in _OF_MESSAGE else Verdict.FAILED

    @property
    def reason(self) -> str:
        """Return, in one line, why the message was not accepted."""
        if self.is_refused:
            return self.text
        outcome = f"the endpoint returned {self.status}"
        if not self.status:
            outcome = "the endpoint cannot be reached" if self.is_unsent else "the endpoint did not respond"
        return f"{outcome}: {self.text}" if self.text else outcome

    def delay_ms(self, attempt: int, *, backoff_min_ms: int, backoff_max_ms: int) -> int | None:
        """Return the delay before the next attempt; None for the subscription's backoff."""
        if self.retry_after_s is not None:
            return int(self.retry_after_s * 1000)
        if backoff_min_ms:
            return None
        return min(BACKOFF_MS_MIN << min(max(attempt - 1, 0), 32), max(backoff_max_ms, BACKOFF_MS_MIN))


def retry_after(value: str | None) -> float | None:
    """Parse a Retry-After header, a number of seconds or a date."""
    if not value:
        return None
    text = value.strip()
    if text.isascii() and text.isdigit() and len(text) <= 10:
        return min(float(text), RETRY_AFTER_S_MAX)
    try:
        retry_at = parsedate_to_datetime(text).timestamp()
    except (ValueError, TypeError, OverflowError):
        return None
    return min(max(0.0, retry_at - time.time()), RETRY_AFTER_S_MAX)


DOWN_AFTER: Final = 3
"""An endpoint is down after at least this many failures in a row."""

BLAMED_AFTER: Final = 5
"""After this many different messages in a row, the endpoint is to blame."""

PAUSE_S_MIN: Final = 1.0

PAUSE_S_MAX: Final = 60.0


class Endpoint:
    """An endpoint as one node sees it; time is a monotonic clock in seconds."""

    def __init__(self, cap: int) -> None:
        self._cap = float(cap)
        self._limit = 1.0
        self._threshold = self._cap
        self._failures = 0
        self._failed: set[tuple[int, int]] = set()
        # The requests in flight at the first failure: when as many have failed in a row, all have.
        self._at_first_failure = 1
        self._pause_s = PAUSE_S_MIN
        self._shrunk_at = float("-inf")
        self._paused_until = float("-inf")
        self.is_down = False
        self.is_used = False

    @property
    def limit(self) -> int:
        """Return the number of requests that may be in flight."""
        return 1 if self.is_down else int(self._limit)

    @property
    def state(self) -> str:
        """Return the state: unused, up, failing or down."""
        if self.is_down:
            return "down"
        if not self.is_used:
            return "unused"
        return "failing" if self._failures else "up"

    @property
    def is_at_fault(self) -> bool:
        """Whether so many different messages have failed that none of them can be the cause."""
        return self.is_down and len(self._failed) >= BLAMED_AFTER

    def room(self, under_way: int, now: float) -> int:
        """Return the number of further requests that may start."""
        return 0 if now < self._paused_until else max(0, self.limit - under_way)

    def remaining_pause_s(self, now: float) -> float:
        return max(0.0, self._paused_until - now)

    def pause(self, seconds: float, now: float) -> None:
        self._paused_until = max(self._paused_until, now + min(seconds, PAUSE_S_MAX))

    def succeeded(self, under_way: int) -> None:
        """Record a success, with the number of requests in flight including this one."""
        self.is_used = True
        self._failures = 0
        self._failed.clear()
        if self.is_down:
            self.is_down = False
            self._limit, self._pause_s = 1.0, PAUSE_S_MIN
            self._paused_until = float("-inf")
        # An unreached limit is no evidence that a higher one works.
        if 2 * under_way >= int(self._limit):
            step = 1.0 if self._limit < self._threshold else 1.0 / self._limit
            self._limit = min(self._cap, self._limit + step)

    def failed(
        self,
        began: float,
        now: float,
        under_way: int,
        *,
        message: tuple[int, int] = (0, 0),
        is_unsent: bool = False,
    ) -> None:
        """Record a failure.

        `began` is when the request started, `under_way` the number in flight including this one, `message` the
        partition and offset that were sent, and `is_unsent` says that no connection was made.
        """
        self.is_used = True
        if len(self._failed) < BLAMED_AFTER:
            self._failed.add(message)
        if not self._failures:
            self._at_first_failure = under_way
        self._failures += 1
        failures_max = max(1 if is_unsent else DOWN_AFTER, self._at_first_failure)
        # Of requests in flight at the same time, only the first failure counts.
        is_new_failure = began >= self._shrunk_at
        if is_new_failure:
            self._limit = max(1.0, self._limit / 2)
            self._threshold = max(2.0, self._limit)
            self._shrunk_at = now
        if self._failures >= failures_max and (is_new_failure or not self.is_down):
            self.is_down = True
            self.pause(self._pause_s, now)
            self._pause_s = min(2 * self._pause_s, PAUSE_S_MAX)

    def refused(self) -> None:
        """Record that the endpoint refused a message, which shows that it works."""
        self.is_used = True
