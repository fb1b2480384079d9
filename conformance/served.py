"""The APIs that a broker reports, requested with ApiVersions in version 0, which is encoded by hand."""

from __future__ import annotations

import socket
import struct
from collections.abc import Mapping

API_VERSIONS_KEY = 18
_RESPONSE_S_MAX = 30.0


def ask_served(address: str) -> Mapping[int, tuple[int, int]]:
    """The keys of the APIs that the broker serves, each with its oldest and newest version."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=_RESPONSE_S_MAX) as connection:
        request = struct.pack(">hhih", API_VERSIONS_KEY, 0, 1, -1)
        connection.sendall(struct.pack(">i", len(request)) + request)
        size: int = struct.unpack(">i", receive(connection, 4))[0]
        response = receive(connection, size)
    _correlation, error, count = struct.unpack_from(">ihi", response)
    if error:
        raise ConnectionError(f"ApiVersions got error code {error}")
    entries = struct.iter_unpack(">hhh", response[10 : 10 + 6 * count])
    return {key: (oldest, newest) for key, oldest, newest in entries}


def describe_served(served: Mapping[int, tuple[int, int]]) -> str:
    """The same as one argument for the clients' programs: `key:oldest-newest,...`."""
    return ",".join(f"{key}:{oldest}-{newest}" for key, (oldest, newest) in sorted(served.items()))


def receive(connection: socket.socket, size: int) -> bytes:
    """Read so many bytes; a connection that ends before them is an error."""
    received = bytearray()
    while len(received) < size:
        chunk = connection.recv(size - len(received))
        if not chunk:
            raise ConnectionError("the broker closed the connection instead of responding to ApiVersions")
        received += chunk
    return bytes(received)
