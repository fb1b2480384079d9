"""How much an endpoint takes: found out by its answers, as TCP finds out how much a network takes.

It begins with one request at a time. While all goes well the limit grows, first by one with each answer, later by one
with each round of them; a failure halves it. When everything that is under way fails, and three requests at least, the
endpoint counts as down: it is left alone for a while, and then asked with one message, until it answers. One that takes
no connection is down at once, however few are under way. When five different messages have failed in a row it is the
endpoint that is to blame, and no longer the messages: those that fail then have used no attempt. So an endpoint that is
down does not use up the attempts of what waits for it.
"""

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
        outcome = f"the endpoint answered {self.status}" if self.status else "the endpoint did not answer"
        return f"{outcome}: {self.text}" if self.text else outcome

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


DOWN_AFTER: Final = 3
"""So many failures in a row at least, without a success between them, and the endpoint is down."""

BLAMED_AFTER: Final = 5
"""So many different messages in a row, and it cannot be them."""

REST_S_MIN: Final = 1.0

REST_S_MAX: Final = 60.0


class Endpoint:
    """One endpoint as one node sees it. Time is any clock that only grows, in seconds."""

    def __init__(self, cap: int) -> None:
        self._cap = float(cap)
        self._limit = 1.0
        self._threshold = self._cap
        self._failures = 0
        self._failed: set[tuple[int, int]] = set()
        # How many were under way when the first failure came: when as many have failed in a row, all have.
        self._at_first_failure = 1
        self._rest_s = REST_S_MIN
        self._shrunk_at = float("-inf")
        self._resting_until = float("-inf")
        self.is_down = False
        self.is_used = False

    @property
    def limit(self) -> int:
        """How many requests may be under way."""
        return 1 if self.is_down else int(self._limit)

    @property
    def state(self) -> str:
        """In one word: unused, up, failing or down."""
        if self.is_down:
            return "down"
        if not self.is_used:
            return "unused"
        return "failing" if self._failures else "up"

    @property
    def is_to_blame(self) -> bool:
        """Whether it is down for certain: too many different messages have failed for it to be one of them."""
        return self.is_down and len(self._failed) >= BLAMED_AFTER

    def room(self, under_way: int, now: float) -> int:
        """How many more requests may begin."""
        return 0 if now < self._resting_until else max(0, self.limit - under_way)

    def rest_left(self, now: float) -> float:
        """For how long it is left alone."""
        return max(0.0, self._resting_until - now)

    def rest(self, seconds: float, now: float) -> None:
        """It has asked to be left alone."""
        self._resting_until = max(self._resting_until, now + min(seconds, REST_S_MAX))

    def succeeded(self, under_way: int) -> None:
        """It has answered well, with so many requests under way, this one among them."""
        self.is_used = True
        self._failures = 0
        self._failed.clear()
        if self.is_down:
            self.is_down = False
            self._limit, self._rest_s = 1.0, REST_S_MIN
            self._resting_until = float("-inf")
        # A limit that is not reached says nothing about a larger one.
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
        """It has not answered, or said that it cannot.

        `began` is when it was asked, `under_way` how many requests are, this one among them, `message` the partition
        and offset of what it was sent, and `is_unsent` says that it took no connection.
        """
        self.is_used = True
        if len(self._failed) < BLAMED_AFTER:
            self._failed.add(message)
        if not self._failures:
            self._at_first_failure = under_way
        self._failures += 1
        failures_max = max(1 if is_unsent else DOWN_AFTER, self._at_first_failure)
        # Of those that were under way at the same time, the first has said what there is to say.
        is_news = began >= self._shrunk_at
        if is_news:
            self._limit = max(1.0, self._limit / 2)
            self._threshold = max(2.0, self._limit)
            self._shrunk_at = now
        if self._failures >= failures_max and (is_news or not self.is_down):
            self.is_down = True
            self.rest(self._rest_s, now)
            self._rest_s = min(2 * self._rest_s, REST_S_MAX)

    def refused(self) -> None:
        """It has answered that it does not want this message, which says that it is there."""
        self.is_used = True
