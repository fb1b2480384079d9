"""Landing through kills at the worst moments, concurrent runs and on a cluster: every message is landed once."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import deltalake
import pyarrow as pa
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.landing import LandProgram
from millstream_testing.server import Server
from millstream_testing.spark_cluster import spark_cluster

pytestmark = [pytest.mark.trial, pytest.mark.timeout(3600)]

PARTITIONS = 3
Row = tuple[int, int, bytes]


class Trial(LandProgram):
    """Topics whose payloads keep changing, landed by the program beside this file."""

    def __init__(self, server: Server, topic: str, folder: Path) -> None:
        self.server = server
        self.topics = [f"{topic}-{number}" for number in range(2)]
        settings = {"topics": ",".join(self.topics), "decode": "json", "batch.max.messages": "3000"}
        super().__init__(Path(__file__).with_name("land_driver.py"), server.kafka, folder, settings)
        self.landed -= timedelta(hours=1)
        self.published: dict[str, list[Row]] = {name: [] for name in self.topics}
        self.fields: list[str] = []
        self._sent = 0
        self._new = ""
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        for future in admin.create_topics([NewTopic(name, PARTITIONS, 1) for name in self.topics]).values():
            future.result(60)

    def publish(self, count: int = 2000, size: int = 100, fraction: float = 0) -> None:
        """Publish to every topic: new fields each time, or fractions in the last, and some that do not fit."""
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0, "linger.ms": 20})

        def delivered(error: object, message: Any) -> None:
            assert error is None
            self.published[message.topic()].append((message.partition(), message.offset(), message.value()))

        if not fraction:
            self._new = f"new_{self._sent}"
            self.fields.append(self._new)
        for name in self.topics:
            for number in range(self._sent, self._sent + count):
                document: dict[str, Any] = {"id": number, "text": "x" * size, self._new: {"a": number + fraction}}
                # The first batch creates columns that accept everything in it; later ones have to fit.
                if number > 2000 and number % 50 == 7:
                    document["id"] = "no number"
                value = json.dumps(document).encode()
                producer.produce(name, value, partition=number % PARTITIONS, on_delivery=delivered)
                producer.poll(0)
        assert producer.flush(60) == 0
        self._sent += count

    def check(self) -> None:
        """Check that every message is in the table or its quarantine once, decoded as published."""
        for name, published in self.published.items():
            rows = self._rows(name)
            refused = self._rows(f"{name}__quarantine")
            both = [(row["partition"], row["offset"], row["value"]) for row in rows + refused]
            assert sorted(both) == sorted(published)
            assert all(row["reason"] == 'id: "no number" is not of type long' for row in refused)
            assert len(refused) == sum(b'"no number"' in value for _, _, value in published)
            for row in rows:
                document = json.loads(row["value"])
                columns = {column: row[column] for column in row if row[column] is not None}
                assert {column: columns.get(column) for column in document} == document

    def _rows(self, name: str) -> list[dict[str, Any]]:
        folder = self.folder / "lake" / name
        if name.endswith("__quarantine") and not folder.exists():
            return []
        table = deltalake.DeltaTable(str(folder))
        rows: list[dict[str, Any]] = table.to_pyarrow_table().to_pylist()
        return rows

    def doubles(self, name: str) -> list[str]:
        """The double fields of a table."""
        schema = pa.schema(deltalake.DeltaTable(str(self.folder / "lake" / name)).schema().to_arrow())
        return [field for field in self.fields if schema.field(field).type == pa.struct([("a", pa.float64())])]

    def files(self, name: str) -> int:
        return len(deltalake.DeltaTable(str(self.folder / "lake" / name)).file_uris())


@pytest.fixture
def trial(server: Server, topic: str, tmp_path: Path) -> Trial:
    return Trial(server, topic, tmp_path)


def test_a_driver_killed_anywhere_lands_every_message_once(trial: Trial) -> None:
    trial.publish()
    trial.land()
    trial.check()
    for fault in ("before-commit", "between-topics", "before-quarantine", "before-compaction", "after-compaction"):
        trial.publish()
        trial.die(fault)
    trial.publish()
    trial.land()
    trial.check()
    assert [trial.files(name) for name in trial.topics] == [1, 1]


def test_a_task_killed_after_writing_its_files_is_repeated(trial: Trial) -> None:
    trial.publish(4000)
    trial.land("kill-worker")
    assert (trial.folder / "struck-kill-worker").exists()
    trial.check()


def test_a_driver_killed_while_columns_are_widened_loses_and_duplicates_nothing(trial: Trial) -> None:
    trial.publish()
    trial.land()
    for fault in ("after-look", "after-rewriting", "before-widening", "after-widening"):
        trial.publish()
        trial.land()
        trial.publish(fraction=0.5)
        trial.die(fault)
    trial.land()
    trial.check()
    for name in trial.topics:
        assert trial.doubles(name) == trial.fields[1:]


def test_a_task_killed_while_it_rewrites_files_is_repeated(trial: Trial) -> None:
    trial.publish()
    trial.land()
    trial.publish(fraction=0.5)
    trial.land("kill-rewriting")
    assert (trial.folder / "struck-kill-rewriting").exists()
    trial.check()
    assert [trial.doubles(name) for name in trial.topics] == [trial.fields, trial.fields]


def test_two_concurrent_runs_widen_columns_once(trial: Trial) -> None:
    for _ in range(3):
        trial.publish(3000)
        trial.land()
        trial.publish(3000, fraction=0.5)
        with trial.driver("one", **{"batch.max.messages": "1000"}) as one, trial.driver("two") as two:
            for process, name in ((one, "one"), (two, "two")):
                trial.check_end(process, name)
    trial.land()
    trial.check()
    assert [trial.doubles(name) for name in trial.topics] == [trial.fields, trial.fields]


def test_two_concurrent_runs_land_every_message_once(trial: Trial) -> None:
    trial.publish(6000)
    with trial.driver("one", **{"batch.max.messages": "1000"}) as one, trial.driver("two") as two:
        trial.publish(2000)
        for process, name in ((one, "one"), (two, "two")):
            trial.check_end(process, name)
    trial.land()
    trial.check()


def test_landing_on_a_cluster_survives_the_loss_of_an_executor(trial: Trial, tmp_path: Path) -> None:
    trial.publish(4000, size=4000)
    with spark_cluster(tmp_path) as master:
        trial.land("kill-executor", master=master)
    assert (trial.folder / "struck-kill-executor").exists()
    trial.check()
