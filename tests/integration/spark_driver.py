"""A Spark program for the trials: copies a topic to another as a stream, with faults at given points.

    python spark_driver.py '{"master": …, "brokers": …, "source": …, "target": …, "folder": …, "fault": …}'

`fault` is `slow`, `kill-worker` or `kill-executor`, which strike the first attempt at one task of every batch when most
of its rows have gone by; or `before-commit` or `after-commit`, where the driver stops in its second batch and waits to
be killed; or `kill-writer`, where the process that writes one task of the second batch kills itself. What happened is
left as files in the folder.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import DataSourceStreamWriter, WriterCommitMessage
from pyspark.sql.types import StructType

from millstream.pipelines.source.options import write_options
from millstream.pipelines.source.source import MillstreamSource
from millstream.pipelines.source.writer import TopicStreamWriter
from millstream.spark.session import session

SLOW_S = 600.0
STRUCK_TASK = 1
STRUCK_PORTION = 12
PAUSED_BATCH = 1


def faulty(folder: str, fault: str) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Pass rows through; the fault strikes in the first attempt at one task."""

    def passed(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        task, attempt = context.partitionId(), context.attemptNumber()
        batch_id = context.getLocalProperty("streaming.sql.batchId")
        name = f"{batch_id}-{task}-{attempt}"
        Path(folder, f"began-{name}").touch()
        strikes = task == STRUCK_TASK and attempt == 0
        for number, batch in enumerate(batches):
            if strikes and number == STRUCK_PORTION:
                Path(folder, f"struck-{name}").touch()
                apply_fault(fault)
            yield batch
        Path(folder, f"passed-{name}").touch()

    return passed


def apply_fault(fault: str) -> None:
    if fault == "slow":
        time.sleep(SLOW_S)
    if fault == "kill-worker":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "kill-executor":
        for parent in psutil.Process().parents():
            if "java" in parent.name():
                parent.kill()
                break
        time.sleep(SLOW_S)


class PausingWriter(TopicStreamWriter):
    """Our sink, which waits to be killed before or after one of its commits, or dies while it writes."""

    def __init__(self, options: dict[str, str], folder: str, fault: str) -> None:
        super().__init__(write_options(options))
        self._folder = folder
        self._fault = fault

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Write, or die when most of the rows are sent."""
        return super().write(self._deadly(iterator) if self._fault == "kill-writer" else iterator)

    def commit(self, messages: list[WriterCommitMessage | None], batchId: int) -> None:  # noqa: N803
        """Commit, with a pause."""
        self._pause("before-commit", batchId)
        super().commit(messages, batchId)
        self._pause("after-commit", batchId)

    def _deadly(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        is_it = context.partitionId() == STRUCK_TASK
        is_it &= context.getLocalProperty("streaming.sql.batchId") == str(PAUSED_BATCH)
        for number, batch in enumerate(batches):
            if is_it and number == STRUCK_PORTION:
                Path(self._folder, "struck-writer").touch()
                os.kill(os.getpid(), signal.SIGKILL)
            yield batch

    def _pause(self, where: str, batch: int) -> None:
        if self._fault == where and batch == PAUSED_BATCH:
            Path(self._folder, f"paused-{where}").touch()
            time.sleep(SLOW_S)


class PausingSource(MillstreamSource):
    """`format("pausing")`: ours with that writer."""

    @classmethod
    def name(cls) -> str:
        """The name for `format(...)`."""
        return "pausing"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802
        """A writer that stops at a given point."""
        options = dict(self.options)
        return PausingWriter(options, options.pop("folder"), options.pop("fault"))


def main(given: dict[str, Any]) -> None:
    """Copy the current messages, and end."""
    settings = {
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        # Rows reach the writer in small portions, so that a part of them is written when a fault strikes.
        "spark.sql.execution.arrow.maxRecordsPerBatch": "100",
        "spark.sql.warehouse.dir": str(Path(given["folder"], "warehouse")),
        **given.get("settings", {}),
    }
    spark = session("trial", master=given["master"], settings=settings)
    spark.sparkContext.setLogLevel("ERROR")
    spark.dataSource.register(PausingSource)
    stream = (
        spark.readStream.format("millstream")
        .option("kafka.bootstrap.servers", given["brokers"])
        .option("subscribe", given["source"])
        .option("startingOffsets", "earliest")
        .option("maxOffsetsPerTrigger", str(given["rows_per_batch"]))
        .load()
        .select("key", "value")
    )
    is_of_sink = given["fault"].endswith("-commit") or given["fault"] == "kill-writer"
    if not is_of_sink:
        stream = stream.mapInArrow(faulty(given["folder"], given["fault"]), stream.schema)
    writer = stream.writeStream.format("pausing" if is_of_sink else "millstream")
    if is_of_sink:
        writer = writer.option("folder", given["folder"]).option("fault", given["fault"])
    query = (
        writer.option("kafka.bootstrap.servers", given["brokers"])
        .option("topic", given["target"])
        .option("checkpointLocation", str(Path(given["folder"], "checkpoint")))
        .trigger(availableNow=True)
        .start()
    )
    query.awaitTermination()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
