"""Producing and consuming with kafka-python, unmodified, against a real server process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from kafka import KafkaConsumer, KafkaProducer, TopicPartition
from kafka.codec import has_gzip, has_lz4, has_snappy, has_zstd
from kafka.errors import MessageSizeTooLargeError

from millstream_testing.server import Server

WAIT_S = 60.0
CODECS = {"gzip": has_gzip, "snappy": has_snappy, "lz4": has_lz4, "zstd": has_zstd}


@contextmanager
def producer_of(server: Server, **settings: Any) -> Iterator[KafkaProducer]:
    producer = KafkaProducer(bootstrap_servers=server.kafka, **settings)
    try:
        yield producer
    finally:
        producer.close()


@contextmanager
def consumer_of(server: Server, *topics: str, **settings: Any) -> Iterator[KafkaConsumer]:
    consumer = KafkaConsumer(
        *topics,
        bootstrap_servers=server.kafka,
        auto_offset_reset="earliest",
        enable_auto_commit=False,
        consumer_timeout_ms=int(WAIT_S * 1000),
        **settings,
    )
    try:
        yield consumer
    finally:
        consumer.close()


def receive(consumer: KafkaConsumer, count: int) -> list[Any]:
    return [next(consumer) for _ in range(count)]


def send(server: Server, topic: str, values: list[bytes], **settings: Any) -> list[int]:
    with producer_of(server, **settings) as producer:
        futures = [producer.send(topic, value, partition=0) for value in values]
        return [future.get(WAIT_S).offset for future in futures]


@pytest.mark.parametrize("acks", [0, 1, "all"])
def test_every_kind_of_acknowledgement(server: Server, topic: str, acks: int | str) -> None:
    values = [b"%d" % number for number in range(20)]
    idempotent = acks == "all"
    send(server, topic, values, acks=acks, enable_idempotence=idempotent)
    with consumer_of(server, topic) as consumer:
        assert [record.value for record in receive(consumer, 20)] == values


@pytest.mark.parametrize("codec", sorted(CODECS))
def test_every_compression_of_the_client(server: Server, topic: str, codec: str) -> None:
    if not CODECS[codec]():
        pytest.skip(f"kafka-python has no {codec} on this machine")
    values = [b"value %d " % number * 10 for number in range(100)]
    assert send(server, topic, values, compression_type=codec, linger_ms=20) == list(range(100))
    with consumer_of(server, topic) as consumer:
        assert [record.value for record in receive(consumer, 100)] == values


def test_headers_null_keys_and_tombstones(server: Server, topic: str) -> None:
    with producer_of(server) as producer:
        producer.send(topic, key=b"k", value=None, headers=[("a", b"1"), ("b", b"")]).get(WAIT_S)
        producer.send(topic, b"no key").get(WAIT_S)
    with consumer_of(server, topic) as consumer:
        first, second = receive(consumer, 2)
    assert (first.key, first.value, list(first.headers)) == (b"k", None, [("a", b"1"), ("b", b"")])
    assert (second.key, second.value) == (None, b"no key")


def test_a_message_beyond_the_limit_is_refused(server: Server, topic: str) -> None:
    # An idempotent producer of this client fails permanently once a message was refused.
    with producer_of(server, max_request_size=4_000_000, enable_idempotence=False) as producer:
        with pytest.raises(MessageSizeTooLargeError):
            producer.send(topic, bytes(2_000_000)).get(WAIT_S)
        assert producer.send(topic, b"small").get(WAIT_S).offset == 0


def test_seeking_by_time_and_offset(server: Server, topic: str) -> None:
    start = 1_700_000_000_000
    place = TopicPartition(topic, 0)
    with producer_of(server) as producer:
        for number in range(20):
            producer.send(topic, b"%d" % number, timestamp_ms=start + number * 1000).get(WAIT_S)
    with consumer_of(server) as consumer:
        consumer.assign([place])
        offset = consumer.offsets_for_times({place: start + 4500})[place]
        assert (offset.offset, offset.timestamp) == (5, start + 5000)
        consumer.seek(place, offset.offset)
        assert receive(consumer, 1)[0].value == b"5"
        assert consumer.beginning_offsets([place]) == {place: 0}
        assert consumer.end_offsets([place]) == {place: 20}


def test_commit_and_resume(server: Server, topic: str) -> None:
    send(server, topic, [b"%d" % number for number in range(10)])
    with consumer_of(server, topic, group_id=f"{topic}-group") as consumer:
        receive(consumer, 4)
        consumer.commit()
    with consumer_of(server, topic, group_id=f"{topic}-group") as consumer:
        assert consumer.committed(TopicPartition(topic, 0)) == 4
        assert [record.offset for record in receive(consumer, 6)] == [4, 5, 6, 7, 8, 9]
