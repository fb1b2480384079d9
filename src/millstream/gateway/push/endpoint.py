"""How much an endpoint takes: found out by its answers, as TCP finds out how much a network takes.

It begins with one request at a time. While all goes well the limit grows, first by one with each answer, later by one
with each round of them; a failure halves it. When everything that is under way fails, and three requests at least, the
endpoint counts as down: it is left alone for a while, and then asked with one message, until it answers. One that takes
no connection is down at once, however few are under way. When five different messages have failed in a row it is the
endpoint that is to blame, and no longer the messages: those that fail then have used no attempt. So an endpoint that is
down does not use up the attempts of what waits for it.
"""

from __future__ import annotations

from typing import Final

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
