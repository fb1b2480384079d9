"""Millstream with the same bare client that the peers without Kafka's protocol are measured with.

librdkafka looks at every message, which at 100 bytes costs far more than any server spends on it. A comparison with a
peer whose messages are only counted needs a client that only counts here, too.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing

from benchmarks.cases import PRODUCE, Case
from benchmarks.peers.pipe import MARK, Connection, PeerFailed, Session, measure, payload
from benchmarks.subject import BARE, Measured
from benchmarks.subjects import Millstream

from millstream.protocol.records.record import NewRecord, encode_batch

_PRODUCE, _PRODUCE_VERSION = 0, 7
_FETCH, _FETCH_VERSION = 1, 11
_FETCH_BYTES = 4 * 1024 * 1024
_WINDOW, _AT_ONCE = 10_000, 500


def _request(key: int, version: int, correlation: int, body: bytes) -> bytes:
    return struct.pack(">ihhih", 10 + len(body), key, version, correlation, -1) + body


class Frames:
    """Splits received bytes into responses."""

    def __init__(self) -> None:
        self._left = b""

    def feed(self, data: bytes) -> Iterator[tuple[int, bytes]]:
        """Yield the correlation id and the body of each complete response."""
        self._left += data
        at = 0
        while len(self._left) - at >= 8:
            size, correlation = struct.unpack_from(">ii", self._left, at)
            if len(self._left) < at + 4 + size:
                break
            yield correlation, self._left[at + 8 : at + 4 + size]
            at += 4 + size
        self._left = self._left[at:]


class Topic(Session):
    def __init__(self, connection: Connection, name: str, size_bytes: int, partition: int = 0) -> None:
        super().__init__(connection)
        self._partition = partition
        self._name = struct.pack(">h", len(name)) + name.encode()
        self._text = payload(size_bytes)

    def messages(self, count: int) -> bytes:
        """One request with one batch; the correlation id is the number of messages that a response is for."""
        now = int(time.time() * 1000)
        batch = bytes(encode_batch([NewRecord(key=None, value=self._text, timestamp_ms=now)] * count))
        body = (
            struct.pack(">hhii", -1, -1, 30_000, 1)
            + self._name
            + struct.pack(">iii", 1, self._partition, len(batch))
            + batch
        )
        return _request(_PRODUCE, _PRODUCE_VERSION, count, body)

    def acknowledgements(self) -> Callable[[bytes], int]:
        """Add up the correlation ids of the responses without an error."""
        frames = Frames()
        # The error stands behind the counts of topics and partitions, the name and the partition's number.
        place = 4 + len(self._name) + 4 + 4

        def feed(data: bytes) -> int:
            acknowledged = 0
            for count, body in frames.feed(data):
                (error,) = struct.unpack_from(">h", body, place)
                if error:
                    raise PeerFailed(f"error {error}")
                acknowledged += count
            return acknowledged

        return feed

    def read(self, count: int) -> Iterator[int]:
        """Fetch from the start; the next request is in flight while the messages of the last response are counted."""
        offset = came = 0
        buffers = [bytearray(2 * _FETCH_BYTES), bytearray(2 * _FETCH_BYTES)]
        self._fetch(offset)
        while came < count:
            buffers.reverse()
            size = self._respond(buffers[0])
            offset = self._next_offset(buffers[0], offset)
            self._fetch(offset)
            now = buffers[0].count(MARK, 0, size)
            came += now
            yield now

    def _fetch(self, offset: int) -> None:
        body = struct.pack(">iiiibiii", -1, 100, 1, _FETCH_BYTES, 0, 0, -1, 1) + self._name
        body += struct.pack(">iiiqqi", 1, self._partition, -1, offset, -1, _FETCH_BYTES) + struct.pack(">ih", 0, 0)
        self.connection.socket.sendall(_request(_FETCH, _FETCH_VERSION, 0, body))

    def _respond(self, buffer: bytearray) -> int:
        """Receive one response, and return its size."""
        view, end, whole = memoryview(buffer), 0, 4
        while end < whole:
            received = self.connection.socket.recv_into(view[end:])
            if not received:
                raise PeerFailed("the server closed the connection")
            end += received
            whole = 4 + struct.unpack_from(">i", buffer)[0] if end >= 4 else 4
        return end

    def _next_offset(self, response: bytearray, offset: int) -> int:
        """Return the offset after the last batch, found by following the headers."""
        # Size, correlation id, throttle time, error, session, count, name, count; then the partition's own fields.
        at = 4 + 4 + 4 + 2 + 4 + 4 + len(self._name) + 4
        _, error, _, _, _, aborted = struct.unpack_from(">ihqqqi", response, at)
        if error or aborted > 0:
            raise PeerFailed(f"error {error}")
        at += struct.calcsize(">ihqqqi") + 4
        (size,) = struct.unpack_from(">i", response, at)
        at += 4
        end = at + size
        while end - at > 61:
            base, length = struct.unpack_from(">qi", response, at)
            (last,) = struct.unpack_from(">i", response, at + 23)
            offset, at = base + last + 1, at + 12 + length
        return offset


class BareMillstream(Millstream):
    """The broker, with a bare client."""

    name = BARE

    def offers(self, case: Case) -> bool:
        """Return whether other peers are measured in this line."""
        return case.plain and case.kind == PRODUCE

    def measure(self, case: Case, seconds: float) -> Measured:
        """Measure on a new topic, with a partition for each producer."""
        with self.topic(case) as target, ExitStack() as stack:
            connections = [stack.enter_context(closing(Connection(target.address))) for _ in range(case.producers)]
            topics = [Topic(connection, target.topic, case.size_bytes, at) for at, connection in enumerate(connections)]
            return measure(topics, case, target.pid, seconds, _WINDOW, _AT_ONCE)
