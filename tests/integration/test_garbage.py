"""Malformed input affects only its sender."""

from __future__ import annotations

import random
import socket
import struct
from collections.abc import Iterator

import pytest
from confluent_kafka import Producer

from millstream_testing.server import Server

WAIT_S = 60.0
API_VERSIONS, PRODUCE, METADATA = 18, 0, 3


@pytest.fixture
def peer(server: Server) -> Iterator[socket.socket]:
    with connect(server) as connected:
        yield connected


def connect(server: Server) -> socket.socket:
    host, _, port = server.kafka.rpartition(":")
    return socket.create_connection((host, int(port)), timeout=WAIT_S)


def frame(body: bytes) -> bytes:
    return struct.pack(">i", len(body)) + body


def header(key: int, version: int, correlation: int = 7) -> bytes:
    return struct.pack(">hhih", key, version, correlation, 4) + b"test"


def is_closed(peer: socket.socket) -> bool:
    """Whether the server disconnects; a response before that is fine."""
    try:
        while peer.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return True


def still_works(server: Server, topic: str) -> None:
    errors: list[object] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    producer.produce(topic, b"fine", on_delivery=lambda error, _: errors.append(error))
    assert producer.flush(WAIT_S) == 0
    assert errors == [None]


GARBAGE = {
    "text": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "a negative size": struct.pack(">i", -1),
    "a huge size": struct.pack(">i", 2**31 - 1) + b"x" * 100,
    "an empty frame": frame(b""),
    "a cut header": frame(b"\x00\x03"),
    "an unknown API": frame(header(9999, 0)),
    "a version from the future": frame(header(METADATA, 999)),
    "a cut body": frame(header(METADATA, 9) + b"\x00"),
    "an array of two billion": frame(header(METADATA, 1) + struct.pack(">i", 2**31 - 1)),
    "a produce request without an end": frame(header(PRODUCE, 9) + b"\x00\xff\xff\x00\x00\x00\x00\xff\xff\xff\xff\x7f"),
}


@pytest.mark.parametrize("name", sorted(GARBAGE))
def test_garbage_closes_only_its_own_connection(server: Server, topic: str, name: str, peer: socket.socket) -> None:
    with connect(server) as other:
        peer.sendall(GARBAGE[name])
        assert is_closed(peer)
        other.sendall(frame(header(API_VERSIONS, 0, correlation=42)))
        response = other.recv(65536)
        assert struct.unpack_from(">i", response, 4)[0] == 42
    still_works(server, topic)


def test_an_unknown_version_of_api_versions_gets_a_response(peer: socket.socket) -> None:
    no_tags, name_and_version = b"\x00", b"\x05name\x031."
    peer.sendall(frame(header(API_VERSIONS, 99) + no_tags + name_and_version + no_tags))
    response = peer.recv(65536)
    correlation, error, count = struct.unpack_from(">ihi", response, 4)
    assert (correlation, error) == (7, 35)
    assert count >= 1


def test_random_bytes_in_well_framed_requests(server: Server, topic: str) -> None:
    source = random.Random(20)
    for _ in range(200):
        with connect(server) as peer:
            key, version = source.randrange(0, 40), source.randrange(0, 14)
            peer.sendall(frame(header(key, version) + source.randbytes(source.randrange(0, 200))))
            peer.shutdown(socket.SHUT_WR)
            assert is_closed(peer)
    still_works(server, topic)
    assert server.is_running()


def test_requests_may_be_sent_byte_by_byte_and_pipelined(peer: socket.socket) -> None:
    request = frame(header(API_VERSIONS, 0))
    for index in range(len(request)):
        peer.sendall(request[index : index + 1])
    size = struct.unpack(">i", receive(peer, 4))[0]
    receive(peer, size)
    peer.sendall(request * 50)
    for _ in range(50):
        assert struct.unpack(">i", receive(peer, 4))[0] == size
        receive(peer, size)


def receive(peer: socket.socket, count: int) -> bytes:
    received = b""
    while len(received) < count:
        part = peer.recv(count - len(received))
        assert part
        received += part
    return received


def test_a_batch_with_a_wrong_checksum_is_refused(server: Server, topic: str, peer: socket.socket) -> None:
    from millstream.protocol.records.record import NewRecord, encode_batch

    still_works(server, topic)
    batch = encode_batch([NewRecord(key=None, value=b"x", timestamp_ms=1)])
    for flipped in (False, True):
        if flipped:
            batch[-1] ^= 1
        body = struct.pack(">hhi", -1, -1, 1000) + struct.pack(">ih", 1, len(topic)) + topic.encode()
        body += struct.pack(">iii", 1, 0, len(batch)) + bytes(batch)
        peer.sendall(frame(header(PRODUCE, 7) + body))
        response = receive(peer, struct.unpack(">i", receive(peer, 4))[0])
        error = struct.unpack_from(">h", response, 4 + 4 + 2 + len(topic) + 4 + 4)[0]
        assert error == (2 if flipped else 0)
