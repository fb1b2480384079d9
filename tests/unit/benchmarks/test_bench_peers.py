"""The bare client for the peers, and the error for a peer that is not installed."""

from __future__ import annotations

import socket
import struct
from contextlib import ExitStack, closing

import pytest
from benchmarks import run
from benchmarks.cases import ALWAYS, OS, REQUESTS, Case
from benchmarks.peers import rabbitmq, redis
from benchmarks.peers.bare import Topic
from benchmarks.peers.pipe import MARK, Connection, Counter, PeerFailed, Tally, Window, measure, payload
from benchmarks.subject import PeerUnavailable
from benchmarks.subjects import Limit
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console


@given(st.lists(st.booleans(), max_size=20), st.integers(1, 40))
def test_a_pattern_is_counted_once_wherever_the_bytes_are_split(marks: list[bool], size: int) -> None:
    data = b"".join(MARK if mark else b"~ma" for mark in marks)
    counter = Counter(MARK)
    assert sum(counter.feed(data[at : at + size]) for at in range(0, len(data), size)) == sum(marks)


def test_a_pattern_is_counted_as_it_comes_from_a_connection() -> None:
    server, client = socket.socketpair()
    connection = Connection.__new__(Connection)
    connection.socket = client
    tally, count = Tally(MARK), 0
    with server, client:
        for part in (b"~ma", b"rk~x~mark", b"~~mark~", b"~mark", b"ing"):
            server.sendall(part)
            count += tally.take(connection)
    assert count == 3


def test_an_error_among_the_responses_is_raised() -> None:
    counter = Counter(b"$", b"-ERR")
    assert counter.feed(b"$15\r\n1-0\r\n") == 1
    with pytest.raises(PeerFailed, match="-ERR full"):
        counter.feed(b"-ERR full\r\n")


def test_a_message_has_its_size_and_one_marker() -> None:
    for size in (10, 100, 1024):
        assert len(payload(size)) == size
        assert payload(size).count(MARK) == 1


@given(st.integers(1, 50))
def test_frames_are_split_at_their_ends(size: int) -> None:
    confirm = rabbitmq.frame(3, b"\x01" + struct.pack(">I", 2) + bytes(16))
    data = rabbitmq.frame(0x8001, b"abc") + confirm
    frames = rabbitmq.Frames()
    received_frames = [frame for at in range(0, len(data), size) for frame in frames.feed(data[at : at + size])]
    assert received_frames == [(0x8001, b"abc"), (3, confirm[8:])]


def test_commands_are_encoded_as_redis_expects() -> None:
    assert redis.command(b"XADD", b"s") == b"*2\r\n$4\r\nXADD\r\n$1\r\ns\r\n"


def test_a_closed_connection_fails_the_pending_sends() -> None:
    window = Window(2)
    window.send(2)
    window.fail(PeerFailed("gone"))
    with pytest.raises(PeerFailed, match="gone"):
        window.send(1)


@pytest.mark.parametrize("case", [Case(flush=OS, partitions=1), Case(kind=REQUESTS, flush=ALWAYS, partitions=1)])
def test_the_bare_client_produces_and_consumes(case: Case) -> None:
    with Limit().topic(case) as target, closing(Connection(target.address)) as connection:
        topic = Topic(connection, target.topic, case.size_bytes)
        flow = measure([topic], case, target.pid, 0.3, 1000, 100)
    assert all(numbers.get("messages/s", numbers.get("requests/s", 0)) > 0 for numbers in flow.values())
    assert len(flow) == 2


def test_several_bare_clients_produce_concurrently() -> None:
    case = Case(flush=OS, producers=10)
    with Limit().topic(case) as target, ExitStack() as stack:
        connections = [stack.enter_context(closing(Connection(target.address))) for _ in range(3)]
        topics = [Topic(connection, target.topic, case.size_bytes, at) for at, connection in enumerate(connections)]
        flow = measure(topics, case, target.pid, 0.3, 300, 10)
    assert flow["produce"]["messages/s"] > 0


def test_a_peer_that_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> Limit:
        raise PeerUnavailable("redis-server is not installed")

    monkeypatch.setitem(run.SUBJECTS, "redis", missing)
    console = Console(record=True)
    facts: dict[str, object] = {}
    with ExitStack() as stack:
        started = run.start(console, ["limit", "redis"], stack, facts)
    assert [subject.name for subject in started] == ["limit"]
    assert "redis: not measured: redis-server is not installed" in console.export_text()
    assert "redis-server is not installed" in str(facts["versions"])
