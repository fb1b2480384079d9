"""A machine with several broker processes: any may die, and their number may change, without losing anything."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest
from confluent_kafka import Consumer, Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.waiting import wait_until

DEADLINE_S = 60
PARTITIONS = 6


@contextmanager
def serving(data: Path, cores: int, *flags: str) -> Iterator[tuple[dict[str, Any], subprocess.Popen[bytes]]]:
    addresses = ("--kafka", "127.0.0.1:0", "--http", "127.0.0.1:0")
    command = [sys.executable, "-m", "millstream.cli.main", "serve", "--data", str(data), *addresses, "--json"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLSTREAM_")}
    with (data.parent / "log").open("ab") as log:
        process = subprocess.Popen(
            [*command, "--cores", str(cores), *flags], stdout=subprocess.PIPE, stderr=log, env=environment
        )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, (data.parent / "log").read_text()[-3000:]
        yield json.loads(line), process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.wait(DEADLINE_S)
        if process.stdout is not None:
            process.stdout.close()


def send(kafka: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": kafka, "enable.idempotence": True})
    for number in numbers:
        producer.produce("t", str(number).encode())
    assert producer.flush(DEADLINE_S) == 0


def read(kafka: str, group: str, wanted: int) -> list[int]:
    """Read as a group and commit."""
    consumer = Consumer({"bootstrap.servers": kafka, "group.id": group, "auto.offset.reset": "earliest"})
    consumer.subscribe(["t"])
    found: list[int] = []
    deadline = time.monotonic() + DEADLINE_S
    while len(found) < wanted and time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is not None and message.error() is None:
            found.append(int(message.value() or b""))
    consumer.commit(asynchronous=False)
    consumer.close()
    return sorted(found)


def leaders(kafka: str) -> set[int]:
    found = AdminClient({"bootstrap.servers": kafka}).list_topics("t", timeout=DEADLINE_S).topics["t"]
    return {one.leader for one in found.partitions.values()}


def test_processes_die_and_their_number_changes(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, 1) as (node, _):
        admin = AdminClient({"bootstrap.servers": node["kafka"]})
        admin.create_topics([NewTopic("t", PARTITIONS)])["t"].result(DEADLINE_S)
        send(node["kafka"], range(100))
        assert read(node["kafka"], "g", 100) == list(range(100))

    with serving(data, 3) as (machine, supervisor):
        assert [one["id"] for one in machine["nodes"]] == [1, 1001, 2001]
        assert leaders(machine["kafka"]) == {1, 1001, 2001}
        send(machine["kafka"], range(100, 200))
        assert read(machine["kafka"], "g", 100) == list(range(100, 200))
        metrics = httpx.get(f"http://{machine['http']}/metrics", timeout=DEADLINE_S).text
        assert all(f'node="{one["id"]}"' in metrics for one in machine["nodes"])

        os.kill(machine["nodes"][1]["pid"], signal.SIGKILL)
        send(machine["kafka"], range(200, 300))
        wait_until(lambda: leaders(machine["kafka"]) == {1, 1001, 2001})
        wait_until(lambda: httpx.get(f"http://{machine['http']}/readyz", timeout=DEADLINE_S).status_code == 200)

        processes = psutil.Process(supervisor.pid).children(recursive=True)
        supervisor.kill()
        supervisor.wait()
        wait_until(lambda: not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes))

    with serving(data, 2) as (machine, _):
        assert leaders(machine["kafka"]) == {1, 1001}
        assert read(machine["kafka"], "g", 100) == list(range(200, 300))
    assert sorted(path.name for path in data.glob("node-*")) == ["node-1", "node-1001"]

    with serving(data, 1) as (node, _):
        send(node["kafka"], range(300, 400))
        assert read(node["kafka"], "other", 400) == list(range(400))
    assert not list(data.glob("node-*"))


def test_a_second_supervisor_is_refused(tmp_path: Path) -> None:
    data = tmp_path / "data"
    with serving(data, 2), pytest.raises(AssertionError, match="another data folder"), serving(data, 1):
        pass
