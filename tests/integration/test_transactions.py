"""Transactions with confluent-kafka and aiokafka, unmodified, against a real server process."""

from __future__ import annotations

import time
from contextlib import closing
from functools import partial
from typing import Any
from uuid import uuid4

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer
from aiokafka import TopicPartition as AioPartition
from aiokafka.errors import ProducerFenced
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from conformance.question import KeptConnection
from conformance.questions.asking import Key

from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

WAIT_S = 60.0


@pytest.fixture
def topics(server: Server) -> tuple[str, str]:
    """A topic with one partition to read from, and one with two to write to."""
    name = uuid4().hex
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    for created in admin.create_topics([NewTopic(f"in-{name}", 1, 1), NewTopic(f"out-{name}", 2, 1)]).values():
        created.result(WAIT_S)
    return f"in-{name}", f"out-{name}"


@pytest.fixture
def source(topics: tuple[str, str]) -> str:
    return topics[0]


@pytest.fixture
def out(topics: tuple[str, str]) -> str:
    return topics[1]


def producer_of(server: Server, transactional_id: str | None) -> Producer:
    settings: dict[str, str | int] = {"bootstrap.servers": server.kafka, "log_level": 0}
    if transactional_id is None:
        return Producer(settings)
    producer = Producer({**settings, "transactional.id": transactional_id})
    producer.init_transactions(WAIT_S)
    return producer


def consumer_of(server: Server, isolation: str, group: str = "readers") -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": server.kafka,
            "log_level": 0,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": isolation,
        }
    )


def read_all(server: Server, out: str, isolation: str, *, stop: bytes) -> list[bytes]:
    """Everything in a topic up to a final message that a plain producer adds to each partition."""
    producer = producer_of(server, None)
    for partition in range(2):
        producer.produce(out, stop, partition=partition)
    assert producer.flush(WAIT_S) == 0
    consumer = consumer_of(server, isolation)
    consumer.assign([TopicPartition(out, partition, 0) for partition in range(2)])
    got: list[bytes] = []
    deadline = time.monotonic() + WAIT_S
    while got.count(stop) < 2:
        assert time.monotonic() < deadline, f"only {got} came"
        message = consumer.poll(1.0)
        if message is not None and message.error() is None:
            got.append(message.value() or b"")
    consumer.close()
    return [value for value in got if value != stop]


def test_committed_records_are_read_and_aborted_ones_are_not(server: Server, out: str) -> None:
    producer = producer_of(server, "writer-1")
    for number in range(6):
        producer.begin_transaction()
        for partition in range(2):
            producer.produce(out, f"{number}-{partition}".encode(), partition=partition)
        if number % 3 == 2:
            assert producer.flush(WAIT_S) == 0
            producer.abort_transaction(WAIT_S)
        else:
            producer.commit_transaction(WAIT_S)

    committed = {f"{number}-{partition}".encode() for number in (0, 1, 3, 4) for partition in range(2)}
    aborted = {f"{number}-{partition}".encode() for number in (2, 5) for partition in range(2)}
    assert sorted(read_all(server, out, "read_committed", stop=b"end")) == sorted(committed)
    assert {*read_all(server, out, "read_uncommitted", stop=b"end 2")} - {b"end"} == committed | aborted


def test_a_newer_producer_fences_the_older_one_and_aborts_its_open_transaction(server: Server, out: str) -> None:
    older = producer_of(server, "writer-2")
    older.begin_transaction()
    older.produce(out, b"never", partition=0)
    assert older.flush(WAIT_S) == 0

    def fencings() -> list[str]:
        lines = server.log.read_text().splitlines()
        return [line for line in lines if " info    a producer is fenced " in line and "writer-2" in line]

    newer = producer_of(server, "writer-2")
    wait_until(lambda: any('reason="a new producer uses its transactional id"' in line for line in fencings()))
    assert not any("client=" in line for line in fencings())
    with pytest.raises(KafkaException) as fenced:
        older.commit_transaction(WAIT_S)
    assert fenced.value.args[0].fatal()
    # The refused producer is named, too.
    wait_until(lambda: any("client=127.0.0.1:" in line and "client_id=rdkafka" in line for line in fencings()))
    newer.begin_transaction()
    newer.produce(out, b"once", partition=0)
    newer.commit_transaction(WAIT_S)

    assert read_all(server, out, "read_committed", stop=b"end") == [b"once"]


def _begin(broker: KeptConnection, producer: dict[str, Any], topic: str) -> bool:
    """Begin a transaction, unless the last one is still ending."""
    transaction = producer | {"topics": [{"name": topic, "partitions": [0]}], "verify_only": False}
    (response,) = broker.ask(Key.ADD_PARTITIONS_TO_TXN, 5, {"transactions": [transaction]})["results_by_transaction"]
    return bool(response["topic_results"][0]["results_by_partition"][0]["partition_error_code"] == "none")


@pytest.mark.parametrize("commit_next", [True, False])
def test_ending_again_while_a_transaction_is_ending_does_not_fence(
    server: Server, out: str, *, commit_next: bool
) -> None:
    """A fencing is fatal to a client; the epoch is the current one, so it may only be asked to wait."""
    with closing(KeptConnection(server.kafka)) as broker:
        named: dict[str, Any] = {"transactional_id": f"ending-{out}"}
        producer = broker.ask(Key.INIT_PRODUCER_ID, 5, named | {"transaction_timeout": 60_000})
        for _ in range(20):
            named |= {key: producer[key] for key in ("producer_id", "producer_epoch")}
            wait_until(partial(_begin, broker, named, out))
            producer = broker.ask(Key.END_TXN, 5, named | {"committed": True})
            assert producer["error_code"] == "none"
            named |= {key: producer[key] for key in ("producer_id", "producer_epoch")}
            again = broker.ask(Key.END_TXN, 5, named | {"committed": commit_next})
            # Once the transaction has ended, there is none to commit, while an empty one may be aborted.
            assert again["error_code"] in ("concurrent_transactions", "invalid_txn_state" if commit_next else "none")
            if again["error_code"] == "none":
                producer = again


def test_a_restart_during_a_transaction(server: Server, out: str) -> None:
    producer = producer_of(server, "writer-3")
    producer.begin_transaction()
    producer.produce(out, b"before", partition=0)
    assert producer.flush(WAIT_S) == 0
    server.kill()
    server.start()
    producer.produce(out, b"after", partition=1)
    producer.commit_transaction(WAIT_S)

    producer.begin_transaction()
    producer.produce(out, b"given up", partition=0)
    assert producer.flush(WAIT_S) == 0
    server.kill()
    server.start()
    producer.abort_transaction(WAIT_S)

    assert sorted(read_all(server, out, "read_committed", stop=b"end")) == [b"after", b"before"]


def committed_offset(consumer: Consumer, source: str) -> int:
    (position,) = consumer.committed([TopicPartition(source, 0)], timeout=WAIT_S)
    return int(position.offset)


def test_offsets_are_committed_with_the_transaction(server: Server, source: str, out: str) -> None:
    plain = producer_of(server, None)
    for number in range(4):
        plain.produce(source, str(number).encode(), partition=0)
    assert plain.flush(WAIT_S) == 0
    consumer = consumer_of(server, "read_committed", group="workers")
    consumer.subscribe([source])
    deadline = time.monotonic() + WAIT_S
    while not consumer.assignment():
        assert time.monotonic() < deadline
        consumer.poll(0.2)
    producer = producer_of(server, "worker")

    producer.begin_transaction()
    producer.produce(out, b"2", partition=0)
    producer.send_offsets_to_transaction([TopicPartition(source, 0, 2)], consumer.consumer_group_metadata(), WAIT_S)
    producer.commit_transaction(WAIT_S)
    assert committed_offset(consumer, source) == 2

    producer.begin_transaction()
    producer.produce(out, b"4", partition=0)
    producer.send_offsets_to_transaction([TopicPartition(source, 0, 4)], consumer.consumer_group_metadata(), WAIT_S)
    producer.abort_transaction(WAIT_S)
    assert committed_offset(consumer, source) == 2
    server.kill()
    server.start()
    assert committed_offset(consumer, source) == 2
    consumer.close()
    assert read_all(server, out, "read_committed", stop=b"end") == [b"2"]


async def test_aiokafka(server: Server, source: str, out: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=server.kafka, transactional_id="aio-5") as producer:
        for number in range(4):
            await producer.begin_transaction()
            await producer.send_and_wait(out, str(number).encode(), partition=number % 2)
            if number == 2:
                await producer.abort_transaction()
            else:
                await producer.commit_transaction()
        async with producer.transaction():
            await producer.send_and_wait(out, b"last", partition=0)
            await producer.send_offsets_to_transaction({AioPartition(source, 0): 7}, "aio-group")
    consumer = AIOKafkaConsumer(
        bootstrap_servers=server.kafka, isolation_level="read_committed", group_id="aio-group", enable_auto_commit=False
    )
    async with consumer:
        partitions = [AioPartition(out, 0), AioPartition(out, 1)]
        consumer.assign(partitions)
        await consumer.seek_to_beginning()
        got: list[bytes] = []
        while len(got) < 4:
            for records in (await consumer.getmany(timeout_ms=1000)).values():
                got += [record.value or b"" for record in records]
        assert sorted(got) == [b"0", b"1", b"3", b"last"]
        assert await consumer.committed(AioPartition(source, 0)) == 7


async def test_aiokafka_is_fenced(server: Server, out: str) -> None:
    async with AIOKafkaProducer(bootstrap_servers=server.kafka, transactional_id="aio-6") as older:
        await older.begin_transaction()
        await older.send_and_wait(out, b"never", partition=0)
        async with AIOKafkaProducer(bootstrap_servers=server.kafka, transactional_id="aio-6") as newer:
            with pytest.raises(ProducerFenced):
                await older.commit_transaction()
            async with newer.transaction():
                await newer.send_and_wait(out, b"once", partition=0)
    assert read_all(server, out, "read_committed", stop=b"end") == [b"once"]
