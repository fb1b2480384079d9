"""Requests to etcd through its JSON door, which every member has on its client port: the members take turns.

What is known of a request that failed decides everything: one that never left, or that etcd surely did not carry out,
goes to the next member; one whose answer was lost is tried again only if doing it twice does no harm.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncGenerator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx

from millstream.cluster.etcd_messages import Failure, Token, decode, encode
from millstream.cluster.store_health import StoreHealth
from millstream.model.errors import StoreRefused, StoreUnavailable, WatchLost

CONNECT_S_MAX = 1.0
ATTEMPT_S_MAX = 2.0
"""How long one member may take to answer a request that another one can be asked as well."""

CONNECTIONS_MAX = 32

_UNAUTHENTICATED = 16
_OUT_OF_RANGE = 11
_UNAVAILABLE = 14
# Not found, invalid, denied, exhausted, precondition, out of range, unimplemented, unauthenticated.
_SURELY_NOT_DONE = frozenset({3, 5, 7, 8, 9, _OUT_OF_RANGE, 12, _UNAUTHENTICATED})
_NOT_SENT = (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout)
# A member that is cut off from the others refuses at once, instead of waiting for them.
_HEADERS = {"Content-Type": "application/json", "Grpc-Metadata-hasleader": "true"}
_KEEP_ALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5),
    (socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 2),
    (socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3),
    (socket.IPPROTO_TCP, socket.TCP_NODELAY, 1),
]
"""A watch waits for ever; this is how it learns that the other side is gone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdAddress:
    """Where etcd is and how to get in."""

    endpoints: tuple[str, ...]
    """One URL per member, `http://host:port` or `https://host:port`."""
    user: str | None = None
    password: str | None = None
    ca: str | None = None
    """File with the authority that signed etcd's certificate."""
    certificate: str | None = None
    """File with this node's certificate, where etcd asks for one; `key` has its private key."""
    key: str | None = None

    @classmethod
    def parse(cls, urls: str, **options: str | None) -> EtcdAddress:
        """Several URLs with commas in between; a user and password may be in the first."""
        endpoints = tuple(part.strip().rstrip("/") for part in urls.split(",") if part.strip())
        parsed = [httpx.URL(endpoint) for endpoint in endpoints]
        if not parsed or any(url.scheme not in ("http", "https") or not url.host for url in parsed):
            raise ValueError(f"etcd's addresses look like http://host:2379,http://other:2379, not {urls!r}")
        if parsed[0].username:
            options = {"user": parsed[0].username, "password": parsed[0].password, **options}
        clean = tuple(str(url.copy_with(username=None, password=None)).rstrip("/") for url in parsed)
        return cls(endpoints=clean, **options)

    def verify(self) -> ssl.SSLContext | bool:
        """How certificates are checked."""
        if not self.endpoints[0].startswith("https"):
            return True
        context = ssl.create_default_context(cafile=self.ca)
        if self.certificate is not None:
            context.load_cert_chain(self.certificate, self.key)
        return context


class Refusal(Exception):
    """An answer that is an error."""

    def __init__(self, status: int, content: bytes) -> None:
        failure = _failure(content)
        self.code = failure.code or failure.grpc_code
        self.reason = failure.message or failure.error or f"HTTP status {status}"
        super().__init__(self.reason)

    @property
    def wants_login(self) -> bool:
        """Whether another token would help."""
        return self.code == _UNAUTHENTICATED or "auth store is old" in self.reason or "name is empty" in self.reason

    @property
    def surely_not_done(self) -> bool:
        """Whether it is certain that the request had no effect."""
        return self.code in _SURELY_NOT_DONE or self.is_cut_off

    @property
    def is_cut_off(self) -> bool:
        """Whether this member refused before it did anything, since it has no leader."""
        return self.code == _UNAVAILABLE and "no leader" in self.reason


class EtcdGateway:
    """Asks one member after the other until one answers."""

    def __init__(self, address: EtcdAddress, health: StoreHealth, *, request_s_max: float) -> None:
        self.address = address
        self.health = health
        self._request_s_max = request_s_max
        self._current = 0
        self._moved: list[Callable[[], None]] = []
        self._token = ""
        transport = httpx.AsyncHTTPTransport(
            verify=address.verify(),
            socket_options=_KEEP_ALIVE,
            limits=httpx.Limits(max_connections=CONNECTIONS_MAX, max_keepalive_connections=CONNECTIONS_MAX),
        )
        self._client = httpx.AsyncClient(transport=transport, trust_env=False)

    @property
    def endpoint(self) -> str:
        """The member that is asked first."""
        return self.address.endpoints[self._current]

    @property
    def headers(self) -> dict[str, str]:
        """What goes with every request."""
        return _HEADERS | {"Authorization": self._token} if self._token else _HEADERS

    def when_moved(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Have `listener` called when another member is turned to, until the function returned is called."""
        self._moved.append(listener)
        return lambda: self._moved.remove(listener)

    def move_on(self, endpoint: str) -> None:
        """Turn to the next member, if this one is still the one that is asked."""
        if endpoint != self.endpoint:
            return
        self._current = (self._current + 1) % len(self.address.endpoints)
        for listener in tuple(self._moved):
            listener()

    async def ask(self, path: str, message: Any, *, repeatable: bool) -> bytes:
        """The content of the answer to a request; one that is repeatable is tried until the time is up."""
        sent = False
        reason = "none of its members could be reached"
        body = encode(message)
        try:
            async with asyncio.timeout(self._request_s_max):
                for _ in range(len(self.address.endpoints) + 1):
                    endpoint = self.endpoint
                    try:
                        return await self._ask(endpoint, path, body, repeatable=repeatable)
                    except Refusal as error:
                        if not error.is_cut_off and error.surely_not_done:
                            self.health.answered()
                            raise _refused(error) from error
                        reason, lost = error.reason, not error.surely_not_done
                    except httpx.TransportError as error:
                        reason, lost = _text(error), not isinstance(error, _NOT_SENT)
                    self.move_on(endpoint)
                    sent = sent or lost
                    if lost and not repeatable:
                        break
        except TimeoutError:
            sent, reason = True, f"no answer within {self._request_s_max:g} s"
            self.move_on(endpoint)
        self.health.silent(reason)
        raise (StoreUnavailable if sent else StoreRefused)(f"etcd gives no answer: {reason}")

    async def _ask(self, endpoint: str, path: str, body: bytes, *, repeatable: bool) -> bytes:
        try:
            return await self._post(endpoint, path, body, repeatable=repeatable)
        except Refusal as error:
            if not error.wants_login or self.address.user is None:
                raise
        await self._log_in(endpoint)
        return await self._post(endpoint, path, body, repeatable=repeatable)

    async def _post(self, endpoint: str, path: str, body: bytes, *, repeatable: bool) -> bytes:
        timeout = httpx.Timeout(
            ATTEMPT_S_MAX if repeatable else self._request_s_max, connect=CONNECT_S_MAX, pool=CONNECT_S_MAX
        )
        answer = await self._client.post(endpoint + path, content=body, headers=self.headers, timeout=timeout)
        if answer.status_code != httpx.codes.OK:
            raise Refusal(answer.status_code, answer.content)
        self.health.answered()
        return answer.content

    async def _log_in(self, endpoint: str) -> None:
        self._token = ""
        body = encode({"name": self.address.user, "password": self.address.password or ""})
        self._token = decode(await self._post(endpoint, "/v3/auth/authenticate", body, repeatable=True), Token).token

    @asynccontextmanager
    async def stream(self, path: str, message: Any) -> AsyncGenerator[httpx.Response, None]:
        """A request whose answer has no end."""
        endpoint = self.endpoint
        timeout = httpx.Timeout(None, connect=CONNECT_S_MAX, pool=CONNECT_S_MAX, write=ATTEMPT_S_MAX)
        if self.address.user is not None and not self._token:
            await self._log_in(endpoint)
        body = encode(message)
        request = self._client.stream("POST", endpoint + path, content=body, headers=self.headers, timeout=timeout)
        async with request as answer:
            if answer.status_code != httpx.codes.OK:
                raise Refusal(answer.status_code, await answer.aread())
            yield answer

    def forget_token(self) -> None:
        """Log in anew with the next request, since the token at hand was refused."""
        self._token = ""

    async def close(self) -> None:
        """Close every connection."""
        await self._client.aclose()


def _failure(content: bytes) -> Failure:
    try:
        return decode(content, Failure)
    except StoreUnavailable:
        return Failure()


def _refused(error: Refusal) -> StoreUnavailable:
    if error.code == _OUT_OF_RANGE:
        return WatchLost(f"etcd has forgotten that part of its history: {error.reason}")
    return StoreRefused(f"etcd refused: {error.reason}")


def _text(error: Exception) -> str:
    return str(error) or type(error).__name__
