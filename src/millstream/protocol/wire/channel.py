"""One client connection to a broker, and the pool of connections to an address.

Requests are pipelined: each gets a correlation id, by which responses are matched. Nothing here runs as a task:
responses arrive as callbacks of the transport and complete the callers' futures. A request that gets no response in
time closes the connection, since all requests after it would wait too.
"""

from __future__ import annotations

import asyncio
import os
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, Self, cast

from millstream import __version__
from millstream.core.errors import (
    AuthenticationFailed,
    BrokerUnreachable,
    InvalidRequest,
    MillstreamError,
    ProtocolViolation,
    RequestTimedOut,
    UnexpectedServer,
)
from millstream.protocol.messages import codec
from millstream.protocol.messages.primitives import Buffer, Reader
from millstream.protocol.wire.credentials import CLI_SPELLED, NODE_CREDENTIALS, Credentials

IN_FLIGHT_MAX: Final = 64
_PENDING_MAX: Final = 2 * IN_FLIGHT_MAX
FRAME_BYTES_MAX: Final = 256 * 1024 * 1024
_SCRATCH_BYTES: Final = 64 * 1024
_SIZE: Final = struct.Struct(">i")
_TLS_HEADS: Final = (b"\x15\x03", b"\x16\x03")
"""How a TLS alert and a TLS handshake start."""
_API_VERSIONS_SENT: Final = 3
_UNSUPPORTED_SASL_MECHANISM: Final = 33
_UNSUPPORTED_VERSION: Final = 35
_SASL_HANDSHAKE_KEY: Final = 17
_SASL_AUTHENTICATE_KEY: Final = 36
_FIRST_REQUESTS: Final = 2
"""ApiVersions, and the first request that needs to know the client."""
_SESSION_PART: Final = 0.85
"""After this part of a session's lifetime requests go over another connection."""
_SESSION_S_MAX: Final = 365 * 86400.0


class Channel(asyncio.BufferedProtocol):
    """An open connection, and the versions that its broker serves."""

    def __init__(self, address: str, client_id: str) -> None:
        self.address = address
        self.versions: dict[int, tuple[int, int]] = {}
        """The oldest and newest version by API key."""
        self._client_id = client_id
        self._transport: asyncio.Transport | None = None
        self._lost: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._pending: dict[int, asyncio.Future[memoryview]] = {}
        self._last_id = 0
        self._in_flight = asyncio.Semaphore(IN_FLIGHT_MAX)
        self._writable = asyncio.Event()
        self._writable.set()
        self._scratch = memoryview(bytearray(_SCRATCH_BYTES))
        self._frame: memoryview | None = None
        self._filled = 0
        self._cause = "closed"
        self._is_other_server = False
        """Whether the server is probably not a broker, or not of the kind that this client expects."""
        self._has_ended_writing = False
        self._has_signed_in = False
        self._spelled = CLI_SPELLED
        self.was_refused = False
        """Whether the broker closed the connection on the first request that needs to know the client."""
        self._is_retired = False
        """Whether another connection takes over, since the session ends soon; this one gets its last responses."""
        self._retiring: asyncio.TimerHandle | None = None
        self.room_for = _new_buffer
        """Returns the buffer for a response that is too large for the scratch buffer."""

    @classmethod
    async def open(
        cls, host: str, port: int, *, client_id: str, timeout_s: float, credentials: Credentials | None = None
    ) -> Self:
        """Connect, negotiate API versions, and authenticate if there are credentials."""
        credentials = credentials or NODE_CREDENTIALS.get()
        try:
            return await cls._open(host, port, client_id, timeout_s, credentials)
        except AuthenticationFailed:
            if credentials.renew is None:
                raise
            await credentials.renew()
        return await cls._open(host, port, client_id, timeout_s, credentials)

    @classmethod
    async def _open(cls, host: str, port: int, client_id: str, timeout_s: float, credentials: Credentials) -> Self:
        tls = credentials.tls_context
        address = f"{host}:{port}"
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(timeout_s):
                _, channel = await loop.create_connection(
                    lambda: cls(address, client_id),
                    host,
                    port,
                    ssl=tls,
                    server_hostname=host if tls is not None else None,
                )
        except TimeoutError:
            raise BrokerUnreachable(f"{address} did not accept a connection within {timeout_s:g} s") from None
        except ssl.SSLCertVerificationError as error:
            raise AuthenticationFailed(
                f"the certificate of {address} is not trusted: {error.verify_message}"
            ) from error
        except ssl.SSLError as error:
            reason = error.reason or str(error)
            raise UnexpectedServer(
                f"{address} does not speak TLS: {reason}; use its TLS port, or connect without TLS"
            ) from error
        except ConnectionError as error:
            if tls is None or isinstance(error, ConnectionRefusedError):
                raise BrokerUnreachable(f"{address}: {_reason(error)}") from error
            raise UnexpectedServer(
                f"{address} closed the connection in the TLS handshake; if it expects plain text, "
                f"connect without TLS ({credentials.spelled.tls}), or use its TLS port"
            ) from error
        except OSError as error:
            raise BrokerUnreachable(f"{address}: {_reason(error)}") from error
        channel._spelled = credentials.spelled
        try:
            if credentials.check_peer is not None:
                credentials.check_peer(channel._ssl_object())
            await channel._negotiate(timeout_s)
            await channel._authenticate(credentials, timeout_s)
        except BaseException:
            await channel.close()
            raise
        return channel

    @property
    def is_open(self) -> bool:
        return (
            self._transport is not None
            and not self._transport.is_closing()
            and not self._has_ended_writing
            and not self._is_retired
        )

    @property
    def is_idle(self) -> bool:
        """Return whether no request awaits its response."""
        return not self._pending

    async def close(self) -> None:
        """Close; pending requests fail."""
        if self._transport is not None:
            self._transport.abort()
        await asyncio.shield(self._lost)

    def version_for(self, api_key: int, *, newest: int, oldest: int = 0) -> int:
        """Return the newest version that both ends know."""
        served = self.versions.get(api_key)
        if served is None:
            raise InvalidRequest(f"the broker at {self.address} does not serve API {api_key}")
        version = min(newest, served[1])
        if version < max(oldest, served[0]):
            raise InvalidRequest(
                f"the broker at {self.address} serves versions {served[0]} to {served[1]} of API {api_key}, "
                f"this client knows {oldest} to {newest}"
            )
        return version

    async def call(self, request: Any, *, timeout_s: float) -> Any:
        """Send a message in its own version and return the response of that version."""
        key, version = request.__api_key__, request.__version__
        frame = await self.exchange(key, version, [codec.write_entity(request)], timeout_s=timeout_s)
        return codec.read_response(key, version, frame)

    async def exchange(self, api_key: int, version: int, body: list[Buffer], *, timeout_s: float) -> memoryview:
        """Send an encoded body; return the response frame, including its header."""
        is_late = False

        def give_up() -> None:
            nonlocal is_late
            is_late = True
            self.abort("a request got no response in time")

        # This costs a fraction of `asyncio.timeout`.
        timer = asyncio.get_running_loop().call_later(timeout_s, give_up)
        try:
            async with self._in_flight:
                return await self._exchange(api_key, version, body)
        except BrokerUnreachable:
            if not is_late:
                raise
            raise RequestTimedOut(
                f"{self.address} did not respond within {timeout_s:g} s; the request may have been carried out"
            ) from None
        finally:
            timer.cancel()

    def request(self, api_key: int, version: int, body: list[Buffer]) -> asyncio.Future[memoryview]:
        """Send a body at once; the caller limits how many are in flight and how long a response may take."""
        response: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        self._pending[self._write(api_key, version, body)] = response
        return response

    async def send(self, api_key: int, version: int, body: list[Buffer]) -> None:
        """Send a body that gets no response."""
        await self._writable.wait()
        self._write(api_key, version, body)

    async def _exchange(self, api_key: int, version: int, body: list[Buffer]) -> memoryview:
        await self._writable.wait()
        if len(self._pending) >= _PENDING_MAX:
            self.abort("too many requests were abandoned before their responses arrived")
        correlation_id = self._write(api_key, version, body)
        response: asyncio.Future[memoryview] = asyncio.get_running_loop().create_future()
        # The entry stays when the caller is cancelled, so that the late response is recognized and dropped.
        self._pending[correlation_id] = response
        return await response

    def _write(self, api_key: int, version: int, body: list[Buffer]) -> int:
        if self._transport is None or not self.is_open:
            raise self._closed_error()
        self._last_id = (self._last_id + 1) & 0x7FFFFFFF
        head = codec.request_head(api_key, version, self._last_id, self._client_id)
        size = len(head) + sum(map(len, body))
        self._transport.writelines([_SIZE.pack(size) + head, *body])
        return self._last_id

    async def _negotiate(self, timeout_s: float) -> None:
        response = await self._send_api_versions(_API_VERSIONS_SENT, timeout_s)
        if response.error_code == _UNSUPPORTED_VERSION:
            response = await self._send_api_versions(0, timeout_s)
        if response.error_code:
            raise BrokerUnreachable(f"{self.address} refused ApiVersions: {response.error_code.name}")
        self.versions = {served.api_key: (served.min_version, served.max_version) for served in response.api_keys}

    async def _authenticate(self, credentials: Credentials, timeout_s: float) -> None:
        """Run the exchange of a SASL mechanism, if there are credentials."""
        begun = credentials.begin()
        if begun is None:
            return
        mechanism, exchange = begun
        body = codec.write_entity(codec.load_request_class(_SASL_HANDSHAKE_KEY, 1)(mechanism=mechanism))
        frame = await self.exchange(_SASL_HANDSHAKE_KEY, 1, [body], timeout_s=timeout_s)
        offered = codec.read_response(_SASL_HANDSHAKE_KEY, 1, frame)
        if offered.error_code:
            if not offered.mechanisms:
                raise AuthenticationFailed(
                    f"the listener at {self.address} requires no authentication; connect without a user and a token "
                    f"({self._spelled.identity})"
                )
            choices = ", ".join(offered.mechanisms)
            raise AuthenticationFailed(f"{self.address} does not support {mechanism}; it supports {choices}")
        version = self.version_for(_SASL_AUTHENTICATE_KEY, newest=2)
        request = codec.load_request_class(_SASL_AUTHENTICATE_KEY, version)
        with suppress(StopIteration):
            message = next(exchange)
            while True:
                body = codec.write_entity(request(auth_bytes=message))
                frame = await self.exchange(_SASL_AUTHENTICATE_KEY, version, [body], timeout_s=timeout_s)
                response = codec.read_response(_SASL_AUTHENTICATE_KEY, version, frame)
                if response.error_code:
                    raise AuthenticationFailed(f"{self.address}: {response.error_message or 'authentication failed'}")
                lifetime = getattr(response, "session_lifetime", None)
                if lifetime:
                    left_s = min(lifetime.total_seconds() * _SESSION_PART, _SESSION_S_MAX)
                    self._retiring = asyncio.get_running_loop().call_later(left_s, self._retire)
                message = exchange.send(bytes(response.auth_bytes))
        self._has_signed_in = True

    async def check_admitted(self, timeout_s: float) -> None:
        """Raise if the broker waits for this client to authenticate, which trying again does not change."""
        if self._has_signed_in or _SASL_HANDSHAKE_KEY not in self.versions:
            return
        body = codec.write_entity(codec.load_request_class(_SASL_HANDSHAKE_KEY, 1)(mechanism=""))
        frame = await self.exchange(_SASL_HANDSHAKE_KEY, 1, [body], timeout_s=timeout_s)
        if codec.read_response(_SASL_HANDSHAKE_KEY, 1, frame).error_code == _UNSUPPORTED_SASL_MECHANISM:
            raise AuthenticationFailed(f"{self.address} closed the connection; {self._needs_identity()}")

    def _needs_identity(self) -> str:
        return f"if it requires authentication, pass a user or a token ({self._spelled.identity})"

    def _ssl_object(self) -> ssl.SSLObject | None:
        return None if self._transport is None else self._transport.get_extra_info("ssl_object")

    async def _send_api_versions(self, version: int, timeout_s: float) -> Any:
        request_class = codec.load_request_class(codec.API_VERSIONS_KEY, version)
        named = {"client_software_name": "millstream", "client_software_version": __version__} if version >= 3 else {}
        body = codec.write_entity(request_class(**named))
        frame = await self.exchange(codec.API_VERSIONS_KEY, version, [body], timeout_s=timeout_s)
        # A broker that does not know the version responds in the oldest one; every version begins with the code.
        unknown = Reader(frame, 4).int16() == _UNSUPPORTED_VERSION
        return codec.read_response(codec.API_VERSIONS_KEY, 0 if unknown else version, frame)

    def abort(self, cause: str) -> None:
        """Close at once; pending requests fail with the cause."""
        self._cause = cause
        if self._transport is not None:
            self._transport.abort()

    def _retire(self) -> None:
        self._is_retired = True
        self._close_if_retired()

    def _close_if_retired(self) -> None:
        """Close when nothing is pending: the broker would wait for the client to authenticate again."""
        if self._is_retired and not self._pending and self._transport is not None:
            self._transport.close()

    def end_writing(self) -> None:
        """Close the sending half: the broker responds to what it can at once, and closes the connection."""
        if self._transport is not None and self.is_open:
            self._has_ended_writing = True
            if self._transport.can_write_eof():
                self._transport.write_eof()
            else:
                # TLS cannot end one side only.
                self._transport.close()

    def _closed_error(self) -> MillstreamError:
        lost = f"the connection to {self.address} was lost: {self._cause}"
        return UnexpectedServer(lost) if self._is_other_server else BrokerUnreachable(f"{lost}; is the broker running?")

    # -- callbacks of asyncio -------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport, which other event loops do not derive from asyncio's class."""
        self._transport = cast("asyncio.Transport", transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail every pending request."""
        self._transport = None
        if self._retiring is not None:
            self._retiring.cancel()
        if exc is not None:
            self._cause = str(exc) or type(exc).__name__
        self._writable.set()
        for response in self._pending.values():
            if not response.done():
                response.set_exception(self._closed_error())
        self._pending.clear()
        if not self._lost.done():
            self._lost.set_result(None)

    def pause_writing(self) -> None:
        """Hold requests back: the broker reads more slowly than they are sent."""
        self._writable.clear()

    def resume_writing(self) -> None:
        """Resume sending: the broker has caught up."""
        self._writable.set()

    def eof_received(self) -> bool:
        """Close: the broker closed its end and will return nothing more."""
        self._cause = "closed by the broker"
        if self._last_id <= _FIRST_REQUESTS and not self._has_signed_in:
            self.was_refused = bool(self.versions and self._pending)
            if self.was_refused:
                self._cause += f"; {self._needs_identity()}"
            elif not self.versions and self._ssl_object() is None:
                self._is_other_server = True
                self._cause += f"; if it uses TLS, pass the authority of its certificate with {self._spelled.tls}"
        return False

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return the buffer for the next bytes: that of a large frame in progress, or the scratch buffer."""
        return (self._scratch if self._frame is None else self._frame)[self._filled :]

    def buffer_updated(self, nbytes: int) -> None:
        self._filled += nbytes
        try:
            if self._frame is None:
                self._split_frames()
            elif self._filled == len(self._frame):
                frame, self._frame, self._filled = self._frame, None, 0
                self._deliver(frame)
        except ProtocolViolation as error:
            self.abort(str(error))

    def _split_frames(self) -> None:
        """Cut whole frames out of the scratch buffer; a larger frame gets its own buffer."""
        position = 0
        while self._filled - position >= _SIZE.size:
            (size,) = _SIZE.unpack_from(self._scratch, position)
            if not 4 <= size <= FRAME_BYTES_MAX:
                self._is_other_server = not self.versions
                head = bytes(self._scratch[position : position + _SIZE.size])
                raise ProtocolViolation(_not_kafka(head, self._spelled.tls))
            start, end = position + _SIZE.size, position + _SIZE.size + size
            if end <= self._filled:
                self._deliver(memoryview(bytes(self._scratch[start:end])))
                position = end
            elif end - position > _SCRATCH_BYTES:
                self._begin_frame(size, start)
                return
            else:
                break
        rest = bytes(self._scratch[position : self._filled])
        self._scratch[: len(rest)] = rest
        self._filled = len(rest)

    def _begin_frame(self, size: int, start: int) -> None:
        frame = self.room_for(size)
        arrived = self._filled - start
        frame[:arrived] = self._scratch[start : self._filled]
        self._frame = frame
        self._filled = arrived

    def _deliver(self, frame: memoryview) -> None:
        correlation_id = codec.read_correlation_id(frame)
        response = self._pending.pop(correlation_id, None)
        if response is None:
            raise ProtocolViolation(f"received a response to request {correlation_id}, which was not sent")
        if not response.done():
            response.set_result(frame)
        self._close_if_retired()


def _new_buffer(size: int) -> memoryview:
    return memoryview(bytearray(size))


def _not_kafka(head: bytes, tls: str) -> str:
    """Describe the server that responds, judging by first bytes that no broker sends."""
    if head == b"HTTP":
        return "an HTTP server responds there; use the Kafka address, which has another port than HTTP"
    if head[:2] in _TLS_HEADS:
        return f"a TLS server responds there, but this client does not use TLS; pass {tls}"
    return f"the server there is not a Kafka broker: its response starts with {head!r}"


def _reason(error: OSError) -> str:
    """Return why a connection could not be opened; asyncio's own text names internals."""
    if error.errno is None:
        return "nothing accepts connections there"
    return (os.strerror(error.errno) if error.errno > 0 else error.strerror or str(error)).lower()


BORROWED_MAX: Final = 16
POOL_MEMBERS_MAX: Final = 256
"""Members of one group wait for each other in JoinGroup, so more of these run concurrently."""

MUTED_S_MAX: Final = 300.0
"""The longest throttle time that is honoured."""


class Pool:
    """A shared connection and a few to borrow, opened on first use and again when lost.

    A broker responds to the requests of one connection in order, so a fetch that waits for records delays everything
    behind it. Ordinary requests therefore share one pipelined connection, and each request that may wait, such as a
    fetch or a JoinGroup, borrows a separate one.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        client_id: str,
        connect_s: float,
        borrowed_max: int = BORROWED_MAX,
        credentials: Credentials | None = None,
    ) -> None:
        self.address = f"{host}:{port}"
        self._host = host
        self._port = port
        self._client_id = client_id
        self._connect_s = connect_s
        self._credentials = credentials or NODE_CREDENTIALS.get()
        self._shared: Channel | None = None
        self._opening = asyncio.Lock()
        self._free: list[Channel] = []
        self._borrowed: set[Channel] = set()
        self._slots = asyncio.Semaphore(borrowed_max)
        self._member_slots = asyncio.Semaphore(POOL_MEMBERS_MAX)
        self._closed = False
        self.muted_until = 0.0
        """The end of the broker's throttling of the client; 0 without throttling."""

    @property
    def is_open(self) -> bool:
        return self._shared is not None and self._shared.is_open

    async def shared(self) -> Channel:
        """Return the connection for requests that get a response at once."""
        if self._shared is not None and self._shared.is_open:
            return self._shared
        async with self._opening:
            if self._shared is None or not self._shared.is_open:
                opened = await self._open()
                if self._shared is not None and self._shared.was_refused:
                    try:
                        await opened.check_admitted(self._connect_s)
                    except BaseException:
                        await opened.close()
                        raise
                self._shared = opened
            return self._shared

    @asynccontextmanager
    async def borrowed(self, *, by_member: bool = False) -> AsyncIterator[Channel]:
        """Borrow a connection for one request that may wait, possibly of a group's member."""
        async with self._member_slots if by_member else self._slots:
            channel = self._acquire_free() or await self._open()
            self._borrowed.add(channel)
            try:
                yield channel
            finally:
                self._borrowed.discard(channel)
                if channel.is_open and channel.is_idle and not self._closed:
                    self._free.append(channel)
                else:
                    await channel.close()

    def mute(self, seconds: float) -> None:
        """Delay all requests to the broker, on any connection: it throttles the client."""
        if seconds > 0:
            until = asyncio.get_running_loop().time() + min(seconds, MUTED_S_MAX)
            self.muted_until = max(self.muted_until, until)

    @property
    def pause_s(self) -> float:
        """Return for how much longer the broker throttles the client."""
        if not self.muted_until:
            return 0.0
        pause_s = self.muted_until - asyncio.get_running_loop().time()
        if pause_s <= 0:
            self.muted_until = pause_s = 0.0
        return pause_s

    async def unmuted(self) -> float:
        """Wait until the broker may be sent something; return how long that took, in seconds."""
        waited = 0.0
        while (pause := self.pause_s) > 0:
            await asyncio.sleep(pause)
            waited += pause
        return waited

    async def close(self) -> None:
        """Close every connection, including those that are borrowed or being opened."""
        self._closed = True
        channels, self._free = [*self._free, *self._borrowed], []
        if self._shared is not None:
            channels.append(self._shared)
            self._shared = None
        for channel in channels:
            await channel.close()

    def _acquire_free(self) -> Channel | None:
        while self._free:
            channel = self._free.pop()
            if channel.is_open:
                return channel
        return None

    async def _open(self) -> Channel:
        channel = await Channel.open(
            self._host,
            self._port,
            client_id=self._client_id,
            timeout_s=self._connect_s,
            credentials=self._credentials,
        )
        if self._closed:
            await channel.close()
            raise BrokerUnreachable("the client was closed while it connected")
        return channel
