"""Mirrors between two real brokers: the same bytes and offsets, failover, and the way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer

from millstream_testing.command import CommandLine
from millstream_testing.server import Server

PATIENCE_S = 60.0


class Sites:
    """Two brokers: paris, and berlin, which mirrors it."""

    def __init__(self, folder: Path) -> None:
        self.paris = Server(folder / "paris")
        self.berlin = Server(folder / "berlin")

    def start(self) -> None:
        self.paris.start()
        self.berlin.start()

    def stop(self) -> None:
        self.paris.stop()
        self.berlin.stop()


@pytest.fixture(scope="module")
def sites(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sites]:
    made = Sites(tmp_path_factory.mktemp("sites"))
    made.start()
    yield made
    made.stop()


@pytest.fixture
def paris(sites: Sites) -> CommandLine:
    return CommandLine(sites.paris.kafka)


@pytest.fixture
def berlin(sites: Sites) -> CommandLine:
    return CommandLine(sites.berlin.kafka)


def wait_for(condition: Callable[[], bool], *, what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.1)


def publish(brokers: str, topic: str, values: list[str], **settings: object) -> None:
    errors: list[Any] = []
    producer = Producer({"bootstrap.servers": brokers, **settings})
    for value in values:
        producer.produce(topic, value, key=value, on_delivery=lambda error, _: errors.append(error) if error else None)
    assert producer.flush(PATIENCE_S) == 0
    assert not errors, errors


def read(brokers: str, topic: str, count: int, *, isolation: str = "read_committed") -> list[tuple[int, int, str]]:
    """Read so many messages of a topic; fail if they do not come."""
    consumer = Consumer(
        {
            "bootstrap.servers": brokers,
            "group.id": f"reader-{time.monotonic_ns()}",
            "auto.offset.reset": "earliest",
            "enable.auto.commit": False,
            "isolation.level": isolation,
        }
    )
    try:
        consumer.subscribe([topic])
        found: list[tuple[int, int, str]] = []
        deadline = time.monotonic() + PATIENCE_S
        while len(found) < count and time.monotonic() < deadline:
            message = consumer.poll(0.5)
            if message is not None:
                assert message.error() is None, message.error()
                found.append((message.partition() or 0, message.offset() or 0, (message.value() or b"").decode()))
        assert len(found) >= count, f"{len(found)} of {count} messages"
        return sorted(found)
    finally:
        consumer.close()


def lag_of(berlin: CommandLine, name: str) -> int | None:
    described = berlin("mirror", "describe", name, "--json").document
    return None if described["lag"] is None else int(described["lag"])


def caught_up(berlin: CommandLine, name: str, topic: str, paris: CommandLine) -> bool:
    """Whether a copy is exposed up to where the original ends."""
    original = paris("topic", "describe", topic, "--json").document
    copy = berlin("topic", "describe", topic, "--json")
    if copy.code != 0:
        return False
    ends = [(one["partition"], one["end"]) for one in original["partitions"]]
    return ends == [(one["partition"], one["end"]) for one in copy.document["partitions"]]


def mirrored(paris: CommandLine, berlin: CommandLine, topic: str, *flags: str) -> str:
    """Mirror one topic from paris to berlin; return the mirror's name."""
    name = f"m-{topic}"
    made = berlin("mirror", "create", name, "--from", paris.brokers, "--topics", topic, *flags)
    assert made.code == 0, made.err
    return name


def test_a_copy_has_the_same_messages_at_the_same_offsets_and_takes_over(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    paris("topic", "create", topic, "--partitions", "3", "--set", "retention.ms=86400000")
    publish(paris.brokers, topic, [f"before-{number}" for number in range(300)])
    name = mirrored(paris, berlin, topic)
    publish(paris.brokers, topic, [f"after-{number}" for number in range(300)], **{"compression.type": "lz4"})
    wait_for(lambda: caught_up(berlin, name, topic, paris), what="the copy has caught up")
    original = paris("topic", "describe", topic, "--json").document
    copy = berlin("topic", "describe", topic, "--json").document
    assert copy["id"] == original["id"]
    assert copy["overrides"] == original["overrides"]
    assert read(berlin.brokers, topic, 600) == read(paris.brokers, topic, 600)

    with pytest.raises(AssertionError, match="POLICY_VIOLATION"):
        publish(berlin.brokers, topic, ["refused"])
    refused = berlin.process("publish", topic, stdin=b"refused")
    assert name in refused.err, refused.err

    report = berlin("mirror", "failover", name, "--json").document
    assert [one["missing"] for one in report["partitions"]] == [0, 0, 0]
    publish(berlin.brokers, topic, ["mine"])
    assert len(read(berlin.brokers, topic, 601)) == 601
    epochs = {one["epoch"] for one in report["partitions"]}
    assert min(epochs) > 0
    assert berlin("mirror", "delete", name).code == 0
