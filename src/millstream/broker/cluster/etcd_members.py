"""Requests to etcd, whose members take turns.

What is known about a failed request decides everything. One that never left, or that etcd certainly did not carry out,
may go to the next member; one whose response was lost is repeated only if doing it twice does no harm.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import grpc
from aetcd import rpc

from millstream.broker.cluster.etcd_address import EtcdAddress, EtcdCredentials
from millstream.broker.cluster.store import StoreHealth
from millstream.core.errors import InvalidSetting, StoreDenied, StoreRefused, StoreUnavailable, WatchLost

_logger = logging.getLogger(__name__)

PROBE_S_MAX = 0.5

_REPLY_BYTES_MAX = 512

_SHOWN_MAX = 60

_PROBE = b"GET /version HTTP/1.0\r\n\r\n"

_ETCD = b"etcdserver"


async def diagnose_endpoint(endpoint: str, *, with_tls: bool) -> str:
    """Return why a member did not answer, judging by its reply to a plain HTTP request."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"{endpoint} did not answer"
    except OSError as error:
        # The loop's own words repeat the address; a name that is not found has no number.
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        return f"{endpoint} cannot be reached ({why})"
    try:
        return _diagnose_reply(endpoint, await _read_reply(reader, writer), with_tls=with_tls)
    finally:
        writer.transport.abort()


async def _read_reply(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    reply = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S_MAX):
            writer.write(_PROBE)
            while len(reply) < _REPLY_BYTES_MAX and (more := await reader.read(_REPLY_BYTES_MAX)):
                reply += more
    return reply


def _diagnose_reply(endpoint: str, reply: bytes, *, with_tls: bool) -> str:
    if _ETCD in reply:
        return f"etcd at {endpoint} answers without TLS" if with_tls else f"etcd at {endpoint} accepts no requests"
    if not reply:
        return f"{endpoint} accepts connections but does not answer"
    first = reply.splitlines()[0][:_SHOWN_MAX].decode("ascii", "backslashreplace")
    return f"{endpoint} is not etcd; it answers {first!r}"


CONNECT_S_MAX = 1.0

ATTEMPT_S_MAX = 2.0
"""How long one member may take to answer a request that can go to another one as well."""

ROUNDS = 3
"""How often each member is tried: the first attempt may have met a connection that was about to break."""

PAUSE_S = 0.2

OPTIONS = (
    # A watch waits forever; keepalives detect that the other side is gone or hangs.
    ("grpc.keepalive_time_ms", 10_000),
    ("grpc.keepalive_timeout_ms", 3_000),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.initial_reconnect_backoff_ms", 100),
    ("grpc.min_reconnect_backoff_ms", 1_000),
    ("grpc.max_reconnect_backoff_ms", 1_000),
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    # Only we know which requests may be repeated.
    ("grpc.enable_retries", 0),
    ("grpc.enable_http_proxy", 0),
    ("grpc.use_local_subchannel_pool", 1),
)

_CODE = grpc.StatusCode

_CERTAINLY_NOT_DONE = frozenset(
    {
        _CODE.INVALID_ARGUMENT,
        _CODE.NOT_FOUND,
        _CODE.PERMISSION_DENIED,
        _CODE.RESOURCE_EXHAUSTED,
        _CODE.FAILED_PRECONDITION,
        _CODE.OUT_OF_RANGE,
        _CODE.UNIMPLEMENTED,
        _CODE.UNAUTHENTICATED,
    }
)

_DENIED = frozenset({_CODE.PERMISSION_DENIED, _CODE.UNAUTHENTICATED})


class NotConnected(Exception):
    """A member cannot be reached, so nothing was sent to it."""


class EtcdMember:
    """One member and the connection to it, which is opened when it is first needed."""

    def __init__(self, endpoint: str, credentials: Any) -> None:
        self.endpoint = endpoint
        self.channel = (
            grpc.aio.insecure_channel(endpoint, options=OPTIONS)
            if credentials is None
            else grpc.aio.secure_channel(endpoint, credentials, options=OPTIONS)
        )
        self.keys = rpc.KVStub(self.channel)
        self.leases = rpc.LeaseStub(self.channel)
        self.watches = rpc.WatchStub(self.channel)
        self.logins = rpc.AuthStub(self.channel)

    async def connect(self) -> None:
        """Wait until there is a connection, or raise `NotConnected`."""
        try:
            async with asyncio.timeout(CONNECT_S_MAX):
                while (state := self.channel.get_state(try_to_connect=True)) != grpc.ChannelConnectivity.READY:
                    if state == grpc.ChannelConnectivity.TRANSIENT_FAILURE:
                        raise NotConnected(f"{self.endpoint} cannot be reached")
                    await self.channel.wait_for_state_change(state)
        except TimeoutError:
            raise NotConnected(f"{self.endpoint} did not answer within {CONNECT_S_MAX:g} s") from None


Call = Callable[[EtcdMember], Any]


class EtcdMembers:
    """Asks one member after another until one answers."""

    def __init__(self, address: EtcdAddress, health: StoreHealth, *, request_s_max: float) -> None:
        self.address = address
        self.health = health
        self._request_s_max = request_s_max
        self.credentials = EtcdCredentials(address)
        self._password = address.password
        self._members: dict[str, EtcdMember] = {}
        self._current = 0
        self._moved: list[Callable[[], None]] = []
        self._token = ""

    @property
    def endpoint(self) -> str:
        """The member that is asked first."""
        return self.address.endpoints[self._current]

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Return the metadata of every request."""
        # A member that is cut off from the others must refuse at once, instead of waiting for them.
        leader = ("hasleader", "true")
        return (leader, ("token", self._token)) if self._token else (leader,)

    def on_moved(self, listener: Callable[[], None]) -> Callable[[], None]:
        """Call `listener` when another member becomes the first, until the returned function is called."""
        self._moved.append(listener)
        return lambda: self._moved.remove(listener)

    def move_on(self, endpoint: str) -> None:
        """Make the next member the first, unless another request has done so."""
        if endpoint != self.endpoint:
            return
        self._current = (self._current + 1) % len(self.address.endpoints)
        for listener in tuple(self._moved):
            listener()

    async def connected(self) -> EtcdMember:
        """Return the first member, connected and logged in."""
        member = self._member(self.endpoint)
        await member.connect()
        if self.address.user is not None and not self._token:
            await self._log_in(member)
        return member

    async def ask(self, call: Call, request: Any, *, repeatable: bool) -> Any:
        """Send a request and return its response; a repeatable one to every member, any other until it has left."""
        reason = unreachable = ""
        maybe_done = False
        for attempt in range(ROUNDS * len(self.address.endpoints)):
            endpoint = self.endpoint
            if attempt and attempt % len(self.address.endpoints) == 0:
                await asyncio.sleep(PAUSE_S * attempt / len(self.address.endpoints))
            try:
                answer = await self._ask(call, request, repeatable=repeatable)
            except NotConnected as error:
                reason, lost, unreachable = str(error), False, endpoint
            except grpc.aio.AioRpcError as error:
                if is_final(error):
                    self.health.answered()
                    raise _refused(error) from error
                reason, lost, unreachable = f"{error.code().name}, {error.details()}", not _is_cut_off(error), ""
            else:
                self.health.answered()
                return answer
            self.move_on(endpoint)
            maybe_done = maybe_done or lost
            if lost and not repeatable:
                break
        if unreachable:
            reason = await diagnose_endpoint(unreachable, with_tls=self.address.encrypted)
        self.health.silent(reason)
        raise (StoreUnavailable if maybe_done else StoreRefused)(f"etcd does not answer: {reason}")

    async def _ask(self, call: Call, request: Any, *, repeatable: bool) -> Any:
        member = await self.connected()
        timeout_s = min(ATTEMPT_S_MAX, self._request_s_max) if repeatable else self._request_s_max
        try:
            return await call(member)(request, timeout=timeout_s, metadata=self.metadata)
        except grpc.aio.AioRpcError as error:
            if self.address.user is None or not wants_login(error):
                raise
        await self._log_in(member)
        return await call(member)(request, timeout=timeout_s, metadata=self.metadata)

    async def _log_in(self, member: EtcdMember) -> None:
        self._token = ""
        answer = await member.logins.Authenticate(self.login(), timeout=ATTEMPT_S_MAX, metadata=self.metadata)
        self._token = answer.token

    def login(self) -> Any:
        """Return the request for a token."""
        try:
            self._password = self.address.read_password()
        except InvalidSetting as error:
            _logger.warning("the password of etcd cannot be read; the last one is used", extra={"error": str(error)})
        return rpc.AuthenticateRequest(name=self.address.user, password=self._password)

    def use_token(self, token: str) -> None:
        """Use a token from elsewhere; an empty one makes the next request log in again."""
        self._token = token

    async def close(self) -> None:
        """Close every connection."""
        for member in self._members.values():
            await member.channel.close()
        self._members.clear()

    def _member(self, endpoint: str) -> EtcdMember:
        if self.credentials.follow():
            # What waits on a connection made with the old files keeps it.
            self._members.clear()
        member = self._members.get(endpoint)
        if member is None:
            member = self._members[endpoint] = EtcdMember(endpoint, self.credentials.current)
        return member


def wants_login(error: Any) -> bool:
    """Whether another token would help."""
    details = str(error.details())
    return error.code() == _CODE.UNAUTHENTICATED or "auth store is old" in details or "name is empty" in details


def is_final(error: Any) -> bool:
    """Return whether etcd answered without carrying out the request, and every member would answer the same."""
    return error.code() in _CERTAINLY_NOT_DONE


def _is_cut_off(error: Any) -> bool:
    """Whether this member refused before it did anything, because it has no leader."""
    return error.code() == _CODE.UNAVAILABLE and "no leader" in str(error.details())


def _refused(error: Any) -> StoreUnavailable:
    if error.code() == _CODE.OUT_OF_RANGE:
        return WatchLost(f"etcd has compacted that part of its history: {error.details()}")
    denied = error.code() in _DENIED or "authentication failed" in str(error.details()) or wants_login(error)
    return (StoreDenied if denied else StoreRefused)(f"etcd refused: {error.details()}")
