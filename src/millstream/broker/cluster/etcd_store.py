"""The coordination store on etcd, version 3: requests, leases, watches.

A lease is kept alive by its own thread for as long as the event loop is alive. A loop that is busy for a second does
not lose its lease, because the thread continues. If the loop hangs for the duration of the lease, the thread revokes
the lease, so that others take over.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import threading
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing, suppress
from copy import copy
from random import Random
from typing import Any

import grpc
from aetcd import rpc

from millstream.broker.cluster.etcd_address import EtcdAddress, EtcdCredentials
from millstream.broker.cluster.store import (
    Change,
    Entry,
    Event,
    Expect,
    Put,
    Snapshot,
    StoreHealth,
    check_changes,
)
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import CorruptState, InvalidSetting, StoreDenied, StoreRefused, StoreUnavailable, WatchLost

_logger = logging.getLogger(__name__)

PROBE_S_MAX = 0.5

_RESPONSE_BYTES_MAX = 512

_SHOWN_MAX = 60

_PROBE = b"GET /version HTTP/1.0\r\n\r\n"

_ETCD = b"etcdserver"


async def diagnose_endpoint(endpoint: str, *, with_tls: bool) -> str:
    """Return why a member did not respond, judging by its response to a plain HTTP request."""
    host, _, port = endpoint.rpartition(":")
    try:
        async with asyncio.timeout(PROBE_S_MAX):
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
    except TimeoutError:
        return f"{endpoint} did not respond"
    except OSError as error:
        # The loop's own message repeats the address; a name that is not found has no errno.
        number = error.errno or 0
        why = os.strerror(number) if number > 0 else error.strerror or str(error)
        return f"{endpoint} cannot be reached ({why})"
    try:
        return _diagnose_response(endpoint, await _read_response(reader, writer), with_tls=with_tls)
    finally:
        writer.transport.abort()


async def _read_response(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    response = b""
    with suppress(OSError, TimeoutError):
        async with asyncio.timeout(PROBE_S_MAX):
            writer.write(_PROBE)
            while len(response) < _RESPONSE_BYTES_MAX and (more := await reader.read(_RESPONSE_BYTES_MAX)):
                response += more
    return response


def _diagnose_response(endpoint: str, response: bytes, *, with_tls: bool) -> str:
    if _ETCD in response:
        return f"etcd at {endpoint} responds without TLS" if with_tls else f"etcd at {endpoint} accepts no requests"
    if not response:
        return f"{endpoint} accepts connections but does not respond"
    first = response.splitlines()[0][:_SHOWN_MAX].decode("ascii", "backslashreplace")
    return f"{endpoint} is not etcd; it returns {first!r}"


CONNECT_S_MAX = 1.0

ATTEMPT_S_MAX = 2.0
"""How long one member may take to respond to a request that can go to another one as well."""

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
    # Only the caller knows which requests may be repeated.
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
    """A member and the connection to it, which is opened when it is first needed."""

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
            raise NotConnected(f"{self.endpoint} did not respond within {CONNECT_S_MAX:g} s") from None


Call = Callable[[EtcdMember], Any]


class EtcdMembers:
    """Asks one member after another until one responds.

    A failed request that was never sent, or that etcd certainly did not execute, may go to the next member; one whose
    response was lost is repeated only if it is idempotent.
    """

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

    async def send(self, call: Call, request: Any, *, repeatable: bool) -> Any:
        """Send a request and return its response; try every member if it is repeatable, otherwise until it was sent."""
        reason = unreachable = ""
        maybe_done = False
        for attempt in range(ROUNDS * len(self.address.endpoints)):
            endpoint = self.endpoint
            if attempt and attempt % len(self.address.endpoints) == 0:
                await asyncio.sleep(PAUSE_S * attempt / len(self.address.endpoints))
            try:
                response = await self._send(call, request, repeatable=repeatable)
            except NotConnected as error:
                reason, lost, unreachable = str(error), False, endpoint
            except grpc.aio.AioRpcError as error:
                if is_final(error):
                    self.health.responded()
                    raise _refusal_error(error) from error
                reason, lost, unreachable = f"{error.code().name}, {error.details()}", not _is_cut_off(error), ""
            else:
                self.health.responded()
                return response
            self.move_on(endpoint)
            maybe_done = maybe_done or lost
            if lost and not repeatable:
                break
        if unreachable:
            reason = await diagnose_endpoint(unreachable, with_tls=self.address.encrypted)
        self.health.silent(reason)
        raise (StoreUnavailable if maybe_done else StoreRefused)(f"etcd does not respond: {reason}")

    async def _send(self, call: Call, request: Any, *, repeatable: bool) -> Any:
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
        response = await member.logins.Authenticate(self.login(), timeout=ATTEMPT_S_MAX, metadata=self.metadata)
        self._token = response.token

    def login(self) -> Any:
        try:
            self._password = self.address.read_password()
        except InvalidSetting as error:
            _logger.warning("the password of etcd cannot be read; the last one is used", extra={"error": str(error)})
        return rpc.AuthenticateRequest(name=self.address.user, password=self._password)

    def use_token(self, token: str) -> None:
        """Use a token from elsewhere; an empty one makes the next request log in again."""
        self._token = token

    async def close(self) -> None:
        for member in self._members.values():
            await member.channel.close()
        self._members.clear()

    def _member(self, endpoint: str) -> EtcdMember:
        if self.credentials.follow():
            # Requests that wait on a connection with the old files keep it.
            self._members.clear()
        member = self._members.get(endpoint)
        if member is None:
            member = self._members[endpoint] = EtcdMember(endpoint, self.credentials.current)
        return member


def wants_login(error: Any) -> bool:
    """Whether a new token could make the request succeed."""
    details = str(error.details())
    return error.code() == _CODE.UNAUTHENTICATED or "auth store is old" in details or "name is empty" in details


def is_final(error: Any) -> bool:
    """Return whether etcd responded without carrying out the request, and every member would do the same."""
    return error.code() in _CERTAINLY_NOT_DONE


def _is_cut_off(error: Any) -> bool:
    """Whether this member refused before it did anything, because it has no leader."""
    return error.code() == _CODE.UNAVAILABLE and "no leader" in str(error.details())


def _refusal_error(error: Any) -> StoreUnavailable:
    if error.code() == _CODE.OUT_OF_RANGE:
        return WatchLost(f"etcd has compacted that part of its history: {error.details()}")
    denied = error.code() in _DENIED or "authentication failed" in str(error.details()) or wants_login(error)
    return (StoreDenied if denied else StoreRefused)(f"etcd refused: {error.details()}")


RENEWALS = 3
"""How often a lease is renewed within its time to live."""

_BEATS = 6
_JOIN_S_MAX = 5.0


class EtcdSession:
    """A session, which is a lease in etcd."""

    def __init__(
        self, members: EtcdMembers, lease: int, ttl_s: float, clock: Clock, on_lost: Callable[[], None]
    ) -> None:
        self._members = members
        self._ttl_s = ttl_s
        self._clock = clock
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._ended = threading.Event()
        self._channels: dict[str, Any] = {}
        self._credentials = copy(members.credentials)
        self._last_heartbeat = clock.monotonic()
        self._renewed_at = self._last_heartbeat
        self._heartbeat_timer = self._loop.call_later(ttl_s / _BEATS, self._heartbeat)
        self._thread = threading.Thread(target=self._keep_alive, name="etcd-lease", daemon=True)
        self.lease = lease
        self.live = True
        self._thread.start()

    @property
    def confirmed(self) -> bool:
        return self.live and self._clock.monotonic() - self._renewed_at < self._ttl_s

    async def close(self) -> None:
        if self.live:
            self._stop()
            with suppress(StoreUnavailable):
                request = rpc.LeaseRevokeRequest(ID=self.lease)
                await self._members.send(lambda member: member.leases.LeaseRevoke, request, repeatable=True)
        await asyncio.to_thread(self._thread.join, _JOIN_S_MAX)

    def _heartbeat(self) -> None:
        self._last_heartbeat = self._clock.monotonic()
        self._heartbeat_timer = self._loop.call_later(self._ttl_s / _BEATS, self._heartbeat)

    def _stop(self) -> None:
        self.live = False
        self._heartbeat_timer.cancel()
        self._ended.set()

    def _on_lease_lost(self) -> None:
        if self.live:
            self._stop()
            self._on_lost()

    def _keep_alive(self) -> None:
        """Renew the lease until the session ends; runs in the thread."""
        try:
            # A closed loop raises RuntimeError: the process ends, and the lease expires.
            with suppress(RuntimeError):
                while not self._ended.wait(self._ttl_s / RENEWALS):
                    if not self._renew():
                        self._loop.call_soon_threadsafe(self._on_lease_lost)
                        return
        finally:
            for channel in self._channels.values():
                channel.close()

    def _renew(self) -> bool:
        """Renew the lease; return False if it is lost."""
        if self._clock.monotonic() - self._last_heartbeat >= self._ttl_s:
            self._send_to_any("LeaseRevoke", rpc.LeaseRevokeRequest(ID=self.lease), rpc.LeaseRevokeResponse)
            return False
        asked_at = self._clock.monotonic()
        response = self._send_to_any(
            "LeaseKeepAlive", rpc.LeaseKeepAliveRequest(ID=self.lease), rpc.LeaseKeepAliveResponse
        )
        if response is None:
            return True
        self._renewed_at = asked_at
        return bool(response.TTL > 0)

    def _send_to_any(self, method: str, request: Any, kind: Any) -> Any:
        """Send a request about the lease to any member; return None if it was not carried out."""
        reason = ""
        for _ in self._members.address.endpoints:
            endpoint = self._members.endpoint
            try:
                response = self._call(endpoint, f"Lease/{method}", request, kind)
            except grpc.RpcError as error:
                if is_final(error):
                    # An error response is a response too, for example that the lease no longer exists.
                    self._loop.call_soon_threadsafe(self._members.health.responded)
                    return None
                reason = str(error.details())
                self._loop.call_soon_threadsafe(self._members.move_on, endpoint)
                continue
            self._loop.call_soon_threadsafe(self._members.health.responded)
            return response
        self._loop.call_soon_threadsafe(self._members.health.silent, reason)
        return None

    def _call(self, endpoint: str, method: str, request: Any, kind: Any) -> Any:
        try:
            return self._post(endpoint, method, request, kind)
        except grpc.RpcError as error:
            if self._members.address.user is None or not wants_login(error):
                raise
        self._members.use_token("")
        response = self._post(endpoint, "Auth/Authenticate", self._members.login(), rpc.AuthenticateResponse)
        self._members.use_token(response.token)
        return self._post(endpoint, method, request, kind)

    def _post(self, endpoint: str, method: str, request: Any, kind: Any) -> Any:
        # A stream of requests that holds just one is the same on the wire as a single request.
        call = self._channel(endpoint).unary_unary(
            f"/etcdserverpb.{method}",
            request_serializer=type(request).SerializeToString,
            response_deserializer=kind.FromString,
        )
        return call(request, timeout=self._ttl_s / RENEWALS, metadata=self._members.metadata)

    def _channel(self, endpoint: str) -> Any:
        if self._credentials.follow():
            while self._channels:
                self._channels.popitem()[1].close()
        channel = self._channels.get(endpoint)
        if channel is None:
            credentials = self._credentials.current
            channel = (
                grpc.insecure_channel(endpoint, options=OPTIONS)
                if credentials is None
                else grpc.secure_channel(endpoint, credentials, options=OPTIONS)
            )
            self._channels[endpoint] = channel
        return channel


def _range_end(prefix: bytes) -> bytes:
    """Return the first key after all keys with this prefix."""
    stem = prefix.rstrip(b"\xff")
    return stem[:-1] + bytes([stem[-1] + 1]) if stem else b"\x00"


def _transaction_request(namespace: bytes, changes: Sequence[Change], expect: Sequence[Expect], lease: int) -> Any:
    return rpc.TxnRequest(
        compare=[
            rpc.Compare(
                key=namespace + key.encode(),
                target=rpc.Compare.MOD,
                result=rpc.Compare.EQUAL,
                mod_revision=revision,
            )
            for key, revision in expect
        ],
        success=[_operation(namespace, change, lease) for change in changes],
    )


def _operation(namespace: bytes, change: Change, lease: int) -> Any:
    key = namespace + change.key.encode()
    if not isinstance(change, Put):
        return rpc.RequestOp(request_delete_range=rpc.DeleteRangeRequest(key=key))
    put = rpc.PutRequest(key=key, value=change.value.encode(), lease=lease if change.leased else 0)
    return rpc.RequestOp(request_put=put)


def _page_request(prefix: bytes, *, first: bytes, revision: int, keys_max: int) -> Any:
    """Build a read of the keys below `prefix` from `first` on, as of a revision; 0 means the newest."""
    return rpc.RangeRequest(key=first, range_end=_range_end(prefix), revision=revision, limit=keys_max)


def _watch_request(prefix: bytes, *, after: int) -> Any:
    create = rpc.WatchCreateRequest(
        key=prefix, range_end=_range_end(prefix), start_revision=after + 1, progress_notify=True
    )
    return rpc.WatchRequest(create_request=create)


def _to_entry(namespace: bytes, stored: Any) -> Entry:
    return Entry(_text(stored.key[len(namespace) :]), _text(stored.value), stored.mod_revision, stored.create_revision)


def _to_event(namespace: bytes, event: Any) -> Event:
    value = None if event.type == rpc.Event.DELETE else _text(event.kv.value)
    return Event(_text(event.kv.key[len(namespace) :]), value, event.kv.mod_revision)


def _text(content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise CorruptState(f"etcd holds a value that is not UTF-8: {content[:100]!r}") from error


SILENCE_S_MAX = 900.0
"""etcd reports progress every ten minutes; a connection that is silent for longer is not trusted."""

_PAUSE_S_MIN = 0.05

_PAUSE_S_MAX = 1.0


class _Interrupted(Exception):
    """The connection must be opened again."""


class EtcdWatch:
    """The changes below a prefix, from one revision on."""

    def __init__(self, members: EtcdMembers, namespace: bytes, prefix: str, after: int) -> None:
        self._members = members
        self._namespace = namespace
        self._prefix = namespace + prefix.encode()
        self._after = after
        self._backoff = Backoff(Random(), first_s=_PAUSE_S_MIN, max_s=_PAUSE_S_MAX)

    async def batches(self) -> AsyncGenerator[Sequence[Event], None]:
        while True:
            endpoint = self._members.endpoint
            try:
                async with aclosing(self._connection()) as responses:
                    async for response in responses:
                        events = self._parse_events(response)
                        if events:
                            yield events
            except NotConnected as error:
                self._members.health.silent(str(error))
                self._members.move_on(endpoint)
            except grpc.aio.AioRpcError as error:
                if wants_login(error):
                    self._members.use_token("")
                self._members.move_on(endpoint)
            except _Interrupted as error:
                _logger.info("a watch on etcd was interrupted and continues", extra={"reason": str(error) or "moved"})
            # Longer each time, with jitter.
            await self._backoff.pause()

    async def _connection(self) -> AsyncGenerator[Any, None]:
        """Yield the responses of one connection until it breaks."""
        moved: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        member = await self._members.connected()
        stop = self._members.on_moved(lambda: None if moved.done() else moved.set_result(None))
        call = member.watches.Watch(metadata=self._members.metadata)
        try:
            await call.write(_watch_request(self._prefix, after=self._after))
            while True:
                yield await _read_next_unless(moved, call)
        finally:
            stop()
            call.cancel()

    def _parse_events(self, response: Any) -> list[Event]:
        if response.compact_revision:
            raise WatchLost(f"etcd has compacted the changes before revision {response.compact_revision}")
        if response.canceled:
            # Some versions of etcd report an expired token only as not permitted.
            self._members.use_token("")
            raise _Interrupted(response.cancel_reason)
        self._members.health.responded()
        self._backoff.reset()
        events_read = (_to_event(self._namespace, event) for event in response.events)
        events = [event for event in events_read if event.revision > self._after]
        if events:
            self._after = events[-1].revision
        elif not response.created and not response.events:
            # A progress report: everything up to the revision in its header has been sent.
            self._after = max(self._after, response.header.revision)
        return events


async def _read_next_unless(moved: asyncio.Future[None], call: Any) -> Any:
    """Return the next response, unless the member is given up."""
    reading = asyncio.create_task(call.read())
    waiting: set[asyncio.Future[Any]] = {reading, moved}
    try:
        await asyncio.wait(waiting, timeout=SILENCE_S_MAX, return_when=asyncio.FIRST_COMPLETED)
    finally:
        if not reading.done():
            reading.cancel()
            await asyncio.wait({reading})
    if reading.cancelled():
        raise _Interrupted
    response = reading.result()
    if response is grpc.aio.EOF:
        raise _Interrupted
    return response


REQUEST_S_MAX = 5.0

PAGE_KEYS = 1000
"""How many keys one response of a read holds, so that a large cluster does not block the loop."""

_READS_MAX = 5


class EtcdStore(StoreHealth):
    """One node's access to etcd. Its keys are below `/millstream/<cluster>/`."""

    def __init__(
        self, address: EtcdAddress, cluster: str, clock: Clock, *, request_s_max: float = REQUEST_S_MAX
    ) -> None:
        super().__init__(clock)
        self._namespace = f"/millstream/{cluster}/".encode()
        self._clock = clock
        self._members = EtcdMembers(address, self, request_s_max=request_s_max)
        self._session: EtcdSession | None = None

    async def read(self, prefix: str) -> Snapshot:
        """Return every key that begins with `prefix`, page by page, all as of the revision of the first page."""
        for _ in range(_READS_MAX):
            try:
                return await self._read(self._namespace + prefix.encode())
            except WatchLost:
                # etcd forgot the revision between two pages.
                continue
        raise StoreUnavailable("etcd compacts its history faster than it can be read")

    async def _read(self, prefix: bytes) -> Snapshot:
        entries: dict[str, Entry] = {}
        revision = 0
        first = prefix
        while True:
            request = _page_request(prefix, first=first, revision=revision, keys_max=PAGE_KEYS)
            response = await self._members.send(lambda member: member.keys.Range, request, repeatable=True)
            revision = revision or response.header.revision
            for pair in response.kvs:
                entry = _to_entry(self._namespace, pair)
                entries[entry.key] = entry
            if not response.more or not response.kvs:
                return Snapshot(entries, revision)
            first = response.kvs[-1].key + b"\x00"

    async def change(self, changes: Sequence[Change], expect: Sequence[Expect] = ()) -> int | None:
        check_changes(changes, expect)
        lease = self._session.lease if self._session is not None and self._session.live else 0
        if not lease and any(isinstance(change, Put) and change.leased for change in changes):
            raise StoreRefused("a leased key needs a live session")
        request = _transaction_request(self._namespace, changes, expect, lease)
        response = await self._members.send(lambda member: member.keys.Txn, request, repeatable=False)
        return int(response.header.revision) if response.succeeded else None

    def watch(self, prefix: str, *, after: int) -> AsyncGenerator[Sequence[Event], None]:
        return EtcdWatch(self._members, self._namespace, prefix, after).batches()

    async def open_session(self, ttl_s: float, on_lost: Callable[[], None]) -> EtcdSession:
        """Begin a session. etcd counts in whole seconds, at least two."""
        if self._session is not None and self._session.live:
            raise StoreRefused("the previous session has not ended")
        # A lease whose response was lost expires, so asking twice is harmless.
        request = rpc.LeaseGrantRequest(TTL=math.ceil(ttl_s))
        granted = await self._members.send(lambda member: member.leases.LeaseGrant, request, repeatable=True)
        self._session = EtcdSession(self._members, granted.ID, granted.TTL, self._clock, on_lost)
        return self._session

    async def close(self) -> None:
        """End the session and every connection; watches end with the tasks that read them."""
        if self._session is not None:
            await self._session.close()
        await self._members.close()
