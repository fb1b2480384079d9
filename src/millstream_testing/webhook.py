"""An endpoint that messages are pushed to: it records requests, and responds as scripted."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ssl
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

from millstream.cli.local_process import ReservedPort


@dataclass(frozen=True, slots=True)
class Request:
    path: str
    headers: dict[str, str]
    body: bytes

    def is_signed_by(self, key: bytes) -> bool:
        """Whether one of its signatures was made with this key."""
        signed = f"{self.headers['webhook-id']}.{self.headers['webhook-timestamp']}.".encode() + self.body
        expected = "v1," + base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
        return expected in self.headers.get("webhook-signature", "").split()


@dataclass(frozen=True, slots=True)
class Response:
    """A response; without a status, the connection is closed instead."""

    status: int | None = 204
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    after_s: float = 0.0


class Webhook:
    """A small HTTP server on a free port."""

    def __init__(
        self, respond: Callable[[Request], Response] | None = None, *, tls: ssl.SSLContext | None = None
    ) -> None:
        self.respond: Callable[[Request], Response] = respond or (lambda _request: Response())
        self._tls = tls
        self.requests: list[Request] = []
        self.in_flight = 0
        self.in_flight_max = 0
        self.connections = 0
        self._arrived = asyncio.Event()
        self._server: asyncio.Server | None = None
        self._serving: set[asyncio.Task[None]] = set()
        # Held while the server is stopped, too: another process must not respond in its place.
        self._port = ReservedPort()

    @property
    def url(self) -> str:
        return f"http://{self._port.address}/hook"

    @property
    def bodies(self) -> list[bytes]:
        return [request.body for request in self.requests]

    async def start(self) -> None:
        """Accept connections, always on the same port."""
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self._port.number, ssl=self._tls)

    async def stop(self) -> None:
        """Close everything at once, as if killed."""
        if self._server is not None:
            self._server.close()
            self._server = None
        serving = list(self._serving)
        for task in serving:
            task.cancel()
        if serving:
            await asyncio.wait(serving)

    async def until(self, is_enough: Callable[[], bool], *, wait_s: float = 200.0) -> None:
        """Wait until a condition holds; it is checked after each request."""
        async with asyncio.timeout(wait_s):
            while not is_enough():
                self._arrived.clear()
                await self._arrived.wait()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.stop()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is not None:
            self._serving.add(task)
            task.add_done_callback(self._serving.discard)
        self.connections += 1
        try:
            with suppress(ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
                while await self._serve_one(reader, writer):
                    pass
        finally:
            writer.transport.abort()

    async def _serve_one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in head[1:-2])}
        request = Request(head[0].split()[1], headers, await reader.readexactly(int(headers["content-length"])))
        self.requests.append(request)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight_max, self.in_flight)
        self._arrived.set()
        try:
            response = self.respond(request)
            if response.after_s:
                await asyncio.sleep(response.after_s)
            if response.status is None:
                return False
            lines = [f"HTTP/1.1 {response.status} so"]
            lines += [f"{name}: {value}" for name, value in response.headers.items()]
            if response.status != 204:
                lines.append(f"content-length: {len(response.body)}")
            writer.write("\r\n".join([*lines, "", ""]).encode() + response.body)
            await writer.drain()
        finally:
            self.in_flight -= 1
            self._arrived.set()
        return True
