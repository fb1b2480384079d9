"""A real server under abuse: its memory stays bounded, and other clients are served."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

from millstream.protocol.records.batch import COMPRESSION_GZIP
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.server import Server

WAIT_S = 60.0
PRODUCE, FETCH, LIST_OFFSETS, METADATA, API_VERSIONS = 0, 1, 2, 3, 18
BUDGET_BYTES = 64 * 1024 * 1024
GROWTH_BYTES_MAX = 3 * BUDGET_BYTES
"""The budget, and twice as much for what the allocator, one batch looked into and the frame with the pass take."""


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"inflight-bytes-max": BUDGET_BYTES, "group-initial-delay-ms": 100}
    with Server(tmp_path_factory.mktemp("faults") / "data", settings=settings) as started:
        # What a broker loads on first use is not counted as growth.
        for number in range(20):
            still_works(started, f"warm-up-{number % 3}")
        yield started


@pytest.fixture
def bounded(server: Server) -> Iterator[None]:
    """Check that the memory of the server grows by no more than is allowed at any moment of the test."""
    Path(f"/proc/{server.pid}/clear_refs").write_text("5", encoding="ascii")
    before = memory_bytes(server, "VmRSS")
    yield
    assert server.is_running()
    assert memory_bytes(server, "VmHWM") - before < GROWTH_BYTES_MAX


def memory_bytes(server: Server, which: str) -> int:
    """A field of the process status, in bytes: VmRSS is the current memory, VmHWM the peak since the last reset."""
    for line in Path(f"/proc/{server.pid}/status").read_text(encoding="ascii").splitlines():
        if line.startswith(which):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"no {which}")


def connect(server: Server) -> socket.socket:
    host, _, port = server.kafka.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def header(key: int, version: int, correlation: int = 7) -> bytes:
    return struct.pack(">hhih", key, version, correlation, 4) + b"test"


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def receive(peer: socket.socket) -> bytes:
    def exactly(count: int) -> bytes:
        received = b""
        while len(received) < count:
            part = peer.recv(count - len(received))
            assert part
            received += part
        return received

    return exactly(struct.unpack(">i", exactly(4))[0])


def send_until_refused(peer: socket.socket, data: bytes) -> None:
    """Send until the server accepts no more or disconnects."""
    peer.setblocking(False)
    try:
        while data:
            data = data[peer.send(data) :]
    except (BlockingIOError, ConnectionError):
        pass
    peer.settimeout(WAIT_S)


def still_works(server: Server, topic: str, count: int = 1) -> None:
    """Check that a producer and a consumer are served."""
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for _ in range(count):
        producer.produce(topic, b"fine", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(WAIT_S) == 0
    assert errors == [None] * count
    consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": "any", "log_level": 0})
    consumer.assign([TopicPartition(topic, 0, 0)])
    assert consumer.consume(1, WAIT_S)[0].value() == b"fine"
    consumer.close()


def fill(server: Server, topic: str, megabytes: int) -> None:
    producer = Producer({"bootstrap.servers": server.kafka, "linger.ms": 20, "log_level": 0})
    producer.produce(topic, b"fine")
    producer.flush(WAIT_S)
    for _ in range(megabytes):
        producer.produce(topic, os.urandom(1000) * 990)
        producer.poll(0)
    assert producer.flush(WAIT_S) == 0


def fetch_request(topic: str, max_bytes: int) -> bytes:
    body = struct.pack(">iiiib", -1, 100, 1, max_bytes, 0) + struct.pack(">ih", 1, len(topic)) + topic.encode()
    return frame(header(FETCH, 4) + body + struct.pack(">iiqi", 1, 0, 0, max_bytes))


@pytest.mark.usefixtures("bounded")
def test_partial_frames_of_many_connections(server: Server, topic: str) -> None:
    with ExitStack() as stack:
        for number in range(300):
            peer = stack.enter_context(connect(server))
            sent = (10, 3_000, 200_000)[number % 3]
            send_until_refused(peer, struct.pack(">i", 90_000_000) + header(PRODUCE, 7) + bytes(sent))
        still_works(server, topic, 100)


@pytest.mark.usefixtures("bounded")
def test_producers_that_announce_more_than_fits(server: Server, topic: str) -> None:
    with ExitStack() as stack:
        for _ in range(40):
            peer = stack.enter_context(connect(server))
            send_until_refused(peer, struct.pack(">i", 50_000_000) + header(PRODUCE, 7) + bytes(8_000_000))
        still_works(server, topic, 100)


@pytest.mark.usefixtures("bounded")
def test_consumers_that_never_read(server: Server, topic: str) -> None:
    fill(server, topic, 40)
    with ExitStack() as stack:
        for _ in range(50):
            peer = stack.enter_context(connect(server))
            peer.sendall(fetch_request(topic, 50_000_000) * 20)
        still_works(server, topic)


@pytest.mark.usefixtures("bounded")
def test_floods_of_tiny_requests(server: Server, topic: str) -> None:
    with ExitStack() as stack:
        for key in (API_VERSIONS, METADATA) * 10:
            peer = stack.enter_context(connect(server))
            body = b"" if key == API_VERSIONS else struct.pack(">i", 0)
            send_until_refused(peer, frame(header(key, 0 if key == API_VERSIONS else 1) + body) * 20_000)
        still_works(server, topic, 10)


@pytest.mark.usefixtures("bounded")
def test_random_bytes(server: Server, topic: str) -> None:
    rng = random.Random(7)
    with ExitStack() as stack:
        for _ in range(200):
            peer = stack.enter_context(connect(server))
            start = struct.pack(">i", rng.choice((-1, 0, 2**31 - 1, -(2**31), 100_000, 1_000_000)))
            send_until_refused(peer, start + rng.randbytes(rng.randrange(100_000)))
        still_works(server, topic)


@pytest.mark.usefixtures("bounded")
def test_a_decompression_bomb_is_not_decompressed(server: Server, topic: str) -> None:
    Producer({"bootstrap.servers": server.kafka}).list_topics(topic, timeout=WAIT_S)
    batch = encode_batch([NewRecord(None, bytes(300_000_000), (), 10)], compression=COMPRESSION_GZIP)
    name = struct.pack(">ih", 1, len(topic)) + topic.encode()
    with connect(server) as peer:
        body = struct.pack(">hhi", -1, -1, 10_000) + name + struct.pack(">iii", 1, 0, len(batch))
        peer.sendall(frame(header(PRODUCE, 7) + body + bytes(batch)))
        receive(peer)
        # A look-up by time makes the broker search the batch.
        peer.sendall(frame(header(LIST_OFFSETS, 1) + struct.pack(">i", -1) + name + struct.pack(">iiq", 1, 0, 5)))
        receive(peer)
    still_works(server, topic + "-other")


def settled(server: Server) -> None:
    """Wait until the server has released the connections and data of other tests."""
    seen: list[tuple[int, int]] = []
    while len(set(seen[-5:])) != 1 or len(seen) < 5:
        seen.append((len(os.listdir(f"/proc/{server.pid}/fd")), memory_bytes(server, "VmRSS")))
        time.sleep(0.2)


def test_a_thousand_idle_connections_cost_nothing(server: Server, topic: str) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 1200:
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
    settled(server)
    before = memory_bytes(server, "VmRSS")
    with ExitStack() as stack:
        for _ in range(1000):
            stack.enter_context(connect(server))
        still_works(server, topic)
        assert memory_bytes(server, "VmRSS") - before < 1000 * 20_000
        assert len(os.listdir(f"/proc/{server.pid}/fd")) > 1000
