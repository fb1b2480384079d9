"""What the gateway takes on at once. More is answered with 429, so that nobody's request waits in a heap."""

from __future__ import annotations

from http import HTTPStatus
from typing import Final

from millstream.http.problem import Refused
from millstream.http.route import Lane

REQUESTS_MAX: Final = (2000, 512, 64)
"""By lane."""

BODY_BYTES_MAX: Final = 64 * 1024 * 1024
"""Bodies of all requests together, from when their length is known until they are answered."""

RETRY_S: Final = 1
PAUSE_S_MAX: Final = 0.5
"""A publisher whom the broker asks to pause for longer than this is told so instead of being kept waiting."""


class Pressure:
    """Counts requests and the bytes of their bodies."""

    def __init__(self, requests_max: tuple[int, ...] = REQUESTS_MAX, body_bytes_max: int = BODY_BYTES_MAX) -> None:
        self._requests_max = requests_max
        self._body_bytes_max = body_bytes_max
        self.requests = [0] * len(Lane)
        self.body_bytes = 0
        self.turned_away = 0

    def enter(self, lane: Lane) -> None:
        """Take on a request, or refuse it."""
        number = self.requests[lane]
        if number >= self._requests_max[lane]:
            raise self._refused(f"{number} requests of this kind are under way")
        self.requests[lane] = number + 1

    def leave(self, lane: Lane) -> None:
        """A request is answered."""
        self.requests[lane] -= 1

    def take(self, size: int) -> None:
        """Make room for a body, or refuse it."""
        if self.body_bytes + size > self._body_bytes_max:
            raise self._refused(f"{self.body_bytes} bytes are under way")
        self.body_bytes += size

    def give_back(self, size: int) -> None:
        """A body is not needed any more."""
        self.body_bytes -= size

    def check_pause(self, pause_s: float) -> None:
        """Refuse what would wait for long, since the broker asks to be left alone."""
        if pause_s > PAUSE_S_MAX:
            raise self._refused("the broker asks publishers to pause", int(pause_s) + 1)

    def _refused(self, why: str, retry_s: int = RETRY_S) -> Refused:
        self.turned_away += 1
        return Refused(HTTPStatus.TOO_MANY_REQUESTS, f"{why}; try again later", headers={"retry-after": str(retry_s)})
