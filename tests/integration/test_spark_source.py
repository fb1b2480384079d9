"""`format("millstream")` in a real Spark: reads, writes, restarts, failures, and errors."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from millstream.core.errors import ProducerFenced
from millstream.pipelines.source.options import write_options
from millstream.pipelines.source.session import use_fitting_java
from millstream.pipelines.source.writer import TopicWriter
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.group_offsets import committed_offsets
from millstream.spark.bulk import records
from millstream_testing.page import samples_of
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

WAIT_S = 60.0
# An interrupted call into the JVM leaves the session unusable, and the first calls take long on a slow machine.
pytestmark = pytest.mark.timeout(900)


class Bench:
    """One topic on the broker, read and written by Spark and by a plain client."""

    def __init__(self, spark: SparkSession, server: Server, topic: str, folder: Path) -> None:
        self.spark = spark
        self.server = server
        self.topic = topic
        self.folder = folder

    def create(self, name: str | None = None, partitions: int = 1, **config: str) -> str:
        name = name or self.topic
        admin = AdminClient({"bootstrap.servers": self.server.kafka, "log_level": 0})
        settings = {key.replace("_", "."): value for key, value in config.items()}
        admin.create_topics([NewTopic(name, partitions, 1, config=settings)])[name].result(WAIT_S)
        return name

    def produce(self, rows: list[dict[str, Any]], name: str | None = None) -> None:
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0})
        for row in rows:
            producer.produce(name or self.topic, **row)
        assert producer.flush(WAIT_S) == 0

    def read(self, name: str | None = None, **options: str) -> DataFrame:
        reader = self.spark.read.format("millstream").option("kafka.bootstrap.servers", self.server.kafka)
        return reader.options(**{"subscribe": name or self.topic, **options}).load()

    def write(self, frame: DataFrame, **options: str) -> None:
        writer = frame.write.format("millstream").option("kafka.bootstrap.servers", self.server.kafka)
        writer.options(**{"topic": self.topic, **options}).mode("append").save()

    def stream(self, name: str, **options: str) -> DataFrame:
        reader = self.spark.readStream.format("millstream").option("kafka.bootstrap.servers", self.server.kafka)
        return reader.options(**{"subscribe": name, "startingOffsets": "earliest", **options}).load()

    def copy(self, frame: DataFrame, checkpoint: str = "checkpoint", **options: str) -> StreamingQuery:
        """Write the current messages of a stream to the topic."""
        writer = frame.writeStream.format("millstream").option("kafka.bootstrap.servers", self.server.kafka)
        writer = writer.options(topic=self.topic, checkpointLocation=str(self.folder / checkpoint), **options)
        query = writer.trigger(availableNow=True).start()
        query.awaitTermination()
        return query

    def values(self, name: str | None = None) -> list[bytes]:
        rows = self.read(name).orderBy("partition", "offset").collect()
        return [bytes(row.value) for row in rows]


@pytest.fixture
def bench(spark: SparkSession, server: Server, topic: str, tmp_path: Path) -> Bench:
    return Bench(spark, server, topic, tmp_path)


def numbered(count: int) -> list[dict[str, Any]]:
    return [{"value": b"%d" % number, "key": b"k%d" % (number % 5)} for number in range(count)]


def test_a_row_has_every_field_of_its_record(bench: Bench) -> None:
    bench.create(partitions=2)
    headers: list[tuple[str, bytes | None]] = [("region", b"eu"), ("empty", None)]
    bench.produce(
        [
            {"key": b"k", "value": b"v", "headers": headers, "timestamp": 1_700_000_000_123, "partition": 0},
            {"key": None, "value": None, "partition": 1, "timestamp": 5},
        ]
    )
    first, second = bench.read(includeHeaders="true").orderBy("partition").collect()
    assert (bytes(first.key), bytes(first.value), first.topic, first.partition, first.offset) == (
        b"k",
        b"v",
        bench.topic,
        0,
        0,
    )
    assert first.timestamp.isoformat(timespec="milliseconds") == "2023-11-14T22:13:20.123"
    assert [(header.key, header.value and bytes(header.value)) for header in first.headers] == headers
    assert (second.key, second.value, second.partition, second.timestampType, second.headers) == (
        None,
        None,
        1,
        0,
        None,
    )


def test_columns_formats_filters_positions_and_tasks(bench: Bench) -> None:
    bench.create()
    bench.produce(
        [
            {"value": json.dumps({"id": number, "total": number / 2}).encode(), "timestamp": 1000 + number}
            for number in range(100)
        ]
    )
    assert bench.read(columns="offset,value", valueFormat="string").dtypes == [
        ("offset", "bigint"),
        ("value", "string"),
    ]
    typed = (
        bench.spark.read.format("millstream")
        .options(**{"kafka.bootstrap.servers": bench.server.kafka, "subscribe": bench.topic, "valueFormat": "json"})
        .schema("id long, total double, offset long")
        .load()
    )
    assert [tuple(row) for row in typed.where("id >= 98").orderBy("offset").collect()] == [
        (98, 49.0, 98),
        (99, 49.5, 99),
    ]
    assert bench.read(filter="payload.total > 40 AND payload.id < 90").count() == 9
    assert bench.read(startingTimestamp="1090").count() == 10
    assert bench.read(startingOffsets=json.dumps({bench.topic: {"0": 95}})).count() == 5
    ends = json.dumps({bench.topic: {"0": 3}})
    assert bench.read(endingOffsets=ends, minPartitions="3").rdd.getNumPartitions() == 3
    assert bench.read(mode="ranges", maxRecordsPerPartition="40").count() == 3


def test_conditions_on_coordinates_are_pushed_down(bench: Bench) -> None:
    bench.create(partitions=3)
    bench.produce([{"value": b"%d" % n, "partition": n % 3, "timestamp": 1000 * (n + 1)} for n in range(90)])
    few = bench.read().where("partition = 1 and offset >= 10 and offset < 12")
    assert sorted(bytes(row.value) for row in few.collect()) == [b"31", b"34"]
    assert few.rdd.getNumPartitions() == 1
    assert bench.read().where("timestamp >= '1970-01-01 00:01:21'").count() == 10
    assert bench.read().where(f"topic = '{bench.topic}' and partition in (0, 2) and value is not null").count() == 60
    assert bench.read().where("topic = 'another'").count() == 0


def test_ranges_are_fetched_without_records_in_the_jvm(bench: Bench) -> None:
    bench.create(partitions=2)
    bench.produce([{"value": b"%d" % n, "partition": n % 2} for n in range(90)])
    brokers = bench.server.kafka

    def added(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in records(batches, brokers, columns=("value",), options={"valueFormat": "string"}):
            numbers = batch.column("value").cast(pa.int64())
            yield pa.RecordBatch.from_pydict({"rows": [len(numbers)], "total": [sum(numbers.to_pylist())]})

    ranges = bench.read(mode="ranges", maxRecordsPerPartition="20")
    rows = ranges.mapInArrow(added, "rows long, total long").collect()
    assert (len(rows), sum(row.rows for row in rows), sum(row.total for row in rows)) == (6, 90, sum(range(90)))


def test_an_empty_topic_has_no_rows(bench: Bench) -> None:
    bench.create(partitions=3)
    assert bench.read().count() == 0


@pytest.mark.parametrize(
    ("options", "output"),
    [
        ({"subscribe": "nobody-made-this"}, "topic 'nobody-made-this' does not exist"),
        (
            {"kafka.bootstrap.servers": "127.0.0.1:1"},
            "check that it is running and that the option kafka.bootstrap.servers is right",
        ),
        ({"startingOffset": "earliest"}, "did you mean 'startingOffsets'"),
        ({"kafka.security.protocol": "SASL_SSL"}, "there are no credentials"),
    ],
)
def test_an_invalid_read_is_refused_at_once(bench: Bench, options: dict[str, str], output: str) -> None:
    from pyspark.errors import PySparkException

    bench.create()
    with pytest.raises(PySparkException, match=output):
        bench.read(**options).count()


def test_an_incompatible_schema_is_refused_at_once(bench: Bench) -> None:
    from pyspark.errors import PySparkException

    reader = bench.spark.read.format("millstream").options(subscribe=bench.topic)
    with pytest.raises(PySparkException, match="in a record it is bigint"):
        reader.schema("offset string").load().count()
    frame = bench.spark.range(1)
    for columns, output in [("id as vale", "did you mean 'value'"), ("struct(id) as value", "make text of it first")]:
        with pytest.raises(PySparkException, match=output):
            bench.write(frame.selectExpr(columns))


def test_offsets_deleted_by_retention_are_reported_exactly(bench: Bench) -> None:
    from pyspark.errors import PySparkException

    bench.create()
    bench.produce(numbered(50))
    admin = AdminClient({"bootstrap.servers": bench.server.kafka, "log_level": 0})
    (deleted,) = admin.delete_records([TopicPartition(bench.topic, 0, 20)]).values()
    deleted.result(WAIT_S)
    start = json.dumps({bench.topic: {"0": 5}})
    with pytest.raises(PySparkException, match=f"{bench.topic}-0: offsets 5 to 19"):
        bench.read(startingOffsets=start).count()
    assert bench.read(startingOffsets=start, failOnDataLoss="false").count() == 30


def test_offsets_beyond_the_end_are_refused_even_if_other_partitions_have_rows(bench: Bench) -> None:
    from pyspark.errors import PySparkException

    bench.create(partitions=2)
    bench.produce([{"value": b"first", "partition": 0}, {"value": b"second", "partition": 1}])
    beyond = json.dumps({bench.topic: {"0": 0, "1": 50}})
    for option in ("startingOffsets", "endingOffsets"):
        with pytest.raises(PySparkException, match=f"option {option} names .*{bench.topic}-1 ends at 1, not 50"):
            bench.read(**{option: beyond}).count()
    assert bench.read(startingOffsets=beyond, failOnDataLoss="false").count() == 1
    assert bench.read(endingOffsets=beyond, failOnDataLoss="false").count() == 1
    at_the_end = json.dumps({bench.topic: {"0": 0, "1": 1}})
    assert bench.read(startingOffsets=at_the_end).count() == 1
    query = bench.stream(bench.topic, startingOffsets=beyond).writeStream.format("noop").start()
    with pytest.raises(PySparkException, match=f"{bench.topic}-1 ends at 1, not 50"):
        query.awaitTermination(int(WAIT_S))


@pytest.mark.trial
def test_a_session_keeps_what_spark_submit_was_given(tmp_path: Path) -> None:
    import pyspark

    script = tmp_path / "job.py"
    script.write_text(
        "from millstream.spark.session import session\n"
        "spark = session(settings={'spark.sql.shuffle.partitions': '5'})\n"
        "conf = spark.sparkContext.getConf()\n"
        "arrow = spark.conf.get('spark.sql.execution.arrow.pyspark.enabled')\n"
        "print(conf.get('spark.master'), conf.get('spark.app.name'), arrow,\n"
        "      spark.conf.get('spark.sql.shuffle.partitions'), conf.get('spark.sql.python.filterPushdown.enabled'))\n"
        "spark.conf.set('spark.sql.python.filterPushdown.enabled', 'false')\n"
        "print(session('again').conf.get('spark.sql.python.filterPushdown.enabled'))\n"
    )
    settings = ["spark.sql.execution.arrow.pyspark.enabled=false", "spark.sql.shuffle.partitions=7"]
    ran = subprocess.run(
        [
            str(Path(pyspark.__file__).parent / "bin" / "spark-submit"),
            *("--master", "local[3]", "--name", "nightly"),
            *(word for setting in settings for word in ("--conf", setting)),
            str(script),
        ],
        env={**os.environ, "JAVA_HOME": use_fitting_java({**os.environ}), "PYSPARK_PYTHON": sys.executable},
        capture_output=True,
        text=True,
        timeout=WAIT_S * 5,
        check=False,
    )
    assert ran.stdout.split("\n")[:2] == ["local[3] nightly false 5 true", "false"], ran.stderr


@pytest.mark.trial
@pytest.mark.parametrize("command", ["python", "spark-submit"])
def test_the_format_is_found_by_the_documented_remedy(tmp_path: Path, command: str) -> None:
    """Spark starts `python3` from the PATH, which here does not have Millstream."""
    import pyspark

    page = Path(__file__).parents[2] / "docs" / "spark.md"
    (sample,) = (sample.text for sample in samples_of(page) if sample.text.startswith("export PYSPARK_PYTHON="))
    remedy = sample.replace("$HOME/millstream-env/bin/python", sys.executable)
    (tmp_path / "job.py").write_text(
        "from pyspark.sql import SparkSession\n"
        "spark = SparkSession.builder.master('local[1]').config('spark.ui.enabled', 'false').getOrCreate()\n"
        "print(spark.read.format('millstream').option('subscribe', 'x').load().columns[:2])\n"
    )
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "python3").symlink_to(Path(sys.base_prefix, "bin", "python3"))
    full = {"python": sys.executable, "spark-submit": f"{Path(pyspark.__file__).parent}/bin/spark-submit"}[command]
    environment = {name: text for name, text in os.environ.items() if not name.startswith("PYSPARK_")}
    environment["JAVA_HOME"] = use_fitting_java({**os.environ})
    environment["PATH"] = f"{commands}:{environment['PATH']}"

    def run(script: str) -> str:
        words = ["bash", "-c", f"{script}\n{full} job.py 2>&1"]
        return subprocess.run(
            words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=WAIT_S * 5, check=False
        ).stdout

    assert "['key', 'value']" in run(remedy)
    (error,) = re.findall(r"`(\[DATA_SOURCE_NOT_FOUND\] [^`]*)`", page.read_text(encoding="utf-8"))
    if command == "python":
        # The driver has Millstream, and the process that Spark starts does not.
        assert error in run("")


async def test_a_stream_resumes_and_sees_new_partitions(bench: Bench) -> None:
    source = bench.create(f"{bench.topic}-source")
    bench.create()
    bench.produce(numbered(30), source)
    stream = bench.stream(source, maxOffsetsPerTrigger="20", groupId=f"{bench.topic}-group")
    query = bench.copy(stream.select("key", "value"))
    assert [progress.numInputRows for progress in query.recentProgress if progress.numInputRows] == [20, 10]
    admin = AdminClient({"bootstrap.servers": bench.server.kafka, "log_level": 0})
    admin.create_partitions([NewPartitions(source, 2)])[source].result(WAIT_S)
    bench.produce([{"value": b"new", "partition": 1}], source)
    bench.copy(stream.select("key", "value"))
    assert sorted(bench.values()) == sorted([*(b"%d" % number for number in range(30)), b"new"])
    async with Client.connect(bench.server.kafka) as client:
        committed = await committed_offsets(client, f"{bench.topic}-group")
    assert {(where.partition, offset) for where, offset in committed.items()} == {(0, 30), (1, 1)}


def test_keys_map_to_the_partitions_of_kafka_clients_and_headers_arrive(bench: Bench) -> None:
    bench.create(partitions=5)
    frame = bench.spark.range(200).selectExpr(
        "concat('key-', id) as key",
        "cast(id as string) as value",
        "array(struct('n' as key, cast('1' as binary) as value)) as headers",
    )
    bench.write(frame, compression="zstd")
    other = bench.create(f"{bench.topic}-other", partitions=5)
    producer = Producer({"bootstrap.servers": bench.server.kafka, "log_level": 0, "partitioner": "murmur2_random"})
    for number in range(200):
        producer.produce(other, b"%d" % number, b"key-%d" % number)
    assert producer.flush(WAIT_S) == 0
    ours = {(row.partition, bytes(row.value)) for row in bench.read().collect()}
    assert ours == {(row.partition, bytes(row.value)) for row in bench.read(other).collect()}
    consumer = Consumer({"bootstrap.servers": bench.server.kafka, "group.id": "g", "log_level": 0})
    consumer.assign([TopicPartition(bench.topic, 0, 0)])
    message = consumer.poll(WAIT_S)
    assert message is not None
    assert message.headers() == [("n", b"1")]
    consumer.close()


def test_rows_may_name_topic_and_partition(bench: Bench) -> None:
    from pyspark.errors import PySparkException

    one, other = bench.create(f"{bench.topic}-1", partitions=2), bench.create(f"{bench.topic}-2", partitions=2)
    frame = bench.spark.range(0, 10, 1, 1).selectExpr(
        f"if(id < 4, '{one}', '{other}') as topic", "cast(id % 2 as int) as partition", "cast(id as string) as value"
    )
    writer = frame.write.format("millstream").option("kafka.bootstrap.servers", bench.server.kafka)
    writer.mode("append").save()
    assert bench.values(one) == [b"0", b"2", b"1", b"3"]
    assert bench.values(other) == [b"4", b"6", b"8", b"5", b"7", b"9"]
    with pytest.raises(PySparkException, match="names partition 7"):
        bench.write(bench.spark.range(1).selectExpr("'x' as value", "7 as partition"))


def test_a_batch_repeated_by_spark_is_stored_once(bench: Bench) -> None:
    source = bench.create(f"{bench.topic}-source")
    bench.create()
    bench.produce(numbered(30), source)
    stream = bench.stream(source).select("key", "value")
    bench.copy(stream)
    commits = bench.folder / "checkpoint" / "commits"
    for file in [*commits.glob("0"), *commits.glob(".0.crc")]:
        file.unlink()
    query = bench.copy(stream)
    assert [progress.numInputRows for progress in query.recentProgress if progress.numInputRows] == [30]
    assert len(bench.values()) == 30
    frame = bench.spark.range(10).selectExpr("cast(id as string) as value")
    for version in ("1", "1", "2", "1"):
        bench.write(frame, txnAppId=f"{bench.topic}/job", txnVersion=version)
    assert len(bench.values()) == 50


async def test_offsets_are_committed_with_the_rows_or_not_at_all(bench: Bench) -> None:
    from pyspark.errors import PySparkException

    source = bench.create(f"{bench.topic}-source", partitions=2)
    bench.create()
    group = f"{bench.topic}-group"
    frame = bench.spark.range(4).selectExpr("cast(id as string) as value")

    def write(version: int, offset: int, rows: DataFrame = frame, **options: str) -> None:
        offsets = json.dumps({source: {"0": offset, "1": offset}})
        named = {"txnAppId": bench.topic, "txnVersion": str(version), "sourceGroup": group, **options}
        bench.write(rows, sourceOffsets=offsets, **named)

    async def committed() -> set[int]:
        async with Client.connect(bench.server.kafka) as client:
            return set((await committed_offsets(client, group)).values())

    write(0, 10)
    assert (len(bench.values()), await committed()) == (4, {10})
    write(0, 99)
    assert (len(bench.values()), await committed()) == (4, {10})
    write(1, 20, frame.where("value = 'no such'"))
    assert (len(bench.values()), await committed()) == (4, {20})
    with pytest.raises(PySparkException, match="offset of group"):
        write(2, 30, sourceMember="nobody", sourceGeneration="7")
    assert (len(bench.values()), await committed()) == (4, {20})
    write(2, 30)
    assert (len(bench.values()), await committed()) == (8, {30})


def test_nothing_of_a_failed_batch_is_visible(bench: Bench) -> None:
    from pyspark.errors import PySparkException

    bench.create(partitions=2)
    # The last of its rows cannot be computed, when everything before it is written.
    frame = bench.spark.range(0, 20_000, 1, 2).selectExpr(
        "if(id = 19999, raise_error('bad'), cast(id as string)) as value"
    )
    with pytest.raises(PySparkException):
        bench.write(frame)
    assert bench.values() == []
    bench.write(bench.spark.range(3).selectExpr("cast(id as string) as value"))
    assert sorted(bench.values()) == [b"0", b"1", b"2"]


def test_a_task_that_outlives_its_failed_write_blocks_nothing(bench: Bench) -> None:
    bench.create()
    options = write_options({"kafka.bootstrap.servers": bench.server.kafka, "topic": bench.topic})
    given_up, again = TopicWriter(options), TopicWriter(options)
    rows = pa.RecordBatch.from_pydict({"value": ["late"]})
    given_up.abort([])
    with pytest.raises(ProducerFenced):
        given_up.write(iter([rows]))
    again.commit([again.write(iter([rows]))])
    assert bench.values() == [b"late"]


@pytest.mark.trial
def test_a_broker_killed_under_a_running_query_costs_a_retry(bench: Bench) -> None:
    source = bench.create(f"{bench.topic}-source", partitions=2)
    bench.create(partitions=2)
    bench.produce(numbered(2000), source)
    stream = bench.stream(source, maxOffsetsPerTrigger="500").select("key", "value")
    writer = stream.writeStream.format("millstream").option("kafka.bootstrap.servers", bench.server.kafka)
    writer = writer.options(topic=bench.topic, checkpointLocation=str(bench.folder / "checkpoint"))
    query = writer.trigger(availableNow=True).start()
    while not query.recentProgress and query.isActive:
        query.awaitTermination(1)
    bench.server.restart(clean=False)
    query.awaitTermination()
    assert sorted(bench.values()) == sorted(b"%d" % number for number in range(2000))


@pytest.mark.trial
@pytest.mark.parametrize("is_strict", [True, False])
def test_records_deleted_by_retention_from_a_running_stream(bench: Bench, is_strict: bool) -> None:
    from pyspark.errors import StreamingQueryException

    bench.create()
    bench.produce(numbered(40))
    admin = AdminClient({"bootstrap.servers": bench.server.kafka, "log_level": 0})
    numbers: list[int] = []

    def seen(frame: DataFrame, number: int) -> None:
        numbers.extend(row.offset for row in frame.select("offset").collect())
        if number == 0:
            (deleted,) = admin.delete_records([TopicPartition(bench.topic, 0, 25)]).values()
            deleted.result(WAIT_S)

    options = {"maxOffsetsPerTrigger": "10", "failOnDataLoss": str(is_strict).lower()}
    writer = bench.stream(bench.topic, **options).writeStream.foreachBatch(seen)
    query = writer.option("checkpointLocation", str(bench.folder / "place")).trigger(availableNow=True).start()
    if is_strict:
        with pytest.raises(StreamingQueryException, match=f"{bench.topic}-0: offsets 10 to 19"):
            query.awaitTermination()
        assert numbers == list(range(10))
    else:
        query.awaitTermination()
        assert numbers == [*range(10), *range(25, 40)]


def test_rows_of_a_catalog_table_are_written_to_the_given_topic(bench: Bench) -> None:
    bench.create(partitions=1)
    other, third = bench.create(f"{bench.topic}-other"), bench.create(f"{bench.topic}-third")
    sql, first, second = bench.spark.sql, *(f"table{n}_{bench.topic.replace('-', '_')}" for n in (1, 2))
    brokers = f"`kafka.bootstrap.servers` '{bench.server.kafka}'"
    columns = "columns 'topic, key string, value string, offset'"
    sql(f"CREATE TABLE {first} USING millstream OPTIONS ({brokers}, subscribe '{bench.topic}', {columns})")
    sql(f"CREATE TABLE {second} USING millstream OPTIONS ({brokers}, subscribe '{other}', {columns})")
    try:
        sql(f"INSERT INTO {first} (key, value) VALUES ('a', 'one')")
        # The columns of the first table have its options, which do not determine where their rows go.
        sql(f"INSERT INTO {second} SELECT * FROM {first}")
        assert bench.values(other) == [b"one"]
        bench.spark.sql("SELECT 'x' AS topic, 'b' AS key, 'two' AS value, 7L AS offset").createOrReplaceTempView(
            f"{first}_v"
        )
        sql(f"INSERT INTO {second} SELECT * FROM {first}_v")
        assert bench.values(other) == [b"one", b"two"]
        rows = bench.spark.table(first)
        there = {"kafka.bootstrap.servers": bench.server.kafka}
        for frame, options in (
            (rows.drop("offset"), {**there, "topic": third}),
            (rows.select("key", "value"), {**there, "topic": third}),
            (rows.selectExpr(f"'{third}' AS topic", "value"), there),
        ):
            frame.write.format("millstream").options(**options).mode("append").save()
        assert bench.values(third) == [b"one"] * 3
        assert bench.values() == [b"one"]
        with pytest.raises(Exception, match="needs a column of text"):
            sql(f"CREATE TABLE {first}_b USING millstream OPTIONS ({brokers}, subscribe '{other}', columns 'value')")
        # A schema taken from a table does not decide what is read.
        read = bench.spark.read.format("millstream").schema(rows.schema)
        found_rows = read.options(**there, subscribePattern=f"{third}|none").load().collect()
        assert {row.topic for row in found_rows} == {third}
    finally:
        sql(f"DROP TABLE {first}")
        sql(f"DROP TABLE {second}")


def test_a_catalog_table_is_read_and_inserted_into(bench: Bench) -> None:
    bench.create(partitions=2)
    sql, table = bench.spark.sql, f"table_{bench.topic.replace('-', '_')}"
    options = f"subscribe '{bench.topic}', `kafka.bootstrap.servers` '{bench.server.kafka}'"
    sql(f"CREATE TABLE {table} USING millstream OPTIONS ({options}, columns 'key string, value string, offset')")
    try:
        sql(f"INSERT INTO {table} (key, value) VALUES ('a', 'one'), (NULL, 'two')")
        sql(f"INSERT INTO {table} SELECT key, upper(value), offset FROM {table} WHERE key IS NOT NULL")
        assert sorted((row.key or "", row.value) for row in sql(f"SELECT * FROM {table}").collect()) == [
            ("", "two"),
            ("a", "ONE"),
            ("a", "one"),
        ]
        assert sorted(bench.values()) == [b"ONE", b"one", b"two"]
        stream = bench.spark.readStream.option("startingOffsets", "earliest").table(table)
        query = stream.writeStream.format("memory").queryName(f"{table}_seen").trigger(availableNow=True).start()
        query.awaitTermination()
        assert bench.spark.table(f"{table}_seen").count() == 3
        with pytest.raises(Exception, match="cannot be overwritten"):
            sql(f"INSERT OVERWRITE {table} (key, value) VALUES ('a', 'one')")
    finally:
        sql(f"DROP TABLE {table}")
    with pytest.raises(Exception, match="tokenFile"):
        sql(f"CREATE TABLE {table} USING millstream OPTIONS ({options}, user 'a', password 'b')")
    sql(f"CREATE TABLE {table} (value STRING) USING millstream OPTIONS ({options})")
    try:
        with pytest.raises(Exception, match="without a list of columns"):
            sql(f"SELECT * FROM {table}").collect()
    finally:
        sql(f"DROP TABLE {table}")
