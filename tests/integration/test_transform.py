"""Transforms on a real Spark and a real server: topics to a topic by SQL, every row once."""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Consumer, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.admin.groups import committed_offsets
from millstream.model.errors import InvalidSetting
from millstream.model.pipeline import Pipeline, PipelineKind
from millstream.pipelines.job import JobContext
from millstream.pipelines.transform import TransformJob
from millstream.spark.session import session
from millstream.testing.server import Server
from millstream.wire.client import Client

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

WAIT_S = 60.0
# A call into the JVM that is interrupted leaves the session unusable, and the first ones take long on a slow machine.
pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SparkSession]:
    settings = {"spark.sql.warehouse.dir": str(tmp_path_factory.mktemp("warehouse"))}
    started = session("millstream-tests", master="local[2]", settings=settings)
    started.sparkContext.setLogLevel("OFF")
    yield started
    started.stop()


class Shop:
    """Topics, and a transform between them."""

    def __init__(self, spark: SparkSession, server: Server, name: str, folder: Path) -> None:
        self.spark = spark
        self.server = server
        self.name = name
        self.orders = f"{name}-orders"
        self.into = f"{name}-into"
        self.folder = folder
        self.id = uuid.uuid4()

    def create(self, name: str, partitions: int = 2) -> None:
        admin = AdminClient({"bootstrap.servers": self.server.kafka, "log_level": 0})
        admin.create_topics([NewTopic(name, partitions, 1)])[name].result(WAIT_S)

    def publish(self, topic: str, rows: list[dict[str, Any]], partitions: int = 2) -> None:
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0})
        for number, row in enumerate(rows):
            key = str(row.get("id", "")).encode()
            producer.produce(topic, json.dumps(row).encode(), key=key, partition=number % partitions)
        assert producer.flush(WAIT_S) == 0

    def pipeline(self, sql: str, **settings: str) -> Pipeline:
        overrides = {"sql": sql.replace("orders", f"`{self.orders}`"), "into": self.into, **settings}
        return Pipeline(pipeline_id=self.id, name=self.name, kind=PipelineKind.TRANSFORM, overrides=overrides)

    def context(self) -> JobContext:
        folder = str(self.folder)
        return JobContext(spark=self.spark, brokers=self.server.kafka, lake=folder, folder=folder)

    def run(self, sql: str, steps: int = 1, **settings: str) -> int:
        """Run some steps of a new job, and say how many messages they took."""
        job = TransformJob(self.pipeline(sql, **settings), self.context())
        try:
            return sum(job.step().rows for _ in range(steps))
        finally:
            job.close()

    def read(self) -> list[dict[str, Any]]:
        """What is in the topic that was written, as far as it is committed."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.server.kafka,
                "group.id": uuid.uuid4().hex,
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
                "log_level": 0,
            }
        )
        found = consumer.list_topics(self.into, timeout=WAIT_S).topics[self.into]
        consumer.assign([TopicPartition(self.into, number, 0) for number in found.partitions])
        rows: list[dict[str, Any]] = []
        open_ends = len(found.partitions)
        while open_ends:
            message = consumer.poll(WAIT_S)
            assert message is not None
            if message.error():
                open_ends -= 1
                continue
            rows.append({"key": message.key(), **json.loads(message.value() or b"")})
        consumer.close()
        return rows


@pytest.fixture
def shop(spark: SparkSession, server: Server, topic: str, tmp_path: Path) -> Shop:
    made = Shop(spark, server, topic[-40:], tmp_path)
    made.create(made.orders)
    return made


def orders(first: int, count: int) -> list[dict[str, Any]]:
    return [
        {"id": number, "total": number * 1.5, "customer": {"tier": "gold" if number % 3 else "silver"}, "key": "own"}
        for number in range(first, first + count)
    ]


async def test_rows_and_offsets_are_one(shop: Shop) -> None:
    sql = "SELECT key, id, total * 2 AS double, customer.tier AS tier, payload_key FROM orders WHERE id % 2 = 0"
    shop.publish(shop.orders, orders(0, 100))
    assert shop.run(sql) == 100
    found = sorted(shop.read(), key=lambda row: row["id"])
    assert [row["id"] for row in found] == list(range(0, 100, 2))
    assert found[1] == {"key": b"2", "id": 2, "double": 6.0, "tier": "gold", "payload_key": "own"}
    shop.publish(shop.orders, orders(100, 50))
    # A new job, as after a crash: it goes on where the one before it ended.
    assert shop.run(sql, steps=2) == 50
    assert sorted(row["id"] for row in shop.read()) == list(range(0, 150, 2))
    async with Client.connect(shop.server.kafka) as client:
        committed = await committed_offsets(client, f"pipeline-{shop.name}")
    assert sum(committed.values()) == 150


def test_a_broken_statement_says_where(shop: Shop) -> None:
    shop.publish(shop.orders, orders(0, 2))
    with pytest.raises(InvalidSetting, match=r"(?s)UNRESOLVED_COLUMN.*line 1, column 8"):
        shop.run("SELECT totl FROM orders")
    with pytest.raises(InvalidSetting, match="PARSE_SYNTAX_ERROR"):
        shop.run("SELECT id FROM orders WHERE WHERE id > 1 1")
