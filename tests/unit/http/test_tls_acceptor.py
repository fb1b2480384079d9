"""TLS handshakes of the HTTP gateway: a bounded number at a time."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import pytest

from millstream.broker.security.tls import ReloadingTls, TlsFiles
from millstream.gateway import process
from millstream.gateway.process import TlsAcceptor
from millstream.protocol.wire.credentials import client_tls
from millstream_testing.security import Certificates


class Greeting(asyncio.Protocol):
    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.write(b"hello")
        transport.close()


async def test_silent_clients_neither_add_up_nor_keep_others_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acceptor, certificates = accept(tmp_path, monkeypatch)
    host, port = acceptor._listening.getsockname()
    silent = [await asyncio.open_connection(host, port) for _ in range(20)]
    reader, writer = await asyncio.open_connection(host, port, ssl=client_tls(certificates.ca))
    assert await reader.read() == b"hello"
    for abandoned, _ in silent[:16]:
        with suppress(ConnectionResetError):
            assert await abandoned.read() == b""
    assert not any(reader.at_eof() for reader, _ in silent[17:])
    await close(acceptor, [*silent, (reader, writer)])


async def test_the_address_with_the_most_handshakes_loses_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    acceptor, certificates = accept(tmp_path, monkeypatch)
    host, port = acceptor._listening.getsockname()
    slow, trusted = socket.socket(), client_tls(certificates.ca)
    await asyncio.to_thread(slow.connect, (host, port))
    silent = [await asyncio.open_connection(host, port, local_addr=("127.0.0.2", 0)) for _ in range(20)]
    reader, writer = await asyncio.open_connection(sock=slow, ssl=trusted, server_hostname=host)
    assert await reader.read() == b"hello"
    await close(acceptor, [*silent, (reader, writer)])


def accept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[TlsAcceptor, Certificates]:
    monkeypatch.setattr(process, "HANDSHAKES_MAX", 4)
    monkeypatch.setattr(process, "HANDSHAKE_S", 1000.0)
    certificates = Certificates(tmp_path)
    files = TlsFiles(certificate=str(certificates.node), key=str(certificates.node_key))
    listening = socket.create_server(("127.0.0.1", 0))
    return TlsAcceptor(listening, ReloadingTls(files).context, Greeting), certificates


async def close(
    acceptor: TlsAcceptor, connections: Iterable[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
) -> None:
    acceptor.close()
    await acceptor.wait_closed()
    acceptor._listening.close()
    for _, writer in connections:
        writer.close()
