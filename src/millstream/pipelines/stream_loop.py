"""A statement that remembers messages, as a stream of Spark: its state and its progress are in a checkpoint.

Rows are written exactly once, by the same commit as those of batches: it is known by the checkpoint's own id and the
number of the batch, which Spark repeats with the same messages and the same state if it has no record of its end. The
offsets of the group only show how far the stream is. A statement that is changed begins with an empty state, where the
one before it ended.
"""

from __future__ import annotations

import json
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from millstream.model.errors import MillstreamError
from millstream.model.pipeline import LATEST, SKIP, Pipeline, TransformSettings
from millstream.pipelines.batch_loop import CLIENT_ID, BatchLoop, read_part
from millstream.pipelines.group_offsets import commit_plainly, stable_offsets
from millstream.pipelines.job import JobContext, Step
from millstream.pipelines.output_rows import as_messages, written
from millstream.pipelines.prepared import Prepared
from millstream.pipelines.statement import told_plainly
from millstream.pipelines.topic_view import TopicView, decoding
from millstream.spark.options import BROKERS
from millstream.spark.parts import Batch, abort_batch
from millstream.spark.ranges import ranges_between
from millstream.wire.transactions import Transactions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

WAIT_S: Final = 1
TABLES_S: Final = 30.0
"""How long a stream goes on at least before it is begun anew for the sake of a table that has changed."""

Ends = dict[str, dict[int, int]]


class _NotWrittenError(Exception):
    """What Spark is told when a batch failed."""


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
        self._began = 0.0
        self._ends: Ends = {}
        self._seen = -1
        self._failure: BaseException | None = None
        self._lock = threading.Lock()
        self._counted: Counter[str] = Counter()
        self._told: Counter[str] = Counter()

    def step(self) -> Step:
        """Wait for the stream to do something, and tell it."""
        if self._query is None:
            self._query = self._start()
        self._wait(self._query)
        rows = self._take_progress(self._query)
        lag = sum(map(len, ranges_between(self._ends, self._latest())))
        if rows or not lag:
            self._follow_tables()
        return Step(rows=rows, lag=lag, counts=self._counts(), is_open=lag > 0 and not rows)

    def close(self) -> None:
        """Stop the stream; what it was doing is done again."""
        if self._query is not None:
            self._query.stop()
            self._query = None

    # -- how ------------------------------------------------------------------------------------------------------

    def _wait(self, query: StreamingQuery) -> None:
        from pyspark.errors import StreamingQueryException

        try:
            query.awaitTermination(WAIT_S)
        except StreamingQueryException as error:
            # What went wrong here is told as it is; Spark has only heard that something did.
            raise self._failure or error from None

    def _start(self) -> StreamingQuery:
        self._ends, self._failure = self._beginnings(), None
        for topic, view in self._prepared.views.items():
            self._prepared.marked(topic, self._stream(topic, view)).createOrReplaceTempView(f"`{topic}`")
        frame = as_messages(self._prepared.frame(), self._prepared.options)
        checkpoint: Future[str] = Future()
        writer = (
            frame.writeStream.foreachBatch(self._writing(checkpoint))
            .option("checkpointLocation", str(self._prepared.stream_folder / "checkpoint"))
            .outputMode(self._prepared.output_mode)
            .queryName(f"{self._pipeline.name}-{self._pipeline.pipeline_id}")
        )
        _make_active(self._prepared.spark)
        query = told_plainly(self._settings.sql, writer.start)
        checkpoint.set_result(str(query.id))
        self._began = time.monotonic()
        self._seen = -1
        return query

    def _beginnings(self) -> Ends:
        """Where a stream without a checkpoint begins."""
        survey = self._loop.survey(self._prepared.statement.topics)
        there = survey.partitions()
        link, group = self._loop.link, self._pipeline.group
        committed = link.call(stable_offsets(link.client, group))
        first = survey.latest(there) if self._settings.start == LATEST else survey.earliest(there)
        ends = {
            topic: {number: committed.get(topic, {}).get(number, first[topic][number]) for number in numbers}
            for topic, numbers in there.items()
        }
        if self._settings.start == LATEST and not all(topic in committed for topic in ends):
            # Else what comes before the first batch would be skipped by a run that begins at the end again.
            link.call(commit_plainly(link.client, group, ends, self._context.member()))
        return ends

    def _stream(self, topic: str, view: TopicView) -> DataFrame:
        stream = (
            self._prepared.spark.readStream.format("millstream")
            .option(BROKERS, self._context.brokers)
            .option("kafka.client.id", CLIENT_ID)
            .option("subscribe", topic)
            .option("startingOffsets", json.dumps({topic: self._ends[topic]}))
            .option("maxOffsetsPerTrigger", str(self._settings.batch_max))
            .option("columns", ",".join(view.records))
            .option("failOnDataLoss", str(self._settings.on_lost != SKIP).lower())
            .load()
        )
        return stream.mapInArrow(decoding(view, self._prepared.notebook), view.schema)

    def _writing(self, checkpoint: Future[str]) -> Any:
        """What Spark calls for each batch. A batch that it has called for before may be there already."""
        options, run = self._prepared.options, uuid4().hex[:12]

        def write(frame: DataFrame, number: int) -> None:
            batch = Batch(checkpoint.result(), number, run)
            try:
                parts = [read_part(row.part) for row in written(frame, options, batch).collect()]
                members = [part.member for part in parts if part.member is not None]
                if members:
                    link = self._loop.link
                    link.call(Transactions(link.client).complete_batch(batch.query, batch.number, members))
            except BaseException as error:
                with suppress(MillstreamError):
                    # What cannot be taken back now is ended by whoever writes the batch.
                    abort_batch(options, batch)
                self._failure = error
                # Spark looks through the whole text of an error of its own, and dies of a long one.
                raise _NotWrittenError(f"batch {number} was not written") from None
            with self._lock:
                self._counted["written"] += sum(part.rows for part in parts if part.member is not None)

        return write

    def _counts(self) -> dict[str, int]:
        """What was counted since the last step."""
        with self._lock:
            now = Counter(self._counted)
        now["undecoded"] = sum(one.undecoded for one in self._prepared.notebook.read().values())
        new = {what: number - self._told[what] for what, number in now.items()}
        self._told = now
        return new

    def _follow_tables(self) -> None:
        """Begin anew, with the same checkpoint, if a table has changed: Spark reads it once for each stream."""
        if time.monotonic() - self._began > TABLES_S and any(table.has_changed() for table in self._prepared.tables):
            self.close()

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
