"""Tables with one row per key, with a real Spark and a real broker, against a model that applies changes one by one."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import duckdb
import polars
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from millstream.core.errors import InvalidSetting
from millstream.pipelines.jobs.job import JobKind, Step, TimeWindow
from millstream.pipelines.jobs.land.backfill import make_requarantine
from millstream.pipelines.jobs.land.inference import LEAVES_MAX, SAMPLE_MAX
from millstream.pipelines.jobs.land.job import make_job
from millstream.pipelines.lake.keyed_table import KEEPS_TYPES
from millstream_testing.command import CommandLine
from millstream_testing.landing import land_job, run, run_and_close
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 60.0
# An interrupted call into the JVM leaves the session unusable, and the first calls take long on a slow machine.
pytestmark = pytest.mark.timeout(900)

Message = tuple[Any, Any]
"""A key and a payload, each encoded as JSON unless it is bytes or None."""


class Keys:
    """A broker with one topic, and a lake."""

    def __init__(self, spark: SparkSession, server: Server, lake: Path, topic: str) -> None:
        self.spark = spark
        self.server = server
        self.lake = lake
        self.topic = topic
        self.admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})

    def create(self, partitions: int = 1) -> None:
        self.admin.create_topics([NewTopic(self.topic, partitions, 1)])[self.topic].result(WAIT_S)

    def publish(self, messages: Iterable[Message], **more: Any) -> None:
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0, "linger.ms": 5})
        for key, value in messages:
            producer.produce(self.topic, _encoded(value), key=_encoded(key), **more)
            producer.poll(0)
        assert producer.flush(WAIT_S) == 0

    def job(self, make: JobKind = make_job, /, window: TimeWindow | None = None, **settings: Any) -> Any:
        options = {"topics": self.topic, "mode": "upsert", "decode": "json", **settings}
        return land_job(self.spark, self.server.kafka, self.lake, options, make, window=window)

    def land(self, window: TimeWindow | None = None, **settings: Any) -> list[Step]:
        return run_and_close(self.job(window=window, **settings))

    @property
    def place(self) -> str:
        return str(self.lake / self.topic)

    def rows(self, ending: str = "") -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = deltalake.DeltaTable(self.place + ending).to_pyarrow_table().to_pylist()
        return rows

    def reasons(self) -> list[str]:
        return sorted(row["reason"] for row in self.rows("__quarantine"))


def _encoded(value: Any) -> bytes | None:
    return value if value is None or isinstance(value, bytes) else json.dumps(value).encode()


def count_of(steps: Iterable[Step], name: str) -> int:
    return sum(step.counts.get(name, 0) for step in steps)


@pytest.fixture
def keys(spark: SparkSession, server: Server, tmp_path: Path, topic: str) -> Keys:
    return Keys(spark, server, tmp_path / "lake", topic)


def test_the_newest_change_of_each_key_wins(keys: Keys) -> None:
    keys.create(partitions=3)
    random_ = random.Random(7)
    model: dict[int, tuple[int, str]] = {}
    deleted: set[int] = set()
    for round_number in range(2):
        changes = []
        for number in range(400):
            key, moment = random_.randrange(60), random_.randrange(1000)
            is_delete = random_.random() < 0.2
            name = f"{round_number}-{number}"
            changes.append(
                (None, {"id": key, "at": moment * 1000 + number, "name": name, "op": "d" if is_delete else "u"})
            )
            at = moment * 1000 + number
            if key not in model or at > model[key][0]:
                model[key] = (at, name)
                (deleted.add if is_delete else deleted.discard)(key)
        keys.publish(changes)
        steps = keys.land(
            key="id", order_by="at", delete_when="op = 'd'", batch_max_messages="150", bucket_bytes="4096"
        )
        rows = {row["id"]: (row["at"], row["name"]) for row in keys.rows()}
        assert rows == {key: change for key, change in model.items() if key not in deleted}
        assert len(keys.rows()) == len(rows)
        assert sum(step.rows for step in steps) == 400
    assert count_of(steps, "late") > 0
    files = deltalake.DeltaTable(keys.place).file_uris()
    assert len(files) > 1, "buckets are split as they grow"
    landed = deltalake.DeltaTable(keys.place).to_pyarrow_dataset()
    counted = duckdb.from_arrow(landed).aggregate("count(*), count(DISTINCT id)")
    assert counted.fetchall() == [(len(rows), len(rows))]
    assert polars.scan_delta(keys.place).select("id").collect().height == len(rows)
    assert keys.land(key="id", order_by="at", delete_when="op = 'd'")[0].rows == 0


def test_keys_and_orders_beyond_doubles_stay_apart(keys: Keys) -> None:
    keys.create()
    first = 2**60
    keys.publish([(None, {"id": first + number, "ts": first, "v": str(number)}) for number in range(20)])
    keys.publish(
        [(None, {"id": first, "ts": first + 1, "v": "newer"}), (None, {"id": first, "ts": first, "v": "late"})]
    )
    keys.publish([(None, {"id": 2**63 + 5, "ts": 2**64, "v": "unsigned"})])
    steps = keys.land(key="id", order_by="ts")
    assert {int(row["id"]): row["v"] for row in keys.rows()} == {
        first: "newer",
        **{first + number: str(number) for number in range(1, 20)},
        2**63 + 5: "unsigned",
    }
    assert (count_of(steps, "late"), count_of(steps, "quarantined")) == (1, 0)


@pytest.mark.parametrize(
    ("mode", "reason"),
    [("upsert", KEEPS_TYPES), ("append", f"it has {2**60 + SAMPLE_MAX - 1}, which doubles cannot hold exactly")],
)
def test_a_fraction_after_the_sample_rounds_no_numbers(keys: Keys, mode: str, reason: str) -> None:
    keys.create()
    keys.publish([*((None, {"id": 2**60 + number}) for number in range(SAMPLE_MAX)), (None, {"id": 1.5})])
    (step,) = keys.land(mode=mode, key="id" if mode == "upsert" else "")
    assert {row["id"] for row in keys.rows()} == {2**60 + number for number in range(SAMPLE_MAX)}
    assert step.counts["quarantined"] == 1
    assert keys.reasons() == [f"id: 1.5 is not of type long; id stays long: {reason}"]


def test_debezium_envelopes_become_rows(keys: Keys) -> None:
    keys.create()
    key = {"id": 1}

    def event(op: str, before: Any, after: Any, lsn: int) -> dict[str, Any]:
        return {"op": op, "before": before, "after": after, "source": {"lsn": lsn, "table": "t"}, "ts_ms": 5}

    keys.publish(
        [
            (key, event("r", None, {"id": 1, "name": "snapshot"}, 10)),
            ({"id": 2}, {"schema": {"type": "struct"}, "payload": event("c", None, {"id": 2, "name": "two"}, 11)}),
            ({"id": 3}, event("c", None, {"id": 3, "name": "three"}, 12)),
            (key, event("u", {"id": 1}, {"id": 1, "name": "one"}, 13)),
            (key, event("u", {"id": 1}, {"id": 1, "name": "late"}, 9)),
            ({"id": 3}, event("d", {"id": 3}, None, 14)),
            ({"id": 3}, None),
            ({"id": 3}, event("u", {"id": 3}, {"id": 3, "name": "revived"}, 13)),
            ({"id": 4}, {"no": "envelope"}),
            ({"id": 5}, event("t", None, None, 15)),
        ]
    )
    steps = keys.land(decode="debezium", key="id", order_by="source.lsn")
    assert {row["id"]: row["name"] for row in keys.rows()} == {1: "one", 2: "two"}
    assert {row["id"]: row["__source_lsn"] for row in keys.rows()} == {1: 13, 2: 11}
    assert count_of(steps, "late") == 2
    assert all(reason.startswith("the payload is not a change event of Debezium") for reason in keys.reasons())
    assert len(keys.reasons()) == 2


def test_tombstones_of_debezium_without_their_delete_events_delete(keys: Keys) -> None:
    keys.create()

    def event(op: str, number: int, lsn: int) -> dict[str, Any]:
        return {"op": op, "before": {"id": number}, "after": {"id": number}, "source": {"lsn": lsn}}

    # The second batch begins with the tombstone of a delete event that is repeated after the row was created again.
    keys.publish(({"id": number}, event("c", number, 12)) for number in (1, 2, 3))
    keys.publish([({"id": 1}, event("d", 1, 11))])
    keys.publish([({"id": 1}, None), ({"id": 2}, None), ({"schema": {}, "payload": {"id": 3}}, None)])
    steps = keys.land(decode="debezium", key="id", order_by="source.lsn", batch_max_messages="4")
    assert [row["id"] for row in keys.rows()] == [1]
    assert len(steps) == 2
    assert (count_of(steps, "deleted"), count_of(steps, "late")) == (2, 1)


def test_tombstones_and_message_keys(keys: Keys) -> None:
    keys.create(partitions=2)
    keys.publish([(b"a", b"1"), (b"b", b"2"), (b"a", b"3"), (b"b", None), (None, b"nobody")])
    keys.land(decode="none")
    assert [(row["key"], row["value"]) for row in keys.rows()] == [(b"a", b"3")]
    assert keys.reasons() == ["the message has no key"]
    keys.publish([(b"b", b"4")])
    keys.land(decode="none")
    assert sorted((row["key"], row["value"]) for row in keys.rows()) == [(b"a", b"3"), (b"b", b"4")]


def test_composite_keys_and_rows_without_one(keys: Keys) -> None:
    keys.create()
    keys.publish(
        [
            (None, {"region": "eu", "order": {"id": 1}, "n": 1}),
            (None, {"region": "us", "order": {"id": 1}, "n": 2}),
            (None, {"region": "eu", "order": {"id": 1}, "n": 3}),
            (None, {"region": None, "order": {"id": 1}, "n": 4}),
            (None, {"region": "eu", "n": 5}),
            (None, b"no JSON"),
            ({"region": "us", "order": {"id": 1}}, None),
        ]
    )
    keys.land(key="region,order.id")
    assert [(row["region"], row["order"]["id"], row["n"]) for row in keys.rows()] == [("eu", 1, 3)]
    assert [reason[:28] for reason in keys.reasons()] == ["the key region, order.id is "] * 2 + [
        "the payload is not JSON: Exp"
    ]


def test_fields_beyond_the_limit_need_a_schema_or_a_map(keys: Keys, caplog: pytest.LogCaptureFixture) -> None:
    keys.create()
    payload = {"id": 1, "odd name": 2, **{f"f{number}": number for number in range(LEAVES_MAX)}, "tags": {"a b": 3}}
    keys.publish([(None, payload)])
    last = f"f{LEAVES_MAX - 1}"
    steps = keys.land(key="id", maps="tags")
    (row,) = keys.rows()
    assert (last in row, "odd name" in row, row["tags"]) == (False, False, [("a b", "3")])
    assert count_of(steps, "dropped-fields") == 3
    assert "3 fields of" in caplog.text
    assert f"{last}, odd name) have no column" in caplog.text
    assert "are not in the table; declare the columns in `schema`" in caplog.text
    schema = ", ".join(f"{name} long" for name in payload if name[0] in "if")
    keys.land(key="id", schema=schema, window=TimeWindow(0, 2**50))
    (row,) = keys.rows()
    assert row[last] == LEAVES_MAX - 1


def test_unchanged_rows_keep_columns_that_the_schema_no_longer_has(keys: Keys) -> None:
    keys.create()
    keys.publish([(None, {"id": number, "a": 1, "b": 1}) for number in (1, 2)])
    keys.land(key="id")
    keys.publish([(None, {"id": 2, "a": 2, "b": 2, "c": 2})])
    keys.land(key="id", schema="id long, a long, c long")
    rows = [[row[name] for name in ("id", "a", "b", "c")] for row in keys.rows()]
    assert sorted(rows) == [[1, 1, 1, None], [2, 2, None, 2]]


def test_grown_topics_need_an_order(keys: Keys) -> None:
    keys.create()
    keys.publish([(b"1", {"id": 1, "at": 1})])
    keys.land(key="id")
    keys.admin.create_partitions([NewPartitions(keys.topic, 2)])[keys.topic].result(WAIT_S)
    with pytest.raises(InvalidSetting, match=r"had 1 partitions when its table began and has 2.*--order-by"):
        keys.land(key="id")
    keys.publish([(b"1", {"id": 1, "at": 2})], partition=1)
    keys.land(key="id", order_by="at")
    assert [(row["id"], row["at"]) for row in keys.rows()] == [(1, 2)]


def test_an_append_table_is_not_taken_over(keys: Keys) -> None:
    keys.create()
    keys.publish([(b"1", {"id": 1})])
    keys.land(mode="append")
    with pytest.raises(InvalidSetting, match="mode=append"):
        keys.land(key="id")


def test_types_do_not_depend_on_batches_and_changes_are_counted(keys: Keys) -> None:
    keys.create()
    keys.publish(
        [
            (None, {"id": 1, "total": 5, "tags": {"a": 1, "b": "x"}, "odd name": 1}),
            (None, {"id": 2, "total": "many", "tags": {}}),
            (None, {"id": 3, "total": -5, "tags": {"c": None}}),
            (None, {"id": 4, "total": 7, "tags": 3}),
            (None, b"{"),
        ],
        headers=[("ce_type", b"order"), ("ce-id", b"7")],
    )
    settings: dict[str, Any] = {"mode": "append", "maps": "tags", "cloudevents": "true", "expect": '["total >= 0"]'}
    (step,) = keys.land(**settings)
    rows = [(row["id"], row["total"], row["tags"], row["ce_type"], row["ce_id"]) for row in keys.rows()]
    assert rows == [(1, 5, [("a", "1"), ("b", "x")], "order", "7")]
    assert keys.reasons() == [
        "tags: 3 is not of type map",
        "the message violates the expectation total >= 0",
        "the payload is not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
        'total: "many" is not of type long',
    ]
    assert step.counts["quarantined"] == 4
    kinds = {name: number for name, number in step.counts.items() if name.startswith("quarantined.")}
    assert kinds == {"quarantined.type": 2, "quarantined.violation": 1, "quarantined.not-json": 1}
    assert (step.counts["violations"], step.counts["dropped-fields"]) == (1, 1)
    assert step.facts == {f"columns of {keys.topic}": "tags map<string,string>, id bigint, total bigint"}


def test_expectations_count_or_fail(keys: Keys) -> None:
    keys.create()
    keys.publish([(None, {"id": 1, "total": -5}), (None, {"id": 2})])
    with pytest.raises(Exception, match=r"offset 0 of topic '\S+', partition 0, violates the expectation 'total"):
        keys.land(mode="append", expect='["total >= 0"]', on_violation="fail")
    (step,) = keys.land(mode="append", expect='["total >= 0"]', on_violation="count")
    assert step.counts["violations"] == 1
    assert len(keys.rows()) == 2


@pytest.mark.parametrize("partition_by", ["", "hour(timestamp)"])
def test_a_backfill_lands_missing_messages(keys: Keys, partition_by: str) -> None:
    keys.create(partitions=2)
    now = time.time_ns() // 1_000_000
    hour = 3_600_000
    for age in (5, 4, 3, 2, 1):
        keys.publish([(f"k{age}{n}", {"id": age * 10 + n}) for n in range(4)], timestamp=now - age * hour)
    how: dict[str, Any] = {"mode": "append", "partition_by": partition_by}
    start: dict[str, Any] = {"from": "latest"}
    job = keys.job(**how, **start)
    assert job.step().rows == 0
    keys.publish([("new", {"id": 100})])
    run(job)
    job.close()
    assert [row["id"] for row in keys.rows()] == [100]
    window = TimeWindow(now - 4 * hour - 1, now - 2 * hour)
    steps = keys.land(window=window, **how, batch_max_messages="3")
    expected = sorted(age * 10 + n for age in (4, 3) for n in range(4))
    assert sorted(row["id"] for row in keys.rows()) == [*expected, 100]
    assert count_of(steps, "duplicates") == 0
    steps = keys.land(window=TimeWindow(0, now + hour), **how)
    everything = [age * 10 + n for age in range(1, 6) for n in range(4)]
    assert sorted(row["id"] for row in keys.rows()) == [*everything, 100]
    assert count_of(steps, "duplicates") == 9
    keys.publish([("newer", {"id": 101})])
    keys.land(**how)
    assert len(keys.rows()) == 22
    if partition_by:
        hours = {(row["timestamp"].date(), row["timestamp"].hour) for row in keys.rows()}
        assert {(row["event_day"], row["event_hour"]) for row in keys.rows()} == hours
        assert len(hours) >= 5


def test_a_backfill_of_keys_changes_nothing_newer(keys: Keys) -> None:
    keys.create()
    keys.publish([(b"a", {"id": 1, "v": 1}), (b"a", {"id": 1, "v": 2}), (b"b", {"id": 2, "v": 3}), (b"b", None)])
    keys.land(decode="json", order_by="v", delete_when="v = 0")
    keys.publish([(b"b", {"id": 2, "v": 9}), (b"b", {"id": 2, "v": 10, "gone": True})])
    keys.land(decode="json", order_by="v", delete_when="gone = true")
    before = sorted(row["v"] for row in keys.rows())
    keys.land(window=TimeWindow(0, 2**50), decode="json", order_by="v", delete_when="gone = true")
    assert sorted(row["v"] for row in keys.rows()) == before == [2]


@pytest.mark.parametrize(("mode", "dedupe_ms"), [("append", "0"), ("append", "60000"), ("upsert", "0")])
def test_a_backfill_quarantines_nothing_twice(keys: Keys, mode: str, dedupe_ms: str) -> None:
    keys.create()
    keys.publish([(b"a", {"id": 1}), (b"b", b"{"), (b"c", {"id": "x"}), (b"d", {"id": 4})])
    how: dict[str, Any] = {"mode": mode, "dedupe_ms": dedupe_ms}
    keys.land(**how)
    for _ in range(2):
        steps = keys.land(window=TimeWindow(0, 2**50), **how)
        assert count_of(steps, "duplicates") == (4 if mode == "append" else 2)
    assert sorted(row["offset"] for row in keys.rows("__quarantine")) == [1, 2]
    assert sorted(row["id"] for row in keys.rows()) == [1, 4]


def test_a_backfill_skips_duplicate_messages(keys: Keys) -> None:
    keys.create()
    keys.publish([(b"a", {"id": 1}), (b"a", {"id": 1})], headers={"message-id": "1"})
    how: dict[str, Any] = {"mode": "append", "dedupe_ms": "60000"}
    keys.land(**how)
    steps = keys.land(window=TimeWindow(0, 2**50), **how)
    assert [row["offset"] for row in keys.rows()] == [0]
    assert count_of(steps, "duplicates") == 2


@pytest.mark.parametrize(("mode", "partition_by"), [("append", ""), ("append", "timestamp"), ("upsert", "")])
def test_quarantined_messages_are_decoded_again_after_a_fix(keys: Keys, mode: str, partition_by: str) -> None:
    keys.create()
    how: dict[str, Any] = {"mode": mode, "partition_by": partition_by}
    keys.publish(
        [
            (b"a", {"id": 1, "total": 5}),
            (b"b", {"id": 2, "total": "12 EUR"}),
            (b"c", b"{"),
            (b"d", {"id": 4, "total": -1}),
        ]
    )
    keys.land(**how, expect='["total > 0"]')
    assert len(keys.rows("__quarantine")) == 3
    job = keys.job(make_requarantine, **how, expect="[]")
    step = job.step()
    job.close()
    assert (step.counts["landed"], step.counts["quarantined"]) == (1, 2)
    assert sorted(row["id"] for row in keys.rows()) == [1, 4]
    assert [row["offset"] for row in keys.rows("__quarantine")] == [1, 2]
    job = keys.job(make_requarantine, **how)
    assert job.step().counts["landed"] == 0
    job.close()
    keys.publish([(b"e", {"id": 5, "total": 1})])
    keys.land(**how)
    assert sorted(row["id"] for row in keys.rows()) == [1, 4, 5]
    assert len(keys.rows("__quarantine")) == 2


def test_a_dry_run_of_changes_shows_rows_and_counts_deletes_and_fields_without_a_column(
    server: Server, topic: str, tmp_path: Path
) -> None:
    millstream = CommandLine(server.kafka)
    assert millstream("topic", "create", topic).code == 0
    changes = [
        {"op": "c", "after": {"id": 1, "a;b": 2}, "source": {"lsn": 1}},
        {"op": "d", "before": {"id": 1}, "after": None, "source": {"lsn": 2}},
    ]
    producer = Producer({"bootstrap.servers": server.kafka, "log_level": 0})
    for value in (*map(json.dumps, changes), None):
        producer.produce(topic, value, key='{"id": 1}')
    assert producer.flush(WAIT_S) == 0
    flags = ("--format", "debezium", "--key", "id", "--order-by", "source.lsn", "--lake", str(tmp_path), "--dry-run")
    tried = millstream("pipeline", "run", "land", topic, *flags)
    assert tried.code == 0, tried.err
    *_, dropped, counted, ignored, row = tried.out.splitlines()
    assert dropped == "without a column: 1 field (a;b)"
    assert counted == "Of 3 messages it would land 2 (1 of them delete their key) and quarantine 0."
    assert ignored == "1 tombstone after a delete would be ignored."
    assert {"__source_lsn", "id"} < json.loads(row).keys()
    assert not any(name.startswith("=") for name in json.loads(row))
