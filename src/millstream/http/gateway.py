"""The gateway's process: `python -m millstream.http.gateway OPTIONS`, started by `http/child.py` and by nothing else.

It is a client of the broker like any other, so that whatever HTTP asks for never stalls the log.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import sys
from collections.abc import Callable, Sequence
from types import FrameType
from typing import Any

import uvicorn
import uvloop

from millstream.http.app import build_app
from millstream.http.broker_status import BrokerStatus
from millstream.http.parts import Parts
from millstream.http.protocol import Protocol
from millstream.http.site import Site
from millstream.model.log_line import set_up_logging
from millstream.wire.lean_kio import import_lean_kio

DRAIN_S = 3
KEEP_ALIVE_S = 75
"""Longer than load balancers keep connections that nobody uses, so that none is closed while one sends a request."""


class Server(uvicorn.Server):
    """uvicorn, but waiting to be told to stop instead of looking ten times a second."""

    def __init__(self, app: Any) -> None:
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
        )
        super().__init__(config)
        self._told = asyncio.Event()
        self.when_stopped: Callable[[], None] = lambda: None
        """Called first when it is told to stop, so that nobody is kept waiting for what does not come any more."""

    async def main_loop(self) -> None:
        """Serve until told to stop."""
        await self._told.wait()

    def stop(self) -> None:
        """Finish the requests under way and end."""
        self.should_exit = True
        self.when_stopped()
        self._told.set()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Stop on a signal; the broker, if it lives, starts another gateway."""
        asyncio.get_running_loop().call_soon_threadsafe(self.stop)


async def serve(listening: socket.socket, kafka_address: str, hosts: Sequence[str]) -> None:
    """Serve until the broker hangs up."""
    status = BrokerStatus(kafka_address)
    told = Told()
    parts = Parts(kafka_address, starting=lambda: told.starting)
    server = Server(build_app(status.ask, lambda: told.starting, parts, Site(hosts)))
    server.when_stopped = parts.stop
    asyncio.get_running_loop().add_reader(sys.stdin.fileno(), _hear, server, told)
    try:
        await server.serve(sockets=[listening])
    finally:
        await parts.close()
        await status.close()


class Told:
    """What the broker says of itself through the pipe, while it cannot answer otherwise."""

    def __init__(self) -> None:
        self.starting: str | None = None
        """Why it gives no answer yet; None once it does."""
        self._rest = b""

    def feed(self, piece: bytes) -> None:
        """Take over the last whole line of what has come."""
        *lines, self._rest = (self._rest + piece).split(b"\n")
        if lines:
            self.starting = json.loads(lines[-1])["starting"]


def _hear(server: Server, told: Told) -> None:
    piece = os.read(sys.stdin.fileno(), 65536)
    if piece:
        told.feed(piece)
        return
    # The pipe is closed: the broker ends, or wants this process to.
    asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
    server.stop()


def main() -> None:
    """Run the gateway as the broker asks."""
    options = json.loads(sys.argv[1])
    set_up_logging(options["log_level"], options["log_format"])
    import_lean_kio()
    uvloop.run(serve(socket.socket(fileno=options["descriptor"]), options["kafka"], options["hosts"]))


if __name__ == "__main__":
    main()
