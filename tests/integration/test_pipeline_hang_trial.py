"""Pipeline drivers whose Java hangs are replaced, or end with their broker, and leave nothing behind."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer

from millstream_testing.child_process import children
from millstream_testing.command import CommandLine
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

pytestmark = [pytest.mark.trial, pytest.mark.timeout(1800)]


def group_of(driver: int) -> list[int]:
    """The live processes of a driver."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            is_over = (folder / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            if os.getpgid(int(folder.name)) == driver and not is_over:
                found.append(int(folder.name))
    return found


def java_of(driver: int) -> int | None:
    return next(iter(children(driver, "java")), None)


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    settings = {"group-initial-delay-ms": 100, "pipelines-master": "local[2]"}
    with Server(tmp_path / "data", settings=settings) as started:
        yield started


def test_a_driver_whose_broker_dies_while_spark_starts_ends_with_its_java(server: Server, topic: str) -> None:
    millstream = CommandLine(server.kafka)
    assert millstream("topic", "create", topic, "--land").code == 0
    (driver,) = wait_until(lambda: children(server.pid, "millstream.pipelines.runtime.driver"))
    java = wait_until(lambda: java_of(driver))
    # From here on Spark never starts.
    os.kill(java, signal.SIGSTOP)
    try:
        server.kill()
        wait_until(lambda: not group_of(driver))
    finally:
        with suppress(ProcessLookupError):
            os.killpg(driver, signal.SIGKILL)


def test_a_driver_with_a_hanging_java_is_replaced_and_no_pipeline_is_blamed(server: Server, topic: str) -> None:
    millstream = CommandLine(server.kafka)
    assert millstream("topic", "create", topic).code == 0
    settings = ("--set", "every.ms=1000", "--set", "stall.ms=60000")
    assert millstream("pipeline", "create", "land", topic, "--topic", topic, *settings).code == 0
    reported: dict[str, Any] = {}

    def landed(rows: int) -> bool:
        reported.update(millstream("pipeline", "describe", topic, "--json").document)
        return bool(reported["report"]) and reported["report"]["rows"] >= rows

    publish(server, topic, 10)
    wait_until(lambda: landed(10))
    (driver,) = children(server.pid, "millstream.pipelines.runtime.driver")
    os.kill(wait_until(lambda: java_of(driver)), signal.SIGSTOP)
    publish(server, topic, 10)
    # A bounded run does not wait either.
    assert millstream("pipeline", "update", topic, "--set", "every.ms=2000").code == 0
    wait_until(lambda: landed(20))
    assert (reported["report"]["rows"], reported["report"]["stalls"], reported["parked"]) == (20, 0, "")
    assert "the Java process has not responded" in reported["report"]["last_error"]
    assert group_of(driver) == []


def publish(server: Server, topic: str, count: int) -> None:
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for number in range(count):
        producer.produce(topic, str(number))
    assert producer.flush(60) == 0
