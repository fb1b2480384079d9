"""transform: writes the rows of an SQL statement over topics to a topic, exactly once.

A statement without state, possibly with joins to lake tables, runs batch by batch. One with state (windows and other
aggregates, DISTINCT, joins of topics) runs as a Spark stream.
"""

from __future__ import annotations

import json
import logging
import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final
from uuid import uuid4

from millstream.core.errors import CorruptState, InvalidPipeline
from millstream.core.pipeline import LATEST, SKIP, Pipeline, TransformSettings
from millstream.pipelines.jobs.batch_loop import (
    CLIENT_ID,
    ROWS_HERE_MAX,
    TASK_ROWS_MIN,
    BatchLoop,
    Plan,
    is_refused,
    parts_of,
    read_part,
    set_job_batch,
    skip_deleted,
    small_batch_slot,
    stream_of,
)
from millstream.pipelines.jobs.job import Job, JobContext, Step
from millstream.pipelines.jobs.transform.prepared_query import PreparedQuery, as_messages, prepare, written
from millstream.pipelines.jobs.transform.statement import explain_errors
from millstream.pipelines.jobs.transform.topic_view import TopicView, decoding
from millstream.pipelines.runtime.fault import MarkedTask
from millstream.pipelines.source.batch_commit import Batch, Part
from millstream.pipelines.source.options import BROKERS, Offsets, WriteOptions
from millstream.pipelines.source.ranges import commit_offsets, ranges_between
from millstream.pipelines.source.target_topic import make_topics
from millstream.protocol.private.transactions import TransactionalProducer, Transactions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_logger = logging.getLogger(__name__)


Ends = dict[str, dict[int, int]]

_VERSION: Final = "v1"
_NO_OFFSET: Final = "-"


class StreamCheckpoint:
    """The folder in which Spark keeps the state and progress of a stream."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def ends(self, number: int) -> Ends:
        """Return the end offsets of a batch; empty if the record is gone."""
        path = self.folder / "offsets" / str(number)
        try:
            lines = path.read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return {}
        if len(lines) < 2 or lines[0] != _VERSION:
            raise CorruptState(f"{path} has an unknown format")
        ends: Ends = {}
        for line in lines[2:]:
            for topic, numbers in ({} if line == _NO_OFFSET else read_offsets(line)).items():
                known = ends.setdefault(topic, {})
                for partition, offset in numbers.items():
                    # A topic that a statement reads twice may have two positions: the smaller one is done.
                    known[partition] = min(offset, known.get(partition, offset))
        return ends

    def is_at(self, committed: Offsets) -> bool:
        """Whether the stream ended at these offsets, with its last batch or, if it is uncommitted, the one before."""
        last = self._last()
        return any(_agree(self.ends(number), committed) for number in (last, last - 1))

    def query_id(self) -> str:
        """Return Spark's id of the stream; empty if there is none yet."""
        try:
            return str(json.loads((self.folder / "metadata").read_text(encoding="utf-8"))["id"])
        except FileNotFoundError:
            return ""
        except (ValueError, KeyError, TypeError):
            raise CorruptState(f"{self.folder / 'metadata'} has an unknown format") from None

    def archive_unless_at(self, committed: Offsets, *, last_batch: int = -1) -> bool:
        """Archive the checkpoint unless the stream ended at the pipeline's position; return whether it was archived.

        Another statement has continued since, the group was reset, or the folder is an old copy: its state does not
        belong to the messages that come next. A checkpoint with fewer batches than were committed is such a copy even
        if it ends at the same offsets, since some batches only advance time; Spark would reuse their numbers for other
        batches.
        """
        if self._last() < 0 or (self._last() >= last_batch and self._is_whole() and self.is_at(committed)):
            return False
        before = self.folder.with_name(f"{self.folder.name}.before")
        shutil.rmtree(before, ignore_errors=True)
        self.folder.rename(before)
        return True

    def _is_whole(self) -> bool:
        """Whether the last file is complete; a power failure may have left half of it."""
        try:
            self.ends(self._last())
        except CorruptState:
            return False
        return True

    def _last(self) -> int:
        """Return the number of the last batch that was started; -1 if there is none."""
        names: list[str] = []
        with suppress(FileNotFoundError):
            names = [path.name for path in (self.folder / "offsets").iterdir()]
        return max((int(name) for name in names if name.isdigit()), default=-1)


def read_offsets(text: Any) -> Ends:
    """Parse the offsets of a source by topic and partition; raise `CorruptState` if they are malformed."""
    try:
        document = json.loads(text) if isinstance(text, str) else text
        return {topic: {int(number): int(offset) for number, offset in ns.items()} for topic, ns in document.items()}
    except (ValueError, TypeError, AttributeError) as error:
        raise CorruptState(f"offsets of a stream cannot be read: {error}") from None


def _agree(ends: Ends, committed: Offsets) -> bool:
    return bool(ends) and all(
        committed.get(topic, {}).get(number) == offset
        for topic, numbers in ends.items()
        for number, offset in numbers.items()
    )


class _NotWrittenError(Exception):
    """Raised to Spark when a batch failed."""


class _ClosedError(Exception):
    """The stream was stopped before the batch was committed."""


class StreamWriting:
    """The function of `foreachBatch` for one run of a stream."""

    def __init__(
        self, loop: BatchLoop, options: WriteOptions, checkpoint: StreamCheckpoint, query_id: Future[str], stream: str
    ) -> None:
        """Write for the checkpoint `query_id`; `stream` is part of the names of all attempts."""
        self._loop = loop
        self._options = options
        self._checkpoint = checkpoint
        self._query_id = query_id
        self._stream = stream
        self._run = uuid4().hex[:12]
        self._lock = threading.Lock()
        self._is_closed = False
        self._counted: Counter[str] = Counter()
        self.lost: Callable[[int, Ends], int] = lambda _number, _ends: 0
        """Returns how many offsets a batch that ends at these offsets skips."""
        self.failure: BaseException | None = None
        """The reason why the last batch was not written."""

    def __call__(self, frame: DataFrame, number: int) -> None:
        """Write a batch, unless an earlier call has."""
        batch = Batch(self._query_id.result(), number, self._run, self._stream)
        try:
            ends = self._checkpoint.ends(number)
            if not ends:
                raise CorruptState(f"Spark has no record of the end offsets of batch {number}")
            lost = self.lost(number, ends)
            rows = self._commit(frame, batch, ends)
        except BaseException as error:
            self.failure = error
            # Spark parses the full text of its errors, and fails on long ones.
            raise _NotWrittenError(f"batch {number} was not written") from None
        if rows is not None:
            with self._lock:
                self._counted.update({"written": rows, "lost": lost} if lost else {"written": rows})

    def counts(self) -> Counter[str]:
        with self._lock:
            return Counter(self._counted)

    def close(self) -> None:
        """Refuse further commits; wait for one in progress."""
        with self._lock:
            self._is_closed = True

    # -- internals ------------------------------------------------------------------------------------------------

    def _commit(self, frame: DataFrame, batch: Batch, ends: Ends) -> int | None:
        """Return the number of rows written; None if the batch was committed before."""
        if self._loop.is_taken(batch):
            self._remember(frame, batch)
            return None
        offsets = self._loop.link.start(self._loop.prepare_offsets(batch, ends))
        try:
            parts = self._parts(frame, batch)
            is_done = self._complete(batch, parts, offsets)
        except BaseException as error:
            self._loop.abort_prepared(batch, offsets)
            if not (is_refused(error) and self._loop.is_taken(batch)):
                raise
            # Another run was faster.
            self._remember(frame, batch)
            return None
        return sum(part.rows for part in parts if part.member is not None) if is_done else None

    def _complete(self, batch: Batch, parts: list[Part], offsets: Future[TransactionalProducer]) -> bool:
        members = [part.member for part in parts if part.member is not None]
        members.append(offsets.result())
        link = self._loop.link
        with self._lock:
            if self._is_closed:
                raise _ClosedError
            return link.call(Transactions(link.client).complete_batch(batch.query, batch.number, members))

    def _remember(self, frame: DataFrame, batch: Batch) -> None:
        """Count a committed batch into the state: tasks notice that its rows exist, and write nothing."""
        self._parts(frame, batch)

    def _parts(self, frame: DataFrame, batch: Batch) -> list[Part]:
        return [read_part(row.part) for row in written(frame, self._options, batch).collect()]


AWAIT_S: Final = 1

TABLES_S: Final = 30.0
"""The shortest time between restarts of a stream because a table changed."""


class StreamLoop:
    """A statement with state, run as a Spark stream whose state and progress are in a checkpoint.

    It is started with the first step, and steps report its progress. Rows are written exactly once, by the same commit
    as those of batches: it is identified by the checkpoint's id and the number of the batch, which Spark repeats with
    the same messages and state if it has no record of its end. The group's offsets are part of that commit. A changed
    statement, whose state is empty, therefore starts exactly where the one before ended, and so does one whose
    checkpoint is lost or belongs to another position.
    """

    def __init__(
        self, pipeline: Pipeline, context: JobContext, settings: TransformSettings, prepared: PreparedQuery
    ) -> None:
        self._pipeline = pipeline
        self._context = context
        self._settings = settings
        self._prepared = prepared
        self._loop = BatchLoop(pipeline, context, settings)
        self._checkpoint = StreamCheckpoint(prepared.stream_folder / "checkpoint")
        self._query: StreamingQuery | None = None
        self._writing: StreamWriting | None = None
        self._began = 0.0
        self._ends: Ends = {}
        self._seen = -1
        self._reported: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        """Counts of streams that were restarted since."""

    def step(self) -> Step:
        if self._query is None:
            self._query = self._start()
        self._wait(self._query)
        rows = self._record_progress(self._query)
        lag = sum(map(len, ranges_between(self._ends, self._latest())))
        if rows or not lag:
            self._follow_tables()
        return Step(rows=rows, lag=lag, counts=self._counts(), is_open=lag > 0 and not rows)

    def close(self) -> None:
        """Stop the stream; unfinished work is repeated."""
        if self._writing is not None:
            # First, since Spark does not wait for its callback, and the next run asks for the committed offsets.
            self._writing.close()
            self._counted += self._writing.counts()
            self._writing = None
        if self._query is not None:
            self._query.stop()
            self._query = None

    # -- internals ------------------------------------------------------------------------------------------------

    def _wait(self, query: StreamingQuery) -> None:
        from pyspark.errors import StreamingQueryException

        try:
            query.awaitTermination(AWAIT_S)
        except StreamingQueryException as error:
            # Raise the original error; Spark only knows that the batch failed.
            raise (self._writing and self._writing.failure) or error from None

    def _start(self) -> StreamingQuery:
        self._ends = self._beginnings()
        for topic, view in self._prepared.views.items():
            self._prepared.marked(topic, self._stream(topic, view)).createOrReplaceTempView(f"`{topic}`")
        frame = as_messages(self._prepared.frame(), self._prepared.options)
        query_id: Future[str] = Future()
        stream = stream_of(self._pipeline.pipeline_id)
        self._writing = StreamWriting(self._loop, self._prepared.options, self._checkpoint, query_id, stream)
        if self._settings.on_lost == SKIP:
            first = {topic: dict(numbers) for topic, numbers in self._ends.items()}
            self._writing.lost = lambda number, ends: self._lost(first, number, ends)
        writer = (
            frame.writeStream.foreachBatch(self._writing)
            .option("checkpointLocation", str(self._checkpoint.folder))
            .outputMode(self._prepared.output_mode)
            .queryName(f"{self._pipeline.name}-{self._pipeline.pipeline_id}")
        )
        _make_active(self._prepared.spark)
        query = explain_errors(self._settings.sql, writer.start)
        query_id.set_result(str(query.id))
        self._began = time.monotonic()
        self._seen = -1
        return query

    def _beginnings(self) -> Ends:
        """Return the pipeline's position, where a stream without a checkpoint starts."""
        resolver = self._loop.resolver(self._prepared.statement.topics)
        partitions = resolver.partitions()
        link, group = self._loop.link, self._pipeline.group
        committed = self._loop.committed()
        query = self._checkpoint.query_id()
        if self._checkpoint.archive_unless_at(committed, last_batch=self._loop.last_batch(query) if query else -1):
            _logger.warning(
                "a stream restarts with an empty state: its checkpoint is not at the pipeline's position",
                extra={"pipeline": self._pipeline.name, "folder": str(self._checkpoint.folder)},
            )
        first = resolver.latest(partitions) if self._settings.start == LATEST else resolver.earliest(partitions)
        ends = {
            topic: {number: committed.get(topic, {}).get(number, first[topic][number]) for number in numbers}
            for topic, numbers in partitions.items()
        }
        if self._settings.start == LATEST and not all(topic in committed for topic in ends):
            # Otherwise a later run that starts at the end would skip messages that arrive before the first batch.
            link.call(commit_offsets(link.client, group, ends, self._context.member()))
        return ends

    def _stream(self, topic: str, view: TopicView) -> DataFrame:
        stream = (
            self._prepared.spark.readStream.format("millstream")
            .option(BROKERS, self._context.brokers)
            .options(**self._context.access.as_options())
            .option("kafka.client.id", CLIENT_ID)
            .option("subscribe", topic)
            .option("startingOffsets", json.dumps({topic: self._ends[topic]}))
            .option("maxOffsetsPerTrigger", str(self._settings.batch_max))
            .option("columns", ",".join(view.records))
            .option("failOnDataLoss", str(self._settings.on_lost != SKIP).lower())
            .option("failOnUnreadable", "false")
            .load()
        )
        access = self._prepared.loop.reading_access([topic])
        decode = decoding(view, self._prepared.accumulator, self._context.brokers, access)
        return stream.mapInArrow(MarkedTask(decode), view.schema)

    def _counts(self) -> dict[str, int]:
        now = self._counted + (self._writing.counts() if self._writing is not None else Counter())
        now["undecoded"] = sum(counts.undecoded for counts in self._prepared.accumulator.read().values())
        new = {name: number - self._reported[name] for name, number in now.items()}
        self._reported = now
        return new

    def _follow_tables(self) -> None:
        """Restart the stream from its checkpoint if a table has changed: Spark reads tables once per stream."""
        if time.monotonic() - self._began > TABLES_S and any(table.has_changed() for table in self._prepared.tables):
            self.close()

    def _record_progress(self, query: StreamingQuery) -> int:
        new = [progress for progress in query.recentProgress if progress.batchId > self._seen]
        rows = 0
        for progress in new:
            if progress.numInputRows:
                # While idle, Spark reports under the number of the next batch.
                self._seen = progress.batchId
            rows += progress.numInputRows
            for source in progress.sources:
                for topic, numbers in (read_offsets(source.endOffset) if source.endOffset else {}).items():
                    self._ends.setdefault(topic, {}).update(numbers)
        return rows

    def _lost(self, first: Ends, number: int, ends: Ends) -> int:
        """Return the number of offsets of a batch that retention deleted unread and Spark was configured to skip."""
        before = self._checkpoint.ends(number - 1) if number else first
        start = {
            topic: {number: offset for number, offset in before.get(topic, {}).items() if number in numbers}
            for topic, numbers in ends.items()
        }
        earliest = self._loop.resolver(list(start)).earliest({topic: list(numbers) for topic, numbers in start.items()})
        there = {
            topic: {number: min(offset, ends[topic][number]) for number, offset in numbers.items()}
            for topic, numbers in earliest.items()
        }
        return skip_deleted(start, there)[1]

    def _latest(self) -> Mapping[str, Mapping[int, int]]:
        resolver = self._loop.resolver(self._prepared.statement.topics)
        latest = resolver.latest(resolver.partitions())
        for topic, numbers in latest.items():
            for number in numbers:
                self._ends[topic].setdefault(number, 0)
        return latest


def _make_active(spark: SparkSession) -> None:
    """Make a session active in this thread: Spark looks up Python data sources there, and only its first thread has
    one.
    """
    jvm: Any = spark._jvm
    spark._get_j_spark_session_class(jvm).setActiveSession(spark._jsparkSession)


WAIT_S = 1.0
"""How long to wait for the first message of a topic whose columns have to be inferred."""


class TransformJob:
    def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._settings = TransformSettings.from_strings(pipeline.overrides)
        self._loop = BatchLoop(pipeline, context, self._settings)
        self._prepared: PreparedQuery | None = None
        self._job: Job | None = None

    def step(self) -> Step:
        if self._job is None:
            self._job = self._begin()
            if self._job is None:
                self._context.idle()
                self._context.stopping.wait(WAIT_S)
                return Step()
        return self._job.step()

    def close(self) -> None:
        """Stop the stream, if there is one, and release tables."""
        if self._job is not None:
            self._job.close()
        if self._prepared is not None:
            self._prepared.close()

    def _begin(self) -> Job | None:
        prepared = self._prepared = prepare(self._pipeline, self._context, self._settings, self._loop)
        if prepared is None:
            return None
        first = prepared.statement.topics[0]
        partitions = len(self._loop.resolver([first]).partitions()[first])
        make_topics(self._loop.link, [self._settings.into], partitions)
        if prepared.needs_state and self._context.window is not None:
            raise InvalidPipeline(
                f"pipeline {self._pipeline.name!r} has windows or aggregates, which a part of the past would leave "
                "incomplete; declare another pipeline that reads from earliest instead"
            )
        if prepared.needs_state:
            return StreamLoop(self._pipeline, self._context, self._settings, prepared)
        return _Batches(self._loop, prepared)


class _Batches:
    """A statement without state: one job per batch."""

    def __init__(self, loop: BatchLoop, prepared: PreparedQuery) -> None:
        self._loop = loop
        self._prepared = prepared

    def step(self) -> Step:
        prepared = self._prepared
        prepared.accumulator.clear()
        with small_batch_slot():
            plan = self._loop.plan(prepared.statement.topics)
            is_idle = not plan.ranges and not self._loop.is_new(plan)
            rows = None if is_idle or plan.rows > ROWS_HERE_MAX else prepared.rows_here(plan)
            if rows is not None:
                may_commit = self._has_all_fields()
                return self._done(plan, self._loop.commit_here(plan, prepared.options, rows) if may_commit else None)
        if is_idle:
            return self._loop.wait(plan)
        prepared.accumulator.clear()
        return self._done(
            plan, self._loop.commit(plan, lambda: self._parts(plan) if plan.ranges else [], self._has_all_fields)
        )

    def _done(self, plan: Plan, sent: int | None) -> Step:
        if sent is None:
            return Step(lag=plan.lag + plan.rows)
        undecoded = sum(counts.undecoded for counts in self._prepared.accumulator.read().values())
        return Step(rows=plan.rows, lag=plan.lag, counts=plan.counts(written=sent, undecoded=undecoded))

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _parts(self, plan: Plan) -> Sequence[Part]:
        prepared = self._prepared
        if plan.rows <= TASK_ROWS_MIN:
            # Small batches are one task anyway.
            result = prepared.result_of_job(plan.batch.query)
            if result is not None:
                set_job_batch(prepared.spark, plan)
                return parts_of(result)
        return parts_of(written(as_messages(prepared.result(plan), prepared.options), prepared.options, plan.batch))

    def _has_all_fields(self) -> bool:
        """Whether the batch had no new field that its rows should contain; otherwise it is repeated."""
        counts = self._prepared.accumulator.read()
        return not self._prepared.grow(
            {topic: count.fields for topic, count in counts.items() if count.fields is not None}
        )


JOB: Final = TransformJob
