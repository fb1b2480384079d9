"""Slow connections: slow request headers, and slow readers of responses."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from millstream.gateway import pressure as bodies
from millstream.gateway import protocol as bounds
from millstream.gateway.api.dispatch import PIECE_BYTES, send_response
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.route import Lane
from millstream.gateway.pressure import Pressure, RequestMemory
from millstream.gateway.protocol import Protocol
from millstream_testing.waiting import until

WAIT_S = 60.0
LARGE = 32 * 1024 * 1024


class AppServer:
    """A server of one application on a free port."""

    def __init__(self) -> None:
        self.size = 2
        self.made: list[Protocol] = []
        self.served = asyncio.Event()
        self.address = ("", 0)
        config = uvicorn.Config(
            self._app, http=Protocol, interface="asgi3", ws="none", lifespan="off", log_config=None, access_log=False
        )
        config.load()
        self._config = config
        self._state = ServerState()

    def make(self) -> Protocol:
        self.made.append(Protocol(self._config, self._state, {}))
        return self.made[-1]

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["path"] == "/body":
            room = RequestMemory(Pressure(), Lane.PUBLISH)
            try:
                await room.read(dict(scope["headers"]), receive)
            except Refused as error:
                await send_response(send, error.status, (b"content-type", b"text/plain"), b"late")
                return
        await send_response(send, 200, (b"content-type", b"text/plain"), b"x" * self.size)
        self.served.set()


@pytest.fixture
async def server() -> AsyncIterator[AppServer]:
    # A process has one gateway, so the state of all connections belongs to their class.
    Protocol.none_stalled_until = 0.0
    Protocol.surplus.clear()
    Protocol.by_network.clear()
    made = AppServer()
    server = await asyncio.get_running_loop().create_server(made.make, "127.0.0.1", 0)
    made.address = server.sockets[0].getsockname()
    yield made
    for protocol in made.made:
        protocol.transport.abort()
    server.close()
    await server.wait_closed()


async def test_every_request_header_must_arrive_in_time(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    for _ in range(2):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            await reader.readuntil(b"\r\n\r\nxx")
    # Between requests, only uvicorn's keep-alive timeout applies.
    assert server.made[0]._expected is None
    monkeypatch.setattr(bounds, "HEAD_S_MAX", 0.01)
    writer.write(b"GET / HTTP/1.1\r\nhost")
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    writer.close()


async def test_a_silent_connection_is_closed(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "HEAD_S_MAX", 0.01)
    reader, writer = await asyncio.open_connection(*server.address)
    async with asyncio.timeout(WAIT_S):
        assert await reader.read() == b""
    writer.close()


@pytest.mark.parametrize("size", [100_000, 200_000, 4_000_000])
async def test_an_oversized_header_is_reported(server: AppServer, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "REFUSED_S_MAX", WAIT_S)
    reader, writer = await asyncio.open_connection(*server.address)
    async with asyncio.timeout(WAIT_S):
        for _ in range(2):
            writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            await reader.readuntil(b"\r\n\r\nxx")
        server.served.clear()
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\na: " + b"a" * size + b"\r\n\r\nhello")
        await writer.drain()
        response = await reader.read()
    assert response.startswith(b"HTTP/1.1 431 ")
    assert b"take at most 65536 bytes" in response
    assert response.count(b"HTTP/1.1") == 1
    assert not server.served.is_set()
    writer.close()


async def test_a_large_body_does_not_count_as_a_large_header(server: AppServer) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 200000\r\n\r\n" + b"x" * 200_000)
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readuntil(b"\r\n\r\nxx")).startswith(b"HTTP/1.1 200 ")
    writer.close()


@pytest.mark.parametrize("too", ["long", "much"])
async def test_a_client_that_continues_after_a_refusal_is_disconnected(
    server: AppServer, monkeypatch: pytest.MonkeyPatch, too: str
) -> None:
    monkeypatch.setattr(bounds, *(("REFUSED_S_MAX", 0.01) if too == "long" else ("REFUSED_BYTES_MAX", 10_000)))
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"this is no request\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        assert (await reader.read()).startswith(b"HTTP/1.1 400 ")
        while not server.made[0].transport.is_closing():
            writer.write(b"x" * 5000 if too == "much" else b"")
            await asyncio.sleep(0)
    writer.close()


async def test_a_client_that_does_not_read_the_response_is_disconnected(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "WRITE_S_MAX", 0.01)
    server.size = LARGE
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        client.setblocking(False)
        await loop.sock_connect(client, server.address)
        await loop.sock_sendall(client, b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(WAIT_S):
            # The response counts as sent only now that no client will receive it.
            await server.served.wait()
        assert server.made[0].transport.is_closing()


async def test_a_slow_reader_gets_everything(server: AppServer) -> None:
    server.size = LARGE
    reader, writer = await asyncio.open_connection(*server.address, limit=PIECE_BYTES)
    writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(b"\r\n\r\n")
        while server.made[0]._stuck is None:
            await asyncio.sleep(0)
        assert not server.served.is_set()
        # Instead of advancing the clock: much was received since the last check.
        server.made[0]._check_client_reading(2 * LARGE)
        assert await reader.readexactly(LARGE) == b"x" * LARGE
        await server.served.wait()
    assert not server.made[0].flow.write_paused
    writer.close()


@pytest.mark.parametrize("begun", [b"", b"x"])
async def test_a_stalled_body_is_refused_and_its_connection_freed(
    server: AppServer, monkeypatch: pytest.MonkeyPatch, begun: bytes
) -> None:
    monkeypatch.setattr(bodies, "BODY_S_MAX", 0.01)
    monkeypatch.setattr(bounds, "REFUSED_S_MAX", 0.01)
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n" + begun)
    async with asyncio.timeout(WAIT_S):
        response = await reader.readuntil(b"late")
        assert response.startswith(b"HTTP/1.1 408 ")
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
        await until(lambda: server.made[0] not in server.made[0].connections)
    writer.close()


async def test_a_connection_is_kept_if_the_rest_of_a_refused_body_arrives(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bodies, "BODY_S_MAX", 0.01)
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(b"late")
        writer.write(b"0123456789")
        while server.made[0]._expected is not None:
            await asyncio.sleep(0)
        assert server.made[0].timeout_keep_alive_task is not None
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        await reader.readuntil(b"\r\n\r\nxx")
    writer.close()


async def ask(server: AppServer, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode())
    async with asyncio.timeout(WAIT_S):
        response = await reader.read()
    writer.close()
    return response


async def test_health_responds_when_all_connections_are_in_use(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "CONNECTIONS_MAX", 2)
    monkeypatch.setattr(bounds, "SURPLUS_MAX", 2)
    monkeypatch.setattr(bounds, "STALLED_S", WAIT_S)
    taken = [await asyncio.open_connection(*server.address) for _ in range(2)]
    # Silent connections beyond the limit replace each other, so that nothing blocks health checks.
    taken += [await asyncio.open_connection(*server.address) for _ in range(20)]
    assert (await ask(server, "/healthz?from=probe")).startswith(b"HTTP/1.1 200 ")
    assert (await ask(server, "/readyz")).startswith(b"HTTP/1.1 200 ")
    refused = await ask(server, "/")
    assert refused.startswith(b"HTTP/1.1 503 ")
    assert b"2 connections are open" in refused
    assert len(server.made[0].connections) <= 5
    for _, writer in taken:
        writer.close()


async def test_a_new_connection_replaces_a_stalled_one(server: AppServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounds, "CONNECTIONS_MAX", 1)
    monkeypatch.setattr(bounds, "STALLED_S", 0.0)
    reader, stalled = await asyncio.open_connection(*server.address)
    stalled.write(b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\n")
    async with asyncio.timeout(WAIT_S):
        while not server.made or server.made[0].cycle is None:
            await asyncio.sleep(0)
        other, writer = await asyncio.open_connection(*server.address)
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await other.readuntil(b"\r\n\r\nxx")).startswith(b"HTTP/1.1 200 ")
        with suppress(ConnectionResetError):
            assert await reader.read() == b""
    writer.close()
    stalled.close()


async def test_the_address_with_the_most_connections_loses_some(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bounds, "CONNECTIONS_MAX", 4)
    monkeypatch.setattr(bounds, "STALLED_S", WAIT_S)
    many = [await asyncio.open_connection(*server.address, local_addr=("127.0.0.2", 0)) for _ in range(4)]
    async with asyncio.timeout(WAIT_S):
        while len(server.made) < len(many):
            await asyncio.sleep(0)
        assert (await ask(server, "/")).startswith(b"HTTP/1.1 200 ")
        # One of them made room; the others stay.
        assert sum(protocol.transport.is_closing() for protocol in server.made[:4]) == 1
        for _, writer in many:
            writer.close()
        for protocol in server.made:
            protocol.transport.abort()
        while Protocol.by_network:
            await asyncio.sleep(0)


async def test_pipelined_requests_wait_as_bytes_and_all_get_a_response(
    server: AppServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    waiting: list[int] = []
    start = Protocol._start_asgi_task

    def note(protocol: Protocol, *arguments: Any) -> None:
        waiting.append(len(protocol.pipeline))
        start(protocol, *arguments)

    monkeypatch.setattr(Protocol, "_start_asgi_task", note)
    get, size = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n", 3 * bounds.BODY_STEP_BYTES
    post = b"POST /body HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % size + b"b" * size
    rounds, gets = 20, 200
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write((get * gets + post) * rounds)
    for _ in range(rounds * (gets + 1)):
        async with asyncio.timeout(WAIT_S):
            assert (await reader.readuntil(b"\r\n\r\nxx")).startswith(b"HTTP/1.1 200")
    assert len(waiting) == rounds * (gets + 1)
    assert max(waiting) <= bounds.BODY_STEP_BYTES // len(get) + 1
    # Nothing is left over, and the connection continues as usual.
    assert server.made[0]._ahead == b""
    writer.write(get)
    async with asyncio.timeout(WAIT_S):
        await reader.readuntil(b"\r\n\r\nxx")
    writer.close()


@pytest.mark.parametrize(
    ("version", "hosts", "status"), [("1.1", 0, 400), ("1.1", 1, 200), ("1.1", 2, 400), ("1.0", 0, 200)]
)
async def test_an_http_1_1_request_has_one_host(server: AppServer, version: str, hosts: int, status: int) -> None:
    reader, writer = await asyncio.open_connection(*server.address)
    writer.write(f"GET / HTTP/{version}\r\n".encode() + b"host: x\r\n" * hosts + b"\r\n")
    async with asyncio.timeout(WAIT_S):
        assert (await reader.readline()).split()[1] == b"%d" % status
    writer.close()
