from __future__ import annotations

import asyncio
import json
import logging
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from millstream.core import child_process as supervised_child
from millstream.gateway import child
from millstream.gateway.child import HttpChild
from millstream.protocol.wire import node_status as broker_status
from millstream.protocol.wire.node_status import QUESTION, BrokerStatusPipe
from millstream_testing.waiting import until

STATUS = {"node_id": 7, "version": "0.1.0", "reasons": [], "warnings": []}


@pytest.fixture
def deaf_child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Start a child that ignores its standard input."""
    (tmp_path / "deaf.py").write_text("import time; time.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(child, "MODULE", "deaf")


@pytest.fixture
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


async def test_a_child_that_keeps_dying_is_restarted_every_time(
    listening: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(child, "MODULE", "millstream.no_such_module")
    monkeypatch.setattr(supervised_child, "BACKOFF_MAX_S", 0.002)
    caplog.set_level(logging.WARNING)
    gateway = HttpChild(listening, "127.0.0.1:9092", backoff_min_s=0.001)
    running = asyncio.create_task(gateway.run())
    await until(lambda: gateway.restarts >= 2)
    await gateway.stop()
    await running
    assert gateway.pid is None
    assert listening.fileno() == -1
    assert "the HTTP gateway exited; restarting it" in caplog.text


@pytest.mark.usefixtures("deaf_child")
async def test_a_child_that_does_not_stop_is_killed(listening: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervised_child, "STOP_S", 0.01)
    gateway = HttpChild(listening, "127.0.0.1:9092")
    running = asyncio.create_task(gateway.run())
    while gateway.pid is None:
        await asyncio.sleep(0.01)
    await gateway.stop()
    await running
    assert gateway.pid is None


@pytest.mark.usefixtures("deaf_child")
async def test_giving_up_stops_the_child(listening: socket.socket) -> None:
    gateway = HttpChild(listening, "127.0.0.1:9092")
    running = asyncio.create_task(gateway.run())
    while gateway.pid is None:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert gateway.pid is None


async def test_a_gateway_reports_why_the_broker_does_not_respond_yet(listening: socket.socket) -> None:
    address = listening.getsockname()
    gateway = HttpChild(listening, "127.0.0.1:1")
    gateway.report_starting("3 of 500 logs are recovered")
    running = asyncio.create_task(gateway.run())
    await gateway.spawned()
    for path in ("/healthz", "/readyz", "/metrics"):
        response = await get(address, path)
        assert response.startswith(b"HTTP/1.1 503")
        assert b"the broker is starting: 3 of 500 logs are recovered" in response
    gateway.report_starting("é" * 5000)
    gateway.report_starting("499 of 500 logs are recovered")
    while b"499 of 500" not in await get(address, "/healthz"):
        await asyncio.sleep(0.01)
    gateway.serve_status(lambda: STATUS)
    while not (response := await get(address, "/healthz")).startswith(b"HTTP/1.1 200"):
        await asyncio.sleep(0.01)
    assert b'"node":7' in response
    assert b"the broker does not respond" in await get(address, "/metrics")
    await gateway.stop()
    await running
    gateway.report_starting("there is no child any more")


async def test_health_follows_the_status_although_the_kafka_port_is_closed(listening: socket.socket) -> None:
    address = listening.getsockname()
    reasons: list[str] = []
    gateway = HttpChild(listening, "127.0.0.1:1")
    gateway.serve_status(lambda: {**STATUS, "reasons": reasons})
    running = asyncio.create_task(gateway.run())
    assert (await get(address, "/readyz")).startswith(b"HTTP/1.1 200")
    reasons.extend(f"orders-{partition}: the disk is full" for partition in range(1000))
    while not (response := await get(address, "/readyz")).startswith(b"HTTP/1.1 503"):
        await asyncio.sleep(0.01)
    assert b"orders-0: the disk is full" in response
    assert (await get(address, "/healthz")).startswith(b"HTTP/1.1 200")
    await gateway.stop()
    await running


async def test_the_last_status_is_used_while_a_busy_broker_does_not_respond(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_status, "FRESH_S", 0.0)
    monkeypatch.setattr(broker_status, "HEALTH_S", 0.01)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        line = BrokerStatusPipe(ours)
        line.feed(json.dumps({"starting": None, "status": STATUS}).encode() + b"\n")
        first = await line.health()
        second = await line.health()
        assert (first.status, second.status) == (STATUS, STATUS)
        assert 0 < first.silent_s < second.silent_s
        assert theirs.recv(100) == QUESTION
        line.feed(json.dumps({"starting": None, "status": {**STATUS, "node_id": 8}}).encode() + b"\n")
        monkeypatch.setattr(broker_status, "FRESH_S", 60.0)
        assert await line.health() == ({**STATUS, "node_id": 8}, 0.0)


async def test_a_status_that_was_not_requested_is_replaced_before_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """The broker writes its status when it starts the gateway, which reads it when it is up, perhaps seconds later."""
    monkeypatch.setattr(broker_status, "FRESH_S", 60.0)
    monkeypatch.setattr(broker_status, "HEALTH_S", 60.0)
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.settimeout(10)
        line = BrokerStatusPipe(ours)
        old = {**STATUS, "warnings": ["11 partitions have no leader"]}
        line.feed(json.dumps({"starting": None, "status": old}).encode() + b"\n")
        asking = asyncio.create_task(line.health())
        await asyncio.sleep(0)
        assert not asking.done()
        assert theirs.recv(100) == QUESTION
        line.feed(json.dumps({"starting": None, "status": STATUS}).encode() + b"\n")
        assert await asking == (STATUS, 0.0)
        assert await line.health() == (STATUS, 0.0)


async def get(address: tuple[str, int], path: str) -> bytes:
    reader, writer = await asyncio.open_connection(*address)
    try:
        writer.write(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        return await reader.read()
    finally:
        writer.close()
