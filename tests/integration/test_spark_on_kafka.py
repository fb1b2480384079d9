"""`format("millstream")` on Apache Kafka, which lacks the batch commit: rows are written at least once."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from millstream.protocol.wire.client import Client
from millstream.protocol.wire.group_offsets import committed_offsets
from millstream_testing.server import Server

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

pytestmark = [pytest.mark.trial, pytest.mark.timeout(1800)]

ROWS = 1000


def values(spark: SparkSession, peer: Server, topic: str) -> list[int]:
    reader = spark.read.format("millstream").option("kafka.bootstrap.servers", peer.kafka)
    return sorted(int(row.value) for row in reader.option("subscribe", topic).load().select("value").collect())


def written(frame: DataFrame, peer: Server, topic: str) -> None:
    writer = frame.write.format("millstream").option("kafka.bootstrap.servers", peer.kafka)
    writer.option("topic", topic).mode("append").save()


async def test_rows_are_written_and_read(spark: SparkSession, peer: Server, topic: str, tmp_path: Path) -> None:
    rows = spark.range(ROWS).selectExpr("cast(id as string) as key", "cast(id as string) as value")
    # Kafka creates the topics, which takes a moment.
    written(rows, peer, f"{topic}-source")
    assert values(spark, peer, f"{topic}-source") == list(range(ROWS))
    stream = spark.readStream.format("millstream").option("kafka.bootstrap.servers", peer.kafka)
    stream = stream.option("subscribe", f"{topic}-source").option("startingOffsets", "earliest")
    copied = stream.option("groupId", topic).option("maxOffsetsPerTrigger", str(ROWS // 2)).load()
    writer = copied.select("key", "value").writeStream.format("millstream").option("topic", topic)
    writer = writer.option("kafka.bootstrap.servers", peer.kafka).option("checkpointLocation", str(tmp_path / "place"))
    writer.trigger(availableNow=True).start().awaitTermination()
    assert values(spark, peer, topic) == list(range(ROWS))
    async with Client.connect(peer.kafka) as client:
        assert sum((await committed_offsets(client, topic)).values()) == ROWS


def test_rows_of_a_failed_batch_stay(spark: SparkSession, peer: Server, topic: str) -> None:
    from pyspark.errors import PySparkException

    rows = spark.range(0, ROWS, 1, 1).selectExpr("cast(id as string) as value")
    written(rows, peer, topic)
    bad = spark.range(0, 2, 1, 2).selectExpr("if(id = 1, raise_error('bad'), cast(id as string)) as value")
    with pytest.raises(PySparkException):
        written(bad, peer, topic)
    assert set(values(spark, peer, topic)) == set(range(ROWS))
