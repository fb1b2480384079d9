"""TLS handshakes at a listener: failed ones leave nothing behind, and data sent with the last message is served."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
import struct
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import pytest

from millstream.broker.net import listener as listener_module
from millstream.broker.net.budget import Budget
from millstream.broker.net.connection import Connection, ConnectionLimits, EventualResponse
from millstream.broker.net.listener import Listener, ListenerOptions, bind
from millstream.broker.security.tls import ReloadingTls, TlsFiles
from millstream.protocol.wire.credentials import client_tls
from millstream_testing.security import Certificates
from millstream_testing.waiting import until

LIMITS = ConnectionLimits(frame_bytes_max=1 << 20)


class Echo:
    def handle(self, frame: memoryview, _connection: Connection) -> EventualResponse:
        return [struct.pack(">i", len(frame)), bytes(frame)]


class Running(NamedTuple):
    listener: Listener
    port: int
    tls: ssl.SSLContext


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[Running]:
    """A listener for one connection at a time."""
    certificates = Certificates(tmp_path)
    files = TlsFiles(certificate=str(certificates.node), key=str(certificates.node_key))
    listener = Listener(Echo(), limits=LIMITS, budget=Budget(1 << 30), connections_max=1, idle_s=600)
    sock = bind("127.0.0.1", 0, flag="kafka")
    port = sock.getsockname()[1]
    await listener.start(sock, ListenerOptions(service=Echo(), limits=LIMITS, tls=ReloadingTls(files)))
    yield Running(listener, port, client_tls(certificates.ca))
    await listener.drain(1)


def frame(payload: bytes) -> bytes:
    return struct.pack(">i", len(payload)) + payload


@pytest.mark.parametrize("sent", [b"", frame(b"x" * 20), b"\x16\x03\x01\x00\x05hello"], ids=["left", "plain", "broken"])
async def test_a_failed_handshake_frees_its_slot(
    running: Running, sent: bytes, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(sent)
    await until(lambda: bool(running.listener._handshakes) or not sent or bool(caplog.records))
    if sent:
        with suppress(ConnectionError):
            assert len(await reader.read()) < 16, "an alert, if anything"
    writer.close()
    await until(lambda: not running.listener._handshakes)
    assert not running.listener.connections
    assert [record.message for record in caplog.records] == (["TLS handshake failed"] if sent else [])
    reader, writer = await asyncio.open_connection(
        "127.0.0.1", running.port, ssl=running.tls, server_hostname="localhost"
    )
    writer.write(frame(b"hello"))
    assert await reader.readexactly(9) == frame(b"hello")
    assert len(running.listener.connections) == 1
    writer.close()


async def test_an_unfinished_handshake_times_out(running: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener_module, "HANDSHAKE_S", 0.1)
    reader, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"\x16\x03\x01")
    with suppress(ConnectionError):
        assert await reader.read() == b""
    await until(lambda: not running.listener._handshakes)
    writer.close()


async def test_requests_sent_with_the_end_of_the_handshake_are_served(running: Running) -> None:
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = running.tls.wrap_bio(incoming, outgoing, server_hostname="localhost")

    def exchange() -> bytes:
        with socket.create_connection(("127.0.0.1", running.port), timeout=30) as connection:
            while True:
                try:
                    tls.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))
            for number in range(3):
                tls.write(frame(bytes([number]) * 10_000))
            # The last message of the handshake and the first requests in one piece.
            connection.sendall(outgoing.read())
            response = b""
            while len(response) < 3 * 10_004:
                try:
                    response += tls.read(65536)
                except ssl.SSLWantReadError:
                    incoming.write(connection.recv(65536))
            return response

    may_respond = await asyncio.to_thread(exchange)
    assert may_respond == b"".join(frame(bytes([number]) * 10_000) for number in range(3))


async def test_the_listener_drains_during_a_handshake(running: Running) -> None:
    _, writer = await asyncio.open_connection("127.0.0.1", running.port)
    writer.write(b"\x16\x03\x01")
    await until(lambda: bool(running.listener._handshakes))
    async with asyncio.timeout(30):
        await running.listener.drain(1)
    await until(lambda: not running.listener._handshakes)
    writer.close()
