"""Clients that go while a real broker waits on their behalf."""

from __future__ import annotations

import socket
import struct
import time
from contextlib import ExitStack
from pathlib import Path

from confluent_kafka import Producer

from millstream_testing.server import Server

POLLS = 40
SOON_S = 60.0
FETCH_V4 = struct.Struct(">hhih")


def waiting(server: Server) -> int:
    """How many fetches wait."""
    lines = server.metrics().splitlines()
    return next(int(float(line.split()[1])) for line in lines if line.startswith("millstream_fetch_waiting "))


def until_waiting(server: Server, count: int) -> None:
    deadline = time.monotonic() + SOON_S
    while (found := waiting(server)) != count:
        assert time.monotonic() < deadline, f"{found} fetches wait, not {count}"
        time.sleep(0.02)


def long_poll(topic: bytes, offset: int) -> bytes:
    """A fetch of version 4 that waits for five minutes for more bytes than will ever come."""
    body = FETCH_V4.pack(1, 4, 7, -1) + struct.pack(">iiiib", -1, 300_000, 1 << 20, 1 << 20, 0)
    body += struct.pack(">ih", 1, len(topic)) + topic + struct.pack(">iiqi", 1, 0, offset, 1 << 20)
    return struct.pack(">i", len(body)) + body


def test_long_polls_end_with_their_clients(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server, ExitStack() as clients:
        producer = Producer({"bootstrap.servers": server.kafka})
        producer.produce("t", b"little")
        assert producer.flush(SOON_S) == 0
        host, _, port = server.kafka.rpartition(":")
        polling = [clients.enter_context(socket.create_connection((host, int(port)))) for _ in range(POLLS)]
        for number, client in enumerate(polling):
            client.settimeout(SOON_S)
            # Behind some of them so much waits that the broker has stopped to read.
            client.sendall(long_poll(b"t", 0) * (1 if number % 2 else 200))
        until_waiting(server, POLLS)
        for client in polling[:10]:
            client.close()
        until_waiting(server, POLLS - 10)
        # Who has closed one half only gets what there is, for every request.
        for number, client in enumerate(polling[10:], 10):
            client.shutdown(socket.SHUT_WR)
            received = bytearray()
            while part := client.recv(1 << 16):
                received += part
            assert received.count(b"little") == (1 if number % 2 else 200)
        until_waiting(server, 0)
