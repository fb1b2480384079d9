"""Requests to one endpoint, over persistent connections to checked addresses, limited in time and size.

A name is resolved and checked here, and the connection goes to the checked address while the request still names the
host, so a name that changes a moment later has no effect. Redirects are followed within the host. Proxies of the
environment are not used, cookies are not kept, and only the start of a response is read.
"""

from __future__ import annotations

import asyncio
import base64
import hmac
import socket
import ssl
import sys
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from time import time
from typing import Final, cast

import certifi
import httpx

from millstream import __version__
from millstream.core.errors import PolicyViolation
from millstream.gateway.push.address import Addresses
from millstream.gateway.push.endpoint import EndpointResponse, retry_after
from millstream.gateway.push.event import Content, Headers

ID = b"webhook-id"

TIMESTAMP = b"webhook-timestamp"

SIGNATURE = b"webhook-signature"


def signature(keys: Iterable[bytes], message_id: bytes, timestamp_s: int, body: bytes) -> bytes:
    signed = b"%b.%d.%b" % (message_id, timestamp_s, body)
    return b" ".join(b"v1," + base64.b64encode(hmac.digest(key, signed, "sha256")) for key in keys)


IDLE_S: Final = 30.0


def mark_sniffio_missing() -> None:
    """Mark sniffio as missing, for a process that only sends.

    httpcore searches the whole module path for it with every lock that it takes.
    """
    if find_spec("sniffio") is None:
        sys.modules["sniffio"] = None  # type: ignore[assignment]


class ConnectionPool:
    """Lends connections to requests, whose number is bounded elsewhere."""

    def __init__(self, trust: ssl.SSLContext) -> None:
        self._trust = trust
        # Least recently used first.
        self._free: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()
        self._sweep: asyncio.TimerHandle | None = None
        self._closing: set[asyncio.Task[None]] = set()
        self._is_closed = False

    @asynccontextmanager
    async def borrow(self) -> AsyncIterator[httpx.AsyncHTTPTransport]:
        """Lend a connection for one request; it is opened on first use."""
        connection = self._free.pop()[1] if self._free else self._make()
        try:
            yield connection
        except BaseException:
            # The connection may hold the rest of a response.
            await connection.aclose()
            raise
        if self._is_closed:
            await connection.aclose()
            return
        self._free.append((asyncio.get_running_loop().time(), connection))
        if self._sweep is None:
            self._sweep = asyncio.get_running_loop().call_later(IDLE_S, self._close_idle)

    async def close(self) -> None:
        self._is_closed = True
        if self._sweep is not None:
            self._sweep.cancel()
        while self._free:
            await self._free.pop()[1].aclose()
        if self._closing:
            await asyncio.wait(self._closing)

    def _make(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_S)
        return httpx.AsyncHTTPTransport(verify=self._trust, limits=limits, trust_env=False)

    def _close_idle(self) -> None:
        self._sweep = None
        loop = asyncio.get_running_loop()
        while self._free and self._free[0][0] <= loop.time() - IDLE_S:
            task = loop.create_task(self._free.popleft()[1].aclose())
            self._closing.add(task)
            task.add_done_callback(self._closing.discard)
        if self._free:
            self._sweep = loop.call_at(self._free[0][0] + IDLE_S, self._close_idle)


REDIRECTS_MAX: Final = 3

TEXT_BYTES_MAX: Final = 300
"""How much of an error response is kept for the reason."""

READ_BYTES_MAX: Final = 64 * 1024
"""How much of a response is read so that its connection can be reused; with a longer one it is closed."""

PLACED_MAX: Final = 64

_REDIRECTS: Final = frozenset({301, 302, 307, 308})

_DEFAULT_PORTS: Final = {"http": 80, "https": 443}

_UNSENT: Final = (httpx.ConnectError, httpx.ConnectTimeout, socket.gaierror)

_USER_AGENT: Final = f"Millstream/{__version__}".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The endpoint of a subscription, and the form of its requests."""

    url: str
    headers: dict[str, str]
    keys: tuple[bytes, ...]
    timeout_s: float
    is_once: bool = False
    """Whether nothing is resent that the endpoint may have received."""


class Sender:
    def __init__(self, target: Target, trust: ssl.SSLContext, *, private_allowed: bool) -> None:
        self._target = target
        self._url = httpx.URL(target.url)
        self._fixed: Headers = [(name.encode(), value.encode()) for name, value in target.headers.items()]
        named = {name.lower() for name in target.headers}
        for name, value in ((b"user-agent", _USER_AGENT), (b"accept", b"*/*"), (b"accept-encoding", b"identity")):
            if name.decode() not in named:
                self._fixed.append((name, value))
        self._host = self._url.raw_host.decode("ascii")
        self._addresses = Addresses(self._host, private_allowed=private_allowed)
        self._placed: dict[tuple[httpx.URL, str], httpx.URL] = {}
        self._connections = ConnectionPool(trust)

    async def close(self) -> None:
        await self._connections.close()

    async def post(self, content: Content) -> EndpointResponse:
        """Send a message; failures are part of the response."""
        try:
            async with asyncio.timeout(self._target.timeout_s):
                return await self._send_following_redirects(content)
        except TimeoutError:
            return EndpointResponse(0, f"no response within {self._target.timeout_s:g} s")
        except PolicyViolation as refused:
            return EndpointResponse(0, str(refused), is_refused=True)
        except (httpx.HTTPError, httpx.InvalidURL, OSError, ssl.SSLError) as error:
            self._addresses.forget()
            return EndpointResponse(0, _line(str(error) or type(error).__name__), is_unsent=isinstance(error, _UNSENT))

    async def _send_following_redirects(self, content: Content) -> EndpointResponse:
        url = self._url
        for _ in range(REDIRECTS_MAX + 1):
            response, location = await self._send(url, content)
            if response.status not in _REDIRECTS:
                return response
            following = None if location is None else url.join(location)
            if following is None or not _is_within(url, following):
                return response._replace(text="it redirects to another host, which is not allowed")
            url = following
        return response._replace(text=f"it redirects more than {REDIRECTS_MAX} times")

    async def _send(self, url: httpx.URL, content: Content) -> tuple[EndpointResponse, str | None]:
        """Send to the first address that accepts a connection."""
        failed: Exception | None = None
        for address in await self._addresses.find():
            try:
                result = await self._exchange(url, address, content)
            except httpx.ConnectError as error:
                failed = error
                continue
            except (httpx.RemoteProtocolError, httpx.ReadError, httpx.WriteError) as broken:
                if self._target.is_once:
                    raise
                # A persistent connection may just have been closed by the peer; a new one decides.
                try:
                    result = await self._exchange(url, address, content)
                except _UNSENT:
                    # The first request may have reached the endpoint, and may even have crashed it.
                    raise broken from None
            self._addresses.prefer(address)
            return result
        raise failed or OSError(f"{url.host} has no address")

    async def _exchange(self, url: httpx.URL, address: str, content: Content) -> tuple[EndpointResponse, str | None]:
        async with self._connections.borrow() as connection:
            return await _read(await connection.handle_async_request(self._request(url, address, content)))

    def _request(self, url: httpx.URL, address: str, content: Content) -> httpx.Request:
        now_s = int(time())
        headers = [
            (b"host", url.netloc),
            *self._fixed,
            *content.headers,
            (ID, content.message_id),
            (TIMESTAMP, b"%d" % now_s),
        ]
        if self._target.keys:
            headers.append((SIGNATURE, signature(self._target.keys, content.message_id, now_s, content.body)))
        timeout_s = self._target.timeout_s
        return httpx.Request(
            "POST",
            self._with_address(url, address),
            headers=headers,
            content=content.body,
            extensions={
                "sni_hostname": self._host,
                # Shorter for connecting, which distinguishes an unreachable endpoint from one that does not respond.
                "timeout": {"connect": timeout_s / 2, **dict.fromkeys(("read", "write", "pool"), timeout_s)},
            },
        )

    def _with_address(self, url: httpx.URL, address: str) -> httpx.URL:
        placed = self._placed.get((url, address))
        if placed is None:
            if len(self._placed) >= PLACED_MAX:
                self._placed.clear()
            placed = self._placed[url, address] = url.copy_with(host=address)
        return placed


def trusted() -> ssl.SSLContext:
    """Return the certificate authorities of the machine and of Python's libraries."""
    context = ssl.create_default_context()
    context.load_verify_locations(certifi.where())
    return context


async def _read(response: httpx.Response) -> tuple[EndpointResponse, str | None]:
    text = b""
    read = 0
    try:
        async for piece in cast("AsyncIterable[bytes]", response.stream):
            read += len(piece)
            if len(text) < TEXT_BYTES_MAX and not response.is_success:
                text += piece
            if read > READ_BYTES_MAX:
                break
    finally:
        await response.aclose()
    excerpt = _line(text[:TEXT_BYTES_MAX].decode(errors="replace"))
    result = EndpointResponse(response.status_code, excerpt, retry_after(response.headers.get("retry-after")))
    return result, response.headers.get("location")


def _is_within(url: httpx.URL, following: httpx.URL) -> bool:
    """Whether a redirect stays on the host: the same origin, or an upgrade to TLS."""
    if following.host != url.host or following.userinfo:
        return False
    if following.scheme == url.scheme:
        return _port(following) == _port(url)
    return (url.scheme, following.scheme) == ("http", "https")


def _port(url: httpx.URL) -> int | None:
    return url.port or _DEFAULT_PORTS.get(url.scheme)


def _line(text: str) -> str:
    return " ".join("".join(character if character.isprintable() else " " for character in text).split())
