"""The gateway process: `python -m millstream.gateway.process OPTIONS`, started only by `gateway/child.py`.

It is a client of the broker like any other, so that HTTP requests never stall the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import socket
import ssl
import sys
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from itertools import chain
from types import FrameType
from typing import Any

import msgspec
import uvicorn
import uvloop

from millstream.core.config import AUTHENTICATION_REQUIRED
from millstream.core.crowding import network_of
from millstream.core.heap import freeze_heap
from millstream.core.log_format import set_up_logging
from millstream.core.scratch import remove_left_behind
from millstream.gateway.api.services import Services
from millstream.gateway.app import build_app
from millstream.gateway.callers import Callers
from millstream.gateway.child import GatewayOptions
from millstream.gateway.console.app import ConsoleApp
from millstream.gateway.console.visit import ConsoleSettings
from millstream.gateway.origin_check import OriginCheck
from millstream.gateway.protocol import CONNECTIONS_MAX, SURPLUS_MAX, Protocol
from millstream.protocol.messages.lean_kio import import_lean_kio
from millstream.protocol.wire.credentials import adopt_node_credentials
from millstream.protocol.wire.node_status import BrokerStatusPipe

_logger = logging.getLogger(__name__)

DRAIN_S = 3
ACCEPTS_PER_ROUND = 16
"""uvloop accepts one connection per handle and round of the loop; clients that connect and hang up all the time must
not block health checks."""
HANDSHAKE_S = 10.0
HANDSHAKES_MAX = 256
"""TLS handshakes in progress. Their buffers take up to 256 KiB each, and clients that never finish one must not keep
others out."""
ACCEPT_RETRY_S = 0.1
OPEN_FILES = 2 * (CONNECTIONS_MAX + SURPLUS_MAX + HANDSHAKES_MAX)
"""Client connections, and the connections to brokers that requests wait on."""
KEEP_ALIVE_S = 75
"""Longer than load balancers keep idle connections, so that none is closed while a request is being sent."""


class TlsAcceptor:
    """Accepts connections that begin with a TLS handshake.

    Beyond the maximum, the address with the most handshakes loses its oldest one, so that one cannot keep out others.
    """

    def __init__(self, listening: socket.socket, tls: ssl.SSLContext, connect: Callable[[], asyncio.Protocol]) -> None:
        self._listening = listening
        self._tls = tls
        self._connect = connect
        self._loop = asyncio.get_running_loop()
        self._handshakes: dict[str, deque[asyncio.Task[None]]] = {}
        """By address, oldest first."""
        self._count = 0
        self._is_closed = False
        listening.setblocking(False)
        self._resume()

    def close(self) -> None:
        """Accept nothing more, and abandon the handshakes; connections stay open."""
        self._is_closed = True
        self._loop.remove_reader(self._listening)
        for task in chain.from_iterable(self._handshakes.values()):
            task.cancel()

    async def wait_closed(self) -> None:
        await asyncio.gather(*chain.from_iterable(self._handshakes.values()), return_exceptions=True)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listening, self._accept)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_PER_ROUND):
            try:
                accepted, address = self._listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                _logger.error("connections cannot be accepted", extra={"error": str(error)})
                self._loop.remove_reader(self._listening)
                self._loop.call_later(ACCEPT_RETRY_S, self._resume)
                return
            accepted.setblocking(False)
            task = self._loop.create_task(self._handshake(accepted))
            network = network_of(address[0])
            self._handshakes.setdefault(network, deque()).append(task)
            self._count += 1
            task.add_done_callback(partial(self._on_handshake_done, network))
            if self._count > HANDSHAKES_MAX:
                most = max(self._handshakes, key=lambda address: len(self._handshakes[address]))
                oldest = self._handshakes[most][0]
                self._forget(most, oldest)
                oldest.cancel()

    def _on_handshake_done(self, network: str, task: asyncio.Task[None]) -> None:
        if task in self._handshakes.get(network, ()):
            self._forget(network, task)

    def _forget(self, network: str, task: asyncio.Task[None]) -> None:
        self._count -= 1
        self._handshakes[network].remove(task)
        if not self._handshakes[network]:
            del self._handshakes[network]

    async def _handshake(self, accepted: socket.socket) -> None:
        # Clients that do not trust the certificate, and port scanners, fail.
        with suppress(OSError):
            await self._loop.connect_accepted_socket(
                self._connect, accepted, ssl=self._tls, ssl_handshake_timeout=HANDSHAKE_S
            )


class Server(uvicorn.Server):
    """uvicorn, but waiting for a stop event instead of polling ten times a second."""

    def __init__(self, app: Any, tls: ssl.SSLContext | None = None) -> None:
        config = uvicorn.Config(
            app,
            http=Protocol,
            interface="asgi3",
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            date_header=False,
            proxy_headers=False,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=DRAIN_S,
            ssl_context_factory=None if tls is None else lambda _config, _default: tls,
        )
        super().__init__(config)
        self._stop_requested = asyncio.Event()
        self.on_stopped: Callable[[], None] = lambda: None
        """Called first on stop, to release requests that wait for messages."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Listen as uvicorn does, but with limits on TLS handshakes."""
        config, loop = self.config, asyncio.get_running_loop()

        def create_protocol() -> asyncio.Protocol:
            return Protocol(config=config, server_state=self.server_state, app_state=self.lifespan.state)

        servers: list[Any] = []
        for listening in sockets or ():
            if isinstance(config.ssl, ssl.SSLContext):
                servers.append(TlsAcceptor(listening, config.ssl, create_protocol))
            else:
                servers.append(await loop.create_server(create_protocol, sock=listening, backlog=config.backlog))
        self.servers = servers
        self.started = True

    async def main_loop(self) -> None:
        await self._stop_requested.wait()

    def stop(self) -> None:
        """Finish the requests in progress and end."""
        self.should_exit = True
        self.on_stopped()
        self._stop_requested.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; the broker, if it runs, starts another gateway."""
        asyncio.get_running_loop().call_soon_threadsafe(self.stop)


async def serve(
    listening: socket.socket,
    kafka_address: str,
    hosts: Sequence[str],
    *,
    registry: socket.socket | None,
    authenticates: str | None,
    tls: ssl.SSLContext | None,
    console: ConsoleSettings,
) -> None:
    """Serve until the broker closes the pipe; requests to `registry` are for the schema registry."""
    line = socket.socket(fileno=os.dup(sys.stdin.fileno()))
    line.setblocking(False)
    broker = BrokerStatusPipe(line, reveals_details=authenticates is None)
    services = Services(kafka_address, starting=lambda: broker.starting)
    callers = None if authenticates is None else Callers(services, requires=authenticates == AUTHENTICATION_REQUIRED)
    port = None if registry is None else registry.getsockname()[1]
    site = OriginCheck(hosts)
    pages = ConsoleApp(services, site, callers, console, is_tls=tls is not None)
    app = build_app(services.status.fetch, broker.health, services, site, callers, registry_port=port, console=pages)
    server = Server(app, tls)
    server.on_stopped = services.stop
    asyncio.get_running_loop().add_reader(line.fileno(), _handle_status, server, line, broker)
    pages.start()
    # A gateway that was killed during a dry run left its folder behind.
    tidying = asyncio.create_task(asyncio.to_thread(remove_left_behind))
    try:
        doubles = [listening.dup() for _ in range(ACCEPTS_PER_ROUND - 1)] if tls is None else []
        await server.serve(sockets=[listening, *doubles, *([] if registry is None else [registry])])
    finally:
        await pages.close()
        if callers is not None:
            await callers.close()
        await services.close()
        await tidying
        line.close()


def _handle_status(server: Server, line: socket.socket, broker: BrokerStatusPipe) -> None:
    try:
        piece = line.recv(65536)
    except BlockingIOError:
        return
    except OSError:
        # The broker was killed before it read the last request for its status.
        piece = b""
    if piece:
        broker.feed(piece)
        return
    # The socket is closed: the broker has ended, or wants this process to end.
    asyncio.get_running_loop().remove_reader(line.fileno())
    server.stop()


def raise_open_files_limit() -> None:
    """Raise the limit of open files so that all connections fit, as far as the system allows.

    A process that runs out of descriptors cannot accept the connection of a health check.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    files_max = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < files_max:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files_max, hard))


def main() -> None:
    """Run the gateway with the broker's options."""
    options = msgspec.json.decode(sys.argv[1], type=GatewayOptions)
    set_up_logging(options.log_level, options.log_format)
    import_lean_kio()
    adopt_node_credentials()
    raise_open_files_limit()
    listening = socket.socket(fileno=options.descriptor)
    tls = None if options.tls is None else _follow_tls(*options.tls)
    registry = None if options.registry is None else socket.socket(fileno=options.registry)
    freeze_heap()
    uvloop.run(
        serve(
            listening,
            options.kafka,
            options.hosts,
            registry=registry,
            authenticates=options.authenticates,
            tls=tls,
            console=ConsoleSettings(**options.console),
        )
    )


def _follow_tls(certificate: str, key: str) -> ssl.SSLContext:
    """Make a context that uses renewed files from the next connection on."""
    from millstream.broker.security.tls import ReloadingTls, TlsFiles

    return ReloadingTls(TlsFiles(certificate=certificate, key=key)).context


if __name__ == "__main__":
    main()
