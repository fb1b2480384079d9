"""Three nodes whose disks lose data: they restore it from each other while clients read and write."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.broker.log.scan import FRAME_BYTES, Frame, read_frame
from millstream_testing.command import CommandLine
from millstream_testing.etcd_server import EtcdServer
from millstream_testing.postgres_server import PostgresServer
from millstream_testing.server import Server, ServerGroup
from millstream_testing.waiting import wait_until

WAIT_S = 90.0
TOPIC = "harmed"
COUNT = 400
REPAIRED = "millstream_replicas_repaired_ranges_total"
SETTINGS = {"lease-ms": 2000, "scrub-interval-ms": 500, "scrub-bytes-per-s": 100_000_000}


def value_of(number: int) -> bytes:
    return b"%d:" % number + b"%020d" % number * 500


@pytest.fixture(scope="module")
def filled(
    tmp_path_factory: pytest.TempPathFactory, etcd: EtcdServer, postgres: PostgresServer
) -> Iterator[ServerGroup]:
    folder = tmp_path_factory.mktemp("damaged")
    with ServerGroup(folder, etcd.url, postgres.new_database(), settings=SETTINGS) as started:
        admin = AdminClient({"bootstrap.servers": started.kafka, "log_level": 0})
        wait_until(lambda: len(admin.list_topics(timeout=WAIT_S).brokers) == 3)
        topic = NewTopic(TOPIC, 1, 3, config={"segment.bytes": "1048576"})
        admin.create_topics([topic], operation_timeout=WAIT_S)[TOPIC].result()
        producer = Producer({"bootstrap.servers": started.kafka, "acks": "all", "batch.size": 20_000})
        for number in range(COUNT):
            producer.produce(TOPIC, value_of(number), partition=0)
        assert producer.flush(WAIT_S) == 0
        assert consume(started) == {number: value_of(number) for number in range(COUNT)}
        yield started


@pytest.fixture
def cluster(filled: ServerGroup) -> ServerGroup:
    """The cluster with all its nodes, undamaged."""
    filled.start()
    wait_until(lambda: all(map(is_whole, filled)) and in_sync(filled))
    return filled


def consume(cluster: ServerGroup) -> dict[int, bytes]:
    """Read everything, as a default consumer does."""
    consumer = Consumer({"bootstrap.servers": cluster.kafka, "group.id": "reader", "log_level": 0})
    consumer.assign([TopicPartition(TOPIC, 0, 0)])
    values: dict[int, bytes] = {}
    try:
        while len(values) < COUNT:
            message = consumer.poll(WAIT_S)
            assert message is not None
            assert message.error() is None, message.error()
            values[message.offset() or 0] = message.value() or b""
        return values
    finally:
        consumer.close()


def segments(node: Server) -> list[Path]:
    paths = sorted(node.data.glob("partitions/*/0/*.log"), key=lambda path: int(path.stem))
    return [path for path in paths if path.stat().st_size > 500_000]


def contents(cluster: ServerGroup) -> list[bytes]:
    return [b"".join(path.read_bytes() for path in segments(node)) for node in cluster]


def frames(path: Path) -> list[Frame]:
    content, position, batches = path.read_bytes(), 0, []
    while len(content) - position >= FRAME_BYTES:
        frame = read_frame(content, position, position)
        batches.append(frame)
        position = frame.end_position
    return batches


def flip(path: Path, batch: int, at: int) -> None:
    position = frames(path)[batch].position + at
    descriptor = os.open(path, os.O_RDWR)
    try:
        (byte,) = os.pread(descriptor, 1, position)
        os.pwrite(descriptor, bytes([byte ^ 0x41]), position)
    finally:
        os.close(descriptor)


def metric(node: Server, name: str) -> float:
    return sum(float(line.split()[1]) for line in node.metrics().splitlines() if line.startswith(f"{name} "))


def is_whole(node: Server) -> bool:
    return metric(node, "millstream_log_damaged_ranges") == 0


def in_sync(cluster: ServerGroup) -> bool:
    admin = AdminClient({"bootstrap.servers": cluster.kafka, "log_level": 0})
    (partition,) = admin.list_topics(TOPIC, timeout=WAIT_S).topics[TOPIC].partitions.values()
    return len(partition.isrs) == 3 and partition.leader >= 0


def test_damaged_replicas_repair_each_other_while_running(cluster: ServerGroup) -> None:
    whole = contents(cluster)
    repaired = sum(metric(node, REPAIRED) for node in cluster)
    # Payload, base offset and length, each on another node and in another place.
    for number, (node, at) in enumerate(zip(cluster, (5000, 7, 10), strict=True)):
        flip(segments(node)[number % 2], 3 + number, at)
    # Whichever node leads, a consumer never sees the damage.
    assert consume(cluster) == {number: value_of(number) for number in range(COUNT)}
    wait_until(lambda: contents(cluster) == whole)
    wait_until(lambda: all(map(is_whole, cluster)) and in_sync(cluster))
    assert contents(cluster) == whole
    assert sum(metric(node, REPAIRED) for node in cluster) > repaired
    checked = CommandLine(cluster.kafka)("doctor", "--json")
    assert [
        finding
        for finding in checked.document["findings"]
        if finding["check"] == "damage" and finding["severity"] != "ok"
    ] == []


def test_files_lost_while_a_node_was_stopped_are_restored(cluster: ServerGroup) -> None:
    for node, gone in ((cluster[1], 0), (cluster[2], 1)):
        node.stop()
        path = segments(node)[gone]
        path.unlink()
        node.start()
        wait_until(lambda node=node: is_whole(node) and in_sync(cluster))  # type: ignore[misc]
    assert consume(cluster) == {number: value_of(number) for number in range(COUNT)}
    # Also after the next start, and with only the damaged nodes.
    cluster[3].stop()
    assert consume(cluster) == {number: value_of(number) for number in range(COUNT)}
