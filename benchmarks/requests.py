"""Requests with one message each, over a bare socket: how long one takes, and how many fit into a second."""

from __future__ import annotations

import socket
import struct
import time
from dataclasses import dataclass

from benchmarks.processes import Cpu, cpu_of

from millstream.records.record import NewRecord, encode_batch
from millstream.testing.server import Server

TOPIC = "requests"
MESSAGE_BYTES = 1024
ALONE = 3000
PIPELINED = 20_000
IN_FLIGHT = 100
_PRODUCE, _METADATA = 0, 3
_PRODUCE_VERSION, _METADATA_VERSION = 7, 4
_RECEIVE_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_CREATE_TRIES_MAX = 100


@dataclass(frozen=True, slots=True)
class Requests:
    """One measurement."""

    median_ms: float
    p99_ms: float
    per_s: float
    cpu_us: float


def first_answer(server: Server) -> float:
    """Seconds until a client that connects now has its topic."""
    began = time.perf_counter()
    with _connect(server) as peer:
        _create_topic(peer)
    return time.perf_counter() - began


def measure(server: Server) -> Requests:
    """One message after the other, then many in flight."""
    with _connect(server) as peer:
        _create_topic(peer)
        request = _produce_request()
        for _ in range(ALONE // 10):
            _exchange(peer, request)
        times_ms = sorted(_timed(peer, request) for _ in range(ALONE))
        before, began = cpu_of(server.pid), time.perf_counter()
        for _ in range(PIPELINED // IN_FLIGHT):
            peer.sendall(request * IN_FLIGHT)
            _receive(peer, IN_FLIGHT)
        elapsed = time.perf_counter() - began
        cpu: Cpu = cpu_of(server.pid).since(before)
    return Requests(
        median_ms=times_ms[len(times_ms) // 2],
        p99_ms=times_ms[len(times_ms) * 99 // 100],
        per_s=PIPELINED / elapsed,
        cpu_us=sum(cpu) / PIPELINED * 1e6,
    )


def _connect(server: Server) -> socket.socket:
    host, _, port = server.kafka.rpartition(":")
    peer = socket.create_connection((host, int(port)), timeout=_TIMEOUT_S)
    peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return peer


def _timed(peer: socket.socket, request: bytes) -> float:
    began = time.perf_counter()
    _exchange(peer, request)
    return (time.perf_counter() - began) * 1000


def _exchange(peer: socket.socket, request: bytes) -> bytes:
    peer.sendall(request)
    return _receive(peer, 1)


def _receive(peer: socket.socket, count: int) -> bytes:
    """Take `count` answers off the socket and return the last."""
    buffer = b""
    frame = b""
    while count:
        received = peer.recv(_RECEIVE_BYTES)
        if not received:
            raise ConnectionError("the server closed the connection")
        buffer += received
        while count and len(buffer) >= 4:
            end = 4 + int(struct.unpack_from(">i", buffer)[0])
            if len(buffer) < end:
                break
            frame, buffer = buffer[:end], buffer[end:]
            count -= 1
    return frame


def _request(key: int, version: int, body: bytes) -> bytes:
    client = b"bench"
    header = struct.pack(">hhih", key, version, 1, len(client)) + client
    return struct.pack(">i", len(header) + len(body)) + header + body


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def _create_topic(peer: socket.socket) -> None:
    """Ask for the topic until it is there; the first asking creates it."""
    request = _request(_METADATA, _METADATA_VERSION, struct.pack(">i", 1) + _text(TOPIC) + b"\x01")
    for _ in range(_CREATE_TRIES_MAX):
        answer = _exchange(peer, request)
        if struct.pack(">h", 0) + _text(TOPIC) in answer:
            return
        time.sleep(0.05)
    raise TimeoutError("the server did not create the topic")


def _produce_request() -> bytes:
    record = NewRecord(key=None, value=bytes(MESSAGE_BYTES), timestamp_ms=int(time.time() * 1000))
    batch = bytes(encode_batch([record]))
    body = struct.pack(">hhi", -1, -1, 30_000) + struct.pack(">i", 1) + _text(TOPIC)
    body += struct.pack(">iii", 1, 0, len(batch)) + batch
    return _request(_PRODUCE, _PRODUCE_VERSION, body)
