"""Topics become tables: every message once, offset by offset, with a real Spark and a real broker."""

from __future__ import annotations

import errno
import json
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib import request

import deltalake
import duckdb
import polars
import pyarrow
import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic
from pyarrow import parquet

from millstream.core.errors import InvalidPipeline, InvalidSetting, UnknownTopic
from millstream.pipelines.jobs.job import JobKind, Step
from millstream.pipelines.jobs.land import job as land
from millstream.pipelines.jobs.land.backfill import make_requarantine
from millstream.pipelines.jobs.land.inference import SAMPLE_MAX, payload_fields
from millstream.pipelines.jobs.land.job import LandJob
from millstream.pipelines.jobs.land.task import LandTasks, Report
from millstream.pipelines.source.ranges import Range
from millstream_testing.command import CommandLine
from millstream_testing.landing import land_job, run, run_and_close
from millstream_testing.page import samples_of
from millstream_testing.server import Server
from millstream_testing.waiting import wait_until

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

LAKE_PAGE = Path(__file__).resolve().parents[2] / "docs" / "lake.md"
WAIT_S = 60.0
# An interrupted call into the JVM leaves the session unusable, and the first calls take long on a slow machine.
pytestmark = pytest.mark.timeout(900)

Row = tuple[int, int, bytes | None, bytes | None]


class LandingSetup:
    """A broker with topics, and a lake."""

    def __init__(self, spark: SparkSession, server: Server, lake: Path) -> None:
        self.spark = spark
        self.server = server
        self.lake = lake
        self.admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})

    def create(self, topic: str, partitions: int = 1, **config: str) -> str:
        settings = {key.replace("_", "."): value for key, value in config.items()}
        self.admin.create_topics([NewTopic(topic, partitions, 1, config=settings)])[topic].result(WAIT_S)
        return topic

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result(WAIT_S)

    def publish(self, topic: str, values: list[Any], **more: Any) -> list[Row]:
        """Publish, and return the position of each message."""
        reported: list[Row] = []
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0, "linger.ms": 20})

        def delivered(error: object, message: Any) -> None:
            assert error is None
            reported.append((message.partition(), message.offset(), message.key(), message.value()))

        for value in values:
            encoded = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            producer.produce(topic, encoded, on_delivery=delivered, **more)
            producer.poll(0)
        assert producer.flush(WAIT_S) == 0
        return sorted(reported)

    def job(self, make: JobKind = LandJob, /, **settings: str) -> Any:
        return land_job(self.spark, self.server.kafka, self.lake, settings, make)

    def land(self, **settings: str) -> list[Step]:
        return run_and_close(self.job(**settings))

    def rows(self, topic: str, ending: str = "") -> list[dict[str, Any]]:
        """A table as seen by Delta readers."""
        table = deltalake.DeltaTable(str(self.lake / (topic + ending))).to_pyarrow_table()
        return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))

    def landed(self, topic: str, ending: str = "") -> list[Row]:
        rows = self.rows(topic, ending)
        return sorted((row["partition"], row["offset"], row["key"], row["value"]) for row in rows)


def overwrite_first_batch(server: Server, topic_id: str) -> None:
    """Change a few bytes of the records at the start of partition 0."""
    first = min((server.data / "partitions" / topic_id / "0").glob("*.log"))
    with first.open("r+b") as file:
        file.seek(200)
        file.write(b"\xff\xff\xff")


@pytest.fixture
def setup(spark: SparkSession, server: Server, tmp_path: Path) -> LandingSetup:
    return LandingSetup(spark, server, tmp_path / "lake")


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"message %d" % number for number in range(first, first + count)]


def test_every_message_is_landed_once(setup: LandingSetup, topic: str) -> None:
    setup.create(topic, partitions=3)
    published = setup.publish(topic, numbered(1000), headers=[("region", b"eu"), ("none", None)])
    steps = setup.land(topics=topic, batch_max_messages="400")
    assert len(steps) >= 3
    assert sum(step.rows for step in steps) == 1000
    assert steps[-1].wait_s > 0
    assert setup.landed(topic) == published
    first = setup.rows(topic)[0]
    assert first["headers"] == [{"key": "region", "value": b"eu"}, {"key": "none", "value": None}]
    assert first["timestamp_type"] == 0
    assert first["timestamp"].year >= 2024
    more = setup.publish(topic, numbered(500, 1000), key=b"k")
    setup.land(topics=topic)
    assert setup.landed(topic) == sorted(published + more)
    assert setup.land(topics=topic)[0].rows == 0
    assert setup.landed(topic) == sorted(published + more)


def test_a_missing_topic_is_reported(setup: LandingSetup, topic: str) -> None:
    with pytest.raises(UnknownTopic, match=f"millstream topic create {topic}"):
        setup.land(topics=topic)
    with pytest.raises(InvalidSetting):
        setup.job(topics=topic, decode="json", schema="no schema at all")


def test_landing_continues_with_added_partitions(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    job = setup.job(topics=topic)
    published = setup.publish(topic, numbered(10))
    run(job)
    setup.admin.create_partitions([NewPartitions(topic, 3)])[topic].result(WAIT_S)
    for partition in range(3):
        published += setup.publish(topic, numbered(5), partition=partition)
    run(job)
    job.close()
    assert setup.landed(topic) == sorted(published)


def test_payloads_become_columns_that_grow(setup: LandingSetup, topic: str) -> None:
    setup.create(topic, partitions=2)
    job = setup.job(topics=topic, decode="json")
    setup.publish(topic, [{"id": number, "total": 1} for number in range(20)])
    run(job)
    ann = {"id": 20, "total": 2.5, "buyer": {"name": "Ann"}, "tags": ["a"], "key": "mine"}
    # The first value by partition and offset decides the type of a new column: that of `buyer.name` is Ann's.
    setup.publish(topic, [ann, {"id": 21, "buyer": {"name": "Bob", "age": 30}}, {"new": True}, None], partition=0)
    setup.publish(topic, [{"id": "x"}, b"no json", {"id": 22, "buyer": {"name": 5, "age": 1.0}}], partition=1)
    run(job)
    setup.publish(topic, [{"id": 23, "total": 4}])
    run(job)
    job.close()
    rows = {row["value"]: row for row in setup.rows(topic)}
    assert len(rows) == 26
    assert [rows[b'{"id": 7, "total": 1}'][name] for name in ("id", "total", "new")] == [7, 1, None]
    more = rows[b'{"id": 20, "total": 2.5, "buyer": {"name": "Ann"}, "tags": ["a"], "key": "mine"}']
    assert [more[name] for name in ("total", "tags", "payload_key")] == [2.5, ["a"], "mine"]
    assert rows[b'{"id": 21, "buyer": {"name": "Bob", "age": 30}}']["buyer"] == {"name": "Bob", "age": 30}
    assert rows[b'{"id": 22, "buyer": {"name": 5, "age": 1.0}}']["buyer"] == {"name": "5", "age": 1}
    assert rows[b'{"new": true}']["new"] is True
    assert rows[None]["id"] is None
    quarantined = {row["value"]: row["reason"] for row in setup.rows(topic, "__quarantine")}
    assert quarantined == {
        b'{"id": "x"}': 'id: "x" is not of type long',
        b"no json": "the payload is not JSON: Expecting value: line 1 column 1 (char 0)",
    }


def test_integer_columns_are_widened_for_fractions(setup: LandingSetup, topic: str) -> None:
    setup.create(topic, partitions=2)
    other = setup.create(f"{topic}-other")
    job = setup.job(pattern=f"{topic}.*", decode="json", batch_max_messages="50")
    published = setup.publish(topic, [{"n": n, "in": {"a": [n]}, "id": 2**60 + n} for n in range(120)])
    setup.publish(other, [{"n": 1}])
    run(job)
    fractions = [{"n": 0.5, "in": {"a": [1, 2.25]}, "new": 1}, {"id": 1.5}, {"n": 2**70}]
    published += setup.publish(topic, fractions, partition=0)
    setup.publish(other, [{"n": 2.0}])
    assert sum(step.counts["widened"] for step in run(job)) == 2
    published += setup.publish(topic, [{"n": 4, "id": 2.5}, {"n": 4.5}])
    assert run(job)[-1].counts["widened"] == 0
    assert [(row["n"], type(row["n"])) for row in setup.rows(other)] == [(1, int), (2, int)]
    # A table that cannot be rewritten delays no other.
    next(setup.lake.joinpath(other).rglob("*.parquet")).unlink()
    setup.publish(other, [{"n": 2.5}])
    published += setup.publish(topic, [{"n": 5}])
    run(job)
    job.close()
    (refused,) = setup.rows(other, "__quarantine")
    assert (
        refused["reason"]
        == "n: 2.5 is not of type long; n stays long: a file of the table is missing, or cannot be read"
    )
    rows = {(row["partition"], row["offset"]): row for row in setup.rows(topic)}
    for partition, offset, _key, value in published:
        document = json.loads(value or b"")
        row = rows.pop((partition, offset), None)
        assert (row is None) == isinstance(document.get("id"), float)
        assert row is None or {name: row[name] for name in document} == document
    assert not rows
    schema = pyarrow.schema(deltalake.DeltaTable(str(setup.lake / topic)).schema().to_arrow())
    kinds = {field.name: str(field.type) for field in schema}
    assert [kinds[name] for name in ("n", "id", "in")] == ["double", "int64", "struct<a: list<element: double>>"]
    reported = re.compile(
        r"id: [12]\.5 is not of type long; id stays long: it has \d+, which doubles cannot hold exactly"
    )
    assert [bool(reported.fullmatch(row["reason"])) for row in setup.rows(topic, "__quarantine")] == [True, True]


def test_the_division_into_batches_changes_nothing(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    large = 2**53 + 1
    sample: list[Any] = [{"n": number % 7} for number in range(SAMPLE_MAX)]
    later: list[Any] = [
        *({"id": large + number} for number in range(20)),
        *({"n": 1.5, "id": 1}, {"id": 2.5}, {"id": "x", "new": large}, {"new": 0.5}, {"n": large - 1}, {"n": 3.0}),
        *({"huge": 2**70 + number} for number in range(5)),
        {"huge": 1.5},
    ]
    setup.publish(topic, [*sample, *later])
    outcomes = []
    for number, batch_max in enumerate(("1000000", "1017", "501")):
        setup.lake = setup.lake.with_name(f"lake-{number}")
        job = setup.job(topics=topic, decode="json", batch_max_messages=batch_max)
        while job.step().lag:
            pass
        job.close()
        schema = pyarrow.schema(deltalake.DeltaTable(str(setup.lake / topic)).schema().to_arrow())
        columns = sorted(payload_fields(schema).names)
        rows = [[row["offset"], *(row[name] for name in columns)] for row in setup.rows(topic)]
        refused = [row["offset"] - SAMPLE_MAX for row in setup.rows(topic, "__quarantine")]
        outcomes.append((columns, rows, refused))
    assert outcomes[0] == outcomes[1] == outcomes[2]
    columns, rows, refused = outcomes[0]
    assert refused == [21, 22, 31]
    landed = {row[0] - SAMPLE_MAX: dict(zip(columns, row[1:], strict=True)) for row in rows}
    assert [landed[number]["id"] for number in range(20)] == [large + number for number in range(20)]
    assert [int(landed[26 + number]["huge"]) for number in range(5)] == [2**70 + number for number in range(5)]
    assert (landed[20]["n"], landed[23]["new"], landed[24]["n"]) == (1.5, 0.5, large - 1)


def test_a_changed_schema_widens_the_table(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    setup.publish(topic, [{"total": 1, "buyer": {"age": 2}}])
    settings = {"topics": topic, "decode": "json", "format": "parquet"}
    setup.land(schema="total long, buyer struct<age long>", **settings)
    setup.publish(topic, [{"total": 1.5}])
    # A table that is too large is not widened, and that is reported.
    wide = "total double, buyer struct<age double, name string>"
    setup.land(schema=wide, widen_max_bytes="10", **settings)
    assert setup.land(schema=wide, **settings)[0].counts["widened"] == 2
    setup.publish(topic, [{"total": 2.5, "buyer": {"age": 0.5, "name": "Ann"}}])
    setup.land(schema=wide, **settings)
    (refused,) = [
        row for path in setup.lake.glob("*__quarantine/*/*/*") for row in parquet.read_table(path).to_pylist()
    ]
    assert refused["reason"].startswith("total: 1.5 is not of type long; total stays long: its table has")
    rows = [row for path in setup.lake.glob(f"{topic}/*/*/*") for row in parquet.ParquetFile(path).read().to_pylist()]
    assert sorted((row["offset"], row["total"], row["buyer"]["age"]) for row in rows) == [(0, 1.0, 2.0), (2, 2.5, 0.5)]
    assert {type(row["total"]) for row in rows} == {float}


def test_payloads_become_the_given_columns(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    published = setup.publish(
        topic,
        [{"id": 1, "at": "2026-01-02T03:04:05Z", "more": 1}, {"id": 2, "at": "soon"}, {"offset": 9}, {"id": 3.5}],
    )
    schema = "id int, at timestamp, offset long, buyer struct<name string>"
    setup.land(topics=topic, decode="json", schema=schema)
    rows = setup.rows(topic)
    assert [(row["offset"], row["id"], row["payload_offset"]) for row in rows] == [(0, 1, None), (2, None, 9)]
    assert rows[0]["at"].isoformat() == "2026-01-02T03:04:05+00:00"
    assert "more" not in rows[0]
    assert [row["reason"] for row in setup.rows(topic, "__quarantine")] == [
        'at: "soon" is not of type timestamp',
        "id: 3.5 is not of type long",
    ]
    assert sorted(setup.landed(topic) + setup.landed(topic, "__quarantine")) == published


def test_every_topic_of_a_pattern_is_landed(setup: LandingSetup, topic: str) -> None:
    job = setup.job(pattern=f"{topic}-.*")
    assert run(job)[0].rows == 0
    published = {}
    for number in range(12):
        name = setup.create(f"{topic}-{number}")
        published[name] = setup.publish(name, numbered(5 * number))
    setup.create(f"other-{topic}")
    step = run(job)[-1]
    job.close()
    assert step.rows == sum(map(len, published.values()))
    assert {name: setup.landed(name) for name in published} == published
    assert {path.name for path in setup.lake.iterdir()} == set(published)


def test_messages_before_and_after_a_topic_is_recreated_are_landed(setup: LandingSetup, topic: str) -> None:
    job = setup.job(topics=topic)
    setup.create(topic)
    first = setup.publish(topic, numbered(30))
    run(job)
    setup.delete(topic)
    assert run(job)[-1].rows == 0
    setup.create(topic)
    second = setup.publish(topic, numbered(20, 100))
    assert run(job)[0].counts["recreated"] == 1
    assert run(job)[0].counts["recreated"] == 0
    job.close()
    assert setup.landed(topic) == sorted(first + second)
    ids = deltalake.DeltaTable(str(setup.lake / topic)).to_pyarrow_table(columns=["topic_id"]).column(0)
    assert sorted(count["counts"] for count in ids.value_counts().to_pylist()) == [20, 30]


def test_a_topic_recreated_while_it_is_read_is_not_mistaken_for_the_old_one(
    setup: LandingSetup, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.create(topic)
    setup.publish(topic, numbered(30))
    job = setup.job(topics=topic)
    plan = job._share

    def change_then_share(batches: Any) -> None:
        plan(batches)
        setup.delete(topic)
        setup.create(topic)
        setup.publish(topic, numbered(50, 100))

    monkeypatch.setattr(job, "_share", change_then_share)
    assert job.step().rows == 0
    monkeypatch.undo()
    run(job)
    job.close()
    assert [value for _, _, _, value in setup.landed(topic)] == numbered(50, 100)


def test_of_two_concurrent_runs_one_is_refused(
    setup: LandingSetup, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.create(topic, partitions=2)
    published = setup.publish(topic, numbered(100))
    late, early = setup.job(topics=topic), setup.job(topics=topic)
    read = late._run

    def read_then_overtake(batches: Any) -> None:
        read(batches)
        published.extend(setup.publish(topic, numbered(10, 100)))
        run(early)

    monkeypatch.setattr(late, "_run", read_then_overtake)
    assert late.step().rows == 0
    monkeypatch.undo()
    assert setup.landed(topic) == sorted(published)
    published += setup.publish(topic, numbered(10, 200))
    assert run(late)[-1].rows == 10
    for job in (late, early):
        job.close()
    assert setup.landed(topic) == sorted(published)


def test_files_of_a_failed_batch_are_deleted(setup: LandingSetup, topic: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lake = setup.lake

    class Failing(LandTasks):
        """Of two tasks the second fails when the first has written a file."""

        def _land(self, topic: str, topic_ranges: Iterable[Range]) -> Report:
            ranges = list(topic_ranges)
            deadline = time.monotonic() + WAIT_S
            while ranges[0].partition and not any(lake.rglob("*.parquet")) and time.monotonic() < deadline:
                time.sleep(0.01)
            if ranges[0].partition:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super()._land(topic, ranges)

    setup.create(topic, partitions=2)
    published = [row for number in (0, 1) for row in setup.publish(topic, numbered(20), partition=number)]
    job = setup.job(topics=topic)
    with monkeypatch.context() as patched:
        patched.setattr(land, "LandTasks", Failing)
        patched.setattr(
            job,
            "_tasks",
            lambda batches: [[offset_range] for batch in batches for offset_range in batch.topic_ranges()],
        )
        with pytest.raises(Exception, match="No space left"):
            job.step()
    assert not list(lake.rglob("*.parquet"))
    run(job)
    job.close()
    assert setup.landed(topic) == sorted(published)
    assert len(list(lake.rglob("*.parquet"))) == len(deltalake.DeltaTable(str(lake / topic)).file_uris())


def test_landing_can_start_at_the_latest_offset(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    setup.publish(topic, numbered(10))
    assert setup.land(topics=topic, **{"from": "latest"})[-1].rows == 0
    published = setup.publish(topic, numbered(10, 10))
    setup.land(topics=topic, **{"from": "latest"})
    assert setup.landed(topic) == published


def test_a_topic_created_between_two_runs_starts_with_its_first_message(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    setup.publish(topic, numbered(10))
    first = setup.job(pattern=f"{topic}.*", **{"from": "latest"})
    run(first)
    first.close()
    published = setup.publish(setup.create(f"{topic}-new"), numbered(10))
    again = LandJob(first._pipeline, first._context)
    run(again)
    again.close()
    assert (setup.landed(topic), setup.landed(f"{topic}-new")) == ([], published)


def test_messages_deleted_by_retention_before_landing_are_counted(
    setup: LandingSetup, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.create(topic)
    job = setup.job(topics=topic)

    def cut(offset: int) -> None:
        setup.admin.delete_records([TopicPartition(topic, 0, offset)])[TopicPartition(topic, 0)].result(WAIT_S)

    published = setup.publish(topic, numbered(10))
    run(job)
    published += setup.publish(topic, numbered(20, 10))
    cut(25)
    step = run(job)[-1]
    assert step.counts["lost"] == 15
    assert setup.landed(topic) == published[:10] + published[25:]
    job.close()
    # Retention may also delete after the tasks were planned.
    published += setup.publish(topic, numbered(10, 30))
    job = setup.job(topics=topic)
    share = job._share

    def share_and_cut(batches: Any) -> None:
        share(batches)
        cut(35)

    monkeypatch.setattr(job, "_share", share_and_cut)
    (step,) = run(job)
    job.close()
    assert (step.rows, step.counts["lost"]) == (5, 5)
    assert setup.landed(topic) == published[:10] + published[25:30] + published[35:]


def test_offsets_that_the_disk_lost_stop_no_topic(
    spark: SparkSession, start_server: Callable[..., Server], tmp_path: Path
) -> None:
    """Damage to what was landed long ago has no effect; damage to what was not is one row of the quarantine."""
    server = start_server()
    setup = LandingSetup(spark, server, tmp_path / "lake")
    topics = [setup.create(name) for name in ("landed", "late", "whole")]
    before = {name: setup.publish(name, numbered(50)) for name in topics}
    setup.land(topics="landed,whole")
    millstream = CommandLine(server.kafka)
    ids = {name: millstream("topic", "describe", name, "--json").document["id"] for name in topics}
    server.stop()
    for name in ("landed", "late"):
        overwrite_first_batch(server, ids[name])
    server.start()
    after = {name: setup.publish(name, numbered(10, 50)) for name in topics}
    setup.land(topics=",".join(topics))
    for name in ("landed", "whole"):
        assert setup.landed(name) == before[name] + after[name]
    assert setup.landed("late") == after["late"]
    (lost,) = setup.rows("late", "__quarantine")
    assert (lost["offset"], lost["value"]) == (0, None)
    assert "0 to 49" in lost["reason"]


def test_a_message_deleted_by_retention_hides_no_other_with_its_id(
    setup: LandingSetup, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.create(topic)
    setup.publish(topic, [b"first"], headers=[("message-id", b"a")])
    offsets = setup.publish(topic, [b"again"], headers=[("message-id", b"a")])
    job = setup.job(topics=topic, dedupe_ms="3600000")
    write = job._run

    def cut_and_write(batches: Any) -> None:
        setup.admin.delete_records([TopicPartition(topic, 0, 1)])[TopicPartition(topic, 0)].result(WAIT_S)
        write(batches)

    monkeypatch.setattr(job, "_run", cut_and_write)
    first, second = run(job)
    job.close()
    assert (first.rows, second.rows, second.counts["duplicates"]) == (0, 1, 0)
    assert setup.landed(topic) == offsets


def test_only_committed_messages_are_landed(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    # On a slow machine Spark takes longer than the default transaction timeout of a minute.
    settings = {"transactional.id": topic, "transaction.timeout.ms": 600_000, "log_level": 0}
    producer = Producer({"bootstrap.servers": setup.server.kafka, **settings})
    producer.init_transactions(WAIT_S)
    for number, ends in enumerate((producer.commit_transaction, producer.abort_transaction) * 3):
        producer.begin_transaction()
        producer.produce(topic, b"%d" % number)
        ends(WAIT_S)
    producer.begin_transaction()
    producer.produce(topic, b"open")
    producer.flush(WAIT_S)
    setup.land(topics=topic)
    assert [value for _, _, _, value in setup.landed(topic)] == [b"0", b"2", b"4"]
    producer.commit_transaction(WAIT_S)
    # The commit is decided when this is reported, and appears in the partition a moment later.
    wait_until(lambda: sum(step.rows for step in setup.land(topics=topic)))
    assert [value for _, _, _, value in setup.landed(topic)] == [b"0", b"2", b"4", b"open"]


def test_messages_with_an_already_landed_id_are_skipped(setup: LandingSetup, topic: str) -> None:
    setup.create(topic, partitions=2)

    def publish(name: str, partition: int) -> Row:
        headers = [("message-id", name.encode()), ("message-id", b"second")]
        return setup.publish(topic, [name.encode()], headers=headers, partition=partition)[0]

    offsets = [publish("a", 0), publish("b", 1)]
    publish("a", 0)
    publish("a", 1)
    offsets += setup.publish(topic, [b"without an id"] * 2, partition=0)
    job = setup.job(topics=topic, dedupe_ms="3600000")
    assert run(job)[-1].counts["duplicates"] == 2
    assert setup.landed(topic) == sorted(offsets)
    publish("b", 0)
    offsets.append(publish("c", 0))
    run(job)
    job.close()
    publish("c", 1)
    offsets.append(publish("d", 1))
    # Another run finds the ids in the table.
    assert setup.land(topics=topic, dedupe_ms="3600000")[-1].counts["duplicates"] == 1
    assert setup.landed(topic) == sorted(offsets)
    offsets.append(publish("d", 0))
    setup.land(topics=topic)
    assert setup.landed(topic) == sorted(offsets)


def test_small_files_of_past_hours_are_compacted(
    setup: LandingSetup, topic: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    setup.create(topic)
    job = setup.job(topics=topic)
    write, moment = job._reports, datetime.now(UTC) - timedelta(hours=1)
    monkeypatch.setattr(job, "_reports", lambda batches, landed: write(batches, moment))
    published = []
    for number in range(4):
        published += setup.publish(topic, numbered(10, 10 * number))
        job._compacted_at.clear()
        run(job)
    job.close()
    assert setup.landed(topic) == published
    assert len(deltalake.DeltaTable(str(setup.lake / topic)).file_uris()) == 1


def test_tables_can_be_plain_parquet(setup: LandingSetup, topic: str) -> None:
    setup.create(topic, partitions=2)
    published = setup.publish(topic, [{"id": number} for number in range(50)] + [b"no json"])
    setup.land(topics=topic, format="parquet", decode="json", batch_max_messages="20")
    more = setup.publish(topic, [{"id": 50, "more": True}])
    setup.land(topics=topic, format="parquet", decode="json")
    rows = [row for path in setup.lake.glob(f"{topic}*/*/*/*.parquet") for row in parquet.read_table(path).to_pylist()]
    assert sorted((row["partition"], row["offset"], row["key"], row["value"]) for row in rows) == sorted(
        published + more
    )
    assert [row["id"] for row in rows if row.get("more")] == [50]
    assert [row["value"] for row in rows if row.get("reason")] == [b"no json"]
    again = setup.job(make_requarantine, topics=topic, format="parquet", decode="json")
    with pytest.raises(InvalidPipeline, match="this needs format=delta"):
        again.step()
    again.close()


def test_tables_can_be_partitioned_by_event_time(setup: LandingSetup, topic: str) -> None:
    setup.create(topic, partitions=2)
    settings = {"topics": topic, "decode": "json", "partition_by": "day(created_at)"}
    days = ["2026-11-14T10:00:00Z", "2026-11-15T23:59:59.999Z", "2026-11-16T00:00:00+02:00", "2026-11-16T12:00:00"]
    published = setup.publish(topic, [{"n": number, "created_at": days[number % 4]} for number in range(400)])
    setup.land(**settings, batch_max_messages="150")
    assert setup.landed(topic) == published
    found_days = {row["n"]: str(row["event_day"]) for row in setup.rows(topic)}
    assert [found_days[number] for number in range(4)] == ["2026-11-14", "2026-11-15", "2026-11-15", "2026-11-16"]
    # Late messages, one that widens a column, and some without a time.
    late = setup.publish(topic, [{"n": 0.5, "created_at": "2024-02-29T00:00:00Z"}])
    setup.publish(topic, [{"n": 1}, {"n": 2, "created_at": "soon"}, {"n": 3, "created_at": 17}, None])
    # A batch ends before the message that widens a column, so there may be two.
    counts = sum((Counter(step.counts) for step in setup.land(**settings)), Counter[str]())
    assert (counts["quarantined"], counts["quarantined.no-time"], counts["widened"]) == (4, 4, 1)
    assert setup.landed(topic) == sorted(published + late)
    assert {row["reason"].partition(",")[0] for row in setup.rows(topic, "__quarantine")} == {
        "created_at is missing or null",
        'created_at: "soon" is not a time',
        'created_at: "17" is not a time',
    }
    assert (setup.lake / topic / "event_day=2024-02-29").is_dir()
    table = deltalake.DeltaTable(str(setup.lake / topic))
    files = setup.spark.read.option("basePath", table.table_uri).parquet(*table.file_uris())
    assert files.where("event_day = date '2026-11-15'").count() == 200
    with pytest.raises(InvalidSetting, match=r"is partitioned by day\(created_at\), not by hour\(created_at\)"):
        setup.land(**{**settings, "partition_by": "hour(created_at)"})
    with pytest.raises(InvalidSetting, match="not by the hour of landing"):
        setup.land(topics=topic, decode="json")


@pytest.mark.parametrize("source", ["environment", "pipeline"])
def test_tables_can_be_in_an_object_store(
    setup: LandingSetup, topic: str, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    moto = pytest.importorskip("moto.server")
    store = moto.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    store.start()
    try:
        host, port = store.get_host_and_port()
        options = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "id",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_REGION": "us-east-1",
        }
        own = {"lake_options": json.dumps(options)} if source == "pipeline" else {}
        for name, value in options.items():
            if own:
                monkeypatch.delenv(name, raising=False)
            else:
                monkeypatch.setenv(name, value)
        request.urlopen(request.Request(f"http://{host}:{port}/lake", method="PUT"), timeout=WAIT_S).close()
        setup.create(topic, partitions=2)
        published = setup.publish(topic, numbered(100))
        setup.land(topics=topic, lake="s3://lake/tables", batch_max_messages="60", **own)
        table = deltalake.DeltaTable(f"s3://lake/tables/{topic}", storage_options={**options, "allow_http": "true"})
        rows = table.to_pyarrow_table(columns=["partition", "offset", "key", "value"]).to_pylist()
        assert sorted(tuple(row.values()) for row in rows) == published
    finally:
        store.stop()


def test_common_readers_read_the_table(setup: LandingSetup, topic: str) -> None:
    setup.create(topic)
    setup.publish(topic, [{"id": number, "buyer": {"name": f"n{number}"}} for number in range(10)])
    setup.land(topics=topic, decode="json")
    url = str(setup.lake / topic)
    assert polars.read_delta(url).select("id").sum().item() == 45
    landed = deltalake.DeltaTable(url).to_pyarrow_table()
    assert landed.to_pandas()["id"].sum() == 45
    with duckdb.connect() as database:
        database.register("landed", landed)
        assert database.execute("select sum(id), max(buyer.name) from landed").fetchone() == (45, "n9")
    (recipe,) = (sample for sample in samples_of(LAKE_PAGE) if sample.use == "spark")
    made: dict[str, Any] = {}
    exec(recipe.text.replace("/lake/orders", url), made)
    assert [made[name].selectExpr("sum(id)").collect()[0][0] for name in ("files", "small")] == [45, 45]
