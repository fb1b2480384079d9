"""A common approach: a Python source and sink over confluent-kafka that process rows one by one.

It also has a null sink, with which the cost of our sink per trigger is compared. Spark's workers import this module.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import pyarrow as pa
from confluent_kafka import Consumer, Producer, TopicPartition
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamArrowWriter,
    DataSourceWriter,
    InputPartition,
    WriterCommitMessage,
)
from pyspark.sql.types import Row, StructType

_AT_ONCE: Final = 500
_WAIT_S: Final = 30.0
_COLUMNS: Final = (
    "key binary, value binary, topic string, partition int, offset long, timestamp timestamp, timestampType int"
)


@dataclass(frozen=True)
class _Partition(InputPartition):
    number: int
    start: int
    end: int


@dataclass(frozen=True)
class _Done(WriterCommitMessage):
    pass


class RowByRow(DataSource):
    """`format("row-by-row")`."""

    @classmethod
    def name(cls) -> str:
        """The name passed to `format(...)`."""
        return "row-by-row"

    def schema(self) -> str:
        """Return the columns of Spark's Kafka source."""
        return _COLUMNS

    def reader(self, schema: StructType) -> DataSourceReader:
        return _Reader(dict(self.options))

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        return _Writer(dict(self.options))


class _Reader(DataSourceReader):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def partitions(self) -> Sequence[InputPartition]:
        consumer = self._consumer()
        topic = self._options["topic"]
        try:
            numbers = consumer.list_topics(topic, _WAIT_S).topics[topic].partitions
            ends = {number: consumer.get_watermark_offsets(TopicPartition(topic, number)) for number in numbers}
        finally:
            consumer.close()
        return [_Partition(number, first, last) for number, (first, last) in ends.items()]

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        assert isinstance(partition, _Partition)
        consumer = self._consumer()
        place = TopicPartition(self._options["topic"], partition.number, partition.start)
        consumer.assign([place])
        try:
            while consumer.position([place])[0].offset < partition.end:
                for message in consumer.consume(_AT_ONCE, 0.5):
                    kind, timestamp_ms = message.timestamp()
                    when = datetime.fromtimestamp(timestamp_ms / 1000, UTC)
                    yield (
                        message.key(),
                        message.value(),
                        message.topic(),
                        message.partition(),
                        message.offset(),
                        when,
                        kind - 1,
                    )
        finally:
            consumer.close()

    def _consumer(self) -> Consumer:
        return Consumer({"bootstrap.servers": self._options["brokers"], "group.id": "row-by-row", "log_level": 0})


class _Writer(DataSourceWriter):
    def __init__(self, options: dict[str, str]) -> None:
        self._options = options

    def write(self, iterator: Iterator[Row]) -> WriterCommitMessage:
        producer = Producer(
            {
                "bootstrap.servers": self._options["brokers"],
                "linger.ms": 50,
                "compression.type": self._options["codec"],
                "log_level": 0,
            }
        )
        topic = self._options["topic"]
        for row in iterator:
            while True:
                try:
                    producer.produce(topic, bytes(row.value), bytes(row.key))
                    break
                except BufferError:
                    producer.poll(0.1)
        if producer.flush(_WAIT_S):
            raise RuntimeError("not everything was acknowledged")
        return _Done()


class Nothing(DataSource):
    """`format("nothing")`: takes Arrow batches and drops them."""

    @classmethod
    def name(cls) -> str:
        """The name passed to `format(...)`."""
        return "nothing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamArrowWriter:
        """Return a writer that does nothing."""
        return _Dropper()


class _Dropper(DataSourceStreamArrowWriter):
    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        for _ in iterator:
            pass
        return _Done()

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass

    def abort(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:
        pass
