"""Quotas with real producers and consumers: they are throttled, they wait, and nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiokafka import AIOKafkaConsumer
from confluent_kafka import Consumer, Producer, TopicPartition
from kafka import KafkaProducer

from millstream.embedded import EmbeddedBroker
from millstream.protocol.private.message import EmptyRequest, decode_document, encode
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream_testing.command import CommandLine
from millstream_testing.security import declare_security
from millstream_testing.server import Server

NODE_STATUS_KEY = 32000
GATEWAY = "millstream-gateway"
WAIT_S = 60.0
PRODUCER, CONSUMER = "producer_byte_rate", "consumer_byte_rate"
MESSAGES = 40
MESSAGE_BYTES = 10_000
# Half of all messages may go at once (ten seconds' worth); the other half goes into debt.
RATE = MESSAGES * MESSAGE_BYTES / 20


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A separate server: some quotas apply to all clients of the gateway, and its refusals are counted."""
    with Server(tmp_path_factory.mktemp("quotas") / "data", settings={"group-initial-delay-ms": 100}) as started:
        yield started


def set_quota(server: Server, client_id: str, **limits: float | None) -> None:
    """Set quotas of a client id as Java's admin client does."""
    from kio.schema.alter_client_quotas.v1 import request

    messages: Any = request
    entity = (messages.EntityData(entity_type="client-id", entity_name=client_id),)
    ops = tuple(
        messages.OpData(key=key, value=0.0 if value is None else value, remove=value is None)
        for key, value in limits.items()
    )
    asked = messages.AlterClientQuotasRequest(
        entries=(messages.EntryData(entity=entity, ops=ops),), validate_only=False
    )
    (entry,) = send(server, asked).entries
    assert entry.error_code == 0, entry.error_message


def quotas_of(server: Server) -> dict[str, dict[str, float]]:
    from kio.schema.describe_client_quotas.v1 import request

    messages: Any = request
    response = send(server, messages.DescribeClientQuotasRequest(components=(), strict=False))
    return {
        entry.entity[0].entity_name: {value.key: value.value for value in entry.values} for entry in response.entries
    }


def send(server: Server, request: Any) -> Any:
    async def ask() -> Any:
        async with Client.connect(server.kafka) as client:
            return await client.send(None, request)

    return asyncio.run(ask())


def throttled(server: Server, quota: str) -> float:
    """The number of requests the broker has throttled, by its metrics."""

    async def ask() -> Any:
        async with Client.connect(server.kafka) as client:
            return decode_document(await client.private(None, NODE_STATUS_KEY, encode(EmptyRequest())))

    metrics = {metric["name"]: metric["samples"] for metric in asyncio.run(ask())["metrics"]}
    (number,) = [value for value, labels in metrics["millstream_throttled_requests_total"] if labels["quota"] == quota]
    return float(number)


class Throttles:
    """What librdkafka reports about throttling, in its events and statistics."""

    def __init__(self) -> None:
        self.events: list[Any] = []
        self.largest_ms = 0

    def settings(self) -> dict[str, Any]:
        return {"throttle_cb": self.events.append, "stats_cb": self.note, "statistics.interval.ms": 50}

    def note(self, statistics: str) -> None:
        for node in json.loads(statistics)["brokers"].values():
            self.largest_ms = max(self.largest_ms, node["throttle"]["max"])


def test_a_producer_is_throttled_and_loses_nothing(server: Server, topic: str) -> None:
    set_quota(server, topic, producer_byte_rate=RATE)
    before = throttled(server, PRODUCER)
    throttles = Throttles()
    settings = {"bootstrap.servers": server.kafka, "client.id": topic, "log_level": 0, "batch.size": MESSAGE_BYTES}
    producer = Producer({**settings, **throttles.settings(), "max.in.flight": 1})
    for _ in range(MESSAGES):
        producer.produce(topic, bytes(MESSAGE_BYTES), partition=0)
        producer.poll(0)
    # Lifting the quota ends the debt, so the test does not wait for it. librdkafka still waits out its throttle time.
    while throttled(server, PRODUCER) == before:
        producer.poll(0.05)
    set_quota(server, topic, producer_byte_rate=None)
    assert producer.flush(WAIT_S) == 0
    assert throttles.events or throttles.largest_ms > 0
    with closing(Consumer({"bootstrap.servers": server.kafka, "group.id": topic, "log_level": 0})) as consumer:
        assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=WAIT_S) == (0, MESSAGES)


def test_a_user_is_throttled_across_client_ids(tmp_path: Path) -> None:
    declare_security(tmp_path / "data", {"admin": "admin-password", "eve": "eve-password"})
    broker = EmbeddedBroker(tmp_path / "data", settings={"auth": "required", "super-users": "admin,eve"})
    broker.start_and_wait()

    async def produce(user: str, client_id: str) -> bool:
        """Whether a client of a user is throttled after its first messages."""
        credentials = Credentials(user=user, password=f"{user}-password")
        async with Client.connect(broker.kafka_address, credentials=credentials, client_id=client_id) as client:
            (node,) = (await client.metadata(["shared-by-users"], create=True)).nodes
            await client.produce("shared-by-users", 0, encode_batch([NewRecord(None, bytes(10_000), (), 0)]))
            return (await client.pool_for(node)).muted_until > 0

    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MILLSTREAM_USER", "admin")
            patch.setenv("MILLSTREAM_PASSWORD", "admin-password")
            assert CommandLine(broker.kafka_address)("quota", "set", "user:eve", "--produce", 500).code == 0
        throttled = [asyncio.run(produce(*who)) for who in (("eve", "one"), ("eve", "two"), ("admin", "one"))]
        assert throttled == [True, True, False]
    finally:
        broker.stop_and_wait()


def test_a_throttled_producer_authenticates_again_over_its_connection(tmp_path: Path) -> None:
    declare_security(tmp_path / "data", {"admin": "admin-password"})
    settings = {"auth": "required", "super-users": "admin", "session-max-ms": 1000}
    broker = EmbeddedBroker(tmp_path / "data", settings=settings)
    broker.start_and_wait()
    reports: list[dict[str, Any]] = []
    producer = Producer(
        {
            "bootstrap.servers": broker.kafka_address,
            "log_level": 0,
            "security.protocol": "SASL_PLAINTEXT",
            "sasl.mechanism": "PLAIN",
            "sasl.username": "admin",
            "sasl.password": "admin-password",
            "batch.size": 2000,
            "statistics.interval.ms": 50,
            "stats_cb": lambda statistics: reports.append(json.loads(statistics)["brokers"]),
        }
    )
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("MILLSTREAM_USER", "admin")
            patch.setenv("MILLSTREAM_PASSWORD", "admin-password")
            assert CommandLine(broker.kafka_address)("quota", "set", "user:admin", "--produce", 100).code == 0
        # Each request is throttled for longer than the session lasts, and they are sent before the handshake.
        for _ in range(20):
            producer.produce("renewed", bytes(1000), partition=0)
        while not any(node["req"].get("SaslHandshake", 0) > 4 for node in (reports or [{}])[-1].values()):
            producer.poll(0.05)
        assert [node["disconnects"] for node in reports[-1].values() if node["req"].get("Produce")] == [0]
    finally:
        producer.purge()
        producer.flush(WAIT_S)
        broker.stop_and_wait()


def test_a_consumer_is_throttled_and_reads_everything(server: Server, topic: str) -> None:
    fill(server, topic)
    set_quota(server, topic, consumer_byte_rate=RATE)
    before = throttled(server, CONSUMER)
    throttles = Throttles()
    settings = {"bootstrap.servers": server.kafka, "client.id": topic, "group.id": topic, "log_level": 0}
    limits = {"auto.offset.reset": "earliest", "fetch.message.max.bytes": 2 * MESSAGE_BYTES}
    with closing(Consumer({**settings, **limits, **throttles.settings()})) as consumer:
        consumer.subscribe([topic])
        read = 0
        while read < MESSAGES:
            message = consumer.poll(WAIT_S)
            assert message is not None
            assert message.error() is None
            read += 1
            if throttled(server, CONSUMER) > before:
                set_quota(server, topic, consumer_byte_rate=None)
    assert throttled(server, CONSUMER) > before
    assert throttles.events or throttles.largest_ms > 0


def fill(server: Server, topic: str) -> None:
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0, "batch.size": MESSAGE_BYTES})
    for _ in range(MESSAGES):
        producer.produce(topic, bytes(MESSAGE_BYTES), partition=0)
    assert producer.flush(WAIT_S) == 0


def test_a_python_producer_counts_its_throttle_time(server: Server, topic: str) -> None:
    set_quota(server, topic, producer_byte_rate=RATE)
    producer = KafkaProducer(bootstrap_servers=server.kafka, client_id=topic, acks="all", batch_size=MESSAGE_BYTES)
    try:
        for _ in range(MESSAGES):
            producer.send(topic, bytes(MESSAGE_BYTES), partition=0).get(WAIT_S)
            if largest_throttle_ms(producer) > 0:
                break
        set_quota(server, topic, producer_byte_rate=None)
        assert largest_throttle_ms(producer) > 0
    finally:
        producer.close()


def largest_throttle_ms(producer: KafkaProducer) -> float:
    groups = producer.metrics().values()
    return max((group["throttle-time-max"] for group in groups if "throttle-time-max" in group), default=0.0)


async def test_an_asyncio_consumer_keeps_reading_under_a_quota(server: Server, topic: str) -> None:
    await asyncio.to_thread(fill, server, topic)
    await asyncio.to_thread(set_quota, server, topic, consumer_byte_rate=RATE * 10)
    settings: dict[str, Any] = {"bootstrap_servers": server.kafka, "client_id": topic}
    settings["max_partition_fetch_bytes"] = 2 * MESSAGE_BYTES
    async with AIOKafkaConsumer(topic, auto_offset_reset="earliest", **settings) as consumer:
        for _ in range(MESSAGES):
            await asyncio.wait_for(consumer.getone(), WAIT_S)
    await asyncio.to_thread(set_quota, server, topic, consumer_byte_rate=None)


def test_other_clients_are_not_throttled(server: Server, topic: str) -> None:
    set_quota(server, topic, producer_byte_rate=1.0)
    held = Producer({"bootstrap.servers": server.kafka, "client.id": topic, "log_level": 0})
    held.produce(topic, bytes(1000), partition=0)
    assert held.flush(WAIT_S) == 0
    fill(server, topic)
    set_quota(server, topic, producer_byte_rate=None)


def test_publish_and_pull_over_http_get_retry_after(server: Server, topic: str) -> None:
    # So small that the debt outlives the test: a request that waited for it would get no response at all.
    set_quota(server, GATEWAY, producer_byte_rate=10.0, consumer_byte_rate=10.0)
    with httpx.Client(base_url=f"http://{server.http}/v1", timeout=WAIT_S) as http:
        once = {"params": {"deduplicate": "true"}, "headers": {"message-id": "1"}}
        put = [
            http.post(f"/topics/{topic}/messages", content=bytes(5000), **how)  # type: ignore[arg-type]
            for how in (once, once, {}, {})
        ]
        declared = http.post("/subscriptions", json={"name": topic, "topics": [topic], "start": "start"})
        got = [http.post(f"/subscriptions/{topic}/messages:pull", json={"wait_ms": wait}) for wait in (60_000, 0, 50)]
        leases = [message["lease"] for message in got[0].json()["messages"]]
        settled = http.post(f"/subscriptions/{topic}/messages:settle", json={"accept": leases})
        counted = http.get("/../metrics").text
    set_quota(server, GATEWAY, producer_byte_rate=None, consumer_byte_rate=None)
    assert [response.status_code for response in put] == [201, 429, 201, 429]
    assert [response.status_code for response in got] == [200, 429, 429]
    for refused in (put[1], put[3], *got[1:]):
        assert int(refused.headers["retry-after"]) > 60
    assert (declared.status_code, settled.status_code, settled.json()["failed"], len(leases)) == (201, 200, 0, 1)
    assert "millstream_http_rejected_total 4" in counted


def test_quotas_survive_a_restart(start_server: Any) -> None:
    server: Server = start_server()
    set_quota(server, "kept", producer_byte_rate=1000.0, consumer_byte_rate=2000.0)
    server.restart(clean=False)
    assert quotas_of(server) == {"kept": {PRODUCER: 1000.0, CONSUMER: 2000.0}}
