"""Accepts connections, counts them, ends those that stall or idle too long, and drains them on shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Final, Protocol

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, ConnectionLimits, Service, Traffic
from millstream.broker.net.presence import Hangups, find_gone
from millstream.broker.net.turns import Turns
from millstream.core.crowding import network_of
from millstream.core.errors import AddressTaken
from millstream.core.heap import Trimmer
from millstream.core.metric import Metric, counter, gauge

_logger = logging.getLogger(__name__)

SWEEP_S = 5.0
BACKLOG = 4096
GONE_CHECK_MIN: Final = 256
"""The minimum number of new connections between two searches for waiting connections that their clients have reset.
Without a search, such a connection would notice the reset only at its turn, and would be counted until then."""
CROWD_MAX: Final = 1024
"""If more connections than this wait for their turn, those that their clients have half-closed are closed as well:
the clients are most likely gone, and the connections would keep new ones from being accepted."""
ACCEPTS_PER_ROUND = 64
"""uvloop accepts one connection per handle and round of the loop, so the listening socket has several: with one,
clients that connect and hang up all the time would keep new clients waiting on a busy node."""
HANDSHAKE_S = 10.0
"""How long the TLS handshake may take."""
ALERT_S = 2.0
"""How long a client whose handshake failed may take to read the reason and disconnect."""
ALERT_READS_MAX = 16
_TLS_REASONS: Final[Mapping[str, str]] = {
    "HTTP_REQUEST": "the client speaks HTTP without TLS",
    "WRONG_VERSION_NUMBER": "the client does not speak TLS, and this listener requires it",
    "UNSUPPORTED_PROTOCOL": "the client offers no version of TLS from 1.2 on",
    "TLSV1_ALERT_UNKNOWN_CA": "the client does not trust the authority of this node's certificate",
}
"""Why a handshake failed, by OpenSSL's name."""
UNKNOWN_PER_ADDRESS_MAX = 256
"""How many clients of one address may be unauthenticated where authentication is required: in the TLS or SASL
handshake, or delayed after a failure. Their TLS buffers take up to 256 KiB each."""
ORPHAN_S: Final = 10.0
"""How long a start after a kill retries an address that a process of the last run may still hold."""
_BIND_RETRY_S: Final = 0.1
ACCEPT_RETRY_S = 1.0
"""How long no connection is accepted after the system could not open one, for lack of file descriptors for example."""


class _Refused(asyncio.Protocol):
    """Refuses a connection beyond the maximum."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close at once."""
        transport.close()


class Tls(Protocol):
    """The TLS of a listener, which changes while it listens."""

    @property
    def context(self) -> ssl.SSLContext:
        """The context of the next connection."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerOptions:
    """The properties of one listening socket."""

    service: Service
    limits: ConnectionLimits
    name: str = ""
    tls: Tls | None = None
    deadline_s: float | None = None
    """How long a client may stay unauthenticated; None where clients need not authenticate."""
    is_limited: bool = True
    """Whether connections are counted by address; not on the listener for the node's own processes."""


def _handshake_reason(error: OSError) -> str:
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"the client's certificate is refused: {error.verify_message}"
    reason = error.reason if isinstance(error, ssl.SSLError) else ""
    return _TLS_REASONS.get(reason or "", reason or str(error))


def _duplicate(accepted: socket.socket) -> socket.socket:
    try:
        return accepted.dup()
    except OSError:
        accepted.close()
        raise


async def _send_alert(connected: socket.socket, alert: bytes) -> None:
    """Send the reason of a failed handshake, and wait until the client has disconnected: a reset would discard it."""
    with suppress(OSError):
        if alert and connected.send(alert):
            connected.shutdown(socket.SHUT_WR)
            async with asyncio.timeout(ALERT_S):
                for _ in range(ALERT_READS_MAX):
                    if not await asyncio.get_running_loop().sock_recv(connected, 4096):
                        return
                    await asyncio.sleep(0)


class Listener:
    """The listening sockets of a node and their connections."""

    def __init__(
        self,
        service: Service,
        *,
        limits: ConnectionLimits,
        budget: Budget,
        connections_max: int,
        idle_s: float,
        per_address_max: int = 2**31,
        turns: Turns | None = None,
    ) -> None:
        self._options = ListenerOptions(service=service, limits=limits)
        self._budget = budget
        self.connections_max = connections_max
        """May change while it listens; connections beyond it that are open stay."""
        self.per_address_max = per_address_max
        """As `connections_max`, for the connections of one address."""
        self._idle_s = idle_s
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._hangups = Hangups()
        self._turns = turns or Turns()
        self._trimmer = Trimmer()
        self._traffic_bytes = 0
        """The counts of `traffic` at the last sweep."""
        self._check_gone_at = GONE_CHECK_MIN
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self.connections: set[Connection] = set()
        self._handshakes: set[asyncio.Task[None]] = set()
        self._accepting: list[socket.socket] = []
        """Sockets whose connections begin with a handshake of TLS."""
        self._by_address: Counter[str] = Counter()
        self._unidentified: Counter[str] = Counter()
        """Connections by address whose clients have to authenticate and have not yet."""
        self.traffic = Traffic()

    async def start(self, listening: socket.socket, options: ListenerOptions | None = None) -> None:
        """Accept connections on a bound socket; may be called for several sockets."""
        loop = asyncio.get_running_loop()
        options = options or self._options
        if options.tls is not None:
            self._accepting.append(listening)
            loop.add_reader(listening, self._accept, listening, options)
        handles = (
            () if options.tls is not None else (listening, *(listening.dup() for _ in range(ACCEPTS_PER_ROUND - 1)))
        )
        for handle in handles:
            server = await loop.create_server(partial(self._create_protocol, options), sock=handle, backlog=BACKLOG)
            self._servers.append(server)
        if self._sweep is None:
            self._sweep = loop.call_later(SWEEP_S, self._sweep_connections)

    def stop_accepting(self) -> None:
        """Accept no new connections; open ones continue."""
        while self._servers:
            self._servers.pop().close()
        while self._accepting:
            listening = self._accepting.pop()
            asyncio.get_running_loop().remove_reader(listening)
            listening.close()

    async def drain(self, timeout_s: float) -> None:
        """Let every connection finish its requests, then close them all."""
        self.stop_accepting()
        if self._sweep is not None:
            self._sweep.cancel()
        for handshake in self._handshakes:
            handshake.cancel()
        for connection in tuple(self.connections):
            connection.drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            _logger.warning(
                "connections were closed with requests in progress", extra={"connections": len(self.connections)}
            )
            for connection in tuple(self.connections):
                connection.abort()
            await self._all_closed.wait()
        self._hangups.close()

    def metrics(self) -> Iterable[Metric]:
        traffic = self.traffic
        yield gauge("millstream_connections", "Connections that are open.", len(self.connections))
        yield gauge("millstream_inflight_bytes", "Bytes held in memory for clients.", self._budget.used_bytes)
        yield gauge("millstream_inflight_waiting", "Connections that wait for memory.", self._budget.waiting)
        yield gauge("millstream_turns_waiting", "Connections that wait for their turn.", self._turns.waiting)
        yield counter("millstream_turns_total", "Turns given to connections that had to wait.", self._turns.given)
        yield counter("millstream_connections_total", "Connections accepted.", traffic.connections_accepted)
        yield counter(
            "millstream_connections_refused_total",
            "Connections refused because too many were open.",
            traffic.connections_refused,
        )
        yield counter(
            "millstream_connections_failed_total",
            "Connections closed because of invalid input.",
            traffic.connections_failed,
        )
        yield counter(
            "millstream_tls_handshakes_failed_total", "TLS handshakes that failed.", traffic.handshakes_failed
        )
        yield counter("millstream_requests_total", "Requests received.", traffic.frames_in)
        yield counter("millstream_received_bytes_total", "Bytes received from clients.", traffic.bytes_in)
        yield counter("millstream_sent_bytes_total", "Bytes sent to clients.", traffic.bytes_out)

    def _create_protocol(self, options: ListenerOptions) -> asyncio.BaseProtocol:
        if self._is_full:
            self.traffic.connections_refused += 1
            return _Refused()
        connection = self._create_connection(options)
        connection.opened = partial(self._count, options)
        self._add_connection(connection)
        return connection

    @property
    def _is_full(self) -> bool:
        return len(self.connections) + len(self._handshakes) >= self.connections_max

    def _create_connection(self, options: ListenerOptions) -> Connection:
        connection = Connection(
            options.service, options.limits, self._budget, self.traffic, self._on_closed, self._turns, self._hangups
        )
        connection.listener = options.name
        if options.deadline_s is not None:
            connection.deadline = asyncio.get_running_loop().time() + options.deadline_s
        return connection

    def _count(self, options: ListenerOptions, connection: Connection) -> None:
        """Count a connection that has begun, and close it if its address has too many."""
        is_allowed = self._is_admitted(connection.host, options)
        self._count_address(connection, connection.host, options)
        if not is_allowed:
            self.traffic.connections_refused += 1
            connection.abort()

    def _is_admitted(self, host: str, options: ListenerOptions) -> bool:
        if not options.is_limited:
            return True
        host = network_of(host)
        return self._by_address[host] < self.per_address_max and self._unidentified[host] < UNKNOWN_PER_ADDRESS_MAX

    def _count_address(self, connection: Connection, host: str, options: ListenerOptions) -> None:
        """Count a connection for its address, as unauthenticated until it authenticates or its handshake is over."""
        if not options.is_limited:
            return
        connection.counted_as = network_of(host)
        self._by_address[connection.counted_as] += 1
        if options.deadline_s is not None or options.tls is not None:
            self._unidentified[connection.counted_as] += 1
            connection.known = self._count_identified

    def _uncount_address(self, connection: Connection) -> None:
        if connection.known is not None:
            self._count_identified(connection)
        if connection.counted_as:
            _decrease(self._by_address, connection.counted_as)
            connection.counted_as = ""

    def _add_connection(self, connection: Connection) -> None:
        self.connections.add(connection)
        if len(self.connections) >= self._check_gone_at:
            self._close_gone()
        self._all_closed.clear()

    def _close_gone(self) -> None:
        """Close connections whose clients have left while they waited for their turn."""
        waiting = {
            waiting_socket: connection
            for connection in self.connections
            if (waiting_socket := connection.waiting_socket) is not None
        }
        gone = find_gone(waiting, or_ended=len(waiting) > CROWD_MAX)
        for descriptor in gone:
            waiting[descriptor].abort()
        left = len(self.connections) - len(gone)
        self._check_gone_at = _next_gone_check(left)

    def _count_identified(self, connection: Connection) -> None:
        connection.known = None
        _decrease(self._unidentified, connection.counted_as)

    def _on_closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        self._uncount_address(connection)
        if not self.connections:
            self._all_closed.set()

    # -- TLS ------------------------------------------------------------------------------------------------

    def _accept(self, listening: socket.socket, options: ListenerOptions) -> None:
        """Accept connections that begin with a handshake, during which they already count for their address."""
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted, address = listening.accept()
                accepted.setblocking(False)
                # If the handshake fails, the transport closes its socket before it has sent the alert.
                spare = _duplicate(accepted)
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _logger.error("connections cannot be accepted", extra={"error": str(error)})
                loop = asyncio.get_running_loop()
                loop.remove_reader(listening)
                loop.call_later(ACCEPT_RETRY_S, self._resume_accepting, listening, options)
                return
            host = str(address[0])
            if self._is_full or not self._is_admitted(host, options):
                self.traffic.connections_refused += 1
                accepted.close()
                spare.close()
                continue
            task = asyncio.get_running_loop().create_task(self._handshake(accepted, spare, host, options))
            self._handshakes.add(task)
            task.add_done_callback(self._handshakes.discard)

    def _resume_accepting(self, listening: socket.socket, options: ListenerOptions) -> None:
        if listening in self._accepting:
            asyncio.get_running_loop().add_reader(listening, self._accept, listening, options)

    async def _handshake(
        self, accepted: socket.socket, spare: socket.socket, host: str, options: ListenerOptions
    ) -> None:
        connection = self._create_connection(options)
        connection.opened = partial(self._on_handshake_done, options)
        self._count_address(connection, host, options)
        context = None if options.tls is None else options.tls.context
        try:
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: connection, accepted, ssl=context, ssl_handshake_timeout=HANDSHAKE_S
            )
        except ConnectionResetError:
            # Port scanners and simple probes cause this.
            self.traffic.handshakes_failed += 1
        except OSError as error:
            self.traffic.handshakes_failed += 1
            extra = {"peer": host, "listener": options.name, "reason": _handshake_reason(error)}
            _logger.warning("TLS handshake failed", extra=extra)
            await _send_alert(spare, getattr(error, "alert", b""))
        finally:
            spare.close()
            if connection not in self.connections:
                self._uncount_address(connection)

    def _on_handshake_done(self, options: ListenerOptions, connection: Connection) -> None:
        self._add_connection(connection)
        if options.deadline_s is None and connection.known is not None:
            self._count_identified(connection)

    def _sweep_connections(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        pressed = self._budget.waiting > 0
        for connection in tuple(self.connections):
            if connection.deadline is not None and now > connection.deadline:
                connection.fail(TimeoutError("the client did not authenticate in time"))
            elif connection.stalled(now, pressed=pressed):
                connection.fail(TimeoutError("a request or a response made no progress"))
            elif connection.is_idle and now - connection.last_activity > self._idle_s:
                connection.abort()
        # Connections have closed since the last search, so the next one is due at a lower number.
        self._check_gone_at = min(self._check_gone_at, _next_gone_check(len(self.connections)))
        traffic_bytes = self.traffic.bytes_in + self.traffic.bytes_out
        self._trimmer.trim_if_grown(traffic_bytes - self._traffic_bytes)
        self._traffic_bytes = traffic_bytes
        self._sweep = loop.call_later(SWEEP_S, self._sweep_connections)


def _next_gone_check(connections: int) -> int:
    """Return the number of connections at which to search again; rare enough to add little cost to each new one."""
    return connections + max(GONE_CHECK_MIN, connections // 16)


def _decrease(counter: Counter[str], key: str) -> None:
    counter[key] -= 1
    if counter[key] <= 0:
        del counter[key]


def bind(
    host: str, port: int, *, flag: str, listener: str = "", listening: bool = True, is_held: bool = False
) -> socket.socket:
    """Bind a socket, so that the address is known before anything is served.

    If the address is taken, the error names the flag that sets it, or the listener if it is an additional one.
    Unless it listens, clients are refused and retry, instead of waiting for a node that is not ready. An address that
    is held may be bound by `hold_address` too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if is_held:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _address_taken_error(host, port, flag, listener, error) from error
    if listening:
        listen(bound, flag=flag, listener=listener)
    bound.setblocking(False)
    return bound


def hold_address(host: str, port: int) -> socket.socket | None:
    """Keep other users of the machine from binding an address while the process that listens there is restarted.

    Return None if it cannot be held, because the socket that listens there was not bound as held.
    """
    held = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    # Without SO_REUSEADDR: only processes of the same user may bind it as well, and only with SO_REUSEPORT.
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        held.bind((host, port))
    except OSError:
        held.close()
        return None
    return held


async def bind_with_retries(host: str, port: int, *, flag: str, wait_s: float) -> socket.socket:
    """Bind without listening; an address that is taken is tried again for `wait_s`.

    The process that serves HTTP holds its address until it has noticed that its node or its machine was killed.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + wait_s
    while True:
        try:
            return bind(host, port, flag=flag, listening=False)
        except AddressTaken:
            if loop.time() >= deadline:
                raise
        await asyncio.sleep(_BIND_RETRY_S)


def listen(bound: socket.socket, *, flag: str, listener: str = "") -> None:
    """Let clients connect to a bound socket; fail as `bind` does if another process has begun to listen there."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        bound.close()
        raise _address_taken_error(host, port, flag, listener, error) from error


def _address_taken_error(host: str, port: int, flag: str, listener: str, error: OSError) -> AddressTaken:
    remedy = f"pass another address with --{flag} HOST:PORT"
    if listener:
        remedy = f"change the address of listener {listener!r}"
    return AddressTaken(f"cannot listen on {host}:{port} ({error.strerror}); {remedy}")
