"""Mirrors between two real brokers: the same bytes and offsets, failover, and the way back."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition

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
    """Mirror topics with a prefix from paris to berlin; return the mirror's name."""
    name = f"m-{topic}"
    made = berlin("mirror", "create", name, "--from", paris.brokers, "--topics", f"{topic}.*", *flags)
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


def test_a_mirror_resumes_after_both_sides_were_killed(
    sites: Sites, paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    paris("topic", "create", topic, "--partitions", "2")
    publish(paris.brokers, topic, [f"a-{number}" for number in range(500)])
    name = mirrored(paris, berlin, topic)
    wait_for(lambda: caught_up(berlin, name, topic, paris), what="the copy has caught up")
    sites.berlin.kill()
    publish(paris.brokers, topic, [f"b-{number}" for number in range(500)])
    sites.berlin.start()
    publish(paris.brokers, topic, [f"c-{number}" for number in range(500)])
    sites.paris.kill()
    sites.paris.start()
    publish(paris.brokers, topic, [f"d-{number}" for number in range(500)])
    wait_for(lambda: caught_up(berlin, name, topic, paris), what="the copy has caught up again")
    assert read(berlin.brokers, topic, 2000) == read(paris.brokers, topic, 2000)
    berlin("mirror", "failover", name)
    sites.berlin.kill()
    sites.berlin.start()
    publish(berlin.brokers, topic, ["mine"])
    assert berlin("mirror", "delete", name).code == 0


def transact(brokers: str, name: str, topics: list[str], values: list[str], *, ends: bool = True) -> Producer:
    """Publish to all topics in one transaction."""
    producer = Producer({"bootstrap.servers": brokers, "transactional.id": name})
    producer.init_transactions(PATIENCE_S)
    producer.begin_transaction()
    for value in values:
        for topic in topics:
            producer.produce(topic, value)
    producer.flush(PATIENCE_S)
    if ends:
        producer.commit_transaction(PATIENCE_S)
    return producer


def test_state_comes_along_and_the_way_back_names_what_it_drops(
    paris: CommandLine, berlin: CommandLine, topic: str
) -> None:
    other = f"{topic}-other"
    for name in (topic, other):
        paris("topic", "create", name)
    made = paris(
        "subscription", "create", f"{topic}-workers", "--topic", topic, "--set", "share.auto.offset.reset=earliest"
    )
    assert made.code == 0, made.err
    transact(paris.brokers, f"{topic}-t1", [topic, other], ["a", "b"])
    mirror = mirrored(paris, berlin, topic, "--exclude", ".*-saved")
    transact(paris.brokers, f"{topic}-t2", [topic, other], ["c"])
    hanging = transact(paris.brokers, f"{topic}-t3", [topic, other], ["open"], ends=False)

    group = Consumer({"bootstrap.servers": paris.brokers, "group.id": f"{topic}-group", "enable.auto.commit": False})
    group.commit(offsets=[TopicPartition(topic, 0, 2)], asynchronous=False)
    group.close()
    taken = paris("subscription", "pull", f"{topic}-workers", "-n", "2", "--accept", "--json")
    assert taken.code == 0, taken.err

    wait_for(lambda: caught_up(berlin, mirror, topic, paris), what="the copy has caught up")
    wait_for(lambda: caught_up(berlin, mirror, other, paris), what="the other copy has caught up")
    assert [value for _, _, value in read(berlin.brokers, topic, 3)] == ["a", "b", "c"]

    def offsets() -> list[Any]:
        found = berlin("group", "describe", f"{topic}-group", "--json")
        return found.document["offsets"] if found.code == 0 else []

    wait_for(lambda: [one["committed"] for one in offsets()] == [2], what="the group's offset is here")
    wait_for(
        lambda: berlin("mirror", "describe", mirror, "--json").document["queues"] > 0, what="the queue's state is here"
    )
    refused = berlin("subscription", "pull", f"{topic}-workers", "-n", "1", "--json")
    assert mirror in refused.err

    report = berlin("mirror", "failover", mirror, "--json").document
    assert {one["aborted"] for one in report["partitions"]} == {1}
    publish(berlin.brokers, topic, ["d"])
    assert [value for _, _, value in read(berlin.brokers, topic, 4)] == ["a", "b", "c", "d"]
    # What was accepted in paris is not delivered again, and nothing new is taken for accepted.
    pulled = berlin("subscription", "pull", f"{topic}-workers", "--accept", "--wait", "20", "-n", "2", "--json")
    assert [one["value"] for one in pulled.documents] == ["c", "d"], pulled.out

    # Paris did not notice, and has records that exist only there.
    hanging.abort_transaction(PATIENCE_S)
    publish(paris.brokers, topic, ["lost-1", "lost-2"])
    reversed_ = berlin("mirror", "reverse", mirror, "--save-to", f"{topic}-saved", "--json")
    assert reversed_.code == 0, reversed_.err
    assert {one["topic"] for one in reversed_.document["removed"]} >= {topic}
    wait_for(lambda: caught_up(paris, mirror, topic, berlin), what="paris follows berlin")
    assert read(paris.brokers, topic, 4) == read(berlin.brokers, topic, 4)
    assert {value for _, _, value in read(paris.brokers, f"{topic}-saved", 2)} >= {"lost-1", "lost-2"}

    # And back, as planned.
    publish(berlin.brokers, topic, ["e"])
    switched = paris("mirror", "switch", mirror, "--json")
    assert switched.code == 0, switched.err
    assert switched.document["removed"] == []
    publish(paris.brokers, topic, ["f"])
    wait_for(lambda: caught_up(berlin, mirror, topic, paris), what="berlin follows paris again")
    values = ["a", "b", "c", "d", "e", "f"]
    assert [value for _, _, value in read(berlin.brokers, topic, len(values))] == values
    berlin("mirror", "failover", mirror)
    assert berlin("mirror", "delete", mirror).code == 0
