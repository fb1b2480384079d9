"""A real server on a full file system: clear errors, reads continue, writes resume, nothing is lost."""

from __future__ import annotations

import json
import os
import subprocess
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from millstream_testing.server import Server

WAIT_S = 60.0
DISK_BYTES = 24 * 1024 * 1024
TOPIC = "filling"
VALUE_BYTES = 50_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Its own small file system."""
    folder = tmp_path / "disk"
    folder.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "millstream-test", str(folder)]
    mounted = subprocess.run(command, capture_output=True, text=True) if os.geteuid() == 0 else None
    if mounted is None or mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip() if mounted else 'that needs root'}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


@pytest.fixture
def server(disk: Path, tmp_path: Path) -> Iterator[Server]:
    with Server(disk / "data", settings={"group-initial-delay-ms": 100}, log=tmp_path / "server.log") as started:
        yield started


class Sender:
    """Sends numbered messages one by one and records which were acknowledged."""

    def __init__(self, server: Server) -> None:
        self._producer = Producer(
            {"bootstrap.servers": server.kafka, "retries": 0, "log_level": 0, "message.timeout.ms": 20_000}
        )
        self._number = 0
        self.acknowledged: list[int] = []

    def send(self) -> KafkaError | None:
        responses: list[KafkaError | None] = []
        value = str(self._number).encode().ljust(VALUE_BYTES, b".")
        self._producer.produce(TOPIC, value, on_delivery=lambda error, _: responses.append(error))
        assert self._producer.flush(WAIT_S) == 0
        if responses[0] is None:
            self.acknowledged.append(self._number)
        self._number += 1
        return responses[0]

    def send_until(self, condition: Callable[[KafkaError | None], bool]) -> KafkaError | None:
        for _ in range(2000):
            error = self.send()
            if condition(error):
                return error
        raise AssertionError("it never came")


def read_numbers(server: Server) -> list[int]:
    consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": "reader", "enable.auto.commit": False})
    partition = TopicPartition(TOPIC, 0, 0)
    consumer.assign([partition])
    _, end = consumer.get_watermark_offsets(partition, timeout=WAIT_S)
    numbers: list[int] = []
    while len(numbers) < end:
        numbers += [int((message.value() or b"").split(b".")[0]) for message in consumer.consume(100, 1)]
    consumer.close()
    return numbers


def readiness(server: Server) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://{server.http}/readyz", timeout=WAIT_S) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            return error.code, error.read().decode()


def commit(server: Server, offset: int) -> None:
    consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": "committer", "log_level": 0})
    consumer.commit(offsets=[TopicPartition(TOPIC, 0, offset)], asynchronous=False)
    consumer.close()


def commit_until_refused(server: Server, first: int) -> int:
    """Commit until refused; return the last accepted offset."""
    for offset in range(first, first + 1000):
        try:
            commit(server, offset)
        except KafkaException:
            return offset - 1
    raise AssertionError("a full disk took every commit")


def committed(server: Server) -> int:
    consumer = Consumer({"bootstrap.servers": server.kafka, "group.id": "committer", "log_level": 0})
    (found_committed,) = consumer.committed([TopicPartition(TOPIC, 0)], timeout=WAIT_S)
    consumer.close()
    return int(found_committed.offset)


def fill_up(disk: Path) -> Path:
    """Use up the remaining space."""
    ballast = disk / "ballast"
    with ballast.open("wb", buffering=0) as file:
        for size in (1 << 20, 1 << 12, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return ballast


def test_a_full_disk_refuses_writes_and_recovers(disk: Path, server: Server) -> None:
    while readiness(server)[0] != 200:
        continue  # The first response waits for the imports of the gateway.
    sender = Sender(server)
    for _ in range(20):
        assert sender.send() is None
    commit(server, 5)
    ballast = fill_up(disk)
    error = sender.send_until(lambda error: error is not None)
    # As shown by librdkafka: Kafka's own error for a failed disk.
    assert error is not None
    assert error.code() == KafkaError.KAFKA_STORAGE_ERROR, error
    assert read_numbers(server) == sender.acknowledged
    status, output = readiness(server)
    assert status == 503
    assert TOPIC in output
    # Some commits fit into space already allocated to the log; the first that does not is refused.
    stored = commit_until_refused(server, 6)
    assert committed(server) == stored

    ballast.unlink()
    assert sender.send_until(lambda error: error is None) is None
    commit(server, 2)
    assert committed(server) == 2
    assert read_numbers(server) == sender.acknowledged
    assert readiness(server)[0] == 200, json.dumps(readiness(server))


@pytest.mark.parametrize("clean", [True, False], ids=["stopped", "killed"])
def test_a_start_on_a_full_disk_serves_reads(disk: Path, server: Server, clean: bool) -> None:
    sender = Sender(server)
    for _ in range(20):
        assert sender.send() is None
    commit(server, 3)
    ballast = fill_up(disk)
    assert sender.send_until(lambda error: error is not None) is not None
    if clean:
        # Its exit code tells whether the full disk allowed marking the stop as clean; both are fine.
        server.stop()
    else:
        server.kill()
    server.start()
    assert read_numbers(server) == sender.acknowledged
    assert committed(server) == 3
    ballast.unlink()
    assert sender.send_until(lambda error: error is None) is None
    server.restart(clean=clean)
    assert read_numbers(server) == sender.acknowledged
