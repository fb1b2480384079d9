"""Requests with one message each, over a bare socket: their latency, and their rate."""

from __future__ import annotations

import socket
import struct
import time

from benchmarks.cases import Case
from benchmarks.percentiles import percentile
from benchmarks.processes import Meter
from benchmarks.subject import Numbers, Target

from millstream.protocol.records.record import NewRecord, encode_batch

ONE_BY_ONE, IN_FLIGHT = "one at a time", "100 in flight"
WINDOW = 100
_PRODUCE, _METADATA = 0, 3
_PRODUCE_VERSION, _METADATA_VERSION = 7, 4
_RECEIVE_BYTES = 1 << 20
_TIMEOUT_S = 60.0
_METADATA_ATTEMPTS_MAX = 200
_METADATA_PAUSE_S = 0.05


def first_response(address: str, topic: str) -> float:
    """Return the seconds until a new client has metadata of its topic, which that request creates."""
    began = time.perf_counter()
    with connect(address) as peer:
        wait_for_topic(peer, topic)
    return time.perf_counter() - began


def measure(target: Target, case: Case, seconds: float) -> dict[str, Numbers]:
    """Measure messages one after the other, then with many in flight, for some seconds each."""
    with connect(target.address) as peer:
        wait_for_topic(peer, target.topic)
        request = produce_frame(target.topic, case.size_bytes)
        for _ in range(200):
            _exchange(peer, request)
        times_ms: list[float] = []
        with Meter(target.pid) as alone:
            deadline = time.perf_counter() + seconds
            while not times_ms or time.perf_counter() < deadline:
                times_ms.append(_timed(peer, request))
        pipelined = 0
        window = request * WINDOW
        with Meter(target.pid) as meter:
            began = time.perf_counter()
            while not pipelined or time.perf_counter() < began + seconds:
                peer.sendall(window)
                _receive(peer, WINDOW)
                pipelined += WINDOW
            elapsed = time.perf_counter() - began
    return {
        ONE_BY_ONE: {
            "p50 ms": percentile(times_ms, 50),
            "p99 ms": percentile(times_ms, 99),
            "requests/s": len(times_ms) / seconds,
            "CPU µs/request": sum(alone.cpu) / len(times_ms) * 1e6,
        },
        IN_FLIGHT: {"requests/s": pipelined / elapsed, "CPU µs/request": sum(meter.cpu) / pipelined * 1e6},
    }


def connect(address: str) -> socket.socket:
    """Return a connection without Nagle's algorithm."""
    host, _, port = address.rpartition(":")
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
    """Receive `count` responses and return the last."""
    buffer = b""
    frame = b""
    while count:
        received = peer.recv(_RECEIVE_BYTES)
        if not received:
            raise ConnectionError("the server closed the connection")
        buffer += received
        at = 0
        while count and len(buffer) - at >= 4:
            end = at + 4 + int(struct.unpack_from(">i", buffer, at)[0])
            if len(buffer) < end:
                break
            frame, at = buffer[at:end], end
            count -= 1
        buffer = buffer[at:]
    return frame


def request_frame(key: int, version: int, body: bytes) -> bytes:
    client = b"bench"
    header = struct.pack(">hhih", key, version, 1, len(client)) + client
    return struct.pack(">i", len(header) + len(body)) + header + body


def text(value: str) -> bytes:
    """Return a string with its length."""
    return struct.pack(">h", len(value)) + value.encode()


def wait_for_topic(peer: socket.socket, topic: str) -> None:
    """Request metadata until the topic exists; the first request may create it."""
    request = request_frame(_METADATA, _METADATA_VERSION, struct.pack(">i", 1) + text(topic) + b"\x01")
    for _ in range(_METADATA_ATTEMPTS_MAX):
        response = _exchange(peer, request)
        if struct.pack(">h", 0) + text(topic) in response:
            return
        time.sleep(_METADATA_PAUSE_S)
    raise TimeoutError("the server did not create the topic")


def produce_frame(topic: str, size_bytes: int) -> bytes:
    """Return a Produce request with one message."""
    record = NewRecord(key=None, value=bytes(size_bytes), timestamp_ms=int(time.time() * 1000))
    batch = bytes(encode_batch([record]))
    body = struct.pack(">hhi", -1, -1, 30_000) + struct.pack(">i", 1) + text(topic)
    body += struct.pack(">iii", 1, 0, len(batch)) + batch
    return request_frame(_PRODUCE, _PRODUCE_VERSION, body)
