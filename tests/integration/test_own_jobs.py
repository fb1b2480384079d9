"""The environment of a job's code, on a real Spark and a real broker: its input, and the output of repeated runs."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from millstream.core.errors import InvalidRequest, NotFound
from millstream.core.pipeline import JobSettings
from millstream.pipelines.jobs.own_job import JobApi, RunContext, load_code, queries_of
from millstream.pipelines.runtime.fault import Fault, fault_of
from millstream.pipelines.runtime.job_driver import QueryProgress
from millstream.pipelines.source.link import Link
from millstream.pipelines.source.ranges import stable_offsets
from millstream_testing.command import CommandLine, run_command
from millstream_testing.committed_messages import committed_messages
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 60.0
CODE = """
from pyspark.sql import functions as F

@F.udf("string")
def doubled(value):
    return double(value)

def double(value):
    return str(2 * int(value))

def run(spark, millstream):
    new = millstream.new_messages(millstream.parameters["topic"])
    values = new.select("key", F.col("value").cast("string").alias("value"))
    millstream.write(values, millstream.parameters["topic"] + "-a")
    if millstream.attempt == 1:
        raise ValueError("after the first write")
    millstream.write(values.select(doubled("value").alias("value")), millstream.parameters["topic"] + "-b")
"""


@pytest.fixture
def link(server: Server) -> Iterator[Link]:
    made = Link(server.kafka, "test-job", WAIT_S)
    yield made
    made.close()


def publish(server: Server, topic: str, numbers: range) -> None:
    producer = Producer({"bootstrap.servers": server.kafka})
    for number in numbers:
        producer.produce(topic, str(number), str(number % 5))
    assert producer.flush(WAIT_S) == 0


def make_surroundings(
    spark: SparkSession, server: Server, topic: str, link: Link, folder: Path, pins: list[dict[str, Any]]
) -> RunContext:
    return RunContext(
        spark=spark,
        link=link,
        brokers=server.kafka,
        lake=str(folder),
        folder=str(folder),
        name="twice",
        pipeline_id=uuid.uuid4(),
        group=f"pipeline-{topic}",
        settings=JobSettings(code=CODE, parameters=f'{{"topic": "{topic}"}}'),
        run=1,
        attempt=1,
        scheduled_ms=0,
        keep_pin=pins.append,
    )


def test_a_repeated_run_takes_the_same_messages_and_writes_only_missing_output(
    spark: SparkSession, server: Server, topic: str, link: Link, tmp_path: Path
) -> None:
    millstream = CommandLine(server.kafka)
    for name in (topic, f"{topic}-a", f"{topic}-b"):
        assert millstream("topic", "create", name, "--partitions", "2").code == 0
    publish(server, topic, range(20))
    pins: list[dict[str, Any]] = []
    around = make_surroundings(spark, server, topic, link, tmp_path, pins)
    run = load_code(CODE, f"job-{topic}", "<job.py>")
    first = JobApi(around)
    with pytest.raises(ValueError, match="after the first write"):
        run(spark, first)
    # More arrives before the second attempt, which ignores it.
    publish(server, topic, range(20, 30))
    second = JobApi(replace(around, attempt=2, pin=pins[-1]))
    assert queries_of(run(spark, second)) == []
    second.finish()
    # The end of the attempt was not stored: a third one writes nothing.
    third = JobApi(replace(around, attempt=3, pin=pins[-1]))
    run(spark, third)
    third.finish()
    last = JobApi(replace(around, run=2, attempt=2, pin=None))
    run(spark, last)
    last.finish()
    assert Counter(map(int, committed_messages(server.kafka, f"{topic}-a"))) == Counter(range(30))
    assert Counter(map(int, committed_messages(server.kafka, f"{topic}-b"))) == Counter(range(0, 60, 2))
    offsets = link.call(stable_offsets(link.client, f"pipeline-{topic}"))
    assert sum(offsets[topic].values()) == 30
    with pytest.raises(InvalidRequest, match="has already written"):
        last.write(last.read(topic).select("value"), f"{topic}-a")
    with pytest.raises(NotFound, match="no pipeline lands topic"):
        last.table(topic)
    with pytest.raises(InvalidRequest, match="returned int"):
        queries_of(7)


def test_the_messages_that_a_streaming_query_read_are_counted_with_its_lag(
    spark: SparkSession, server: Server, topic: str, link: Link, tmp_path: Path
) -> None:
    millstream = CommandLine(server.kafka)
    for name in (topic, f"{topic}-a"):
        assert millstream("topic", "create", name, "--partitions", "2").code == 0
    publish(server, topic, range(20))
    api = JobApi(make_surroundings(spark, server, topic, link, tmp_path, []))
    stream = api.read_stream(topic, maxOffsetsPerTrigger=15).select("key", "value")
    query = api.write_stream(stream, f"{topic}-a")
    progress = QueryProgress()
    try:
        query.processAllAvailable()
        assert progress.take(query.recentProgress) is not None
        publish(server, topic, range(20, 30))
        query.processAllAvailable()
        progress.take(query.recentProgress)
        progress.take(query.recentProgress)
    finally:
        query.stop()
    assert (progress.rows, progress.lag) == (30, 0)


def test_a_run_whose_messages_were_deleted_by_retention_continues_only_if_configured(
    spark: SparkSession, server: Server, topic: str, link: Link, tmp_path: Path
) -> None:
    from pyspark.errors import PySparkException

    assert CommandLine(server.kafka)("topic", "create", topic).code == 0
    publish(server, topic, range(10))
    pins: list[dict[str, Any]] = []
    around = make_surroundings(spark, server, topic, link, tmp_path, pins)
    assert JobApi(around).new_messages(topic).count() == 10
    admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
    start = TopicPartition(topic, 0, 4)
    admin.delete_records([start])[start].result(WAIT_S)
    again = JobApi(replace(around, attempt=2, pin=pins[-1]))
    with pytest.raises(PySparkException, match=r"offsets 0 to 3.* set failOnDataLoss to false") as refused:
        again.new_messages(topic).count()
    assert fault_of(refused.value) is Fault.DECLARED
    assert again.new_messages(topic, failOnDataLoss=False).count() == 6
    again.finish()
    assert link.call(stable_offsets(link.client, f"pipeline-{topic}")) == {topic: {0: 10}}


@pytest.mark.trial
def test_a_dry_run_prints_its_output_and_nothing_of_spark(server: Server, topic: str, tmp_path: Path) -> None:
    assert CommandLine(server.kafka)("topic", "create", topic, "--partitions", "2").code == 0
    publish(server, topic, range(1000))
    code = (
        "def run(spark, millstream):\n"
        f"    print(len(millstream.read({topic!r}).take(1)), 'taken')\n"
        f"    millstream.write(millstream.new_messages({topic!r}).select('value').limit(1), 'copies')\n"
    )
    (tmp_path / "job.py").write_text(code, encoding="utf-8")
    flags = ("--file", str(tmp_path / "job.py"), "--dry-run", "--brokers", server.kafka)
    tried = run_command(["pipeline", "run", "job", *flags])
    # Java itself announces a module that Spark asks for.
    printed = [line for line in tried.err.splitlines() if not line.startswith("WARNING: Using incubator modules")]
    assert (tried.code, tried.out) == (0, "Job job-by-hand would have succeeded.\n")
    assert printed[0] == "1 taken"
    assert [line.partition(" copies")[0] for line in printed[1:]] == ["dry run: would write to"]
