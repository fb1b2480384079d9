"""Transforms and routes whose driver, workers or broker are killed at the worst moments: every message, once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.spark.java import use_fitting_java
from millstream.testing.committed_messages import committed_messages
from millstream.testing.server import Server

pytestmark = [pytest.mark.trial, pytest.mark.timeout(1800)]

# Only there to end a hang: a session and its first query take half a minute on a slow machine.
WAIT_S = 600.0
ROWS = 4000
PARTITIONS = 2


class Trial:
    """A pipeline that is run by the program beside this file."""

    def __init__(self, server: Server, name: str, folder: Path, kind: str) -> None:
        self.server = server
        self.source = f"{name}-source"
        self.targets = [f"{name}-{region}" for region in ("eu", "us", "all")]
        self.folder = folder
        self.log = folder / "driver.log"
        rules: list[dict[str, Any]] = [
            {"name": region, "topic": self.source, "targets": [target], "condition": condition}
            for region, target, condition in zip(
                ("eu", "us", "all"),
                self.targets,
                ("payload.region = 'eu'", "payload.region = 'us' AND payload.id > 100", ""),
                strict=True,
            )
        ]
        sql = f"SELECT key, id, region FROM `{self.source}` WHERE region = 'eu'"
        is_route = kind == "route"
        settings = {"batch.max.messages": str(ROWS // 4)}
        self.pipeline: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "name": name,
            "kind": kind,
            "settings": settings if is_route else {**settings, "sql": sql, "into": self.targets[0]},
            "rules": rules if is_route else [],
        }
        self.wanted = {
            self.targets[0]: [number for number in range(ROWS) if number % 3 == 0],
            self.targets[1]: [number for number in range(101, ROWS) if number % 3 == 1],
            self.targets[2]: list(range(ROWS)),
        }
        if not is_route:
            self.wanted = {self.targets[0]: self.wanted[self.targets[0]]}
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        admin.create_topics([NewTopic(self.source, PARTITIONS, 1)])[self.source].result(60)
        producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
        for number in range(ROWS):
            value = json.dumps({"id": number, "region": ("eu", "us", "asia")[number % 3]}).encode()
            producer.produce(self.source, value, key=b"%d" % number, partition=number % PARTITIONS)
        assert producer.flush(60) == 0

    def start(self, pause: str) -> subprocess.Popen[bytes]:
        """The program, as a group of processes of its own."""
        given: dict[str, Any] = {
            "brokers": self.server.kafka,
            "folder": str(self.folder),
            "pipeline": self.pipeline,
            "pause": pause,
        }
        environment = dict(os.environ)
        use_fitting_java(environment)
        program = str(Path(__file__).with_name("pipeline_driver.py"))
        with self.log.open("ab") as output:
            return subprocess.Popen(
                [sys.executable, program, json.dumps(given)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                process_group=0,
            )

    def until(self, what: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
        """Wait for something while the program runs."""
        deadline = time.monotonic() + WAIT_S
        while not what():
            if process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"exit code {process.poll()}: {self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)

    def finish(self) -> None:
        """Run it to its end, without faults."""
        process = self.start("")
        try:
            assert process.wait(WAIT_S) == 0, self.log.read_text(errors="replace")[-3000:]
        finally:
            kill(process)

    def check(self) -> None:
        """Every message is in each of its targets once."""
        assert {target: self._ids(target) for target in self.wanted} == self.wanted

    def _ids(self, topic: str) -> list[int]:
        return sorted(json.loads(value)["id"] for value in committed_messages(self.server.kafka, topic))


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kill -9, the whole group."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(WAIT_S)


@pytest.mark.parametrize("kind", ["route", "transform"])
@pytest.mark.parametrize("pause", ["before-commit", "after-commit"])
def test_a_driver_that_is_killed_around_a_commit(
    server: Server, topic: str, tmp_path: Path, kind: str, pause: str
) -> None:
    trial = Trial(server, topic[-40:], tmp_path, kind)
    process = trial.start(pause)
    try:
        trial.until(lambda: (tmp_path / "paused").exists(), process)
    finally:
        kill(process)
    trial.finish()
    trial.check()


def test_a_worker_that_is_killed_when_its_rows_are_written(server: Server, topic: str, tmp_path: Path) -> None:
    trial = Trial(server, topic[-40:], tmp_path, "route")
    process = trial.start("kill-worker")
    try:
        assert process.wait(WAIT_S) == 0, trial.log.read_text(errors="replace")[-3000:]
    finally:
        kill(process)
    assert (tmp_path / "struck").exists()
    trial.check()


def test_a_broker_that_is_killed_between_promise_and_commit(tmp_path: Path, topic: str) -> None:
    with Server(tmp_path / "data") as server:
        trial = Trial(server, topic[-40:], tmp_path, "route")
        process = trial.start("before-commit")
        try:
            trial.until(lambda: (tmp_path / "paused").exists(), process)
        finally:
            kill(process)
        server.kill()
        server.start()
        trial.finish()
        trial.check()
