"""Statements that remember, whose driver is killed at the worst moments: every window once, and every total right.

Spark keeps the state of such a statement in files beside its own record of batches, and the rows of a batch are
committed in between. Wherever a driver ends, the next one has to come to the same rows, and to write them once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.pipelines.source.session import use_fitting_java
from millstream_testing.committed_messages import committed_messages
from millstream_testing.server import Server

pytestmark = [pytest.mark.trial, pytest.mark.timeout(1800)]

# Only there to end a hang: a session and its first query take half a minute on a slow machine.
WAIT_S = 600.0
ROWS = 4000
BATCH = 500
PARTITIONS = 2
REGIONS = 10
FIRST = datetime(2026, 11, 15, 12, tzinfo=UTC)
WINDOW_S = 60
LATE_S = 10

WINDOWS = "SELECT window.start AS at, count(*) AS n, sum(id) AS total FROM `{0}` GROUP BY window(at, '1 minute')"
TOTALS = "SELECT region AS key, region, count(*) AS n, sum(id) AS total FROM `{0}` GROUP BY region"


class Run:
    """A running driver, and the folder in which it leaves marks."""

    def __init__(self, process: subprocess.Popen[bytes], marks: Path) -> None:
        self.process = process
        self.marks = marks

    def has(self, mark: str) -> bool:
        return self.marks.joinpath(mark).exists()

    def leave_mark(self, mark: str) -> None:
        self.marks.joinpath(mark).touch()

    def kill(self) -> None:
        """Kill -9, the whole group, and let tasks that outlive it go on."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(WAIT_S)
        self.leave_mark("go")

    def kill_java(self) -> None:
        """Kill -9 the JVM alone."""
        for process in _members(self.process.pid):
            if process.joinpath("comm").read_text().strip() == "java":
                os.kill(int(process.name), signal.SIGKILL)


def _members(group: int) -> list[Path]:
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            if os.getpgid(int(process.name)) == group:
                found.append(process)
    return found


class StreamTrial:
    """A stateful statement, run by the program beside this file."""

    def __init__(self, server: Server, name: str, folder: Path, sql: str) -> None:
        self.server = server
        self.source = f"{name}-source"
        self.into = f"{name}-into"
        self.folder = folder
        self.log = folder / "driver.log"
        schema = {self.source: "id long, region string, at timestamp"}
        settings = {
            "batch.max.messages": str(BATCH),
            "sql": sql.format(self.source),
            "into": self.into,
            "schemas": json.dumps(schema),
        }
        if sql == WINDOWS:
            settings["watermarks"] = json.dumps({self.source: f"at {LATE_S} seconds"})
        self.pipeline: dict[str, Any] = {
            "id": str(uuid.uuid4()),
            "name": name,
            "kind": "transform",
            "settings": settings,
            "rules": [],
        }
        self._runs: list[Run] = []
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        made = admin.create_topics([NewTopic(self.source, PARTITIONS, 1), NewTopic(self.into, PARTITIONS, 1)])
        for future in made.values():
            future.result(60)
        producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
        for number in range(ROWS):
            at = (FIRST + timedelta(seconds=number)).isoformat()
            value = json.dumps({"id": number, "region": f"region-{number % REGIONS}", "at": at}).encode()
            producer.produce(self.source, value, partition=number % PARTITIONS)
        assert producer.flush(60) == 0

    def say(self, sql: str) -> None:
        """Change the statement for drivers started from now on."""
        self.pipeline["settings"]["sql"] = sql.format(self.source)

    def start(self, pause: str = "", batch: int = 0) -> Run:
        """The program, as a separate process group."""
        marks = self.folder / f"run-{len(self._runs)}"
        marks.mkdir()
        arguments: dict[str, Any] = {
            "brokers": self.server.kafka,
            "folder": str(self.folder),
            "marks": str(marks),
            "pipeline": self.pipeline,
            "pause": pause,
            "batch": batch,
            "ends": "on-request",
        }
        environment = dict(os.environ)
        use_fitting_java(environment)
        program = str(Path(__file__).with_name("pipeline_driver.py"))
        with self.log.open("ab") as output:
            process = subprocess.Popen(
                [sys.executable, program, json.dumps(arguments)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=environment,
                process_group=0,
            )
        run = Run(process, marks)
        self._runs.append(run)
        return run

    def until(self, what: Callable[[], bool], run: Run) -> None:
        """Wait for something while a driver runs."""
        deadline = time.monotonic() + WAIT_S
        while not what():
            if run.process.poll() is not None or time.monotonic() > deadline:
                pytest.fail(f"exit code {run.process.poll()}: {self.log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.002)

    def kill_at(self, pause: str, batch: int) -> None:
        """Run it up to a pause, and kill it there."""
        run = self.start(pause, batch)
        self.until(lambda: run.has("paused"), run)
        run.kill()

    def kill_when_there_is(self, pattern: str) -> None:
        """Run it until Spark begins to write a file, and kill it then."""
        run = self.start()
        self.until(lambda: any(self.folder.glob(f"*/stream-*/checkpoint/{pattern}")), run)
        run.kill()

    def finish(self, rows: int) -> list[dict[str, Any]]:
        """Run it until there are so many rows and nothing more happens; return them in order."""
        run = self.start()
        self.until(lambda: len(self.read()) >= rows, run)
        run.leave_mark("enough")
        assert run.process.wait(WAIT_S) == 0, self.log.read_text(errors="replace")[-3000:]
        return self.read()

    def close(self) -> None:
        """Leave no process."""
        for run in self._runs:
            run.kill()

    def read(self) -> list[dict[str, Any]]:
        """The committed rows, in the order of each partition."""
        return [json.loads(value) for value in committed_messages(self.server.kafka, self.into)]


def check_windows(trial: StreamTrial) -> None:
    """Check that every finished window is stored once, with all of its messages."""
    expected = []
    for first in range(0, ROWS - LATE_S - WINDOW_S, WINDOW_S):
        at = f"{FIRST + timedelta(seconds=first):%Y-%m-%dT%H:%M:%S}.000Z"
        expected.append({"at": at, "n": WINDOW_S, "total": sum(range(first, first + WINDOW_S))})
    rows = trial.finish(len(expected))
    assert sorted(rows, key=lambda row: str(row["at"])) == expected


def check_totals(trial: StreamTrial) -> None:
    """Check that every region has a row of every batch, and that the last one counts everything."""
    batches = ROWS // BATCH
    rows_by_region: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
    for row in trial.finish(batches * REGIONS):
        rows_by_region[row["region"]].append((row["n"], row["total"]))
    assert sorted(rows_by_region) == [f"region-{number}" for number in range(REGIONS)]
    for number in range(REGIONS):
        of_region = range(number, ROWS, REGIONS)
        counts = [BATCH // REGIONS * (batch + 1) for batch in range(batches)]
        assert rows_by_region[f"region-{number}"] == [(count, sum(of_region[:count])) for count in counts]


CHECKS = {WINDOWS: check_windows, TOTALS: check_totals}


@pytest.fixture(params=[WINDOWS, TOTALS], ids=["windows", "totals"])
def trial(server: Server, topic: str, tmp_path: Path, request: pytest.FixtureRequest) -> Any:
    made = StreamTrial(server, topic[-40:], tmp_path, request.param)
    yield made, CHECKS[request.param]
    made.close()


ScriptedTrial = tuple[StreamTrial, Callable[[StreamTrial], None]]


def test_a_driver_killed_around_the_commits_of_a_batch(trial: ScriptedTrial) -> None:
    stream, check = trial
    # Twice at the same batch, and once more when it is committed, which Spark does not know.
    stream.kill_at("before-commit", 1)
    stream.kill_at("in-task", 1)
    stream.kill_at("after-commit", 1)
    stream.kill_at("after-commit", 2)
    stream.kill_at("before-commit", 4)
    check(stream)


def test_a_driver_killed_while_spark_writes(trial: ScriptedTrial) -> None:
    stream, check = trial
    # The offsets of a batch without any work yet, the state of one task, a temporary file, and the commit.
    stream.kill_when_there_is("offsets/1")
    stream.kill_when_there_is("state/0/*/3.delta")
    stream.kill_when_there_is("state/0/*/.*5.delta*.tmp")
    stream.kill_when_there_is("commits/5")
    check(stream)


def test_a_jvm_killed_around_a_commit(trial: ScriptedTrial) -> None:
    stream, check = trial
    for pause, batch in (("before-commit", 1), ("after-commit", 3)):
        run = stream.start(pause, batch)
        stream.until(lambda run=run: run.has("paused"), run)  # type: ignore[misc]
        run.kill_java()
        run.leave_mark("go")
        # It commits the written rows, or does not, and ends without a JVM.
        assert run.process.wait(WAIT_S) != 0
        run.kill()
    check(stream)


def test_a_driver_that_returns_after_it_was_replaced(trial: ScriptedTrial) -> None:
    stream, check = trial
    old = stream.start("before-commit", 2)
    stream.until(lambda: old.has("paused"), old)
    # Another one aborts what is prepared and not decided, before it continues from there.
    stream.kill_at("before-commit", 2)
    old.leave_mark("go")
    assert old.process.wait(WAIT_S) != 0
    check(stream)


def test_a_changed_statement_starts_where_the_rows_of_the_previous_one_end(
    server: Server, topic: str, tmp_path: Path
) -> None:
    stream = StreamTrial(server, topic[-40:], tmp_path, TOTALS)
    try:
        # Spark does not know the commit, and prepared transactions are undecided.
        stream.kill_at("after-commit", 2)
        stream.say(TOTALS.replace("count(*)", "sum(1)"))
        stream.kill_at("before-commit", 1)
        # The first statement again, whose checkpoint is stale by now.
        stream.say(TOTALS)
        rows = stream.finish((3 + 1 + 4) * REGIONS)
    finally:
        stream.close()
    expected = [
        (1, 0, 500),
        (2, 0, 1000),
        (3, 0, 1500),
        (1, 1500, 2000),
        *((n, 2000, 2000 + n * BATCH) for n in range(1, 5)),
    ]
    for number in range(REGIONS):
        totals = [(row["n"], row["total"]) for row in rows if row["region"] == f"region-{number}"]
        assert totals == [
            (BATCH // REGIONS * batches, sum(range(first + number, end, REGIONS))) for batches, first, end in expected
        ]
