"""Clients that take all they can get: each connection sends the same request again without waiting for answers.

python -m benchmarks.overload_flood KIND CONNECTIONS SECONDS HOST:PORT TOPIC

`chaos_overload` starts it as a process of its own, so that it competes with the broker and not with what measures. It
prints one line of JSON with what was sent and what was answered.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import Callable
from typing import Final

import uvloop

from millstream.core.ids import Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import request_head
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.fetch import FetchLimits, write_fetch
from millstream.protocol.wire.produce import write_produce

PRODUCE, FETCH, METADATA, HEARTBEAT, VERSIONS, SHARE_FETCH, HTTP, CONNECT, SLOW_READER = (
    "produce",
    "fetch",
    "metadata",
    "heartbeat",
    "versions",
    "share-fetch",
    "http",
    "connect",
    "slow-reader",
)
RECORDS, RECORD_BYTES = 10, 1024
SENT_AHEAD_BYTES: Final = 256 * 1024
RECONNECT_S: Final = 0.05


def _frame(key: int, version: int, *body: bytes | bytearray | memoryview) -> bytes:
    payload = request_head(key, version, 1, "flood") + b"".join(body)
    return struct.pack(">i", len(payload)) + payload


def _produce(topic: str) -> bytes:
    now_ms = int(time.time() * 1000)
    batch = encode_batch([NewRecord(None, bytes(RECORD_BYTES), timestamp_ms=now_ms) for _ in range(RECORDS)])
    return _frame(0, 9, *write_produce(9, topic, 0, batch, acks=1, timeout_ms=30_000))


def _fetch(topic: str) -> bytes:
    place = TopicPartition(topic, PartitionIndex(0))
    return _frame(1, 12, write_fetch(12, {place: Offset(0)}, FetchLimits(max_wait_ms=0, max_bytes=1 << 20)))


def _text(value: str) -> bytes:
    return struct.pack(">h", len(value)) + value.encode()


def _share_fetch(topic: str) -> bytes:
    # A first request without a session that was agreed on: it is refused, and costs what refusing costs.
    member = b"\x25" + b"0123456789abcdef0123456789abcdef0123"
    head = b"\x06flood" + member + struct.pack(">iiiiiii", 0, 0, 1, 1 << 20, 500, 500, 0)[:28]
    return _frame(78, 1, head + b"\x01\x01\x00")


REQUESTS: dict[str, Callable[[str], bytes]] = {
    PRODUCE: _produce,
    FETCH: _fetch,
    SLOW_READER: _fetch,
    METADATA: lambda _topic: _frame(3, 4, struct.pack(">i?", -1, False)),
    HEARTBEAT: lambda _topic: _frame(12, 0, _text("flood"), struct.pack(">i", 1), _text("nobody")),
    VERSIONS: lambda _topic: _frame(18, 0),
    SHARE_FETCH: _share_fetch,
    HTTP: lambda topic: f"GET /v1/topics/{topic} HTTP/1.1\r\nHost: flood\r\n\r\n".encode(),
    CONNECT: lambda _topic: _frame(18, 0),
}


class Flooder(asyncio.Protocol):
    """One connection that never waits."""

    def __init__(self, request: bytes, *, reads: bool) -> None:
        self._chunk = request * max(1, SENT_AHEAD_BYTES // len(request))
        self._reads = reads
        self._transport: asyncio.Transport | None = None
        self.received_bytes = 0
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin to send, and go on whenever the socket takes more."""
        assert isinstance(transport, asyncio.Transport) or hasattr(transport, "write")
        self._transport = transport  # type: ignore[assignment]
        if not self._reads:
            self._transport.pause_reading()  # type: ignore[union-attr]
        self.resume_writing()

    def resume_writing(self) -> None:
        """Send more."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(self._chunk)
            if self._transport.get_write_buffer_size() == 0:
                asyncio.get_running_loop().call_soon(self.resume_writing)

    def data_received(self, data: bytes) -> None:
        """Count answers by their bytes."""
        self.received_bytes += len(data)

    def connection_lost(self, exc: Exception | None) -> None:
        """The broker, or the end, has closed it."""
        self._transport = None
        if not self.lost.done():
            self.lost.set_result(None)

    def close(self) -> None:
        """Hang up."""
        if self._transport is not None:
            self._transport.abort()


class Flood:
    """All connections of one kind."""

    def __init__(self, kind: str, address: str, topic: str) -> None:
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._kind = kind
        self._request = REQUESTS[kind](topic)
        self.received_bytes = 0
        self.connects = 0
        self.failures = 0

    async def run(self, connections: int, seconds: float) -> None:
        """Send for some seconds."""
        until = time.monotonic() + seconds
        await asyncio.gather(*(self._one(until) for _ in range(connections)))

    async def _one(self, until: float) -> None:
        loop = asyncio.get_running_loop()
        while (left_s := until - time.monotonic()) > 0:
            flooder = Flooder(self._request, reads=self._kind != SLOW_READER)
            try:
                await loop.create_connection(lambda: flooder, self._host, self._port)  # noqa: B023
            except OSError:
                self.failures += 1
                await asyncio.sleep(RECONNECT_S)
                continue
            self.connects += 1
            await asyncio.wait([flooder.lost], timeout=RECONNECT_S if self._kind == CONNECT else left_s)
            flooder.close()
            self.received_bytes += flooder.received_bytes
            if flooder.lost.done():
                await asyncio.sleep(RECONNECT_S)


def main(arguments: list[str]) -> None:
    """Flood, then say what came of it."""
    kind, connections, seconds, address, topic = arguments
    flood = Flood(kind, address, topic)
    uvloop.run(flood.run(int(connections), float(seconds)))
    totals = {"received_bytes": flood.received_bytes, "connects": flood.connects, "failures": flood.failures}
    sys.stdout.write(json.dumps(totals) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
