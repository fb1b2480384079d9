"""Queries that start before the log does: older messages come from the landed table, without gaps or duplicates."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from millstream.client.admin.pipelines import PipelineClient
from millstream.core.pipeline import PipelineKind
from millstream.pipelines.jobs.replay import Replay, ReplayOrder
from millstream.protocol.wire.client import Client
from millstream_testing.committed_messages import committed_records
from millstream_testing.landing import land_job, run_and_close
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

WAIT_S = 60.0
FIRST_MS = 1_700_000_000_000
# An interrupted call into the JVM leaves the session unusable, and the first calls take long on a slow machine.
pytestmark = pytest.mark.timeout(900)

Place = tuple[int, int]


class Landed:
    """A landed topic of two partitions whose log is truncated."""

    def __init__(self, spark: SparkSession, server: Server, topic: str, lake: Path) -> None:
        self.spark = spark
        self.server = server
        self.topic = topic
        self.settings = {"topics": topic, "lake": str(lake), "decode": "json", "schema": "n long"}
        self.messages: dict[Place, bytes] = {}
        self.admin = AdminClient({"bootstrap.servers": server.kafka, "log_level": 0})
        self.admin.create_topics([NewTopic(topic, 2, 1)])[topic].result(WAIT_S)

    def publish(self, count: int) -> None:
        """Publish numbered messages, one second apart; every seventh is not JSON, and is quarantined."""
        producer = Producer({"bootstrap.servers": self.server.kafka, "log_level": 0})

        def delivered(error: object, message: Any) -> None:
            assert error is None
            self.messages[message.partition(), message.offset()] = message.value()

        for number in range(len(self.messages), len(self.messages) + count):
            value = b"%d" % number if number % 7 == 3 else json.dumps({"n": number}).encode()
            stamp = FIRST_MS + 1000 * number
            producer.produce(self.topic, value, partition=number % 2, timestamp=stamp, on_delivery=delivered)
        assert producer.flush(WAIT_S) == 0

    def land(self) -> None:
        run_and_close(land_job(self.spark, self.server.kafka, Path(), self.settings))

    async def declare(self) -> None:
        async with Client.connect(self.server.kafka) as client:
            await PipelineClient(client).create(f"land-{self.topic}", PipelineKind.LAND, self.settings)

    def cut(self, offset: int) -> None:
        """Delete the start of both partitions, as retention does."""
        limits = [TopicPartition(self.topic, number, offset) for number in range(2)]
        for done in self.admin.delete_records(limits).values():
            done.result(WAIT_S)

    def read(self, **options: str) -> DataFrame:
        frame: DataFrame = self._options(self.spark.read, **options).load()
        return frame

    def stream(self, folder: Path, **options: str) -> list[Any]:
        """Everything that a bounded stream reads, in as many batches as it wants."""
        frame = self._options(self.spark.readStream, **options).load()
        found_rows: list[Any] = []
        query = (
            frame.writeStream.foreachBatch(lambda rows, _batch: found_rows.extend(rows.collect()))
            .option("checkpointLocation", str(folder))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return found_rows

    def _options(self, reader: Any, **options: str) -> Any:
        given_options = {"kafka.bootstrap.servers": self.server.kafka, "subscribe": self.topic, **options}
        return reader.format("millstream").options(**given_options)


def places(rows: list[Any]) -> list[tuple[Place, bytes]]:
    return sorted(((row.partition, row.offset), bytes(row.value)) for row in rows)


@pytest.fixture
def landed(spark: SparkSession, server: Server, topic: str, tmp_path: Path) -> Landed:
    return Landed(spark, server, topic, tmp_path / "lake")


def test_messages_no_longer_in_the_log_come_from_the_table(landed: Landed, tmp_path: Path) -> None:
    from pyspark.errors import PySparkException

    landed.publish(200)
    with pytest.raises(PySparkException, match="no pipeline lands topic"):
        landed.read(startingOffsets="earliest-landed").collect()
    asyncio.run(landed.declare())
    landed.land()
    landed.cut(60)
    landed.publish(40)
    everything = sorted(landed.messages.items())
    inside = [row for row in everything if row[0][1] >= 60]
    assert places(landed.read(startingOffsets="earliest").collect()) == inside

    rows = landed.read(startingOffsets="earliest-landed", includeHeaders="true").collect()
    assert places(rows) == everything
    assert {row.topic for row in rows} == {landed.topic}
    assert {row.timestampType for row in rows} == {0}
    in_order = landed.read(startingOffsets="earliest-landed").where("partition = 1").collect()
    assert [row.offset for row in in_order] == list(range(120))
    some = landed.read(startingOffsets="earliest-landed", columns="offset,value").where("offset between 58 and 61")
    assert sorted(row.offset for row in some.collect()) == [58, 58, 59, 59, 60, 60, 61, 61]

    late = landed.read(startingTimestamp=str(FIRST_MS + 1000 * 50)).collect()
    assert places(late) == [row for row in everything if row[0][1] >= 25]
    assert len(landed.read(startingTimestamp=str(FIRST_MS + 1000 * 200)).collect()) == 40
    # The end may precede the start of the log, too.
    until = {"endingTimestamp": str(FIRST_MS + 1000 * 80)}
    early = landed.read(startingTimestamp=str(FIRST_MS + 1000 * 50), **until).collect()
    assert places(early) == [row for row in everything if 25 <= row[0][1] < 40]
    ends = {"endingOffsets": json.dumps({landed.topic: {"0": 30, "1": 70}})}
    named = landed.read(startingOffsets="earliest-landed", **ends).collect()
    assert places(named) == [row for row in everything if row[0][1] < (30, 70)[row[0][0]]]

    streamed = landed.stream(
        tmp_path / "checkpoint", startingOffsets="earliest-landed", maxOffsetsPerTrigger="50", minPartitions="4"
    )
    assert places(streamed) == everything
    landed.publish(10)
    assert len(landed.stream(tmp_path / "checkpoint", startingOffsets="earliest-landed")) == 10

    # Retention has deleted everything, and the table has it.
    landed.land()
    landed.cut(125)
    everything = sorted(landed.messages.items())
    assert places(landed.read(startingTimestamp="0").collect()) == everything
    with pytest.raises(PySparkException, match=r"has no record of \d+ ms or later"):
        landed.read(startingTimestamp=str(FIRST_MS + 1000 * 250)).collect()


def test_messages_lost_before_landing_are_reported(landed: Landed) -> None:
    from pyspark.errors import PySparkException

    landed.publish(40)
    asyncio.run(landed.declare())
    landed.land()
    landed.publish(40)
    landed.cut(30)
    with pytest.raises(PySparkException, match="offsets 20 to 29"):
        landed.read(startingOffsets="earliest-landed").collect()
    rows = landed.read(startingOffsets="earliest-landed", failOnDataLoss="false").collect()
    assert places(rows) == [message for message in sorted(landed.messages.items()) if not 20 <= message[0][1] < 30]


async def test_a_replay_of_the_table_has_the_messages_that_the_log_has_lost(landed: Landed, topic: str) -> None:
    landed.publish(40)
    await asyncio.to_thread(landed.land)
    await landed.declare()
    landed.cut(15)
    into = f"{topic}-again"
    landed.admin.create_topics([NewTopic(into, 1, 1)])[into].result(WAIT_S)
    order = ReplayOrder(topic=topic, into=into, from_table=True, since_ms=FIRST_MS + 4000, until_ms=FIRST_MS + 30_000)
    done = await asyncio.to_thread(lambda: Replay(order, landed.server.kafka).run())
    assert (done.examined, done.written) == (40, 26)
    arrived = await asyncio.to_thread(committed_records, landed.server.kafka, into)
    origins = {(dict(record.headers)["replayed-from"] or b"").decode(): record.value for record in arrived}
    expected = {place: value for place, value in landed.messages.items() if 4 <= number_of(value) < 30}
    assert origins == {f"{topic}/{number}/{offset}": value for (number, offset), value in expected.items()}
    # The condition applies to the messages of the table as to those of the log.
    some = ReplayOrder(topic=topic, into=into, from_table=True, where="payload.n < 10 AND offset > 0", name="some")
    counted = await asyncio.to_thread(lambda: Replay(some, landed.server.kafka).run(dry=True))
    assert counted.written == len([number for number in range(2, 10) if number % 7 != 3])


def number_of(value: bytes) -> int:
    document = json.loads(value)
    return int(document["n"] if isinstance(document, dict) else document)
