"""Long-running landing while all of its processes are killed: every message is landed once, unchanged."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import UTC, datetime, timedelta
from pathlib import Path
from subprocess import Popen, TimeoutExpired
from typing import Any

import deltalake
import duckdb
import polars
import psutil
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.server import Server
from millstream_testing.spark_cluster import WAIT_S, ProcessFailed, environment, running, wait_until

pytestmark = [pytest.mark.trial, pytest.mark.timeout(7200)]

PARTITIONS = 2
KILLS = int(os.environ.get("LANDING_KILLS", "36"))
NAMED = ("before-commit", "between-topics", "before-quarantine", "before-compaction", "after-compaction", "in-vacuum")
LANDED = re.compile(rb"^\[Step\(rows=[1-9]", re.MULTILINE)
# Of 40 messages for each topic.
LIFE_PORTIONS = 60
STEP_PORTIONS = 10
# A fault that is never reached, such as one in a vacuum without work, is not waited for any longer.
FAULT_S = 90.0
Row = tuple[int, int, bytes]


class Publisher(threading.Thread):
    """Publishes to all topics until it is stopped, and waits for an unavailable broker.

    The amount depends on what is landed, not on the time.
    """

    def __init__(self, brokers: str, decoded: list[str], raw: list[str], portions: Callable[[], int]) -> None:
        super().__init__(name="publisher")
        self._portions = portions
        self._producer = Producer(
            {"bootstrap.servers": brokers, "log_level": 0, "linger.ms": 20, "enable.idempotence": True}
        )
        self._decoded = decoded
        self._raw = raw
        self.published: dict[str, list[Row]] = {name: [] for name in (*decoded, *raw)}
        self.failures: list[str] = []
        self._ended = threading.Event()
        self._number = 0
        self._random = random.Random(7)

    def run(self) -> None:
        published = 0
        while not self._ended.wait(0.05):
            if published < self._portions():
                self.publish()
                published += 1
        self._producer.flush(300)

    def publish(self) -> None:
        """Publish some more messages to each topic."""
        for _ in range(40):
            self._number += 1
            for name in self._decoded:
                self._send(name, self._number, self._document(self._number))
            for name in self._raw:
                self._send(name, self._number, self._random.randbytes(self._number % 200))
        self._producer.poll(0)

    def flush(self) -> None:
        """Wait until all of them are stored."""
        assert self._producer.flush(300) == 0

    def end(self) -> None:
        self._ended.set()
        self.join()

    def _send(self, topic: str, number: int, value: bytes) -> None:
        with suppress(BufferError):
            self._producer.produce(
                topic, value, key=b"%d" % number, partition=number % PARTITIONS, on_delivery=self._print_line
            )

    def _print_line(self, error: object, message: Any) -> None:
        if error is not None:
            self.failures.append(str(error))
        else:
            self.published[message.topic()].append((message.partition(), message.offset(), message.value()))

    def _document(self, number: int) -> bytes:
        """A document with new fields every now and then, also nested; some do not fit, and some are not JSON."""
        document: dict[str, Any] = {"id": number, "text": f"é{number}", "inner": {"a": number / 2}}
        document[f"field_{number // 3000}"] = number
        document["inner"][f"deep_{number // 5000}"] = [number, None]
        if number > 40 and number % 50 == 7:
            document["id"] = "no number"
        return b"\xff no JSON" if number % 333 == 0 else json.dumps(document, ensure_ascii=False).encode()


class LongTrial:
    """A broker with topics, programs that land them, and the killer of those programs."""

    def __init__(self, server: Server, folder: Path) -> None:
        self.server = server
        self.folder = folder
        self.lake = folder / "lake"
        self.decoded, self.raw = ["orders", "bills"], ["bytes"]
        self.kills: list[str] = []
        self._landed = datetime.now(UTC) - timedelta(hours=1)
        self._random = random.Random(11)
        self._until = folder / "until"
        self._lives = 0
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        for future in admin.create_topics(
            [NewTopic(name, PARTITIONS, 1) for name in (*self.decoded, *self.raw)]
        ).values():
            future.result(60)

    @contextmanager
    def driver(self, fault: str = "") -> Iterator[Popen[bytes]]:
        self._lives += 1
        arguments = {
            "master": "local[2,8]",
            "brokers": self.server.kafka,
            "lake": str(self.lake),
            "folder": str(self.folder),
            "fault": fault,
            "landed": self._landed.isoformat(),
            "settings": {"topics": ",".join(self.decoded), "decode": "json", "batch.max.messages": "20000"},
            "more": [{"topics": ",".join(self.raw)}],
            "until": str(self._until),
        }
        command = [sys.executable, str(Path(__file__).with_name("land_driver.py")), json.dumps(arguments)]
        with running(command, self.log, environment()) as process:
            yield process

    @property
    def log(self) -> Path:
        return self.folder / "driver.log"

    def tear(self) -> None:
        """Run a program until one of its processes is killed; kills that it survives come before."""
        fault = self._random.choice((*NAMED, "", "", "", ""))
        with ExitStack() as stack:
            process = stack.enter_context(self.driver(fault))
            if self._random.random() < 0.2:
                stack.enter_context(self.driver())
                self._note("two at once")
            self._inject_fault(process)
            if fault:
                with suppress(TimeoutError):
                    self._wait(process)
            self._end(process, fault)
        self._age()

    def _inject_fault(self, process: Popen[bytes]) -> None:
        """Kill processes that a program can do without: workers, and the broker."""
        for _ in range(self._random.randrange(1, 4)):
            begun = self._steps()
            with suppress(ProcessFailed):
                wait_until(lambda: self._steps() > begun, process, self.log)  # noqa: B023
            if process.poll() is not None:
                return
            time.sleep(self._random.random())
            if self._random.random() < 0.3:
                self.server.restart(clean=False)
                self._note("broker")
                continue
            workers = [
                descendant
                for descendant in descendants(process.pid)
                if "pyspark.daemon" in " ".join(command_of(descendant))
            ]
            if workers:
                with suppress(psutil.NoSuchProcess):
                    self._random.choice(workers).kill()
                    self._note("worker")

    def _steps(self) -> int:
        """The number of batches landed so far, by all programs."""
        return self._said().count(b"[Step(")

    def portions(self) -> int:
        """The amount that may be published by now: some for each program, and for each batch that it lands."""
        return LIFE_PORTIONS * self._lives + STEP_PORTIONS * len(LANDED.findall(self._said()))

    def _said(self) -> bytes:
        return self.log.read_bytes() if self.log.exists() else b""

    def _wait(self, process: Popen[bytes]) -> None:
        """Wait until a fault has struck, or others were faster."""
        deadline = time.monotonic() + FAULT_S
        while process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.2)

    def _end(self, process: Popen[bytes], fault: str) -> None:
        if process.poll() == -signal.SIGKILL:
            self._note(fault or "worker took all")
        elif process.poll() is not None:
            self._note("ended by what was killed before")
        elif self._random.random() < 0.4:
            java = [
                descendant
                for descendant in descendants(process.pid)
                if command_of(descendant)[:1] and "java" in command_of(descendant)[0]
            ]
            for java_process in java:
                with suppress(psutil.NoSuchProcess):
                    java_process.kill()
            self._note("JVM")
        else:
            self._note("driver")

    def _age(self) -> None:
        """Make half of the files old while nothing runs, so that the vacuum has work."""
        long_ago = time.time() - timedelta(days=9).total_seconds()
        for path in sorted(self.lake.rglob("*.parquet")):
            if self._random.random() < 0.5:
                os.utime(path, (long_ago, long_ago))

    def _note(self, what: str) -> None:
        self.kills.append(what)
        print(f"{time.strftime('%H:%M:%S')} {len(self.kills)} {what}", flush=True)

    def finish(self) -> None:
        """Land the rest; a program that finds the broker just restarted may need another attempt."""
        self._until.touch()
        for _ in range(3):
            with self.driver() as process:
                if self._end_of(process) == 0:
                    self._until.unlink()
                    return
        pytest.fail(self.log.read_text(errors="replace")[-3000:])

    def _end_of(self, process: Popen[bytes]) -> int:
        """How a program ended, for as long as it makes progress."""
        while True:
            steps = self._steps()
            try:
                return process.wait(WAIT_S)
            except TimeoutExpired:
                if self._steps() == steps:
                    raise

    # -- checks ---------------------------------------------------------------------------------------------------

    def check(self, published: dict[str, list[Row]]) -> None:
        for name in self.raw:
            assert sorted(self._rows(name)) == sorted(published[name])
            assert not (self.lake / f"{name}__quarantine").exists()
        for name in self.decoded:
            refused = self._rows(f"{name}__quarantine")
            both = [*self._rows(name), *refused]
            assert sorted(both) == sorted(published[name])
            odd = [value for _, _, value in published[name] if b'"no number"' in value or b"no JSON" in value]
            assert sorted(value for _, _, value in refused) == sorted(odd)
            self._check_columns(name)
        for name in (*self.decoded, *self.raw, *(f"{table}__quarantine" for table in self.decoded)):
            self._check_readers(name)

    def _table(self, name: str) -> deltalake.DeltaTable:
        return deltalake.DeltaTable(str(self.lake / name))

    def _rows(self, name: str) -> list[Row]:
        rows = pa.table(self._table(name).to_pyarrow_table(columns=["partition", "offset", "value"])).to_pydict()
        return list(zip(rows["partition"], rows["offset"], rows["value"], strict=True))

    def _check_columns(self, name: str) -> None:
        """Check that decoded values are as published; fields added later are null."""
        for row in pa.table(self._table(name).to_pyarrow_table()).to_pylist():
            document = json.loads(row["value"])
            inner = {key: value for key, value in row["inner"].items() if value is not None}
            assert {**{key: row[key] for key in document}, "inner": inner} == document
            assert all(row[key] is None for key in row if key.startswith("field_") and key not in document)

    def _check_readers(self, name: str) -> None:
        expected = sorted(self._rows(name))
        table, columns = self._table(name), ["partition", "offset", "value"]
        data = table.to_pyarrow_dataset()
        query = duckdb.connect().execute('SELECT "partition", "offset", "value" FROM data')
        assert sorted(query.fetchall()) == expected
        assert sorted(polars.read_delta(str(self.lake / name)).select(columns).rows()) == expected
        frame: Any = table.to_pandas(columns=columns)
        assert sorted(frame.itertuples(index=False, name=None)) == expected
        assert data.count_rows() == len(expected)


def descendants(pid: int) -> list[psutil.Process]:
    with suppress(psutil.NoSuchProcess):
        return list(psutil.Process(pid).children(recursive=True))
    return []


def command_of(process: psutil.Process) -> list[str]:
    with suppress(psutil.Error):
        return list(process.cmdline())
    return []


def test_landing_survives_repeated_kills_of_everything(tmp_path: Path) -> None:
    with Server(tmp_path / "data") as server:
        trial = LongTrial(server, tmp_path)
        publisher = Publisher(server.kafka, trial.decoded, trial.raw, trial.portions)
        # The first landed messages decide the types of columns.
        publisher.publish()
        publisher.flush()
        trial.finish()
        publisher.start()
        try:
            while len(trial.kills) < KILLS:
                trial.tear()
        finally:
            publisher.end()
        assert not publisher.failures
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        with suppress(Exception):
            # The committed offsets of the group are informational.
            admin.delete_consumer_groups(["pipeline-trial"])["pipeline-trial"].result(60)
        trial.finish()
        trial.check(publisher.published)
        print({name: len(rows) for name, rows in publisher.published.items()})
