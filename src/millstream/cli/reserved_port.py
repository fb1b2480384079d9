"""A port of this machine that is kept for one server, before it listens and while it is down."""

from __future__ import annotations

import socket
import weakref


class ReservedPort:
    """A port that nobody else is given as long as this is there.

    Linux lets sockets share an address if all of them allow it and only one listens, as servers do that start again
    where they were. Until one listens, clients are refused.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        holds = socket.socket()
        holds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holds.bind((host, 0))
        self.number = int(holds.getsockname()[1])
        self.address = f"{host}:{self.number}"
        weakref.finalize(self, holds.close)
