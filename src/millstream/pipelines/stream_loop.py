"""A statement that remembers messages, as a stream of Spark: its state and its progress are in a checkpoint.

Rows are written exactly once, by the same commit as those of batches; the offsets of the group only show how far the
stream is. A statement that is changed begins with an empty state, where the one before it ended.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from millstream.model.pipeline import SKIP, Pipeline, TransformSettings
from millstream.pipelines.batch_loop import CLIENT_ID, BatchLoop
from millstream.pipelines.group_offsets import commit_plainly, stable_offsets
from millstream.pipelines.job import JobContext, Step
from millstream.pipelines.output_rows import as_messages
from millstream.pipelines.prepared import Prepared
from millstream.pipelines.statement import told_plainly
from millstream.pipelines.topic_view import TopicView, decoding
from millstream.spark.options import BROKERS
from millstream.spark.ranges import ranges_between

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

WAIT_S: Final = 1

Ends = dict[str, dict[int, int]]


class StreamLoop:
    """One stream, started with the first step; steps look at what it did."""

    def __init__(
        self, pipeline: Pipeline, context: JobContext, settings: TransformSettings, prepared: Prepared
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._settings = settings
        self._prepared = prepared
        self._loop = BatchLoop(pipeline, context, settings)
        self._query: StreamingQuery | None = None
        self._ends: Ends = {}
        self._seen = -1

    def step(self) -> Step:
        """Wait for the stream to do something, and tell it."""
        if self._query is None:
            self._query = self._start()
        self._query.awaitTermination(WAIT_S)
        rows = self._take_progress(self._query)
        lag = sum(map(len, ranges_between(self._ends, self._latest())))
        return Step(rows=rows, lag=lag, is_open=lag > 0 and not rows)

    def close(self) -> None:
        """Stop the stream; what it was doing is done again."""
        if self._query is not None:
            self._query.stop()

    # -- how ------------------------------------------------------------------------------------------------------

    def _start(self) -> StreamingQuery:
        topics = self._prepared.statement.topics
        survey = self._loop.survey(topics)
        there = survey.partitions()
        committed = self._loop.link.call(stable_offsets(self._loop.link.client, self._pipeline.group))
        first = survey.latest(there) if self._settings.start == "latest" else survey.earliest(there)
        self._ends = {
            topic: {number: committed.get(topic, {}).get(number, first[topic][number]) for number in numbers}
            for topic, numbers in there.items()
        }
        watermarks = self._settings.delays()
        for topic, view in self._prepared.views.items():
            self._stream(topic, view, watermarks.get(topic)).createOrReplaceTempView(f"`{topic}`")
        frame = as_messages(self._prepared.frame(), self._loop.options_for(self._settings.into))
        writer = (
            frame.writeStream.format("millstream")
            .option(BROKERS, self._context.brokers)
            .option("kafka.client.id", CLIENT_ID)
            .option("topic", self._settings.into)
            .option("checkpointLocation", str(self._checkpoint()))
            .outputMode("append" if watermarks or not self._prepared.aggregates else "update")
            .queryName(f"{self._pipeline.name}-{self._pipeline.pipeline_id}")
        )
        _make_active(self._prepared.spark)
        return told_plainly(self._settings.sql, writer.start)

    def _stream(self, topic: str, view: TopicView, watermark: tuple[str, str] | None) -> DataFrame:
        wanted = {one.source for one in view.columns if not one.is_payload} | {"value"}
        stream = (
            self._prepared.spark.readStream.format("millstream")
            .option(BROKERS, self._context.brokers)
            .option("kafka.client.id", CLIENT_ID)
            .option("subscribe", topic)
            .option("startingOffsets", json.dumps({topic: self._ends[topic]}))
            .option("maxOffsetsPerTrigger", str(self._settings.batch_max))
            .option("columns", ",".join(sorted(wanted)))
            .option("failOnDataLoss", str(self._settings.on_lost != SKIP).lower())
            .load()
        )
        decoded = stream.mapInArrow(decoding(view), view.schema)
        return decoded if watermark is None else decoded.withWatermark(*watermark)

    def _checkpoint(self) -> Path:
        views = {topic: view.schema.simpleString() for topic, view in self._prepared.views.items()}
        said = json.dumps([self._settings.sql, self._settings.watermarks, views], sort_keys=True)
        digest = sha256(said.encode()).hexdigest()[:16]
        return Path(self._context.folder, str(self._pipeline.pipeline_id), f"checkpoint-{digest}")

    def _take_progress(self, query: StreamingQuery) -> int:
        new = [one for one in query.recentProgress if one.batchId > self._seen]
        rows = 0
        for one in new:
            self._seen = one.batchId
            rows += one.numInputRows
            for source in one.sources:
                for topic, numbers in _offsets(source.endOffset).items():
                    self._ends.setdefault(topic, {}).update(numbers)
        if rows:
            client = self._loop.link.client
            self._loop.link.call(commit_plainly(client, self._pipeline.group, self._ends, self._context.member()))
        return rows

    def _latest(self) -> Mapping[str, Mapping[int, int]]:
        survey = self._loop.survey(self._prepared.statement.topics)
        latest = survey.latest(survey.partitions())
        for topic, numbers in latest.items():
            for number in numbers:
                self._ends[topic].setdefault(number, 0)
        return latest


def _make_active(spark: SparkSession) -> None:
    """Spark looks for formats written in Python in the session of the thread, and only its first thread has one."""
    jvm: Any = spark._jvm
    spark._get_j_spark_session_class(jvm).setActiveSession(spark._jsparkSession)


def _offsets(text: Any) -> Ends:
    try:
        document = json.loads(text) if isinstance(text, str) else text
        return {topic: {int(number): int(offset) for number, offset in ns.items()} for topic, ns in document.items()}
    except (ValueError, TypeError, AttributeError):
        return {}
