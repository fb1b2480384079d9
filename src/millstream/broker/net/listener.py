"""Accepts connections, counts them, ends those that stall or idle too long, and drains them on shutdown."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Iterable

from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, ConnectionLimits, Service, Traffic
from millstream.broker.net.presence import Hangups
from millstream.broker.net.turns import Turns
from millstream.core.errors import AddressTaken
from millstream.core.metric import Metric, counter, gauge

_logger = logging.getLogger(__name__)

SWEEP_S = 5.0
BACKLOG = 1024
ACCEPTS_PER_ROUND = 16
"""uvloop accepts one connection per handle and round of the loop, so the listening socket has several: with one, a busy
node would keep new clients waiting behind those who connect and hang up all the time."""


class _Refused(asyncio.Protocol):
    """Refuses a connection beyond the maximum."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Close at once."""
        transport.close()


class Listener:
    """A listening socket and its connections."""

    def __init__(
        self,
        service: Service,
        *,
        limits: ConnectionLimits,
        budget: Budget,
        connections_max: int,
        idle_s: float,
        turns: Turns | None = None,
    ) -> None:
        self._service = service
        self._limits = limits
        self._budget = budget
        self.connections_max = connections_max
        """May change while it listens; connections beyond it that are open stay."""
        self._idle_s = idle_s
        self._servers: list[asyncio.Server] = []
        self._sweep: asyncio.TimerHandle | None = None
        self._hangups = Hangups()
        self._turns = turns or Turns()
        self._all_closed = asyncio.Event()
        self._all_closed.set()
        self.connections: set[Connection] = set()
        self.traffic = Traffic()

    async def start(self, listening: socket.socket) -> None:
        """Accept connections on a socket that is bound already."""
        loop = asyncio.get_running_loop()
        for handle in (listening, *(listening.dup() for _ in range(ACCEPTS_PER_ROUND - 1))):
            self._servers.append(await loop.create_server(self._connection, sock=handle, backlog=BACKLOG))
        self._sweep = loop.call_later(SWEEP_S, self._sweep_connections)

    def stop_accepting(self) -> None:
        """Accept no new connections; open ones continue."""
        while self._servers:
            self._servers.pop().close()

    async def drain(self, timeout_s: float) -> None:
        """Let every connection finish its requests, then close them all."""
        self.stop_accepting()
        if self._sweep is not None:
            self._sweep.cancel()
        for connection in tuple(self.connections):
            connection.drain()
        try:
            async with asyncio.timeout(timeout_s):
                await self._all_closed.wait()
        except TimeoutError:
            _logger.warning("connections closed before they were done", extra={"connections": len(self.connections)})
            for connection in tuple(self.connections):
                connection.abort()
            await self._all_closed.wait()
        self._hangups.close()

    def metrics(self) -> Iterable[Metric]:
        """Return the metrics of connections and traffic."""
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
        yield counter("millstream_requests_total", "Requests received.", traffic.frames_in)
        yield counter("millstream_received_bytes_total", "Bytes received from clients.", traffic.bytes_in)
        yield counter("millstream_sent_bytes_total", "Bytes sent to clients.", traffic.bytes_out)

    def _connection(self) -> asyncio.BaseProtocol:
        if len(self.connections) >= self.connections_max:
            self.traffic.connections_refused += 1
            return _Refused()
        connection = Connection(
            self._service, self._limits, self._budget, self.traffic, self._closed, self._turns, self._hangups
        )
        self.connections.add(connection)
        self._all_closed.clear()
        return connection

    def _closed(self, connection: Connection) -> None:
        self.connections.discard(connection)
        if not self.connections:
            self._all_closed.set()

    def _sweep_connections(self) -> None:
        loop = asyncio.get_running_loop()
        now = loop.time()
        pressed = self._budget.waiting > 0
        for connection in tuple(self.connections):
            if connection.stalled(now, pressed=pressed):
                connection.fail(TimeoutError("a request or a reply made no progress"))
            elif connection.is_idle and now - connection.last_activity > self._idle_s:
                connection.abort()
        self._sweep = loop.call_later(SWEEP_S, self._sweep_connections)


def bind(host: str, port: int, *, flag: str, listening: bool = True) -> socket.socket:
    """Bind a socket, so that the address is known before anything is served; name the flag if it is taken.

    Unless it listens, clients are refused and retry, instead of waiting for a node that is not ready.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((host, port))
    except OSError as error:
        bound.close()
        raise _taken(host, port, flag, error) from error
    if listening:
        listen(bound, flag=flag)
    bound.setblocking(False)
    return bound


def listen(bound: socket.socket, *, flag: str) -> None:
    """Let clients connect to a bound socket; name the flag if another process has begun to listen there meanwhile."""
    try:
        bound.listen(BACKLOG)
    except OSError as error:
        host, port = bound.getsockname()[:2]
        bound.close()
        raise _taken(host, port, flag, error) from error


def _taken(host: str, port: int, flag: str, error: OSError) -> AddressTaken:
    return AddressTaken(
        f"cannot listen on {host}:{port} ({error.strerror}); give another address with --{flag} HOST:PORT"
    )
