"""The same requests to every server, over a bare socket: what a gigabyte costs, without a client that adapts.

librdkafka makes its batches and fetches larger or smaller depending on how fast the server is, and a server's CPU time
per gigabyte depends on their size. Here every Produce request has one batch of `BATCH_BYTES` for each partition, and
the records are fetched twice from the start: the first time, a server may have to verify what it has stored.
"""

from __future__ import annotations

import socket
import struct
import time
from typing import Final

from benchmarks.cases import Case
from benchmarks.processes import Meter
from benchmarks.requests import connect, request_frame, text, wait_for_topic
from benchmarks.subject import Numbers, Target

from millstream.protocol.records.record import NewRecord, encode_batch

PRODUCED, FIRST, AGAIN = "fixed requests, produce", "fixed requests, fetch", "fixed requests, fetch again"
BATCH_BYTES: Final = 64 * 1024
IN_FLIGHT: Final = 4
FETCH_BYTES_MAX: Final = 50 * 1024 * 1024
PARTITION_BYTES_MAX: Final = 1024 * 1024
BYTES_PER_SECOND: Final = 300_000_000
_PRODUCE, _PRODUCE_VERSION = 0, 7
_FETCH, _FETCH_VERSION = 1, 4
_HEADER: Final = struct.Struct(">ihqqi")


def measure(target: Target, case: Case, seconds: float) -> dict[str, Numbers]:
    """Produce and fetch about as many bytes as a server takes in this time."""
    with connect(target.address) as peer:
        wait_for_topic(peer, target.topic)
        request, size = _produce_request(target.topic, case)
        _produce(peer, request, IN_FLIGHT)
        count = max(1, int(BYTES_PER_SECOND * seconds) // size)
        with Meter(target.pid) as produced:
            _produce(peer, request, count)
        costs = {PRODUCED: _costs(produced, count * size)}
        for name in (FIRST, AGAIN):
            with Meter(target.pid) as fetched:
                received = _fetch_all(peer, target.topic, case.partitions)
            costs[name] = _costs(fetched, received)
    return costs


def _costs(meter: Meter, size: int) -> Numbers:
    return {"user CPU s/GB": meter.cpu.user_s * 1e9 / size, "system CPU s/GB": meter.cpu.system_s * 1e9 / size}


def _produce_request(topic: str, case: Case) -> tuple[bytes, int]:
    """Return the request, and how many bytes of batches it has."""
    record = NewRecord(key=None, value=bytes(case.size_bytes), timestamp_ms=int(time.time() * 1000))
    batch = bytes(encode_batch([record] * max(1, BATCH_BYTES // case.size_bytes)))
    body = struct.pack(">hhii", -1, -1, 30_000, 1) + text(topic) + struct.pack(">i", case.partitions)
    body += b"".join(struct.pack(">ii", index, len(batch)) + batch for index in range(case.partitions))
    return request_frame(_PRODUCE, _PRODUCE_VERSION, body), case.partitions * len(batch)


def _produce(peer: socket.socket, request: bytes, count: int) -> None:
    for number in range(count):
        peer.sendall(request)
        if number >= IN_FLIGHT:
            _response(peer)
    for _ in range(min(count, IN_FLIGHT)):
        _response(peer)


def _response(peer: socket.socket) -> memoryview:
    with_size = _receive(peer, 4)
    return _receive(peer, struct.unpack(">i", with_size)[0])


def _receive(peer: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    at = 0
    while at < size:
        received = peer.recv_into(buffer[at:])
        if not received:
            raise ConnectionError("the server closed the connection")
        at += received
    return buffer


def _fetch_all(peer: socket.socket, topic: str, partitions: int) -> int:
    """Fetch all partitions from the start to the high watermark; return the number of bytes."""
    offsets = dict.fromkeys(range(partitions), 0)
    total = 0
    while offsets:
        body = struct.pack(">iiiibi", -1, 100, 1, FETCH_BYTES_MAX, 0, 1) + text(topic) + struct.pack(">i", len(offsets))
        body += b"".join(struct.pack(">iqi", index, at, PARTITION_BYTES_MAX) for index, at in offsets.items())
        peer.sendall(request_frame(_FETCH, _FETCH_VERSION, body))
        response = _response(peer)
        # Behind the correlation id, the throttle time and an array of one topic.
        at = 12 + len(text(topic)) + 4
        for _ in range(len(offsets)):
            index, error, high_watermark, _, aborted = _HEADER.unpack_from(response, at)
            if error:
                raise ConnectionError(f"fetching failed with error {error}")
            at += _HEADER.size + 16 * max(aborted, 0)
            (size,) = struct.unpack_from(">i", response, at)
            at += 4
            offsets[index] = _next_offset(response[at : at + size], offsets[index])
            at += size
            total += size
            if offsets[index] >= high_watermark:
                del offsets[index]
    return total


def _next_offset(batches: memoryview, offset: int) -> int:
    """Return the offset after the last whole batch."""
    at = 0
    while len(batches) - at >= 27:
        base, length = struct.unpack_from(">qi", batches, at)
        if at + 12 + length > len(batches):
            break
        offset = base + struct.unpack_from(">i", batches, at + 23)[0] + 1
        at += 12 + length
    return offset
