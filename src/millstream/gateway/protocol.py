"""HTTP on one connection: uvicorn's protocol with limits on incomplete requests and slow clients.

Clients that stall must not keep others out. Beyond `CONNECTIONS_MAX`, a new connection replaces one whose client has
sent nothing for a while, else one that waits for its client at the address that has the most. If there is none, it
becomes a surplus connection: it may send the head of a request, and only a health check is served. Surplus connections
that have not sent a head are closed in favour of newer ones.

A client may send requests ahead of their responses. Of those that follow the one in progress, about one is read; the
rest stays as bytes, and nothing more is received before it is read.
"""

from __future__ import annotations

import asyncio
from heapq import nsmallest
from http import HTTPStatus
from typing import Any, ClassVar, Final, cast

import msgspec
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from millstream.core.crowding import network_of
from millstream.gateway.api.problem import CONTENT_TYPE, problem_document

JOINED_BYTES_MAX: Final = 64 * 1024
"""A longer body is not copied to be joined with its head."""

_CONTINUE: Final = b"HTTP/1.1 100 Continue\r\n\r\n"


class JoinedTransport:
    """A transport that holds a response head back until the body follows or the response ends."""

    def __init__(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self._write = transport.write
        self._head: bytes | None = None
        self._is_head_next = True
        # Asked for every request.
        self.is_closing = transport.is_closing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        """Send, holding back the head of a response."""
        if self._is_head_next:
            if data != _CONTINUE:
                self._is_head_next = False
                self._head = data
                return
        elif self._head is not None:
            head, self._head = self._head, None
            if len(data) <= JOINED_BYTES_MAX:
                data = head + data
            else:
                self._write(head)
        self._write(data)

    def responded(self) -> None:
        """Flush a response without a body."""
        self._flush()
        self._is_head_next = True

    def close(self) -> None:
        self._flush()
        self._transport.close()

    def _flush(self) -> None:
        if self._head is not None:
            head, self._head = self._head, None
            self._write(head)


CONNECTIONS_MAX: Final = 2048

SURPLUS_MAX: Final = 256

STALLED_S: Final = 5.0
"""At the limit of connections, one whose client has sent nothing for this long, and whose request is incomplete or
idle, is closed for a new one."""

REPLACED_MAX: Final = 32
"""The number of connections that are closed at once, so that not every new connection examines all others."""

HEALTH_PATHS: Final = frozenset({b"/healthz", b"/readyz"})

HEAD_BYTES_MAX: Final = 64 * 1024

HEAD_STEP_BYTES: Final = 1024
BODY_STEP_BYTES: Final = 8 * 1024
"""How much is read in one step; between steps, requests sent ahead are detected."""

HEAD_S_MAX: Final = 30.0
"""A connection that has not completed the head of its first request, or of one it has started, is closed after this
time."""

REFUSED_S_MAX: Final = 5.0

REFUSED_BYTES_MAX: Final = 16 * 1024 * 1024
"""The time and bytes that a refused client may still send; closed earlier, it would not see the response."""

WRITE_S_MAX: Final = 30.0

WRITE_BYTES_MIN: Final = 64 * 1024
"""A client that reads less than this of a response in that time, while more is available, is disconnected."""

_ONE_HOST: Final = "an HTTP/1.1 request has one Host header"
_TRANSFER_CODING: Final = "the only Transfer-Encoding that is supported is chunked"
_HEAD_TOO_LARGE: Final = f"the path and the headers of a request take at most {HEAD_BYTES_MAX} bytes"


class Protocol(HttpToolsProtocol):
    """Limits connections, request heads, and the time that clients take to send and to read."""

    _head_bytes = 0
    _is_in_head = True
    _is_begun = False
    _expected: asyncio.TimerHandle | None = None
    _refused_bytes = -1
    """Bytes received since the connection was refused; negative while it is not."""
    _stuck: asyncio.TimerHandle | None = None
    _joined: JoinedTransport
    _ahead: bytes = b""
    """Bytes received after requests that have no response yet."""
    _last_data_at = 0.0
    """When the client last sent something or received a response."""
    surplus: ClassVar[dict[Protocol, None]] = {}
    """Connections beyond the maximum, oldest first."""
    none_stalled_until: ClassVar[float] = 0.0
    by_network: ClassVar[dict[str, set[Protocol]]] = {}
    """All connections by the client's address."""
    _network = ""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Accept a connection, replacing another one if there are too many."""
        self._joined = JoinedTransport(transport)
        super().connection_made(cast("asyncio.Transport", self._joined))
        self._last_data_at = self.loop.time()
        self._network = network_of(self.client[0]) if self.client else ""
        self.by_network.setdefault(self._network, set()).add(self)
        is_full = len(self.connections) - len(self.surplus) > CONNECTIONS_MAX
        if is_full and not self._replace_stalled() and not self._replace_crowding():
            self.surplus[self] = None
            if len(self.surplus) > SURPLUS_MAX:
                next(iter(self.surplus)).close_stalled()
        self._start_head_timeout()

    def _replace_stalled(self) -> bool:
        """Close the connections whose clients have been silent longest, if that is long enough."""
        if self._last_data_at < Protocol.none_stalled_until:
            return False
        waiting = [
            connection
            for connection in cast("set[Protocol]", self.connections)
            if connection is not self and connection.waits_for_client
        ]
        silent = nsmallest(REPLACED_MAX, waiting, key=_last_data_time)
        stalled = [connection for connection in silent if self._last_data_at - connection._last_data_at >= STALLED_S]
        if not stalled:
            # No other connection can have been silent for long enough before the first of these.
            Protocol.none_stalled_until = min(map(_last_data_time, silent), default=self._last_data_at) + STALLED_S
        for connection in stalled:
            connection.close_stalled()
        return bool(stalled)

    def _replace_crowding(self) -> bool:
        """Close connections of the address that has the most, unless this one's address has about as many."""
        most = max(self.by_network.values(), key=len)
        excess = (len(most) - len(self.by_network[self._network])) // 2
        waiting = [connection for connection in most if connection.waits_for_client]
        closed = nsmallest(min(excess, REPLACED_MAX), waiting, key=_last_data_time)
        for connection in closed:
            connection.close_stalled()
        return bool(closed)

    @property
    def waits_for_client(self) -> bool:
        """Whether the connection waits for its client: its request is incomplete, or none has started."""
        cycle = self.cycle
        return self not in self.surplus and (cycle is None or cycle.more_body or cycle.response_complete)

    def close_stalled(self) -> None:
        """Close at once and stop counting the connection."""
        self.connections.discard(self)
        self.surplus.pop(self, None)
        self._leave_network()
        self.transport.abort()

    def _leave_network(self) -> None:
        own = self.by_network.get(self._network, set())
        own.discard(self)
        if not own:
            self.by_network.pop(self._network, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._ahead = b""
        self.surplus.pop(self, None)
        self._leave_network()
        self._head_received()
        self._is_client_reading()

    def data_received(self, data: bytes) -> None:
        self._last_data_at = self.loop.time()
        if self._refused_bytes >= 0:
            self._discard(len(data))
            return
        self._read(self._ahead + data if self._ahead else data)

    def _read(self, data: bytes) -> None:
        """Read requests until one is found that has to wait for the responses before it."""
        position, size = 0, len(data)
        while position < size:
            if self.pipeline:
                self._ahead = data[position:]
                self.flow.pause_reading()
                return
            end = position + (HEAD_STEP_BYTES if self._is_in_head else BODY_STEP_BYTES)
            self._read_step(data if size <= end and not position else data[position:end])
            if self._refused_bytes >= 0 or self.transport.is_closing():
                break
            position = end
        self._ahead = b""

    def _read_ahead(self) -> None:
        if self._ahead and not self.transport.is_closing():
            self._read(self._ahead)
            if not self.pipeline:
                self.flow.resume_reading()

    def _read_step(self, data: bytes) -> None:
        self._head_bytes += len(data)
        super().data_received(data)
        if not self._is_in_head or self._refused_bytes >= 0 or self.transport.is_closing():
            return
        if self._head_bytes > HEAD_BYTES_MAX:
            self._refuse_rest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _HEAD_TOO_LARGE)
        elif self._is_begun and self._expected is None:
            # Only for a head that arrives in pieces; most arrive whole.
            self._start_head_timeout()

    def on_message_begin(self) -> None:
        """Start the limits of another head."""
        self._is_begun = True
        super().on_message_begin()

    def on_headers_complete(self) -> None:
        """End the limits of the head, and measure it if so much arrived that it may be too large."""
        size = 0
        if self._head_bytes > HEAD_BYTES_MAX:
            size = len(self.url) + sum(len(name) + len(value) for name, value in self.headers)
        if size > HEAD_BYTES_MAX:
            self._refuse_rest(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE, _HEAD_TOO_LARGE)
            raise ValueError(_HEAD_TOO_LARGE)  # The rest of the request is not read.
        hosts = sum(name == b"host" for name, _ in self.headers)
        if hosts > 1 or (not hosts and self.parser.get_http_version() == "1.1"):
            # Of several, a proxy and the check of origins could each use another one.
            self._refuse_rest(HTTPStatus.BAD_REQUEST, _ONE_HOST)
            raise ValueError(_ONE_HOST)
        if any(name == b"transfer-encoding" and value.lower() != b"chunked" for name, value in self.headers):
            self._refuse_rest(HTTPStatus.NOT_IMPLEMENTED, _TRANSFER_CODING)
            raise ValueError(_TRANSFER_CODING)
        if self in self.surplus:
            self._check_surplus()
        self._is_begun = False
        self._is_in_head = False
        self._head_received()
        super().on_headers_complete()
        # Those after the body are not part of the request: a proxy does not check a credential there.
        self.headers = []

    def _check_surplus(self) -> None:
        """Accept a health check as the newest surplus connection; refuse anything else."""
        if self.url.partition(b"?")[0] not in HEALTH_PATHS:
            refusal = f"{CONNECTIONS_MAX} connections are open"
            self._refuse_rest(HTTPStatus.SERVICE_UNAVAILABLE, refusal)
            raise ValueError(refusal)
        del self.surplus[self]
        self.surplus[self] = None

    def on_message_complete(self) -> None:
        """Expect the head of another request."""
        self._is_in_head = True
        self._head_bytes = 0
        if self.cycle.response_complete:
            # The rest of a body whose request has its response already. uvicorn watches idle connections from a
            # response on, and stopped doing so when more of the body arrived.
            self._head_received()
            self.timeout_keep_alive_task = self.loop.call_later(
                self.timeout_keep_alive, self.timeout_keep_alive_handler
            )
        super().on_message_complete()

    def on_response_complete(self) -> None:
        """Expect the head of another response."""
        self._last_data_at = self.loop.time()
        self._joined.responded()
        if self in self.surplus:
            self.transport.close()
        elif self.cycle.response_complete and self.cycle.more_body:
            # The response was sent before the body was complete, for example because it took too long: the rest has to
            # arrive soon.
            self._head_received()
            self._expected = self.loop.call_later(REFUSED_S_MAX, self.transport.abort)
        super().on_response_complete()
        if self._ahead and not self.transport.is_closing():
            # Uvicorn continues to receive.
            self.flow.pause_reading()
            self.loop.call_soon(self._read_ahead)

    def pause_writing(self) -> None:
        """Watch a client that reads its response slowly."""
        super().pause_writing()
        if self._stuck is None:
            self._watch_client_reading()

    def resume_writing(self) -> None:
        """Resume writing: the client has drained its response."""
        super().resume_writing()
        self._is_client_reading()

    def _watch_client_reading(self) -> None:
        waiting = self.transport.get_write_buffer_size()
        self._stuck = self.loop.call_later(WRITE_S_MAX, self._check_client_reading, waiting)

    def _check_client_reading(self, before: int) -> None:
        if before - self.transport.get_write_buffer_size() < WRITE_BYTES_MIN:
            # Closing it would keep the unread data.
            self.transport.abort()
        else:
            self._watch_client_reading()

    def _is_client_reading(self) -> None:
        if self._stuck is not None:
            self._stuck.cancel()
            self._stuck = None

    def _start_head_timeout(self) -> None:
        self._expected = self.loop.call_later(HEAD_S_MAX, self.transport.close)

    def _head_received(self) -> None:
        if self._expected is not None:
            self._expected.cancel()
            self._expected = None

    def send_400_response(self, msg: str) -> None:
        """Respond to malformed HTTP, unless the request was refused while it was parsed."""
        if self._refused_bytes < 0:
            self._refuse_rest(HTTPStatus.BAD_REQUEST, "this is not an HTTP request")

    def _refuse_rest(self, status: HTTPStatus, detail: str) -> None:
        """Refuse everything that arrives on this connection; closing it while the client sends would lose the
        response.
        """
        self._refused_bytes = 0
        self._head_received()
        if self.cycle is not None and not self.cycle.response_complete:
            # A response is being sent; this one would be mixed into it.
            self.transport.close()
            return
        self._respond(status, detail)
        self._joined.responded()
        if self._joined.can_write_eof():
            # TLS cannot end one side only.
            self._joined.write_eof()
        self._expected = self.loop.call_later(REFUSED_S_MAX, self.transport.abort)

    def _discard(self, size: int) -> None:
        self._refused_bytes += size
        if self._refused_bytes > REFUSED_BYTES_MAX:
            self.transport.abort()

    def _respond(self, status: HTTPStatus, detail: str) -> None:
        content = msgspec.json.encode(problem_document("", status, detail, {}))
        head: list[Any] = [
            STATUS_LINE[status],
            b"content-type: %s\r\n" % CONTENT_TYPE.encode(),
            b"content-length: %d\r\n" % len(content),
            b"retry-after: 1\r\n" if status is HTTPStatus.SERVICE_UNAVAILABLE else b"",
            b"connection: close\r\n\r\n",
            content,
        ]
        self.transport.write(b"".join(head))


def _last_data_time(connection: Protocol) -> float:
    return connection._last_data_at
