"""The gateway's limits on requests and on their memory; beyond them it returns 429 instead of queueing."""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final, Self

from millstream.core.crowding import is_crowding
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane

REQUESTS_MAX: Final = (2000, 512, 64)
"""Per lane."""

BYTES_MAX: Final = (192 * 1024 * 1024, 192 * 1024 * 1024, 64 * 1024 * 1024)
"""Memory of a lane's requests: their bodies, and the messages that their responses may hold. Requests that wait for
messages reserve memory, which must not keep publishers out."""

RETRY_S: Final = 1
REFUSED_LATELY_S: Final = 10.0
"""How long a node warns after it has refused a request because of these limits."""
PAUSE_S_MAX: Final = 0.5
"""A publisher that the broker throttles for longer is refused instead of being kept waiting."""


class Pressure:
    """Counts requests and their memory, in total and for each principal."""

    def __init__(self, requests_max: tuple[int, ...] = REQUESTS_MAX, bytes_max: tuple[int, ...] = BYTES_MAX) -> None:
        self._requests_max = requests_max
        self._bytes_max = bytes_max
        self.requests = [0] * len(Lane)
        self.bytes = [0] * len(Lane)
        self._requests_held: Counter[tuple[Lane, str]] = Counter()
        self._bytes_held: Counter[tuple[Lane, str]] = Counter()
        self._refused_at = [-math.inf] * len(Lane)
        self.rejected = 0
        self.responses: dict[int, int] = {}
        """The number of responses by status."""

    def metrics(self) -> list[dict[str, Any]]:
        """Return the requests in progress and the responses, in the form of a node's metrics."""
        lanes = [[number, {"lane": lane.name.lower()}] for lane, number in zip(Lane, self.requests, strict=True)]
        responses = [[number, {"status": str(int(status))}] for status, number in sorted(self.responses.items())]
        return [
            _metric("millstream_http_requests", "gauge", "API requests in progress.", lanes),
            _metric(
                "millstream_http_bytes",
                "gauge",
                "Memory reserved for API requests in progress.",
                [[sum(self.bytes), {}]],
            ),
            _metric("millstream_http_responses_total", "counter", "API responses by status.", responses),
            _metric(
                "millstream_http_rejected_total",
                "counter",
                "API requests rejected with 429.",
                [[self.rejected, {}]],
            ),
        ]

    def warnings(self) -> list[str]:
        return [
            f"{lane.name.lower()} requests were refused in the last {REFUSED_LATELY_S:g} s; {number} are in progress"
            for lane, number in zip(Lane, self.requests, strict=True)
            if time.monotonic() - self._refused_at[lane] < REFUSED_LATELY_S
        ]

    def enter(self, lane: Lane, principal: str = "") -> None:
        """Admit a request or refuse it; without authentication there are no principals."""
        number, held, most = self.requests[lane], self._requests_held[lane, principal], self._requests_max[lane]
        if number >= most or (principal and is_crowding(held, number, most)):
            raise self._refusal(lane, f"{held or number} requests of this kind are in progress")
        self.requests[lane] = number + 1
        if principal:
            self._requests_held[lane, principal] += 1

    def count(self, status: int) -> None:
        if status == HTTPStatus.TOO_MANY_REQUESTS:
            self.rejected += 1
        self.responses[status] = self.responses.get(status, 0) + 1

    def leave(self, lane: Lane, principal: str = "") -> None:
        self.requests[lane] -= 1
        if principal:
            _reduce(self._requests_held, (lane, principal), 1)

    def reserve(self, lane: Lane, size: int, principal: str = "") -> None:
        """Reserve memory for a body or a response, or refuse the request."""
        taken, held, most = self.bytes[lane], self._bytes_held[lane, principal], self._bytes_max[lane]
        if taken + size > most or (principal and is_crowding(held + size, taken + size, most)):
            raise self._refusal(lane, f"requests in progress hold {held or taken} bytes")
        self.bytes[lane] = taken + size
        if principal:
            self._bytes_held[lane, principal] += size

    def release(self, lane: Lane, size: int, principal: str = "") -> None:
        self.bytes[lane] -= size
        if principal:
            _reduce(self._bytes_held, (lane, principal), size)

    def check_pause(self, pause_s: float) -> None:
        """Refuse a publisher that would have to wait for long because the broker throttles it."""
        if pause_s > PAUSE_S_MAX:
            raise _too_many("the broker throttles publishers", int(pause_s) + 1)

    def _refusal(self, lane: Lane, why: str) -> Refused:
        self._refused_at[lane] = time.monotonic()
        return _too_many(why, RETRY_S)


def _too_many(why: str, retry_s: int) -> Refused:
    return Refused(HTTPStatus.TOO_MANY_REQUESTS, f"{why}; try again later", headers={"retry-after": str(retry_s)})


def _reduce(held: Counter[tuple[Lane, str]], key: tuple[Lane, str], amount: int) -> None:
    held[key] -= amount
    if not held[key]:
        del held[key]


def _metric(name: str, kind: str, text: str, samples: list[list[Any]]) -> dict[str, Any]:
    return {"name": name, "kind": kind, "help": text, "samples": samples}


BODY_BYTES_MAX: Final = 8 * 1024 * 1024
BODY_S_MAX: Final = 30.0
"""A body that takes longer to arrive is abandoned, since it holds memory."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


class RequestMemory:
    """Reserves memory for one request; as a context, it also admits the request."""

    __slots__ = ("_lane", "_pressure", "_principal", "_reserved")

    def __init__(self, pressure: Pressure, lane: Lane, principal: str = "") -> None:
        self._pressure = pressure
        self._lane = lane
        self._principal = principal
        self._reserved = 0

    def __enter__(self) -> Self:
        self._pressure.enter(self._lane, self._principal)
        return self

    def __exit__(self, *exception: object) -> None:
        self._pressure.release(self._lane, self._reserved, self._principal)
        self._pressure.leave(self._lane, self._principal)

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body, or raise `Refused`."""
        declared = headers.get(b"content-length")
        if declared is not None and declared.isdigit():
            self._reserve(int(declared))
        try:
            async with asyncio.timeout(BODY_S_MAX):
                return await self._read_all(receive)
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {BODY_S_MAX:g} s") from None

    def reserve(self, size: int) -> None:
        """Reserve memory for the largest possible response, or raise `Refused`."""
        self._pressure.reserve(self._lane, size, self._principal)
        self._reserved += size

    def resize(self, size: int) -> None:
        """Change the reserved memory, or raise `Refused` and keep the old amount."""
        if size > self._reserved:
            self._pressure.reserve(self._lane, size - self._reserved, self._principal)
        else:
            self._pressure.release(self._lane, self._reserved - size, self._principal)
        self._reserved = size

    async def _read_all(self, receive: Receive) -> bytes:
        whole = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body: bytes = message["body"]
            if len(whole) + len(body) > self._reserved:
                self._reserve(len(whole) + len(body) - self._reserved)
            if not message["more_body"]:
                return bytes(whole + body) if whole else body
            whole += body

    def _reserve(self, size: int) -> None:
        if self._reserved + size > BODY_BYTES_MAX:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request body has at most {BODY_BYTES_MAX} bytes")
        self._pressure.reserve(self._lane, size, self._principal)
        self._reserved += size
