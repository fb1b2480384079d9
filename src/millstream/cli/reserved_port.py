"""Reserves a port for a server, before it listens and while it is down."""

from __future__ import annotations

import socket
import weakref


class ReservedPort:
    """A port that no other process is given while this object exists.

    Linux lets sockets share an address if all of them allow it and only one listens, as restarted servers do. Until one
    listens, connections are refused.
    """

    def __init__(self, host: str = "127.0.0.1") -> None:
        holds = socket.socket()
        holds.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holds.bind((host, 0))
        self.number = int(holds.getsockname()[1])
        self.address = f"{host}:{self.number}"
        weakref.finalize(self, holds.close)
