"""The limit server: the minimum that a server must do to accept and return a Kafka client's messages.

It implements just enough of the protocol for librdkafka to produce and to consume with `assign()`. It moves the same
bytes over the same event loop, with the same flush policy, into one file per partition. It validates nothing, has no
idempotence and no index except the start of each batch, and loses everything when it stops. `benchmarks.run` compares
Millstream with it.

    python -m benchmarks.limit_server --data DIR --kafka 127.0.0.1:0 --flush always|interval|os|discard --partitions N \
        [--tls-cert FILE --tls-key FILE]

With `--flush discard` nothing is written, so that only the client and the socket are measured.
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import json
import os
import signal
import socket
import ssl
import struct
import sys
from array import array
from bisect import bisect_right
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple, cast

import uvloop

PRODUCE, FETCH, LIST_OFFSETS, METADATA, FIND_COORDINATOR, API_VERSIONS, INIT_PRODUCER_ID = 0, 1, 2, 3, 10, 18, 22
# Only the last version of each is supported, and librdkafka uses it; it also expects some older ones to be listed.
VERSIONS = (
    (PRODUCE, 0, 7),
    (FETCH, 4, 11),
    (LIST_OFFSETS, 1, 1),
    (METADATA, 4, 4),
    (FIND_COORDINATOR, 0, 0),
    (API_VERSIONS, 0, 3),
    (INIT_PRODUCER_ID, 0, 0),
)
NODE_ID = 1
EARLIEST = -2
INTERVAL_S = 1.0
RECEIVE_BYTES = 2 * 1024 * 1024
AT_ONCE_BYTES = 256 * 1024
VECTORS_MAX = 1024
WRITE_BUFFER_BYTES = 64 * 1024 * 1024
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1

Wanted = list[tuple[bytes, list[tuple[int, int, int, "Partition"]]]]
"""The partitions of a fetch: per topic, the index, offset and byte limit of each."""

_HEADER = struct.Struct(">ihhih")
_I16 = struct.Struct(">h")
_I32 = struct.Struct(">i")
_I64 = struct.Struct(">q")
_FETCH_PARTITION = struct.Struct(">iiqqi")
_PRODUCED = struct.Struct(">ihqqq")
_FETCHED = struct.Struct(">ihqqqiii")


class Partition:
    """One file, the first offset and the position of every batch in it, and the fetches that wait for more."""

    def __init__(self, path: Path, discards: bool) -> None:
        self.discards = discards
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        self.end_offset = 0
        self.end_position = 0
        self.visible_offset = 0
        self.visible_position = 0
        self.offsets = array("q")
        self.positions = array("q")
        self.unwritten: list[memoryview] = []
        self.waiting: dict[Connection, Callable[[], None]] = {}

    def append(self, view: memoryview, start: int, end: int) -> int:
        """Assign offsets to the batches between `start` and `end`, which `write` writes."""
        base = self.end_offset
        at = start
        while at < end:
            self.offsets.append(self.end_offset)
            self.positions.append(self.end_position + at - start)
            _I64.pack_into(view, at, self.end_offset)
            self.end_offset += _I32.unpack_from(view, at + 23)[0] + 1
            at += 12 + _I32.unpack_from(view, at + 8)[0]
        self.unwritten.append(view[start:end])
        self.end_position += end - start
        return base

    def write(self) -> None:
        """Write what was appended since the last call."""
        views, self.unwritten = self.unwritten, []
        if not self.discards:
            position = self.end_position - sum(map(len, views))
            for first in range(0, len(views), VECTORS_MAX):
                position += os.pwritev(self.file, views[first : first + VECTORS_MAX], position)

    def show(self, offset: int, position: int) -> None:
        """Make everything up to here visible to readers, and wake waiting fetches."""
        self.visible_offset, self.visible_position = offset, position
        waiting, self.waiting = self.waiting, {}
        for wake in waiting.values():
            wake()

    def find(self, offset: int, bytes_max: int) -> tuple[int, int]:
        """Return the file range of whole batches from `offset` on, up to `bytes_max` but at least one batch."""
        if offset >= self.visible_offset:
            return self.visible_position, 0
        first = bisect_right(self.offsets, offset) - 1
        start = self.positions[first]
        if start + bytes_max >= self.visible_position:
            return start, self.visible_position - start
        last = bisect_right(self.positions, start + bytes_max) - 1
        if last <= first:
            last = first + 1
        end = self.positions[last] if last < len(self.positions) else self.end_position
        return start, min(end, self.visible_position) - start


class Store:
    """All partitions, with one flusher that all producers share."""

    def __init__(self, folder: Path, partitions: int, flush: str) -> None:
        self.folder = folder
        self.partitions = partitions
        self.flush_always = flush == "always"
        self.flush_later = flush == "interval"
        self.discards = flush == "discard"
        self.topics: dict[bytes, list[Partition]] = {}
        self.dirty: dict[Partition, None] = {}
        self.waiting: list[Callable[[], None]] = []
        self.flushing = False

    def topic(self, name: bytes) -> list[Partition]:
        """Return the partitions of a topic, which is created on first use."""
        partitions = self.topics.get(name)
        if partitions is None:
            paths = [self.folder / f"{name.decode()}-{index}.log" for index in range(self.partitions)]
            partitions = self.topics[name] = [Partition(path, self.discards) for path in paths]
        return partitions

    def settle(self, written: list[Partition], respond: Callable[[], None]) -> None:
        """Respond now, or after the sync that covers what was just written."""
        if self.flush_always:
            self.dirty.update(dict.fromkeys(written))
            self.waiting.append(respond)
            if not self.flushing:
                self.flush()
            return
        if self.flush_later:
            if not self.dirty:
                asyncio.get_running_loop().call_later(INTERVAL_S, self.sync_dirty)
            self.dirty.update(dict.fromkeys(written))
        for partition in written:
            partition.show(partition.end_offset, partition.end_position)
        respond()

    def sync_dirty(self) -> None:
        """Sync files in a thread whose writes were acknowledged before the sync."""
        files = [partition.file for partition in self.dirty]
        self.dirty = {}
        asyncio.get_running_loop().run_in_executor(None, sync_files, files)

    def flush(self) -> None:
        """Sync all dirty files in a thread; later writes share the next sync."""
        self.flushing = True
        dirty = [(partition, partition.end_offset, partition.end_position) for partition in self.dirty]
        responding, self.waiting = self.waiting, []
        self.dirty = {}

        def synced(_: object) -> None:
            for partition, offset, position in dirty:
                partition.show(offset, position)
            for respond in responding:
                respond()
            self.flushing = False
            if self.dirty:
                self.flush()

        files = [partition.file for partition, _, _ in dirty]
        asyncio.get_running_loop().run_in_executor(None, sync_files, files).add_done_callback(synced)


def sync_files(files: list[int]) -> None:
    """Sync each file; runs in a thread."""
    for file in files:
        os.fdatasync(file)


class Repeated(NamedTuple):
    """A request for one partition, so that those like it need not be parsed."""

    before: bytes
    """Everything before the length of the records."""
    number: int
    """Of the partition."""
    partition: Partition
    response: bytes
    """The beginning of the response, up to the partition."""


class Connection(asyncio.BufferedProtocol):
    """Receives into one reused buffer, so that no byte is copied between socket and file."""

    def __init__(self, store: Store, address: tuple[str, int]) -> None:
        self.store = store
        self.address = address
        self.buffer = bytearray(RECEIVE_BYTES)
        self.view = memoryview(self.buffer)
        self.start = 0
        self.end = 0
        self.unsent: list[bytes] = []
        self.written: dict[Partition, None] = {}
        self.produced: list[bytes] = []
        self.repeated: Repeated | None = None
        self.transport: asyncio.Transport
        self.handlers: dict[int, Callable[[int, int, int, int], None]] = {
            PRODUCE: self.produce,
            FETCH: self.fetch,
            LIST_OFFSETS: self.list_offsets,
            METADATA: self.metadata,
            FIND_COORDINATOR: self.find_coordinator,
            API_VERSIONS: self.api_versions,
            INIT_PRODUCER_ID: self.init_producer_id,
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)  # uvloop does not derive from asyncio
        self.transport.set_write_buffer_limits(high=WRITE_BUFFER_BYTES)

    def connection_lost(self, error: Exception | None) -> None:
        self.handlers.clear()

    def get_buffer(self, sizehint: int) -> memoryview:
        return self.view[self.end :]

    def buffer_updated(self, count: int) -> None:
        self.end += count
        at, end, view = self.start, self.end, self.view
        while end - at >= 4:
            frame_end = at + 4 + _I32.unpack_from(view, at)[0]
            if frame_end > end:
                break
            self.request(at, frame_end)
            at = frame_end
        if self.written:
            self.write()
        self.make_room(at)

    def write(self) -> None:
        """Write what all requests that arrived together produced, once per partition, and respond to them together."""
        written, self.written = list(self.written), {}
        responses, self.produced = self.produced, []
        for partition in written:
            partition.write()
        self.store.settle(written, lambda: self.send(responses))

    def make_room(self, at: int) -> None:
        """Move an incomplete frame to the front of the buffer if the rest does not fit."""
        size_left = self.end - at
        if not size_left:
            self.start = self.end = 0
            return
        need = 4 + _I32.unpack_from(self.view, at)[0] if size_left >= 4 else 4
        if need > len(self.buffer):
            bigger = bytearray(need * 2)
            bigger[:size_left] = self.view[at : self.end]
            self.buffer, self.view = bigger, memoryview(bigger)
            self.start, self.end = 0, size_left
        elif at + need > len(self.buffer):
            self.view[:size_left] = bytes(self.view[at : self.end])
            self.start, self.end = 0, size_left
        else:
            self.start = at

    def request(self, at: int, end: int) -> None:
        _, api, version, correlation, client_length = _HEADER.unpack_from(self.view, at)
        self.handlers[api](version, correlation, at + _HEADER.size + max(client_length, 0), end)

    def respond(self, correlation: int, body: bytes) -> None:
        self.send([struct.pack(">ii", 4 + len(body), correlation) + body])

    def send(self, parts: list[bytes]) -> None:
        """Send at the end of this loop iteration, so that all responses share one system call."""
        if not self.unsent:
            asyncio.get_running_loop().call_soon(self.send_now)
        self.unsent += parts

    def send_now(self) -> None:
        parts, self.unsent = self.unsent, []
        if parts:
            self.transport.writelines(parts)

    def text(self, at: int) -> tuple[bytes, int]:
        length = _I16.unpack_from(self.view, at)[0]
        return bytes(self.view[at + 2 : at + 2 + length]), at + 2 + max(length, 0)

    def integer(self, at: int) -> int:
        value: int = _I32.unpack_from(self.view, at)[0]
        return value

    def produce(self, version: int, correlation: int, at: int, end: int) -> None:
        begin = at
        if self.repeated is not None and self.view[at : at + len(self.repeated.before)] == self.repeated.before:
            self.produce_again(self.repeated, correlation, at)
            return
        _, at = self.text(at)
        acks = _I16.unpack_from(self.view, at)[0]
        at += 6
        response = bytearray(_I32.pack(self.integer(at)))
        at += 4
        for _ in range(self.integer(at - 4)):
            name, at = self.text(at)
            topic = self.store.topic(name)
            count = self.integer(at)
            at += 4
            response += _I16.pack(len(name)) + name + _I32.pack(count)
            for _ in range(count):
                index, length = struct.unpack_from(">ii", self.view, at)
                partition = topic[index]
                base = partition.append(self.view, at + 8, at + 8 + length)
                at += 8 + length
                response += _PRODUCED.pack(index, 0, base, -1, 0)
                self.written[partition] = None
                if acks and at == end:
                    before = bytes(self.view[begin : at - length - 4])
                    self.repeated = Repeated(before, index, partition, bytes(response[: -_PRODUCED.size]))
        if acks:
            self.produced.append(struct.pack(">ii", 8 + len(response), correlation) + response + bytes(4))

    def produce_again(self, repeated: Repeated, correlation: int, at: int) -> None:
        """Store the records of a request that differs from an earlier one only in them."""
        at += len(repeated.before) + 4
        base = repeated.partition.append(self.view, at, at + self.integer(at - 4))
        self.written[repeated.partition] = None
        response = repeated.response + _PRODUCED.pack(repeated.number, 0, base, -1, 0)
        self.produced.append(struct.pack(">ii", 8 + len(response), correlation) + response + bytes(4))

    def fetch(self, version: int, correlation: int, at: int, end: int) -> None:
        _, wait_ms, _, bytes_max = struct.unpack_from(">iiii", self.view, at)
        at += 25
        requested: Wanted = []
        topics = self.integer(at)
        at += 4
        for _ in range(topics):
            name, at = self.text(at)
            topic = self.store.topic(name)
            partition_count = []
            count = self.integer(at)
            at += 4
            for _ in range(count):
                index, _, offset, _, limit = _FETCH_PARTITION.unpack_from(self.view, at)
                at += _FETCH_PARTITION.size
                partition_count.append((index, offset, limit, topic[index]))
            requested.append((name, partition_count))
        if any(
            offset < partition.visible_offset
            for _, partition_count in requested
            for _, offset, _, partition in partition_count
        ):
            self.send_fetched(correlation, requested, bytes_max)
        else:
            self.wait(correlation, requested, bytes_max, wait_ms)

    def wait(self, correlation: int, requested: Wanted, bytes_max: int, wait_ms: int) -> None:
        """Hold the fetch until the first append to one of its partitions, or until it times out."""
        done = False

        def wake() -> None:
            nonlocal done
            if not done:
                done = True
                timer.cancel()
                self.send_fetched(correlation, requested, bytes_max)

        timer = asyncio.get_running_loop().call_later(wait_ms / 1000, wake)
        for _, partition_count in requested:
            for _, _, _, partition in partition_count:
                partition.waiting[self] = wake

    def send_fetched(self, correlation: int, requested: Wanted, bytes_max: int) -> None:
        """Respond with the bytes of the files."""
        pieces: list[tuple[bytes, int, int, int]] = []
        head = bytearray(struct.pack(">ihii", 0, 0, 0, len(requested)))
        total = 4
        for name, partition_count in requested:
            head += _I16.pack(len(name)) + name + _I32.pack(len(partition_count))
            for index, offset, limit, partition in partition_count:
                position, size = partition.find(offset, min(limit, max(bytes_max, 1)))
                bytes_max -= size
                end = partition.visible_offset
                head += _FETCHED.pack(index, 0, end, end, 0, 0, -1, size)
                if size:
                    pieces.append((bytes(head), partition.file, size, position))
                    total += len(head) + size
                    head = bytearray()
        self.send([struct.pack(">ii", total + len(head), correlation)])
        for before, file, size, position in pieces:
            self.send([before, os.pread(file, size, position)])
            # The client receives a large response while the rest is still being read.
            if total > AT_ONCE_BYTES:
                self.send_now()
        self.send([bytes(head)])

    def list_offsets(self, version: int, correlation: int, at: int, end: int) -> None:
        at += 4
        topics = self.integer(at)
        at += 4
        response = bytearray(_I32.pack(topics))
        for _ in range(topics):
            name, at = self.text(at)
            count = self.integer(at)
            at += 4
            response += _I16.pack(len(name)) + name + _I32.pack(count)
            for _ in range(count):
                index, timestamp = struct.unpack_from(">iq", self.view, at)
                at += 12
                offset = 0 if timestamp == EARLIEST else self.store.topic(name)[index].visible_offset
                response += struct.pack(">ihqq", index, 0, -1, offset)
        self.respond(correlation, bytes(response))

    def metadata(self, version: int, correlation: int, at: int, end: int) -> None:
        names = []
        count = self.integer(at)
        at += 4
        for _ in range(max(count, 0)):
            name, at = self.text(at)
            names.append(name)
        host, port = self.address
        response = struct.pack(">ii", 0, 1) + struct.pack(">ih", NODE_ID, len(host)) + host.encode()
        response += struct.pack(">ihh", port, -1, 5) + b"limit" + struct.pack(">ii", NODE_ID, len(names))
        for name in names:
            partitions = self.store.topic(name)
            response += struct.pack(">hh", 0, len(name)) + name + struct.pack(">bi", 0, len(partitions))
            for index in range(len(partitions)):
                response += struct.pack(">hiiiiii", 0, index, NODE_ID, 1, NODE_ID, 1, NODE_ID)
        self.respond(correlation, response)

    def find_coordinator(self, version: int, correlation: int, at: int, end: int) -> None:
        host, port = self.address
        self.respond(correlation, struct.pack(">hih", 0, NODE_ID, len(host)) + host.encode() + _I32.pack(port))

    def init_producer_id(self, version: int, correlation: int, at: int, end: int) -> None:
        self.respond(correlation, struct.pack(">ihqh", 0, 0, 1, 0))

    def api_versions(self, version: int, correlation: int, at: int, end: int) -> None:
        if version > 3:
            self.respond(correlation, struct.pack(">hi", 35, 1) + struct.pack(">hhh", API_VERSIONS, 0, 3))
        elif version == 3:
            keys = b"".join(struct.pack(">hhhb", *supported, 0) for supported in VERSIONS)
            self.respond(correlation, struct.pack(">hb", 0, len(VERSIONS) + 1) + keys + struct.pack(">ib", 0, 0))
        else:
            keys = b"".join(struct.pack(">hhh", *supported) for supported in VERSIONS)
            self.respond(correlation, struct.pack(">hi", 0, len(VERSIONS)) + keys + (bytes(4) if version else b""))


async def serve(arguments: argparse.Namespace) -> None:
    """Listen, print the address, stop on SIGTERM."""
    loop = asyncio.get_running_loop()
    host, _, port = arguments.kafka.rpartition(":")
    store = Store(arguments.data, arguments.partitions, arguments.flush)
    listening = socket.create_server((host, int(port)), backlog=128)
    address = listening.getsockname()[:2]
    tls = None
    if arguments.tls_cert is not None:
        tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        tls.load_cert_chain(arguments.tls_cert, arguments.tls_key)
    server = await loop.create_server(lambda: Connection(store, address), sock=listening, ssl=tls)
    print(json.dumps({"kafka": f"{address[0]}:{address[1]}"}), flush=True)
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    await stop.wait()
    server.close()


def keep_freed_memory() -> None:
    """Tell glibc to reuse large blocks: returning them to the kernel costs a page fault per 4 KiB sent."""
    if sys.platform == "linux":
        mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
        if mallopt is not None:
            mallopt(M_MMAP_THRESHOLD, 32 * 1024 * 1024)
            mallopt(M_TRIM_THRESHOLD, 128 * 1024 * 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--data", required=True, type=Path)
    parser.add_argument("--kafka", default="127.0.0.1:0")
    parser.add_argument("--flush", choices=("always", "interval", "os", "discard"), default="always")
    parser.add_argument("--partitions", type=int, default=4)
    parser.add_argument("--tls-cert", type=Path)
    parser.add_argument("--tls-key", type=Path)
    arguments = parser.parse_args()
    arguments.data.mkdir(parents=True, exist_ok=True)
    keep_freed_memory()
    uvloop.run(serve(arguments))


if __name__ == "__main__":
    main()
