"""Compacted topics with real clients: the last value of each key, deletions, refusals, restarts and kills."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaError, Message, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

import millstream
from millstream_testing.committed_messages import committed_records
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

WAIT_S = 120.0
QUIET = {"log_level": 0, "reconnect.backoff.ms": 20, "reconnect.backoff.max.ms": 200}
SETTINGS = {
    "cleanup.policy": "compact",
    "segment.ms": "100",
    "min.cleanable.dirty.ratio": "0.01",
    "delete.retention.ms": "0",
}
Content = list[tuple[int, bytes | None, bytes | None]]


@pytest.fixture(scope="module")
def eager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """A server that compacts continuously."""
    settings = {"retention-check-ms": 100, "pipelines-enabled": "false"}
    with Server(tmp_path_factory.mktemp("compacted") / "data", settings=settings) as started:
        yield started


def create(server: Server, topic: str, **changes: str) -> None:
    config = SETTINGS | {name.replace("_", "."): value for name, value in changes.items()}
    admin = AdminClient({"bootstrap.servers": server.kafka, **QUIET})
    (created,) = admin.create_topics([NewTopic(topic, 1, 1, config=config)]).values()
    created.result(WAIT_S)


def send(server: Server, topic: str, pairs: list[tuple[bytes | None, bytes | None]]) -> list[KafkaError]:
    errors: list[KafkaError] = []

    def note(error: KafkaError | None, _message: Message) -> None:
        if error is not None:
            errors.append(error)

    producer = Producer({"bootstrap.servers": server.kafka, "enable.idempotence": True, "linger.ms": 5, **QUIET})
    for key, value in pairs:
        producer.produce(topic, value, key, on_delivery=note)
        producer.poll(0)
    assert producer.flush(WAIT_S) == 0
    return errors


def content(server: Server, topic: str) -> Content:
    """Everything that a new consumer reads, up to the log end."""
    return [(record.offset, record.key, record.value) for record in committed_records(server.kafka, topic)]


def metric(server: Server, name: str) -> float:
    lines = server.metrics().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(name + " "))


def test_the_last_value_of_each_key_stays_and_tombstones_are_removed(eager: Server, topic: str) -> None:
    create(eager, topic)
    pairs: list[tuple[bytes | None, bytes | None]] = [(b"k%d" % (n % 50), b"v%d" % n) for n in range(500)]
    assert send(eager, topic, [*pairs, (b"k7", None)]) == []
    wait_until(lambda: len(content(eager, topic)) == 50)
    records = content(eager, topic)
    assert records[-1] == (500, b"k7", None)
    assert {key: value for _, key, value in records} == dict(pairs) | {b"k7": None}
    assert send(eager, topic, [(b"k8", b"last")]) == []
    wait_until(lambda: b"k7" not in {key for _, key, _ in content(eager, topic)})
    expected = {key: value for key, value in [*pairs, (b"k8", b"last")] if key != b"k7"}
    eager.stop()
    eager.start()
    wait_until(lambda: len(content(eager, topic)) == 49)
    assert {key: value for _, key, value in content(eager, topic)} == expected
    assert [offset for offset, *_ in content(eager, topic)][-1] == 501


def test_records_without_a_key_are_refused(eager: Server, topic: str) -> None:
    create(eager, topic)
    (error,) = send(eager, topic, [(None, b"v")])
    assert error.code() == KafkaError.INVALID_RECORD
    assert content(eager, topic) == []


@pytest.mark.parametrize(
    "settings", [{"segment_ms": "1000"}, {"segment_ms": "86400000", "max_compaction_lag_ms": "1000"}]
)
def test_compaction_runs_when_it_is_due(server: Server, topic: str, settings: dict[str, str]) -> None:
    """By the topic's own settings, however rarely the node checks for old segments."""
    create(server, topic, **settings)
    for value in (b"old", b"older", b"last"):
        assert send(server, topic, [(b"k", value)]) == []
    wait_until(lambda: [value for _, _, value in content(server, topic)] == [b"last"])


@pytest.mark.parametrize("blamed_for", ["no key", "a timestamp in the future"])
def test_only_the_invalid_records_of_a_batch_are_refused(eager: Server, topic: str, blamed_for: str) -> None:
    """librdkafka distinguishes the records that the broker names from others of their batch."""
    create(eager, topic, message_timestamp_after_max_ms="1000")
    outcomes: dict[bytes | None, KafkaError | None] = {}
    producer = Producer({"bootstrap.servers": eager.kafka, "linger.ms": 60_000, **QUIET})
    # Messages that wait for metadata while the producer is flushed are sent in several batches.
    producer.list_topics(topic, WAIT_S)
    for at in range(10):
        is_keyless = at in (3, 7) and blamed_for == "no key"
        is_early = at in (3, 7) and not is_keyless
        producer.produce(
            topic,
            b"%d" % at,
            None if is_keyless else b"k",
            timestamp=int(time.time() * 1000) + (3_600_000 if is_early else 0),
            on_delivery=lambda error, message: outcomes.update({message.value(): error}),
        )
    assert producer.flush(WAIT_S) == 0
    codes = {value: error.code() if error is not None else None for value, error in outcomes.items()}
    wrong, other = KafkaError.INVALID_RECORD, KafkaError._INVALID_DIFFERENT_RECORD
    assert codes == {b"%d" % at: wrong if at in (3, 7) else other for at in range(10)}


async def test_the_sdk_publishes_the_valid_records_of_a_refused_batch(eager: Server, topic: str) -> None:
    create(eager, topic)
    messages = [millstream.NewMessage(f"{at}", key=None if at in (3, 7) else f"k{at}") for at in range(10)]
    async with millstream.connect(eager.kafka) as ms:
        with pytest.raises(millstream.PublishFailed) as failed:
            await ms.publish_many(topic, messages)
    refused = [at for at, outcome in enumerate(failed.value.outcomes) if isinstance(outcome, Exception)]
    assert refused == [3, 7]
    assert [value for _, _, value in content(eager, topic)] == [b"%d" % at for at in range(10) if at not in (3, 7)]


def test_nothing_is_lost_when_killed_during_compaction(start_server: Callable[..., Server], topic: str) -> None:
    server = start_server(retention_check_ms=100)
    create(server, topic)
    expected: dict[bytes, bytes] = {}
    folder = server.data / "partitions"
    for round_ in range(2):
        pairs: list[tuple[bytes | None, bytes | None]] = [
            (b"key-%d" % (n % 50), b"%d-%d" % (round_, n) + bytes(500)) for n in range(500)
        ]
        assert send(server, topic, pairs) == []
        expected |= {key: value for key, value in pairs if key is not None and value is not None}
        if round_ == 0:
            wait_until(lambda: bool(list(folder.rglob("*.cleaned"))) or _compacted(folder))
            server.kill()
            server.start()
        assert {key: value for _, key, value in content(server, topic)} == expected
    wait_until(lambda: len(content(server, topic)) == 50)
    assert {key: value for _, key, value in content(server, topic)} == expected
    # All passes may have ended before the last kill, which their counters do not survive.
    assert metric(server, "millstream_log_failed_partitions") == 0


def _compacted(folder: Path) -> bool:
    """Whether a pass was so quick that it was missed."""
    return sum(path.stat().st_size for path in folder.rglob("*.log")) < 100_000
