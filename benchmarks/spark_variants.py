"""The variants of reading and writing rows with Spark, measured on the same rows."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic
from pyspark.sql import DataFrame, SparkSession

OURS: Final = "millstream"
LIMIT: Final = "parquet (the limit)"
ROWS: Final = "row by row, confluent-kafka"
JVM: Final = "Spark's connector"
JVM_KAFKA: Final = "Spark's connector, Apache Kafka"

PARTITIONS: Final = 4
_ADMIN_S_MAX: Final = 60.0
_PART: Final = 10
"""The slow variant gets a tenth of the rows; the result is per row."""


@dataclass(frozen=True, slots=True)
class Load:
    """The number and the size of rows."""

    rows: int
    size: int

    @property
    def title(self) -> str:
        return f"{self.rows / 1e6:g} million rows of {'1 KiB' if self.size == 1024 else f'{self.size} B'}"


@dataclass(slots=True)
class Stage:
    """The session, the brokers, a folder, and the reasons why variants are skipped."""

    spark: SparkSession
    folder: Path
    codec: str
    millstream: str
    kafka: str | None = None
    has_connector: bool = False
    missing: dict[str, str] = field(default_factory=dict)

    def create(self, brokers: str) -> str:
        name = f"bench-{uuid.uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
        admin.create_topics([NewTopic(name, PARTITIONS, 1)])[name].result(_ADMIN_S_MAX)
        return name

    def delete(self, brokers: str, name: str) -> None:
        admin = AdminClient({"bootstrap.servers": brokers, "log_level": 0})
        admin.delete_topics([name])[name].result(_ADMIN_S_MAX)


@dataclass(frozen=True, slots=True)
class Variant:
    """One variant: how to read the rows, how to write them to a new target and remove it, and their number."""

    name: str
    rows: int
    read: Callable[[], DataFrame]
    write: Callable[[], Callable[[], None]]
    """Returns a function that removes the target."""


class Rows:
    """The rows of a load: a table as the input of writes, and the same rows in topics and in a table for reads."""

    def __init__(self, stage: Stage, load: Load) -> None:
        self.stage = stage
        self.load = load
        self._folder = stage.folder / f"rows-{load.size}"
        self._table("input", self._made())
        self._table("part", self.input().where(f"cast(cast(key as string) as long) < {load.rows // _PART}"))
        self._topics = {name: stage.create(stage.millstream) for name in ("input", "part")}
        for name, topic in self._topics.items():
            self.write_ours(self.input(name), topic)
        self._table("read", self.read_ours())
        if stage.kafka is not None:
            self._kafka_topic = stage.create(stage.kafka)
            self.write_jvm(self.input(), stage.kafka, self._kafka_topic)

    def input(self, name: str = "input") -> DataFrame:
        """Return the rows to write."""
        return self.stage.spark.read.parquet(str(self._folder / name))

    def variants(self) -> list[Variant]:
        """Return every variant that is available on this machine."""
        stage, rows, ours = self.stage, self.load.rows, self.stage.millstream
        found_variants = [
            Variant(OURS, rows, self.read_ours, lambda: self._to_new(ours, self.write_ours)),
            Variant(LIMIT, rows, lambda: stage.spark.read.parquet(str(self._folder / "read")), self._to_parquet),
            Variant(ROWS, rows // _PART, self._read_rows, self._write_rows),
        ]
        if stage.has_connector:
            found_variants.append(
                Variant(
                    JVM,
                    rows,
                    lambda: self._read_jvm(ours, self._topics["input"]),
                    lambda: self._to_new(ours, lambda frame, topic: self.write_jvm(frame, ours, topic)),
                )
            )
        kafka = stage.kafka
        if stage.has_connector and kafka is not None:
            found_variants.append(
                Variant(
                    JVM_KAFKA,
                    rows,
                    lambda: self._read_jvm(kafka, self._kafka_topic),
                    lambda: self._to_new(kafka, lambda frame, topic: self.write_jvm(frame, kafka, topic)),
                )
            )
        return found_variants

    # -- each variant ---------------------------------------------------------------------------------------------

    def read_ours(self) -> DataFrame:
        """Read the topic through `format("millstream")`."""
        reader = self.stage.spark.read.format("millstream").option("kafka.bootstrap.servers", self.stage.millstream)
        return reader.option("subscribe", self._topics["input"]).load()

    def write_ours(self, frame: DataFrame, topic: str) -> None:
        """Write to a topic through `format("millstream")`."""
        writer = frame.write.format("millstream").option("kafka.bootstrap.servers", self.stage.millstream)
        writer.option("compression", self.stage.codec).option("topic", topic).mode("append").save()

    def write_jvm(self, frame: DataFrame, brokers: str, topic: str) -> None:
        """Write to a topic through Spark's own connector."""
        writer = frame.write.format("kafka").option("kafka.bootstrap.servers", brokers).option("topic", topic)
        writer.option("kafka.compression.type", self.stage.codec).save()

    def _read_jvm(self, brokers: str, topic: str) -> DataFrame:
        reader = self.stage.spark.read.format("kafka").option("kafka.bootstrap.servers", brokers)
        return reader.option("subscribe", topic).load()

    def _read_rows(self) -> DataFrame:
        reader = self.stage.spark.read.format("row-by-row").option("brokers", self.stage.millstream)
        return reader.option("topic", self._topics["part"]).load()

    def _write_rows(self) -> Callable[[], None]:
        stage = self.stage
        topic = stage.create(stage.millstream)
        writer = self.input("part").write.format("row-by-row").option("brokers", stage.millstream)
        writer = writer.option("codec", stage.codec)
        writer.option("topic", topic).mode("append").save()
        return lambda: stage.delete(stage.millstream, topic)

    def _to_new(self, brokers: str, write: Callable[[DataFrame, str], None]) -> Callable[[], None]:
        topic = self.stage.create(brokers)
        write(self.input(), topic)
        return lambda: self.stage.delete(brokers, topic)

    def _to_parquet(self) -> Callable[[], None]:
        return to_parquet(self.stage, self.input())

    # -- how ------------------------------------------------------------------------------------------------------

    def _made(self) -> DataFrame:
        """Return rows with incompressible values of the requested size."""
        size = self.load.size
        digests = ", ".join(f"sha2(concat(id, '/{part}'), 256)" for part in range(-(-size // 64)))
        value = f"substring(concat({digests}), 1, {size})"
        return self.stage.spark.range(0, self.load.rows, 1, PARTITIONS).selectExpr(
            "cast(cast(id as string) as binary) as key", f"cast({value} as binary) as value"
        )

    def _table(self, name: str, frame: DataFrame) -> None:
        codec = "uncompressed" if self.stage.codec == "none" else self.stage.codec
        frame.write.option("compression", codec).mode("overwrite").parquet(str(self._folder / name))


def to_parquet(stage: Stage, frame: DataFrame) -> Callable[[], None]:
    """Write rows to a new table; return a function that removes it."""
    folder = stage.folder / f"table-{uuid.uuid4().hex[:8]}"
    codec = "uncompressed" if stage.codec == "none" else stage.codec
    frame.write.option("compression", codec).parquet(str(folder))
    return lambda: shutil.rmtree(folder)
