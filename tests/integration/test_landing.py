"""Topics become tables: every message once, offset by offset, in a real Spark with a real broker."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import deltalake
import pytest
from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from millstream.model.errors import InvalidSetting, UnknownTopic
from millstream.model.pipeline import Pipeline, PipelineKind
from millstream.pipelines.job import JobContext, Step
from millstream.pipelines.land import LandJob
from millstream.spark.session import session
from millstream.testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 60.0
STEPS_MAX = 100
# A call into the JVM that is interrupted leaves the session unusable, and the first ones take long on a slow machine.
pytestmark = pytest.mark.timeout(900)

Row = tuple[int, int, bytes | None, bytes | None]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with Server(tmp_path_factory.mktemp("landing-server") / "data") as started:
        yield started


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    settings = {
        "spark.sql.shuffle.partitions": "1",
        "spark.sql.session.timeZone": "UTC",
        "spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse")),
    }
    started = session("millstream-landing", master="local[2]", settings=settings)
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()


class Shore:
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
        """Publish, and tell where each message is."""
        told: list[Row] = []
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0, "linger.ms": 20})

        def tell(error: object, message: Any) -> None:
            assert error is None
            told.append((message.partition(), message.offset(), message.key(), message.value()))

        for value in values:
            encoded = value if value is None or isinstance(value, bytes) else json.dumps(value).encode()
            producer.produce(topic, encoded, on_delivery=tell, **more)
            producer.poll(0)
        assert producer.flush(WAIT_S) == 0
        return sorted(told)

    def job(self, **settings: str) -> LandJob:
        given = {key.replace("_", "."): value for key, value in settings.items()}
        pipeline = Pipeline(
            pipeline_id=uuid.uuid4(), name=f"land-{uuid.uuid4().hex[:8]}", kind=PipelineKind.LAND, overrides=given
        )
        context = JobContext(spark=self.spark, brokers=self.server.kafka, lake=str(self.lake), folder="")
        return LandJob(pipeline, context)

    def land(self, **settings: str) -> list[Step]:
        """Step until nothing is left."""
        job = self.job(**settings)
        try:
            return run(job)
        finally:
            job.close()

    def rows(self, topic: str, ending: str = "") -> list[dict[str, Any]]:
        """A table as Delta readers see it."""
        table = deltalake.DeltaTable(str(self.lake / (topic + ending))).to_pyarrow_table()
        return sorted(table.to_pylist(), key=lambda row: (row["partition"], row["offset"]))

    def landed(self, topic: str, ending: str = "") -> list[Row]:
        return [(row["partition"], row["offset"], row["key"], row["value"]) for row in self.rows(topic, ending)]


def run(job: LandJob) -> list[Step]:
    steps = [job.step()]
    while steps[-1].lag:
        assert len(steps) < STEPS_MAX
        steps.append(job.step())
    return steps


@pytest.fixture
def shore(spark: SparkSession, server: Server, tmp_path: Path) -> Shore:
    return Shore(spark, server, tmp_path / "lake")


def numbered(count: int, first: int = 0) -> list[bytes]:
    return [b"message %d" % number for number in range(first, first + count)]


def test_every_message_is_landed_once(shore: Shore, topic: str) -> None:
    shore.create(topic, partitions=3)
    published = shore.publish(topic, numbered(1000), headers=[("region", b"eu"), ("none", None)])
    steps = shore.land(topics=topic, batch_max_messages="400")
    assert len(steps) >= 3
    assert sum(step.rows for step in steps) == 1000
    assert steps[-1].wait_s > 0
    assert shore.landed(topic) == published
    first = shore.rows(topic)[0]
    assert first["headers"] == [{"key": "region", "value": b"eu"}, {"key": "none", "value": None}]
    assert first["timestamp_type"] == 0
    assert first["timestamp"].year >= 2024
    more = shore.publish(topic, numbered(500, 1000), key=b"k")
    shore.land(topics=topic)
    assert shore.landed(topic) == sorted(published + more)
    assert shore.land(topics=topic)[0].rows == 0
    assert shore.landed(topic) == sorted(published + more)


def test_a_topic_that_is_not_there_is_told(shore: Shore, topic: str) -> None:
    with pytest.raises(UnknownTopic, match=f"millstream topic create {topic}"):
        shore.land(topics=topic)
    with pytest.raises(InvalidSetting):
        shore.job(topics=topic, decode="json", schema="no schema at all")


def test_a_topic_that_gets_partitions_goes_on(shore: Shore, topic: str) -> None:
    shore.create(topic)
    job = shore.job(topics=topic)
    published = shore.publish(topic, numbered(10))
    run(job)
    shore.admin.create_partitions([NewPartitions(topic, 3)])[topic].result(WAIT_S)
    for partition in range(3):
        published += shore.publish(topic, numbered(5), partition=partition)
    run(job)
    job.close()
    assert shore.landed(topic) == sorted(published)
