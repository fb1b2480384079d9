"""A lightweight HTTP load generator: each connection repeats its request as soon as it gets a response."""

from __future__ import annotations

import asyncio
import time
from typing import Final, cast

_LENGTH: Final = b"content-length: "
_END: Final = b"\r\n\r\n"


class Failed(Exception):
    """A response was not the expected one."""


class Load(asyncio.Protocol):
    """One connection with one request in flight."""

    def __init__(self, request: bytes, latencies: list[float]) -> None:
        self._request = request
        self._latencies = latencies
        self._rest = b""
        self._sent = 0.0
        self._transport: asyncio.Transport | None = None
        self.left = 0
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # A cast, since uvloop's transports do not derive from asyncio's.
        self._transport = cast("asyncio.Transport", transport)

    def begin(self, requests: int) -> asyncio.Future[None]:
        """Send this many requests, one after the other."""
        self.left = requests
        self.done = asyncio.get_running_loop().create_future()
        self._send()
        return self.done

    def data_received(self, data: bytes) -> None:
        """Process a response, or a part of it."""
        self._rest += data
        head, separator, rest = self._rest.partition(_END)
        if not separator:
            return
        if b" 201 " not in head[:16]:
            self.done.set_exception(Failed(self._rest[:500].decode(errors="replace")))
            return
        length = int(head[head.index(_LENGTH) + len(_LENGTH) :].partition(b"\r")[0])
        if len(rest) < length:
            return
        self._rest = b""
        self._latencies.append(time.perf_counter() - self._sent)
        self.left -= 1
        if self.left:
            self._send()
        else:
            self.done.set_result(None)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the run: the server closed the connection."""
        if not self.done.done():
            self.done.set_exception(Failed("the connection was lost"))

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.close()

    def _send(self) -> None:
        self._sent = time.perf_counter()
        if self._transport is not None:
            self._transport.write(self._request)


async def run_load(address: str, request: bytes, *, connections: int, requests: int) -> tuple[float, list[float]]:
    """Send requests over connections; return the total time and the latencies."""
    host, port = address.rsplit(":", 1)
    latencies: list[float] = []
    loop = asyncio.get_running_loop()
    opened = [
        (await loop.create_connection(lambda: Load(request, latencies), host, int(port)))[1] for _ in range(connections)
    ]
    began = time.perf_counter()
    await asyncio.gather(*(connection.begin(requests // connections) for connection in opened))
    took_s = time.perf_counter() - began
    for connection in opened:
        connection.close()
    return took_s, latencies


def post(path: str, body: bytes, headers: dict[str, str]) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "host: bench", "user-agent: bench", "accept: */*"]
    lines += [f"{name}: {value}" for name, value in headers.items()]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode() + body
