"""What the gateway takes on at once. More is answered with 429, so that nobody's request waits in a heap."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane

REQUESTS_MAX: Final = (2000, 512, 64)
"""By lane."""

BYTES_MAX: Final = (192 * 1024 * 1024, 192 * 1024 * 1024, 64 * 1024 * 1024)
"""What the requests of a lane take together: their bodies, and the messages that they may be answered with. Those who
wait for messages keep room for them, and publishers must not be turned away for that."""

RETRY_S: Final = 1
PAUSE_S_MAX: Final = 0.5
"""A publisher whom the broker asks to pause for longer than this is told so instead of being kept waiting."""


class Pressure:
    """Counts requests and the bytes of their bodies."""

    def __init__(self, requests_max: tuple[int, ...] = REQUESTS_MAX, bytes_max: tuple[int, ...] = BYTES_MAX) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self.requests = [0] * len(Lane)
        self.bytes = [0] * len(Lane)
        self.turned_away = 0
        self.answers: dict[int, int] = {}
        """How many, by status."""

    def metrics(self) -> list[dict[str, Any]]:
        """What is under way and what was answered, as a node's status tells its own numbers."""
        lanes = [[number, {"lane": lane.name.lower()}] for lane, number in zip(Lane, self.requests, strict=True)]
        answers = [[number, {"status": str(int(status))}] for status, number in sorted(self.answers.items())]
        return [
            _metric("millstream_http_requests", "gauge", "Requests to the API that are under way.", lanes),
            _metric("millstream_http_bytes", "gauge", "What these may take in memory.", [[sum(self.bytes), {}]]),
            _metric("millstream_http_answers_total", "counter", "Answers of the API.", answers),
            _metric(
                "millstream_http_turned_away_total", "counter", "Requests answered with 429.", [[self.turned_away, {}]]
            ),
        ]

    def warnings(self) -> list[str]:
        """What is full now, so that requests are refused."""
        return [
            f"{lane.name.lower()} requests are refused: {number} are in progress"
            for lane, number in zip(Lane, self.requests, strict=True)
            if number >= self._requests_max[lane]
        ]

    def enter(self, lane: Lane) -> None:
        """Take on a request, or refuse it."""
        number = self.requests[lane]
        if number >= self._requests_max[lane]:
            raise self._refused(f"{number} requests of this kind are under way")
        self.requests[lane] = number + 1

    def count(self, status: int) -> None:
        """Note an answer."""
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            self.turned_away += 1
        self.answers[status] = self.answers.get(status, 0) + 1

    def leave(self, lane: Lane) -> None:
        """A request is answered."""
        self.requests[lane] -= 1

    def take(self, lane: Lane, size: int) -> None:
        """Make room for a body or an answer, or refuse it."""
        taken = self.bytes[lane]
        if taken + size > self._bytes_max[lane]:
            raise self._refused(f"{taken} bytes are under way")
        self.bytes[lane] = taken + size

    def give_back(self, lane: Lane, size: int) -> None:
        """So much is not needed any more."""
        self.bytes[lane] -= size

    def check_pause(self, pause_s: float) -> None:
        """Refuse what would wait for long, since the broker asks to be left alone."""
        if pause_s > PAUSE_S_MAX:
            raise self._refused("the broker asks publishers to pause", int(pause_s) + 1)

    def _refused(self, why: str, retry_s: int = RETRY_S) -> Refused:
        return Refused(HTTPStatus.TOO_MANY_REQUESTS, f"{why}; try again later", headers={"retry-after": str(retry_s)})


def _metric(name: str, kind: str, text: str, samples: list[list[Any]]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "help": text, "samples": samples}
