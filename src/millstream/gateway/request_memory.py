"""The memory of a request: its body, bounded in size and time, and its possible answer."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, MutableMapping
from http import HTTPStatus
from typing import Any, Final

from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane
from millstream.gateway.pressure import Pressure

BODY_BYTES_MAX: Final = 8 * 1024 * 1024
BODY_S_MAX: Final = 30.0
"""A body that takes longer to arrive is abandoned, since it holds memory."""

Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]


class ClientDisconnected(Exception):
    """The client disconnected before its request was complete."""


class RequestMemory:
    """The memory that one request holds."""

    __slots__ = ("_lane", "_pressure", "_taken")

    def __init__(self, pressure: Pressure, lane: Lane) -> None:
        self._pressure = pressure
        self._lane = lane
        self._taken = 0

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read the whole body, or raise `Refused`."""
        declared = headers.get(b"content-length")
        if declared is not None and declared.isdigit():
            self._take(int(declared))
        try:
            async with asyncio.timeout(BODY_S_MAX):
                return await self._read_all(receive)
        except TimeoutError:
            raise Refused(HTTPStatus.REQUEST_TIMEOUT, f"the body did not arrive within {BODY_S_MAX:g} s") from None

    def reserve(self, size: int) -> None:
        """Reserve memory for the largest possible answer, or raise `Refused`."""
        self._pressure.take(self._lane, size)
        self._taken += size

    def resize(self, size: int) -> None:
        """Change the reserved memory, or raise `Refused` and keep the old amount."""
        if size > self._taken:
            self._pressure.take(self._lane, size - self._taken)
        else:
            self._pressure.give_back(self._lane, self._taken - size)
        self._taken = size

    def release(self) -> None:
        """Release everything."""
        self._pressure.give_back(self._lane, self._taken)
        self._taken = 0

    async def _read_all(self, receive: Receive) -> bytes:
        whole = bytearray()
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientDisconnected
            body: bytes = message["body"]
            if len(whole) + len(body) > self._taken:
                self._take(len(whole) + len(body) - self._taken)
            if not message["more_body"]:
                return bytes(whole + body) if whole else body
            whole += body

    def _take(self, size: int) -> None:
        if self._taken + size > BODY_BYTES_MAX:
            raise Refused(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"a request body has at most {BODY_BYTES_MAX} bytes")
        self._pressure.take(self._lane, size)
        self._taken += size
