"""`millstream client list` against a real broker with real clients."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, ShareConsumer

from millstream import __version__
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client
from millstream_testing.command import CommandLine
from millstream_testing.server import Server

WAIT_S = 60.0


@pytest.fixture
def producer(server: Server, topic: str) -> Producer:
    """A producer that has sent something and stays connected."""
    client = Producer({"bootstrap.servers": server.kafka, "client.id": f"{topic}-p", "log_level": 0})
    client.produce(topic, b"x" * 5000)
    assert client.flush(WAIT_S) == 0
    return client


@pytest.fixture
def consumer(server: Server, topic: str, producer: Producer) -> Iterator[Consumer]:
    """A consumer that has read something and stays connected."""
    settings = {"bootstrap.servers": server.kafka, "client.id": f"{topic}-c", "group.id": topic, "log_level": 0}
    with closing(Consumer({**settings, "auto.offset.reset": "earliest"})) as client:
        client.subscribe([topic])
        message = client.poll(WAIT_S)
        assert message is not None
        assert message.error() is None
        yield client


def of(listed: Any, client_id: str) -> list[dict[str, Any]]:
    return [client for client in listed["clients"] if client["client_id"] == client_id]


@pytest.mark.usefixtures("consumer")
def test_producers_and_consumers_are_listed_by_kind(millstream: CommandLine, topic: str) -> None:
    result = millstream("client", "list", "--interval", 0.1, "--json")
    assert result.code == 0
    (producing,) = of(result.document, f"{topic}-p")
    assert producing["roles"] == ["producer"]
    assert producing["address"].startswith("127.0.0.1:")
    assert (producing["software"], producing["node"]) == ("confluent-kafka-python", 1)
    assert producing["version"][0].isdigit()
    assert producing["produced_bytes"] > 5000
    assert (producing["fetched_bytes"], producing["produced_bytes_per_s"]) == (0, 0.0)
    (consuming,) = of(result.document, f"{topic}-c")
    assert consuming["roles"] == ["consumer"]
    assert consuming["fetched_bytes"] > 5000
    assert result.document["omitted"] == 0


async def test_waiting_workers_are_listed_as_consumers(server: Server, millstream: CommandLine, topic: str) -> None:
    settings = {"bootstrap.servers": server.kafka, "client.id": f"{topic}-s", "group.id": f"{topic}-s", "log_level": 0}
    async with Client.connect(server.kafka, client_id=f"{topic}-w") as client:
        await client.metadata([topic], create=True)
        subscriptions = SubscriptionClient(client)
        await subscriptions.create(f"{topic}-w", [topic], {})
        waiting = asyncio.create_task(subscriptions.receive(f"{topic}-w", "w", max_records=1, wait_ms=600_000))
        with closing(ShareConsumer(settings)) as sharing:
            sharing.subscribe([topic])
            for name in (f"{topic}-w", f"{topic}-s"):
                while not of(await asyncio.to_thread(_listed, millstream), name):
                    await asyncio.to_thread(sharing.poll, 0.1)
        waiting.cancel()
        await asyncio.wait([waiting])


def _listed(millstream: CommandLine) -> Any:
    return millstream("client", "list", "--interval", 0, "--json").document


def test_millstreams_own_clients_report_their_version(millstream: CommandLine) -> None:
    document = millstream("client", "list", "--all", "--interval", 0.1, "--json").document
    # The one that asks; the broker may not have noticed yet that earlier ones are gone.
    mine, *_ = of(document, "millstream-cli")
    assert (mine["software"], mine["version"]) == ("millstream", __version__)


@pytest.mark.usefixtures("consumer")
def test_the_table_omits_millstreams_own_clients_unless_all_is_given(millstream: CommandLine, topic: str) -> None:
    shown = millstream("client", "list", "--interval", 0)
    header = "CLIENT ID NODE ADDRESS SOFTWARE VERSION ROLE IN/S OUT/S IDLE"
    assert shown.lines[0].split() == header.split()
    assert any(line.startswith(f"{topic}-p ") and " producer " in line for line in shown.lines)
    assert "millstream-cli" not in shown.out
    show_all = millstream("client", "list", "--all", "--interval", 0, "--json").document
    assert of(show_all, "millstream-cli")[0]["roles"] == []


@contextmanager
def flowing(producer: Producer, topic: str) -> Iterator[None]:
    """Keep a little data flowing."""
    stop = threading.Event()

    def flow() -> None:
        while not stop.wait(0.01):
            producer.produce(topic, b"x" * 100)
            producer.poll(0)

    thread = threading.Thread(target=flow)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        assert producer.flush(WAIT_S) == 0


def test_a_rate_is_measured_while_data_flows(millstream: CommandLine, producer: Producer, topic: str) -> None:
    with flowing(producer, topic):
        for _ in range(20):
            document = millstream("client", "list", "--interval", 0.3, "--json").document
            (producing,) = of(document, f"{topic}-p")
            if producing["produced_bytes_per_s"]:
                break
        else:
            pytest.fail("no rate was measured although data flows")


def test_an_unreachable_broker_is_reported(start_server: Any) -> None:
    alone = CommandLine(start_server().kafka)
    assert "No producer and no consumer" in alone("client", "list", "--interval", 0).out
