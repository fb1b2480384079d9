"""Producing and consuming with aiokafka, unmodified, against a real server process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiokafka import AIOKafkaConsumer, AIOKafkaProducer, ConsumerRecord, TopicPartition
from aiokafka.errors import MessageSizeTooLargeError

from millstream_testing.server import Server

WAIT_S = 60.0


@asynccontextmanager
async def producer_of(server: Server, **settings: Any) -> AsyncIterator[AIOKafkaProducer]:
    producer = AIOKafkaProducer(bootstrap_servers=server.kafka, **settings)
    await producer.start()
    try:
        yield producer
    finally:
        await producer.stop()


@asynccontextmanager
async def consumer_of(server: Server, *topics: str, **settings: Any) -> AsyncIterator[AIOKafkaConsumer]:
    consumer = AIOKafkaConsumer(
        *topics, bootstrap_servers=server.kafka, auto_offset_reset="earliest", enable_auto_commit=False, **settings
    )
    await consumer.start()
    try:
        yield consumer
    finally:
        await consumer.stop()


async def receive(consumer: AIOKafkaConsumer, count: int) -> list[ConsumerRecord]:
    async with asyncio.timeout(WAIT_S):
        return [await consumer.getone() for _ in range(count)]


@pytest.mark.parametrize("acks", [0, 1, "all"])
async def test_every_kind_of_acknowledgement(server: Server, topic: str, acks: int | str) -> None:
    async with producer_of(server, acks=acks) as producer:
        for number in range(20):
            await producer.send_and_wait(topic, b"%d" % number)
    async with consumer_of(server, topic) as consumer:
        assert [record.value for record in await receive(consumer, 20)] == [b"%d" % number for number in range(20)]


@pytest.mark.parametrize("codec", [None, "gzip", "snappy", "lz4", "zstd"])
async def test_every_compression(server: Server, topic: str, codec: str | None) -> None:
    async with producer_of(server, compression_type=codec, linger_ms=20) as producer:
        for number in range(200):
            await producer.send(topic, b"value %d " % number * 10, key=b"k%d" % number)
    async with consumer_of(server, topic) as consumer:
        got = await receive(consumer, 200)
    assert [(record.key, record.value) for record in got] == [
        (b"k%d" % number, b"value %d " % number * 10) for number in range(200)
    ]
    assert [record.offset for record in got] == list(range(200))


async def test_headers_null_keys_and_tombstones(server: Server, topic: str) -> None:
    async with producer_of(server) as producer:
        await producer.send_and_wait(topic, None, key=b"k", headers=[("a", b"1"), ("b", b"")])
        await producer.send_and_wait(topic, b"no key")
    async with consumer_of(server, topic) as consumer:
        first, second = await receive(consumer, 2)
    assert (first.key, first.value, list(first.headers)) == (b"k", None, [("a", b"1"), ("b", b"")])
    assert (second.key, second.value) == (None, b"no key")


async def test_an_idempotent_producer(server: Server, topic: str) -> None:
    async with producer_of(server, enable_idempotence=True, linger_ms=2) as producer:
        futures = [await producer.send(topic, b"%d" % number, partition=0) for number in range(500)]
        offsets = [(await future).offset for future in futures]
    assert offsets == list(range(500))


async def test_a_message_beyond_the_limit_is_refused(server: Server, topic: str) -> None:
    async with producer_of(server, max_request_size=4_000_000) as producer:
        with pytest.raises(MessageSizeTooLargeError):
            await producer.send_and_wait(topic, bytes(2_000_000))
        assert (await producer.send_and_wait(topic, b"small")).offset == 0


async def test_seeking_by_time_and_offset(server: Server, topic: str) -> None:
    start = 1_700_000_000_000
    place = TopicPartition(topic, 0)
    async with producer_of(server) as producer:
        for number in range(20):
            await producer.send_and_wait(topic, b"%d" % number, timestamp_ms=start + number * 1000)
    async with consumer_of(server) as consumer:
        consumer.assign([place])
        offsets = await consumer.offsets_for_times({place: start + 4500})
        assert offsets[place].offset == 5
        assert offsets[place].timestamp == start + 5000
        consumer.seek(place, offsets[place].offset)
        assert (await receive(consumer, 1))[0].value == b"5"
        assert await consumer.beginning_offsets([place]) == {place: 0}
        assert await consumer.end_offsets([place]) == {place: 20}
        assert (await consumer.offsets_for_times({place: start + 1_000_000}))[place] is None


async def test_commit_and_resume(server: Server, topic: str) -> None:
    place = TopicPartition(topic, 0)
    async with producer_of(server) as producer:
        for number in range(10):
            await producer.send_and_wait(topic, b"%d" % number)
    async with consumer_of(server, topic, group_id=f"{topic}-group") as consumer:
        await receive(consumer, 4)
        await consumer.commit()
    async with consumer_of(server, topic, group_id=f"{topic}-group") as consumer:
        assert await consumer.committed(place) == 4
        assert [record.offset for record in await receive(consumer, 6)] == [4, 5, 6, 7, 8, 9]


async def test_two_members_share_the_partitions(server: Server, topic: str) -> None:
    async with producer_of(server) as producer:
        await producer.client.force_metadata_update()
        group = {"group_id": f"{topic}-group", "metadata_max_age_ms": 500, "heartbeat_interval_ms": 200}
        topics = [f"{topic}-{letter}" for letter in "ab"]
        for name in topics:
            await producer.send_and_wait(name, b"first")
        async with consumer_of(server, *topics, **group) as one, consumer_of(server, *topics, **group) as two:
            # Both topics have one partition, which the default strategy gives to one member; count the messages.
            for name in topics:
                await producer.send_and_wait(name, b"second")
            got: list[ConsumerRecord] = []
            async with asyncio.timeout(WAIT_S):
                while len({(record.topic, record.offset) for record in got}) < 4:
                    for member in (one, two):
                        for records in (await member.getmany(timeout_ms=100)).values():
                            got.extend(records)
    assert {(record.topic, record.offset) for record in got} == {(name, offset) for name in topics for offset in (0, 1)}


async def test_a_waiting_fetch_is_woken_by_an_append(server: Server, topic: str) -> None:
    async with producer_of(server) as producer:
        await producer.send_and_wait(topic, b"0")
        async with consumer_of(server, topic, fetch_max_wait_ms=35_000) as consumer:
            await receive(consumer, 1)
            for number in range(1, 4):
                await producer.send_and_wait(topic, b"%d" % number)
                async with asyncio.timeout(WAIT_S / 2):
                    assert (await consumer.getone()).value == b"%d" % number
