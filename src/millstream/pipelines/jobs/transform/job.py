"""transform: topics become a topic by a statement of SQL, exactly once.

A statement that looks at each message by itself, perhaps beside lake tables, is run batch by batch. One that has to
remember messages, for windows and other aggregates, DISTINCT or joins of topics, is a stream of Spark's own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from millstream.core.pipeline import Pipeline, TransformSettings
from millstream.pipelines.jobs.batch_loop import BatchLoop, Plan
from millstream.pipelines.jobs.job import Job, JobContext, Step
from millstream.pipelines.jobs.transform.output_rows import as_messages, written
from millstream.pipelines.jobs.transform.prepared_query import PreparedQuery, prepare
from millstream.pipelines.jobs.transform.stream_loop import StreamLoop
from millstream.pipelines.source.target_topic import make_topics

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

WAIT_S = 1.0
"""How long a topic without any message is left alone, when the columns of its payloads are to be found in them."""


class TransformJob:
    """One transform that runs."""

    def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._settings = TransformSettings.from_strings(pipeline.overrides)
        self._loop = BatchLoop(pipeline, context, self._settings)
        self._prepared: PreparedQuery | None = None
        self._way: Job | None = None

    def step(self) -> Step:
        """Do one batch, once there is something to see what the columns are."""
        if self._way is None:
            self._way = self._begin()
            if self._way is None:
                self._context.stopping.wait(WAIT_S)
                return Step()
        return self._way.step()

    def close(self) -> None:
        """End the stream, if there is one, and let go of tables."""
        if self._way is not None:
            self._way.close()
        if self._prepared is not None:
            self._prepared.close()

    def _begin(self) -> Job | None:
        prepared = self._prepared = prepare(self._pipeline, self._context, self._settings, self._loop)
        if prepared is None:
            return None
        first = prepared.statement.topics[0]
        partitions = len(self._loop.survey([first]).partitions()[first])
        make_topics(self._loop.link, [self._settings.into], partitions)
        if prepared.needs_state:
            return StreamLoop(self._pipeline, self._context, self._settings, prepared)
        return _Batches(self._loop, prepared)


class _Batches:
    """A statement without state: one job for each batch."""

    def __init__(self, loop: BatchLoop, prepared: PreparedQuery) -> None:
        self._loop = loop
        self._prepared = prepared

    def step(self) -> Step:
        """Take what there is, up to the limit of a batch."""
        prepared = self._prepared
        plan = self._loop.plan(prepared.statement.topics)
        if not plan.ranges and not self._loop.is_new(plan):
            return self._loop.wait(plan)
        prepared.accumulator.clear()
        sent = self._loop.commit(plan, self._parts(plan) if plan.ranges else None, self._saw_everything)
        if sent is None:
            return Step(lag=plan.lag + plan.rows)
        undecoded = sum(one.undecoded for one in prepared.accumulator.read().values())
        return Step(rows=plan.rows, lag=plan.lag, counts=plan.counts(written=sent, undecoded=undecoded))

    def close(self) -> None:
        """There is nothing that a batch leaves behind."""

    def _parts(self, plan: Plan) -> DataFrame:
        rows = as_messages(self._prepared.result(plan), self._prepared.options)
        return written(rows, self._prepared.options, plan.batch)

    def _saw_everything(self) -> bool:
        """Whether there was no field in the batch that its rows ought to have and lack; else it is done again."""
        found = self._prepared.accumulator.read()
        return not self._prepared.grow({topic: one.fields for topic, one in found.items() if one.fields is not None})


JOB: Final = TransformJob
