"""ClientList (key 32001), version 0: lists the clients that are connected to a node.

`millstream client list` uses it. The response holds:

    {"clock_s": …, "clients": [{"connection": 1, "address": "host:port", "client_id": "…", "software": "…",
     "software_version": "…", "idle_s": …, "produce_requests": …, "produced_bytes": …, "fetch_requests": …,
     "fetched_bytes": …}, …], "omitted": 0}

Counters start with the connection. For rates, send the request twice and divide by the difference of `clock_s`, which
is not a wall clock. Those that produced or fetched come first. A response has at most `CLIENTS_MAX` of them, so that it
never blocks the loop; `omitted` says how many more there are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Any, Final

from millstream.broker.kafka.api import ClientInfo, encode_private, refuse_unless_described
from millstream.broker.net.connection import Connection, EventualResponse
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.private.message import Response

CLIENTS_MAX: Final = 2000


class ClientListResponse(Response, frozen=True, kw_only=True):
    """The connected clients, at most `CLIENTS_MAX`, and how many more there are."""

    clock_s: float = 0.0
    clients: Sequence[dict[str, Any]] = ()
    omitted: int = 0


class ClientList:
    """Lists connected clients and their activity."""

    key = 32001
    versions = (0, 0)

    def __init__(self, connections: Collection[Connection]) -> None:
        self._connections = connections

    def handle_frame(self, frame: memoryview, header: RequestHeader, client: ClientInfo) -> EventualResponse:
        return refuse_unless_described(header, client) or encode_private(
            header, self.snapshot(asyncio.get_running_loop().time())
        )

    def snapshot(self, now: float) -> ClientListResponse:
        busy: list[tuple[Connection, ClientInfo]] = []
        others: list[tuple[Connection, ClientInfo]] = []
        for connection in self._connections:
            client: ClientInfo | None = connection.state
            if client is not None:
                moves_data = client.produce_requests or client.fetch_requests
                (busy if moves_data else others).append((connection, client))
        known = [*busy, *others]
        return ClientListResponse(
            clock_s=now,
            clients=[_describe_client(connection, client, now) for connection, client in known[:CLIENTS_MAX]],
            omitted=max(0, len(known) - CLIENTS_MAX),
        )


def _describe_client(connection: Connection, client: ClientInfo, now: float) -> dict[str, Any]:
    return {
        "connection": client.connection_id,
        "address": client.address,
        "client_id": client.client_id,
        "software": client.software_name,
        "software_version": client.software_version,
        "idle_s": round(max(0.0, now - connection.last_activity), 3),
        "produce_requests": client.produce_requests,
        "produced_bytes": client.produced_bytes,
        "fetch_requests": client.fetch_requests,
        "fetched_bytes": client.fetched_bytes,
    }
