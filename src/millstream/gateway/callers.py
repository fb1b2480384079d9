"""The callers of a gateway: its node authenticates each of them, and the gateway uses connections with their rights.

The gateway forwards the caller's credentials and gets an assertion that the node has signed, with which it connects to
every node of the cluster. It cannot assert identities itself. Results are cached for a short time under a keyed hash of
the credential, never the credential itself, and equal callers share their connections.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import hmac
import logging
import secrets
import time
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager, suppress
from http import HTTPStatus
from typing import Final, NamedTuple

from millstream.core.crowding import is_crowding, network_of
from millstream.core.errors import MillstreamError
from millstream.gateway.api.problem import RETRY_S, Refused, refusal_of
from millstream.gateway.api.services import Services
from millstream.protocol.private.message import decode, encode
from millstream.protocol.private.security_messages import (
    BASIC,
    BEARER,
    NO_CREDENTIAL,
    AuthenticateRequest,
    AuthenticateResponse,
)
from millstream.protocol.wire.credentials import on_behalf_of
from millstream.protocol.wire.error_codes import error_from_code

_logger = logging.getLogger(__name__)

RENEW_S: Final = 60.0
"""How long a response of the node is used again for the same credential; half of what an assertion lasts."""
REMEMBERED_MAX: Final = 4096
CALLERS_MAX: Final = 256
"""Callers with their own connections; those idle the longest are closed first."""
CHECK_INTERVAL_S_MIN: Final = 0.1
IDLE_S: Final = 60.0
"""How long the connections of a caller without requests stay open."""
PENDING_PER_HOST_MAX: Final = 32
"""Credentials of one address that are being verified, or whose failure is held back."""
CREDENTIAL_BYTES_MAX: Final = 24 * 1024
AUTHENTICATION_FAILED: Final = 58
CHALLENGE: Final = 'Basic realm="millstream", charset="UTF-8", Bearer realm="millstream"'

Headers = Iterable[tuple[bytes, bytes]]


class CallerCredentials(NamedTuple):
    scheme: str
    user: str
    secret: str
    host: str

    def __repr__(self) -> str:
        return f"Shown(scheme={self.scheme!r}, user={self.user!r}, host={self.host!r})"


class OpenedSession(NamedTuple):
    """A sealed session, and when it ends, on the wall clock."""

    session: str
    expires_ms: int


class Caller:
    """A caller that the gateway acts for, and the services that it uses."""

    def __init__(
        self, principal: str, assertion: str, gateway: Services, renew: Callable[[Caller], Awaitable[None]]
    ) -> None:
        self.principal = principal
        self.assertion = assertion
        self.services = gateway.acting_for(principal, on_behalf_of(lambda: self.assertion, lambda: renew(self)))
        self.requests = 0
        """Requests in progress."""
        self.shown: CallerCredentials | None = None
        """The credentials of the requests in progress; not kept beyond them."""
        self.is_closed = False
        self.closing: asyncio.TimerHandle
        """Closes the connections when there have been no requests for a while."""


class _CachedCaller(NamedTuple):
    identity: tuple[str, str]
    caller: Caller
    until: float
    """The end of its validity, by the loop's monotonic clock."""


class Callers:
    def __init__(self, gateway: Services, *, requires: bool) -> None:
        self._gateway = gateway
        self._requires = requires
        self._key = secrets.token_bytes(32)
        self._remembered: OrderedDict[bytes, _CachedCaller] = OrderedDict()
        self._callers: OrderedDict[tuple[str, str], Caller] = OrderedDict()
        self._verifying: dict[bytes, asyncio.Task[_CachedCaller]] = {}
        self._pending: Counter[str] = Counter()
        self._closing: set[asyncio.Task[None]] = set()

    def acting_for(self, headers: Headers, host: str) -> AbstractAsyncContextManager[Caller]:
        """Authenticate the caller of a request, and keep its connections open meanwhile; raise `Refused` otherwise."""
        return self.acting_as(self.read(headers, host))

    @asynccontextmanager
    async def acting_as(self, credentials: CallerCredentials) -> AsyncIterator[Caller]:
        """Authenticate given credentials, as `acting_for` does."""
        caller = (await self._find(credentials)).caller
        while caller.is_closed:
            # Another caller needed the room before this request began.
            caller = (await self._find(credentials)).caller
        caller.requests += 1
        caller.shown = credentials
        caller.closing.cancel()
        try:
            yield caller
        finally:
            caller.requests -= 1
            if not caller.requests:
                caller.shown = None
                caller.closing = self._close_later(caller)

    async def until_lapsed(self, credentials: CallerCredentials) -> Refused:
        """Wait until the credentials of a caller are no longer valid; return why."""
        now = asyncio.get_running_loop().time
        verified_at = now()
        while True:
            refused: Refused | None = None
            try:
                caller = await self._find(credentials)
                verified_at = now()
            except Refused as error:
                refused = error
            except MillstreamError as error:
                refused = refusal_of(error)
            # A node that cannot respond says nothing about the caller, until the last assertion has expired.
            if refused is not None and (refused.status is HTTPStatus.UNAUTHORIZED or now() - verified_at > RENEW_S):
                return refused
            await asyncio.sleep(RETRY_S if refused is not None else max(CHECK_INTERVAL_S_MIN, caller.until - now()))

    async def verify_again(self, headers: Headers, host: str) -> None:
        """Drop the cached result of a caller whose assertion a node has refused, and ask again.

        Raise `Refused` unless the refusal was temporary, as by a node that does not know a change yet.
        """
        credentials = self.read(headers, host)
        self._remembered.pop(self._credential_digest(credentials), None)
        await self._find(credentials)

    async def _renew(self, caller: Caller) -> None:
        """Replace an assertion that a node refused: the user was deleted and created again, or the node restarted."""
        shown = caller.shown
        if shown is None:
            return
        mark = self._credential_digest(shown)
        remembered = self._remembered.get(mark)
        if remembered is not None and remembered.caller.assertion == caller.assertion:
            del self._remembered[mark]
        # Without another assertion, the connection fails as before.
        with suppress(Refused):
            caller.assertion = (await self._find(shown)).caller.assertion

    async def open_session(self, credentials: CallerCredentials, lifetime_s: int) -> OpenedSession:
        """Make the node open a session for a caller's credentials; raise `Refused` if they are not valid."""
        with self.verifying(credentials.host):
            response = await self._authenticate(credentials, session_s=lifetime_s)
        return OpenedSession(response.session, response.session_expires_ms)

    async def close(self) -> None:
        for task in self._verifying.values():
            task.cancel()
        for caller in tuple(self._callers.values()):
            self._close(caller)
        if self._closing:
            await asyncio.wait(self._closing)

    # -- authentication -------------------------------------------------------------------------------------

    def read(self, headers: Headers, host: str) -> CallerCredentials:
        """Read the credentials of a request; raise `Refused` if it has none, and some are required."""
        authorizations = [value for name, value in headers if name == b"authorization"]
        if len(authorizations) > 1:
            raise Refused(HTTPStatus.BAD_REQUEST, "a request has one Authorization header, not several")
        if not authorizations:
            if self._requires:
                raise unauthorized("authentication is required; send a user and a password (Basic) or a token (Bearer)")
            return CallerCredentials(NO_CREDENTIAL, "", "", host)
        return _parse(authorizations[0], host)

    def _credential_digest(self, credentials: CallerCredentials) -> bytes:
        return hmac.digest(self._key, "\0".join(credentials).encode(), "sha256")

    async def _find(self, credentials: CallerCredentials) -> _CachedCaller:
        mark = self._credential_digest(credentials)
        cached = self._remembered.get(mark)
        if cached is not None and asyncio.get_running_loop().time() < cached.until:
            self._callers.move_to_end(cached.identity)
            return cached
        verifying = self._verifying.get(mark)
        if verifying is None:
            self._admit(credentials.host)
            verifying = self._verifying[mark] = asyncio.ensure_future(self._verify(mark, credentials))
            verifying.add_done_callback(lambda done: self._on_verified(mark, credentials.host, done))
        # Shielded, since requests with the same credential wait for one response.
        return await asyncio.shield(verifying)

    @contextmanager
    def verifying(self, host: str) -> Iterator[None]:
        """Count a credential of an address while it is being verified; raise `Refused` if it has too many."""
        self._admit(host)
        try:
            yield
        finally:
            self._release(host)

    def _admit(self, host: str) -> None:
        """Count a credential of an address that is being verified."""
        host = network_of(host)
        if self._pending[host] >= PENDING_PER_HOST_MAX:
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                "too many credentials of this address are being verified; try again later",
                headers={"retry-after": str(RETRY_S)},
            )
        self._pending[host] += 1

    def _release(self, host: str) -> None:
        host = network_of(host)
        self._pending[host] -= 1
        if not self._pending[host]:
            del self._pending[host]

    def _on_verified(self, mark: bytes, host: str, done: asyncio.Task[_CachedCaller]) -> None:
        del self._verifying[mark]
        self._release(host)
        if not done.cancelled():
            # Retrieved, so that asyncio does not log an error whose callers have all gone.
            done.exception()

    async def _authenticate(self, credentials: CallerCredentials, *, session_s: int = 0) -> AuthenticateResponse:
        """Ask the node whose credentials these are."""
        request = AuthenticateRequest(
            scheme=credentials.scheme,
            host=credentials.host,
            user=credentials.user,
            secret=credentials.secret,
            session_s=session_s,
        )
        client = self._gateway.client
        response = decode(await client.private(None, request.KEY, encode(request), waits=True), AuthenticateResponse)
        if response.error == AUTHENTICATION_FAILED:
            # Delayed here and not by the node, whose connections others need.
            await asyncio.sleep(response.pause_ms / 1000)
            raise unauthorized(response.message or "authentication failed")
        if response.error:
            raise error_from_code(response.error, response.message)
        return response

    async def _verify(self, mark: bytes, credentials: CallerCredentials) -> _CachedCaller:
        response = await self._authenticate(credentials)
        lifetime_s = RENEW_S if not response.expires_ms else min(RENEW_S, response.expires_ms / 1000 - time.time())
        identity = (response.identity, credentials.host)
        cached = _CachedCaller(
            identity, self._caller(identity, response), asyncio.get_running_loop().time() + max(lifetime_s, 0.0)
        )
        self._remembered[mark] = cached
        self._remembered.move_to_end(mark)
        if len(self._remembered) > REMEMBERED_MAX:
            self._remembered.popitem(last=False)
        return cached

    # -- their connections ----------------------------------------------------------------------------------

    def _caller(self, identity: tuple[str, str], response: AuthenticateResponse) -> Caller:
        known = self._callers.get(identity)
        if known is not None:
            known.assertion = response.assertion
            self._callers.move_to_end(identity)
            return known
        busy = [caller.principal for caller in self._callers.values() if caller.requests]
        if len(busy) >= CALLERS_MAX or is_crowding(busy.count(response.principal), len(busy), CALLERS_MAX):
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"{len(busy)} other callers have requests in progress here; try another node, or again later",
                headers={"retry-after": str(RETRY_S)},
            )
        if len(self._callers) >= CALLERS_MAX:
            self._close(next(caller for caller in self._callers.values() if not caller.requests))
        made = self._callers[identity] = Caller(response.principal, response.assertion, self._gateway, self._renew)
        made.closing = self._close_later(made)
        return made

    def _close_later(self, caller: Caller) -> asyncio.TimerHandle:
        return asyncio.get_running_loop().call_later(IDLE_S, self._close, caller)

    def _close(self, caller: Caller) -> None:
        """Forget a caller without requests, and close its connections."""
        caller.closing.cancel()
        caller.is_closed = True
        for identity in [credential for credential, known in self._callers.items() if known is caller]:
            del self._callers[identity]
        for mark in [credential for credential, known in self._remembered.items() if known.caller is caller]:
            del self._remembered[mark]
        task = asyncio.ensure_future(self._close_services(caller))
        self._closing.add(task)
        task.add_done_callback(self._closing.discard)

    async def _close_services(self, caller: Caller) -> None:
        try:
            await caller.services.close()
        except MillstreamError as error:
            _logger.warning(
                "connections of a caller were not closed cleanly",
                extra={"principal": caller.principal, "error": str(error)},
            )


def unauthorized(detail: str) -> Refused:
    """Refuse a request whose caller is not authenticated."""
    return Refused(HTTPStatus.UNAUTHORIZED, detail, headers={"www-authenticate": CHALLENGE})


def _parse(authorization: bytes, host: str) -> CallerCredentials:
    scheme, _, content = authorization.partition(b" ")
    name, content = scheme.decode("latin-1").lower(), content.strip()
    if len(content) > CREDENTIAL_BYTES_MAX:
        raise unauthorized(f"the credential has more than {CREDENTIAL_BYTES_MAX} bytes")
    with suppress(ValueError, binascii.Error):
        if name == BEARER and content:
            return CallerCredentials(BEARER, "", content.decode("ascii"), host)
        if name == BASIC:
            user, colon, secret = base64.b64decode(content, validate=True).decode().partition(":")
            # Hashing a password treats zeros at its end as if they were not there.
            if colon and user and secret and "\0" not in user + secret:
                return CallerCredentials(BASIC, user, secret, host)
    raise unauthorized(
        "the Authorization header is neither `Basic` with a user and a password nor `Bearer` with a token"
    )
