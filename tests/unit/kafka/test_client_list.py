"""ClientList: the connected clients, the busiest first, a bounded number per turn."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from millstream.broker.kafka.api import ClientInfo
from millstream.broker.kafka.apis import client_list
from millstream.broker.kafka.apis.client_list import ClientList
from millstream.broker.net.connection import Connection
from millstream.protocol.messages import codec
from millstream_testing.api_requests import client_info


def connection(number: int, *, last_activity: float = 90.0, **done: int) -> Connection:
    state = ClientInfo(connection_id=number, host="h", address=f"h:{number}", client_id=f"c{number}", **done)  # type: ignore[arg-type]
    return cast("Connection", SimpleNamespace(state=state, last_activity=last_activity))


def silent() -> Connection:
    """A connection that has not sent a request yet."""
    return cast("Connection", SimpleNamespace(state=None, last_activity=0.0))


def test_the_busiest_clients_come_first() -> None:
    api = ClientList([connection(1), silent(), connection(2, fetch_requests=1, fetched_bytes=7)])
    snapshot = api.snapshot(100.0)
    assert [client["client_id"] for client in snapshot.clients] == ["c2", "c1"]
    assert (snapshot.clock_s, snapshot.omitted) == (100.0, 0)
    assert snapshot.clients[0] == {
        "connection": 2,
        "address": "h:2",
        "client_id": "c2",
        "software": "unknown",
        "software_version": "unknown",
        "idle_s": 10.0,
        "produce_requests": 0,
        "produced_bytes": 0,
        "fetch_requests": 1,
        "fetched_bytes": 7,
    }


def test_the_number_of_callbacks_per_turn_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_list, "CLIENTS_MAX", 2)
    snapshot = ClientList([connection(1), connection(2), connection(3, produce_requests=1)]).snapshot(0.0)
    assert [client["connection"] for client in snapshot.clients] == [3, 1]
    assert (snapshot.omitted, snapshot.clients[0]["idle_s"]) == (1, 0.0)


async def test_the_response_is_a_document() -> None:
    frame = memoryview(codec.request_head(ClientList.key, 0, 7, "test"))
    response: Any = ClientList([connection(1)]).handle_frame(frame, codec.read_request_header(frame), client_info())
    encoded = b"".join(response)[4:]
    document = msgspec.msgpack.decode(encoded[codec.response_body_at(ClientList.key, 0, encoded) :])
    assert [client["client_id"] for client in document["clients"]] == ["c1"]
