"""Tables with one row per key through kills at the worst moments, row by row against a model."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import deltalake
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream_testing.landing import LandProgram
from millstream_testing.server import Server

pytestmark = [pytest.mark.trial, pytest.mark.timeout(3600)]

PARTITIONS = 3
KEYS = 400
FIELDS = 2000


class Trial(LandProgram):
    """Debezium events in any order, some of them twice, and the expected table."""

    def __init__(self, server: Server, topic: str, folder: Path) -> None:
        self.server = server
        settings = {
            "topics": topic,
            "decode": "debezium",
            "mode": "upsert",
            "key": "id",
            "order.by": "source.lsn",
            "batch.max.messages": "1500",
            "bucket.bytes": "8192",
        }
        super().__init__(Path(__file__).with_name("land_driver.py"), server.kafka, folder, settings)
        self.topic = topic
        self.refused = 0
        self.random = random.Random(5)
        self._lsn = 0
        self._best: dict[int, tuple[int, dict[str, Any] | None]] = {}
        admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        admin.create_topics([NewTopic(topic, PARTITIONS, 1)])[topic].result(60)

    def publish(self, count: int = 3000) -> None:
        events = [self._event() for _ in range(count)]
        repeated = self.random.sample(events, count // 10)
        mixed = [*events, *repeated]
        # Late by some hundred messages.
        mixed = [
            event for _, event in sorted(enumerate(mixed), key=lambda entry: entry[0] + self.random.randrange(500))
        ]
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0, "linger.ms": 20})
        for key, value in mixed:
            producer.produce(self.topic, value, key=json.dumps({"id": key}).encode())
            producer.poll(0)
        for value in (b"{", b'{"op": "t"}'):
            producer.produce(self.topic, value, key=b"{}")
            self.refused += 1
        assert producer.flush(60) == 0

    def _event(self) -> tuple[int, bytes | None]:
        self._lsn += 1
        key = self.random.randrange(KEYS)
        row = {"id": key, "name": f"{self._lsn}", "amount": self.random.choice([1, 2.5, None])}
        op = self.random.choice("rccuuuuud")
        after = None if op == "d" else row
        before = {"id": key} if op == "d" else None
        self._best[key] = (self._lsn, after)
        event: dict[str, Any] = {"op": op, "before": before, "after": after, "source": {"lsn": self._lsn}}
        return key, json.dumps(event if key % 2 else {"schema": {}, "payload": event}).encode()

    def check(self) -> None:
        rows = deltalake.DeltaTable(str(self.folder / "lake" / self.topic)).to_pyarrow_table().to_pylist()
        rows_by_id = {row["id"]: {name: row[name] for name in ("id", "name", "amount")} for row in rows}
        assert len(rows_by_id) == len(rows)
        assert rows_by_id == {key: row for key, (_lsn, row) in self._best.items() if row is not None}
        quarantine = deltalake.DeltaTable(str(self.folder / "lake" / f"{self.topic}__quarantine"))
        assert quarantine.to_pyarrow_table().num_rows == self.refused


@pytest.mark.parametrize("fault", ["before-merge", "before-commit", "before-quarantine", "after-commit"])
def test_kills_at_the_worst_moments(server: Server, topic: str, tmp_path: Path, fault: str) -> None:
    trial = Trial(server, topic, tmp_path)
    trial.publish()
    trial.land()
    trial.publish()
    trial.die(fault)
    trial.publish()
    trial.land()
    trial.check()


def test_a_task_that_dies_after_writing_its_bucket(server: Server, topic: str, tmp_path: Path) -> None:
    trial = Trial(server, topic, tmp_path)
    trial.publish()
    # Spark restarts the task.
    trial.land("kill-rewriting")
    trial.check()


def test_two_concurrent_runs(server: Server, topic: str, tmp_path: Path) -> None:
    trial = Trial(server, topic, tmp_path)
    trial.publish(6000)
    with trial.driver("") as one, trial.driver("second") as other:
        trial.check_end(one, "")
        trial.check_end(other, "second")
    trial.check()


def test_events_with_thousands_of_fields(server: Server, topic: str, tmp_path: Path) -> None:
    trial = Trial(server, topic, tmp_path)
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for key in range(20):
        row = {"id": key, **{f"field_{number}": number * key for number in range(FIELDS)}}
        event = {"op": "c", "after": row, "source": {"lsn": key}}
        producer.produce(topic, json.dumps(event).encode(), key=b"%d" % key)
    assert producer.flush(60) == 0
    trial.land()
    rows = deltalake.DeltaTable(str(tmp_path / "lake" / topic)).to_pyarrow_table().to_pylist()
    assert sorted(row["id"] for row in rows) == list(range(20))
    assert all(row["field_7"] == 7 * row["id"] for row in rows)
    assert len(rows[0]) > 900
