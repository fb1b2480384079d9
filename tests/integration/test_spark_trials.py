"""Streams from topic to topic on a real Spark cluster while tasks, executors and drivers die: every row once."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaError, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.client.admin.transactions import ONGOING, PREPARED, list_transactions
from millstream.protocol.wire.client import Client
from millstream_testing.server import Server
from millstream_testing.spark_cluster import WAIT_S, environment, kill, running, spark_cluster, wait_until

pytestmark = [pytest.mark.trial, pytest.mark.timeout(7200)]

PARTITIONS = 2
ROWS = 6000
ROWS_PER_BATCH = 3000
VALUE_BYTES = 6000
_SPECULATION = {
    "spark.speculation": "true",
    "spark.speculation.interval": "200ms",
    "spark.speculation.multiplier": "1.1",
    "spark.speculation.quantile": "0.5",
}


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with spark_cluster(tmp_path_factory.mktemp("spark-cluster")) as master:
        yield master


class Trial:
    """A topic that is copied by the program beside this file."""

    def __init__(self, server: Server, topic: str, folder: Path) -> None:
        self.server = server
        self.source = f"{topic}-source"
        self.target = topic
        self.folder = folder
        self.log = folder / "driver.log"
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        made = admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in (self.source, self.target)])
        for future in made.values():
            future.result(60)
        self.expected = sorted(b"%07d" % number + b"x" * VALUE_BYTES for number in range(ROWS))
        producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
        for number, value in enumerate(self.expected):
            producer.produce(self.source, value, partition=number % PARTITIONS)
        assert producer.flush(60) == 0

    @contextmanager
    def driver(self, master: str, fault: str, **settings: str) -> Iterator[Popen[bytes]]:
        """The program, started."""
        arguments: dict[str, Any] = {
            "master": master,
            "brokers": self.server.kafka,
            "source": self.source,
            "target": self.target,
            "folder": str(self.folder),
            "fault": fault,
            "rows_per_batch": ROWS_PER_BATCH,
            "settings": {
                "spark.eventLog.enabled": "true",
                "spark.eventLog.compress": "false",
                "spark.eventLog.dir": self.events.as_uri(),
                **settings,
            },
        }
        command = [sys.executable, str(Path(__file__).with_name("spark_driver.py")), json.dumps(arguments)]
        with running(command, self.log, environment()) as process:
            yield process

    def copy(self, master: str, fault: str, **settings: str) -> None:
        """Run the program to its end."""
        with self.driver(master, fault, **settings) as process:
            assert process.wait(WAIT_S) == 0, self.log.read_text(errors="replace")[-3000:]

    @property
    def events(self) -> Path:
        """The task events that Spark logs."""
        folder = self.folder / "events"
        folder.mkdir(exist_ok=True)
        return folder

    def happened(self, pattern: str) -> list[str]:
        """The marks that the program left."""
        return sorted(file.name for file in self.folder.iterdir() if re.fullmatch(pattern, file.name))

    def count_of_tasks(self, mark: str) -> int:
        """The number of ended tasks in Spark's log that have a mark."""
        files = [file for file in self.events.rglob("*") if file.is_file()]
        ends = [
            line for file in files for line in file.read_text().splitlines() if '"Event":"SparkListenerTaskEnd"' in line
        ]
        return sum(mark in line for line in ends)

    def values(self, isolation: str = "read_committed") -> list[bytes]:
        """The copy as read by a plain client."""
        settings = {"bootstrap.servers": self.server.kafka, "group.id": "trial", "log_level": 0}
        consumer = Consumer({**settings, "enable.partition.eof": True, "isolation.level": isolation})
        consumer.assign([TopicPartition(self.target, number, 0) for number in range(PARTITIONS)])
        found_values: list[bytes] = []
        ended = 0
        while ended < PARTITIONS:
            message = consumer.poll(60)
            assert message is not None
            error = message.error()
            if error is None:
                found_values.append(message.value() or b"")
            else:
                assert error.code() == KafkaError._PARTITION_EOF
                ended += 1
        consumer.close()
        return sorted(found_values)


@pytest.fixture
def trial(server: Server, topic: str, tmp_path: Path) -> Trial:
    return Trial(server, topic, tmp_path)


def test_of_two_attempts_that_ran_one_counts(trial: Trial, cluster: str) -> None:
    trial.copy(cluster, "slow", **_SPECULATION)
    # In the first batch at least; in a later one the second attempt may win before the first has come that far.
    assert "struck-0-1-0" in trial.happened("struck-.*")
    assert "passed-0-1-1" in trial.happened("passed-.*")
    assert trial.count_of_tasks('"Speculative":true') >= 1
    assert trial.values() == trial.expected
    # The losing attempts had written something, or this would have been easy.
    assert len(trial.values("read_uncommitted")) > ROWS


@pytest.mark.parametrize("fault", ["kill-worker", "kill-executor"])
def test_a_task_killed_in_mid_batch_is_repeated_without_a_trace(trial: Trial, cluster: str, fault: str) -> None:
    trial.copy(cluster, fault)
    assert trial.happened("struck-.*") == ["struck-0-1-0", "struck-1-1-0"]
    assert trial.values() == trial.expected


@pytest.mark.parametrize("fault", ["before-commit", "after-commit"])
def test_a_driver_killed_around_its_commit_resumes(trial: Trial, fault: str) -> None:
    paused = trial.folder / f"paused-{fault}"
    with trial.driver("local[2]", fault) as process:
        wait_until(paused.exists, process, trial.log)
        kill(process)
    # The batch that hangs between its end and the driver's commit is visible or not, but never in part.
    assert len(trial.values()) == (ROWS if fault == "after-commit" else ROWS_PER_BATCH)
    trial.copy("local[2]", "no-commit")
    assert trial.values() == trial.expected


async def test_a_failing_stream_blocks_nothing_and_resumes(trial: Trial) -> None:
    with trial.driver("local[2]", "kill-writer") as process:
        assert process.wait(WAIT_S) != 0
    assert trial.happened("struck-.*") == ["struck-writer"]
    async with Client.connect(trial.server.kafka) as client:
        transactions = await list_transactions(client, states=(ONGOING, PREPARED))
    assert transactions == []
    assert len(trial.values()) == ROWS_PER_BATCH
    trial.copy("local[2]", "no-commit")
    assert trial.values() == trial.expected
