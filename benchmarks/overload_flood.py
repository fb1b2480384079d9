"""Clients that flood a broker: each connection repeats the same request without waiting for responses.

python -m benchmarks.overload_flood KIND CONNECTIONS SECONDS HOST:PORT TOPIC

`chaos_overload` starts it as its own process, so that it competes with the broker and not with the measurement. It
prints one line of JSON with its counters. Requests are those of real clients: heartbeats come from a member of a group,
and a share fetch acquires messages in its own session, which the next request closes.
"""

from __future__ import annotations

import asyncio
import json
import struct
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from typing import Any, Final
from uuid import UUID, uuid4

import uvloop
from kio.schema.consumer_group_heartbeat.v0 import request as group_heartbeat
from kio.schema.errors import ErrorCode
from kio.schema.share_fetch.v1 import request as share_fetch
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32, i32Timedelta

from millstream.core.ids import Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.messages.codec import request_head
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.fetch import FetchLimits, write_fetch
from millstream.protocol.wire.produce import write_produce
from millstream_testing.api_requests import write_request

KINDS: Final = (
    PRODUCE := "produce",
    FETCH := "fetch",
    METADATA := "metadata",
    HEARTBEAT := "heartbeat",
    VERSIONS := "versions",
    SHARE_FETCH := "share-fetch",
    HTTP := "http",
    CONNECT := "connect",
    SLOW_READER := "slow-reader",
)
RECORDS, RECORD_BYTES = 10, 1024
SENT_AHEAD_BYTES: Final = 256 * 1024
RECONNECT_S: Final = 0.05
PENDING_S_MAX: Final = 60.0
_ERROR_AT, _NO_ERROR = 13, b"\0\0"
"""The position of the error code in a frame: after size, correlation id, tags and throttle time."""


def _frame(key: int, version: int, *body: bytes | bytearray | memoryview) -> bytes:
    payload = request_head(key, version, 1, "flood") + b"".join(body)
    return struct.pack(">i", len(payload)) + payload


def _produce(topic: str) -> bytes:
    now_ms = int(time.time() * 1000)
    batch = encode_batch([NewRecord(None, bytes(RECORD_BYTES), timestamp_ms=now_ms) for _ in range(RECORDS)])
    return _frame(0, 9, *write_produce(9, topic, 0, batch, acks=1, timeout_ms=30_000))


def _fetch(topic: str) -> bytes:
    partition = TopicPartition(topic, PartitionIndex(0))
    return _frame(1, 12, write_fetch(12, {partition: Offset(0)}, FetchLimits(max_wait_ms=0, max_bytes=1 << 20)))


def _share_fetch(group: str, topic_id: UUID | None) -> bytes:
    """Open a session and acquire messages, then close it, which releases them."""
    partition = share_fetch.FetchPartition(partition_index=i32(0), acknowledgement_batches=())
    topics = (share_fetch.FetchTopic(topic_id=topic_id, partitions=(partition,)),)
    request = share_fetch.ShareFetchRequest(
        group_id=GroupId(group),
        member_id=str(uuid4()),
        share_session_epoch=i32(0),
        max_wait=i32Timedelta.parse(timedelta(0)),
        min_bytes=i32(0),
        max_bytes=i32(1 << 20),
        max_records=i32(100),
        batch_size=i32(100),
        topics=topics,
        forgotten_topics_data=(),
    )
    closing = replace(request, share_session_epoch=i32(-1), topics=())
    return write_request(1, "flood", request) + write_request(2, "flood", closing)


def _heartbeat(group: str, member_id: str, epoch: int, topics: tuple[TopicName, ...] | None = None) -> Any:
    return group_heartbeat.ConsumerGroupHeartbeatRequest(
        group_id=GroupId(group),
        member_id=member_id,
        member_epoch=i32(epoch),
        rebalance_timeout=i32Timedelta.parse(timedelta(seconds=-0.001 if topics is None else 60)),
        subscribed_topic_names=topics,
        topic_partitions=None if topics is None else (),
    )


async def prepare(kind: str, address: str, topic: str) -> Callable[[], bytes]:
    """Set up what requests of a kind need; return a factory for the request of each connection."""
    if kind in SAME_FOR_ALL:
        request = SAME_FOR_ALL[kind](topic)
        return lambda: request
    async with Client.connect(address) as client:
        if kind == SHARE_FETCH:
            topic_id = (await client.metadata([topic])).topics[topic].topic_id
            return lambda: _share_fetch(topic, topic_id)
        member_id = str(uuid4())
        joining = _heartbeat("flood", member_id, 0, (TopicName(topic),))
        joined = await client.send(await client.coordinator("flood"), joining)
        if joined.error_code is not ErrorCode.none:
            raise SystemExit(f"a member could not join: {joined.error_code.name}: {joined.error_message}")
        heartbeat = write_request(1, "flood", _heartbeat("flood", member_id, joined.member_epoch))
        return lambda: heartbeat


SAME_FOR_ALL: dict[str, Callable[[str], bytes]] = {
    PRODUCE: _produce,
    FETCH: _fetch,
    SLOW_READER: _fetch,
    METADATA: lambda _topic: _frame(3, 4, struct.pack(">i?", -1, False)),
    VERSIONS: lambda _topic: _frame(18, 0),
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
        self.first = b""
        """The first bytes of the first response."""
        self.lost = asyncio.get_running_loop().create_future()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start sending, and continue whenever the socket accepts more."""
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
        """Count responses by their bytes."""
        self.received_bytes += len(data)
        if len(self.first) < _ERROR_AT + 2:
            self.first = (self.first + data)[: _ERROR_AT + 2]

    def connection_lost(self, exc: Exception | None) -> None:
        """Record that the connection was closed."""
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
        self._address = address
        host, _, port = address.rpartition(":")
        self._host, self._port = host, int(port)
        self._kind = kind
        self._topic = topic
        self.received_bytes = 0
        self.connects = 0
        self.failures = 0
        self.refused = 0

    async def run(self, connections: int, seconds: float) -> None:
        """Send for some seconds, and again if there was no response, which may happen on a busy machine."""
        request_of_connection = await prepare(self._kind, self._address, self._topic)
        deadline = time.monotonic() + seconds + PENDING_S_MAX
        while True:
            until = time.monotonic() + seconds
            await asyncio.gather(*(self._one(request_of_connection(), until) for _ in range(connections)))
            if self.received_bytes or self._kind == SLOW_READER or time.monotonic() > deadline:
                return

    async def _one(self, request: bytes, until: float) -> None:
        loop = asyncio.get_running_loop()
        while (left_s := until - time.monotonic()) > 0:
            flooder = Flooder(request, reads=self._kind != SLOW_READER)
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
            self.refused += self._kind in (SHARE_FETCH, HEARTBEAT) and flooder.first[_ERROR_AT:] not in (b"", _NO_ERROR)
            if flooder.lost.done():
                await asyncio.sleep(RECONNECT_S)


def main(arguments: list[str]) -> None:
    """Flood the broker, and print the counters."""
    kind, connections, seconds, address, topic = arguments
    flood = Flood(kind, address, topic)
    uvloop.run(flood.run(int(connections), float(seconds)))
    counted = ("received_bytes", "connects", "failures", "refused")
    sys.stdout.write(json.dumps({name: getattr(flood, name) for name in counted}) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
