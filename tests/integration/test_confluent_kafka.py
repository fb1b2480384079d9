"""Producing and consuming with confluent-kafka (librdkafka), unmodified, against a real server process."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from typing import Any

import pytest
from confluent_kafka import (
    OFFSET_BEGINNING,
    OFFSET_END,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    Producer,
    TopicPartition,
)

from millstream_testing.server import Server

WAIT_S = 60.0


def send(server: Server, topic: str, messages: list[dict[str, Any]], **settings: Any) -> list[Message]:
    """Produce, wait for every response, and return the delivered messages."""
    delivered: list[Message] = []

    def note(error: KafkaError | None, message: Message) -> None:
        if error is not None:
            raise KafkaException(error)
        delivered.append(message)

    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0, "linger.ms": 5, **settings})
    for message in messages:
        producer.produce(topic, on_delivery=note, **message)
    assert producer.flush(WAIT_S) == 0
    return delivered


def consumer_of(server: Server, group: str = "alone", **settings: Any) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": server.kafka,
            "log_level": 0,
            "group.id": group,
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "enable.partition.eof": False,
            **settings,
        }
    )


def receive(consumer: Consumer, count: int) -> list[Message]:
    """Receive exactly so many messages, or fail."""
    got: list[Message] = []
    deadline = time.monotonic() + WAIT_S
    while len(got) < count:
        assert time.monotonic() < deadline, f"{len(got)} of {count} messages came"
        for message in consumer.consume(count - len(got), 0.2):
            error = message.error()
            # The client reports topics that a pattern may match later; that is not a failure of the broker.
            if error is not None and error.code() != KafkaError.UNKNOWN_TOPIC_OR_PART:
                raise KafkaException(error)
            if error is None:
                got.append(message)
    return got


def read_all(server: Server, topic: str, count: int, *, partitions: int = 1, **settings: Any) -> list[Message]:
    consumer = consumer_of(server, **settings)
    try:
        consumer.assign([TopicPartition(topic, index, OFFSET_BEGINNING) for index in range(partitions)])
        return receive(consumer, count)
    finally:
        consumer.close()


@pytest.mark.parametrize("acks", ["0", "1", "all"])
def test_every_kind_of_acknowledgement(server: Server, topic: str, acks: str) -> None:
    send(server, topic, [{"value": b"%d" % number} for number in range(100)], acks=acks)
    assert [message.value() for message in read_all(server, topic, 100)] == [b"%d" % number for number in range(100)]


@pytest.mark.parametrize("codec", ["none", "gzip", "snappy", "lz4", "zstd"])
def test_every_compression(server: Server, topic: str, codec: str) -> None:
    sent = [{"key": b"k%d" % number, "value": b"value %d " % number * 20} for number in range(500)]
    send(server, topic, sent, **{"compression.type": codec})
    got = read_all(server, topic, 500, **{"check.crcs": True})
    assert [{"key": message.key(), "value": message.value()} for message in got] == sent
    assert [message.offset() for message in got] == list(range(500))


def test_headers_null_keys_and_tombstones(server: Server, topic: str) -> None:
    send(
        server,
        topic,
        [
            {"key": None, "value": b"no key"},
            {"key": b"k", "value": None},
            {"key": b"", "value": b"", "headers": [("a", b"1"), ("a", b"2"), ("empty", b""), ("null", None)]},
        ],
    )
    first, second, third = read_all(server, topic, 3)
    assert (first.key(), first.value(), first.headers()) == (None, b"no key", None)
    assert (second.key(), second.value()) == (b"k", None)
    assert (third.key(), third.value()) == (b"", b"")
    assert third.headers() == [("a", b"1"), ("a", b"2"), ("empty", b""), ("null", None)]


def test_an_idempotent_producer_gets_dense_offsets_in_order(server: Server, topic: str) -> None:
    messages = [{"value": b"%d" % number, "partition": 0} for number in range(5000)]
    delivered = send(server, topic, messages, **{"enable.idempotence": True, "batch.num.messages": 100})
    assert [message.offset() for message in delivered] == list(range(5000))
    assert [message.value() for message in read_all(server, topic, 5000)] == [b"%d" % n for n in range(5000)]


def test_a_message_keeps_its_timestamp(server: Server, topic: str) -> None:
    send(server, topic, [{"value": b"x", "timestamp": 1_600_000_000_123}])
    (message,) = read_all(server, topic, 1)
    assert message.timestamp() == (1, 1_600_000_000_123)


def test_seeking_by_time(server: Server, topic: str) -> None:
    start = 1_700_000_000_000
    sent = [{"value": b"%d" % number, "timestamp": start + number * 1000} for number in range(100)]
    send(server, topic, sent, **{"batch.num.messages": 10})
    consumer = consumer_of(server)
    try:
        places = [TopicPartition(topic, 0, time_ms) for time_ms in (start + 41_500,)]
        (offset,) = consumer.offsets_for_times(places, timeout=WAIT_S)
        assert offset.offset == 42
        consumer.assign([offset])
        assert receive(consumer, 1)[0].value() == b"42"
        (beyond,) = consumer.offsets_for_times([TopicPartition(topic, 0, start + 1_000_000)], timeout=WAIT_S)
        assert beyond.offset == OFFSET_END
    finally:
        consumer.close()


def test_watermarks_and_seeking_by_offset(server: Server, topic: str) -> None:
    send(server, topic, [{"value": b"%d" % number} for number in range(10)])
    consumer = consumer_of(server)
    try:
        assert consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=WAIT_S) == (0, 10)
        consumer.assign([TopicPartition(topic, 0, 7)])
        assert [message.offset() for message in receive(consumer, 3)] == [7, 8, 9]
        consumer.seek(TopicPartition(topic, 0, 2))
        assert receive(consumer, 1)[0].offset() == 2
    finally:
        consumer.close()


def test_a_missing_offset_follows_the_reset_policy(server: Server, topic: str) -> None:
    send(server, topic, [{"value": b"only"}])
    consumer = consumer_of(server)
    try:
        consumer.assign([TopicPartition(topic, 0, 1000)])
        assert receive(consumer, 1)[0].offset() == 0
    finally:
        consumer.close()


def test_commit_and_resume(server: Server, topic: str) -> None:
    send(server, topic, [{"value": b"%d" % number} for number in range(10)])
    group = f"{topic}-group"
    first = consumer_of(server, group)
    first.subscribe([topic])
    for message in receive(first, 4):
        first.commit(message=message, asynchronous=False)
    first.close()
    second = consumer_of(server, group)
    try:
        (committed,) = second.committed([TopicPartition(topic, 0)], timeout=WAIT_S)
        assert committed.offset == 4
        second.subscribe([topic])
        assert [message.offset() for message in receive(second, 6)] == [4, 5, 6, 7, 8, 9]
    finally:
        second.close()


def test_several_topics_and_partitions(server: Server, topic: str) -> None:
    topics = [f"{topic}-{letter}" for letter in "abc"]
    create(server, topics, partitions=3)
    for name in topics:
        messages = [{"key": b"%d" % number, "value": f"{name} {number}".encode()} for number in range(60)]
        send(server, name, messages)
    consumer = consumer_of(server, f"{topic}-group")
    try:
        consumer.subscribe(topics)
        got = receive(consumer, 180)
    finally:
        consumer.close()
    expected = {f"{name} {number}".encode() for name in topics for number in range(60)}
    assert {message.value() for message in got} == expected
    assert {(message.topic(), message.partition()) for message in got} == {(n, p) for n in topics for p in range(3)}
    for name in topics:
        for index in range(3):
            offsets = [m.offset() for m in got if (m.topic(), m.partition()) == (name, index)]
            assert offsets == list(range(len(offsets)))


def test_a_message_beyond_the_limit_is_refused_and_the_next_one_accepted(server: Server, topic: str) -> None:
    failures: list[KafkaError | None] = []
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0, "message.max.bytes": 4_000_000})
    for size in (2_000_000, 10):
        producer.produce(topic, bytes(size), on_delivery=lambda error, _: failures.append(error))
        assert producer.flush(WAIT_S) == 0
    assert failures[0] is not None
    assert failures[0].code() == KafkaError.MSG_SIZE_TOO_LARGE
    assert failures[1] is None
    assert len(read_all(server, topic, 1)[0].value() or b"") == 10


def test_a_waiting_fetch_is_woken_by_an_append(server: Server, topic: str) -> None:
    """The fetch would wait for a minute; the message must arrive before that."""
    create(server, [topic], partitions=1)
    patient: dict[str, Any] = {"fetch.wait.max.ms": 60_000, "socket.timeout.ms": 90_000, "fetch.min.bytes": 1}
    consumer = consumer_of(server, **patient)
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        assert consumer.poll(0.5) is None
        for number in range(3):
            send(server, topic, [{"value": b"%d" % number}])
            assert receive(consumer, 1)[0].value() == b"%d" % number
    finally:
        consumer.close()


def test_a_fetch_larger_than_requested_makes_progress(server: Server, topic: str) -> None:
    send(server, topic, [{"value": bytes(500_000)} for _ in range(3)], **{"batch.num.messages": 1})
    small = {"fetch.message.max.bytes": 1000, "fetch.max.bytes": 1_000_000}
    assert [len(m.value() or b"") for m in read_all(server, topic, 3, **small)] == [500_000] * 3


def test_an_idle_client_sees_topics_that_others_create(server: Server, topic: str) -> None:
    consumer = consumer_of(server, f"{topic}-group", **{"topic.metadata.refresh.interval.ms": 200})
    try:
        consumer.subscribe([f"^{topic}-.*"])
        consumer.poll(0.5)
        send(server, f"{topic}-late", [{"value": b"hello"}])
        assert receive(consumer, 1)[0].topic() == f"{topic}-late"
    finally:
        consumer.close()


@pytest.fixture(scope="module")
def strict_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that does not create topics automatically."""
    settings = {"auto-create-topics": "false"}
    with Server(tmp_path_factory.mktemp("strict") / "data", settings=settings) as started:
        yield started


def test_an_unknown_topic_without_auto_creation(strict_server: Server, topic: str) -> None:
    failures: list[KafkaError | None] = []
    impatient = {"topic.metadata.propagation.max.ms": 100, "message.timeout.ms": 10_000}
    producer = Producer({"bootstrap.servers": strict_server.kafka, "log_level": 0, **impatient})
    producer.produce(topic, b"x", on_delivery=lambda error, _: failures.append(error))
    assert producer.flush(WAIT_S) == 0
    (failure,) = failures
    assert failure is not None
    assert failure.code() in (KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART)
    create(strict_server, [topic], partitions=1)
    send(strict_server, topic, [{"value": b"now"}])
    assert read_all(strict_server, topic, 1)[0].value() == b"now"


def create(server: Server, topics: list[str], *, partitions: int) -> None:
    from confluent_kafka.admin import AdminClient
    from confluent_kafka.cimpl import NewTopic

    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    new_topics = [NewTopic(name, num_partitions=partitions, replication_factor=1) for name in topics]
    for created in admin.create_topics(new_topics).values():
        created.result(WAIT_S)


def test_responses_stay_within_the_limit_of_the_consumer(server: Server, topic: str) -> None:
    """librdkafka disconnects on a response larger than `receive.message.max.bytes`, and would repeat the request."""
    value = bytes(921_600)
    create(server, [topic], partitions=2)
    send(server, topic, [{"value": value, "partition": index} for index in (0, 1)])
    # From an explicit offset on, the first request asks for both partitions: neither waits for ListOffsets.
    settings: dict[str, Any] = {"fetch.max.bytes": 1_000_000, "receive.message.max.bytes": 1_000_512}
    consumer = consumer_of(server, **settings)
    with closing(consumer):
        consumer.assign([TopicPartition(topic, index, 0) for index in (0, 1)])
        got = receive(consumer, 2)
    assert sorted(message.partition() or 0 for message in got) == [0, 1]
