"""Transforms and routes whose driver, workers or broker are killed at the worst moments: every message once.

Each target is compared with its source offset by offset, and the messages of each key in their order.
"""

from __future__ import annotations

import json
import sys
import uuid
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest

from millstream.pipelines.jobs.batch_loop import ROWS_HERE_MAX
from millstream_testing.committed_messages import committed_records
from millstream_testing.moved_messages import Place, Source, faults_of, make_topic
from millstream_testing.server import Server
from millstream_testing.spark_cluster import WAIT_S, environment, kill, running, wait_until

pytestmark = [pytest.mark.trial, pytest.mark.timeout(7200)]

# A batch makes two tasks, one of which reads two partitions.
BATCH = 7000
ROWS = 4 * BATCH
PARTITIONS = 3
TARGET_PARTITIONS = 4
KEYS = 97
REGIONS = ("eu", "us", "asia")
CONDITIONS = {"eu": "payload.region = 'eu'", "us": "payload.region = 'us' AND payload.id > 100", "all": ""}


def key_of(number: int) -> bytes | None:
    """Keys repeat in all partitions; some messages have none."""
    return None if number % 41 == 0 else b"key-%d" % (number % KEYS)


class Run:
    """A running driver, and the folder in which it leaves marks."""

    def __init__(self, process: Popen[bytes], marks: Path, log: Path) -> None:
        self._process = process
        self._marks = marks
        self._log = log

    def until(self, mark: str) -> None:
        wait_until(lambda: self.has(mark), self._process, self._log)

    def has(self, mark: str) -> bool:
        return self._marks.joinpath(mark).exists()

    def leave_mark(self, mark: str) -> None:
        self._marks.joinpath(mark).touch()

    def end(self) -> None:
        """Wait for its end, which has to be a success."""
        assert self._process.wait(WAIT_S) == 0, self._log.read_text(errors="replace")[-3000:]

    def kill(self) -> None:
        kill(self._process)


class Trial:
    """A pipeline that is run by the program beside this file."""

    def __init__(self, server: Server, name: str, folder: Path, kind: str, batch: int = BATCH) -> None:
        self.server = server
        self.name = name
        self.folder = folder
        self.kind = kind
        self.log = folder / "driver.log"
        self._runs = 0
        self.source = Source(server.kafka, f"{name}-source", PARTITIONS)
        self.source.publish(
            ({"id": number, "region": REGIONS[number % len(REGIONS)]} for number in range(ROWS)), key_of
        )
        for target in CONDITIONS if kind == "route" else ["eu"]:
            make_topic(server.kafka, self.target(target), TARGET_PARTITIONS)
        self.pipeline: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "name": name,
            "kind": kind,
            "settings": {"batch.max.messages": str(batch), **(self._statement() if kind == "transform" else {})},
            "rules": self._rules() if kind == "route" else [],
        }

    def target(self, name: str) -> str:
        return f"{self.name}-{name}"

    def _statement(self) -> dict[str, str]:
        sql = f"SELECT key, partition, offset, id * 2 AS twice FROM `{self.source.topic}` WHERE region = 'eu'"
        return {"sql": sql, "into": self.target("eu")}

    def _rules(self) -> list[dict[str, Any]]:
        return [
            {"name": name, "topic": self.source.topic, "targets": [self.target(name)], "condition": condition}
            for name, condition in CONDITIONS.items()
        ]

    @contextmanager
    def driver(self, pause: str = "", batch: int = 1) -> Iterator[Run]:
        """The program, which is killed in the end."""
        self._runs += 1
        marks = self.folder / f"run-{self._runs}"
        marks.mkdir()
        arguments: dict[str, Any] = {
            "brokers": self.server.kafka,
            "folder": str(self.folder),
            "marks": str(marks),
            "pipeline": self.pipeline,
            "pause": pause,
            "batch": batch,
        }
        command = [sys.executable, str(Path(__file__).with_name("pipeline_driver.py")), json.dumps(arguments)]
        with running(command, self.log, environment()) as process:
            yield Run(process, marks, self.log)

    def kill_at(self, pause: str, batch: int) -> None:
        """Run it up to a pause, and kill it there."""
        with self.driver(pause, batch) as run:
            run.until("paused")

    def finish(self) -> None:
        """Run it to its end, without faults."""
        with self.driver() as run:
            run.end()

    def check(self) -> None:
        """Check that every target has its messages once, in the order of each key."""
        source = self.source
        assert source.read() == []
        europe = source.where(lambda document: document["region"] == "eu")
        if self.kind == "transform":
            assert self._faults_of_rows(europe) == []
            return
        america = source.where(lambda document: document["region"] == "us" and document["id"] > 100)
        for name, expected in {"eu": europe, "us": america, "all": set(source.messages)}.items():
            assert source.faults(committed_records(self.server.kafka, self.target(name)), expected) == []

    def _faults_of_rows(self, expected: Collection[Place]) -> list[str]:
        """The faults in the rows of the statement, which contain their own origin."""
        found = []
        reported = []
        for record in committed_records(self.server.kafka, self.target("eu")):
            row = json.loads(record.value or b"")
            place = Place(row["partition"], row["offset"])
            found.append((place, record))
            if (row["twice"], record.key) != (2 * self.source.document(place)["id"], self.source.messages[place].key):
                reported.append(f"{place} became {record}")
        return reported + faults_of(found, expected)


@pytest.mark.parametrize("size", [BATCH, ROWS_HERE_MAX], ids=["tasks", "driver"])
@pytest.mark.parametrize("kind", ["route", "transform"])
@pytest.mark.parametrize("pause", ["before-commit", "after-commit"])
def test_a_driver_killed_around_a_commit(
    server: Server, topic: str, tmp_path: Path, kind: str, pause: str, size: int
) -> None:
    trial = Trial(server, topic[-40:], tmp_path, kind, size)
    # At the first batch, before which nothing is known; then in the middle, twice at the same one.
    for batch in (0, 2, 2) if pause == "before-commit" else (0, 2):
        trial.kill_at(pause, batch)
    trial.finish()
    trial.check()


@pytest.mark.parametrize("size", [BATCH, ROWS_HERE_MAX], ids=["tasks", "driver"])
@pytest.mark.parametrize("kind", ["route", "transform"])
def test_a_driver_that_returns_after_it_was_replaced(
    server: Server, topic: str, tmp_path: Path, kind: str, size: int
) -> None:
    trial = Trial(server, topic[-40:], tmp_path, kind, size)
    with trial.driver("before-commit", 1) as old:
        old.until("paused")
        with trial.driver("before-commit", 2) as new:
            # It has aborted what the other one prepared, and done the batch itself.
            new.until("paused")
            old.leave_mark("go")
            # The older one finds its batch done, aborts the next one that the other has prepared, and continues.
            old.end()
            new.leave_mark("go")
            new.end()
    trial.check()


def test_a_worker_killed_after_its_rows_are_written(server: Server, topic: str, tmp_path: Path) -> None:
    trial = Trial(server, topic[-40:], tmp_path, "route")
    with trial.driver("kill-worker") as run:
        run.end()
        assert run.has("struck")
    trial.check()


@pytest.mark.parametrize("kind", ["route", "transform"])
@pytest.mark.parametrize("size", [BATCH, ROWS_HERE_MAX], ids=["tasks", "driver"])
def test_a_broker_killed_between_prepare_and_commit(tmp_path: Path, topic: str, kind: str, size: int) -> None:
    with Server(tmp_path / "data") as server:
        trial = Trial(server, topic[-40:], tmp_path, kind, size)
        trial.kill_at("before-commit", 1)
        server.restart(clean=False)
        # And once more while a driver runs that has prepared, and commits when the broker is back.
        with trial.driver("before-commit", 2) as run:
            run.until("paused")
            server.restart(clean=False)
            run.leave_mark("go")
            run.end()
        trial.check()
