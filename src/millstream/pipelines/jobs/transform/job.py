"""transform: writes the rows of an SQL statement over topics to a topic, exactly once.

A statement without state, possibly with joins to lake tables, runs batch by batch. One with state (windows and other
aggregates, DISTINCT, joins of topics) runs as a Spark stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from millstream.core.errors import InvalidPipeline
from millstream.core.pipeline import Pipeline, TransformSettings
from millstream.pipelines.jobs.batch_loop import TASK_ROWS_MIN, BatchLoop, Plan, parts_of, set_job_batch
from millstream.pipelines.jobs.job import Job, JobContext, Step
from millstream.pipelines.jobs.transform.output_rows import as_messages, written
from millstream.pipelines.jobs.transform.prepared_query import PreparedQuery, prepare
from millstream.pipelines.jobs.transform.stream_loop import StreamLoop
from millstream.pipelines.source.batch_commit import Part
from millstream.pipelines.source.target_topic import make_topics

WAIT_S = 1.0
"""How long to wait for the first message of a topic whose columns have to be inferred."""


class TransformJob:
    """A running transform."""

    def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
        self._pipeline = pipeline
        self._context = context
        self._settings = TransformSettings.from_strings(pipeline.overrides)
        self._loop = BatchLoop(pipeline, context, self._settings)
        self._prepared: PreparedQuery | None = None
        self._way: Job | None = None

    def step(self) -> Step:
        """Run one batch, once the columns are known."""
        if self._way is None:
            self._way = self._begin()
            if self._way is None:
                self._context.stopping.wait(WAIT_S)
                return Step()
        return self._way.step()

    def close(self) -> None:
        """Stop the stream, if there is one, and release tables."""
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
        """Process the available messages, up to the limit of a batch."""
        prepared = self._prepared
        plan = self._loop.plan(prepared.statement.topics)
        if not plan.ranges and not self._loop.is_new(plan):
            return self._loop.wait(plan)
        prepared.accumulator.clear()
        sent = self._loop.commit(plan, lambda: self._parts(plan) if plan.ranges else [], self._saw_everything)
        if sent is None:
            return Step(lag=plan.lag + plan.rows)
        undecoded = sum(one.undecoded for one in prepared.accumulator.read().values())
        return Step(rows=plan.rows, lag=plan.lag, counts=plan.counts(written=sent, undecoded=undecoded))

    def close(self) -> None:
        """Nothing to release."""

    def _parts(self, plan: Plan) -> Sequence[Part]:
        prepared = self._prepared
        if plan.rows <= TASK_ROWS_MIN:
            # They are one task anyway.
            kept = prepared.result_of_job(plan.batch.query)
            if kept is not None:
                set_job_batch(prepared.spark, plan)
                return parts_of(kept)
        return parts_of(written(as_messages(prepared.result(plan), prepared.options), prepared.options, plan.batch))

    def _saw_everything(self) -> bool:
        """Whether the batch had no new field that its rows should contain; otherwise it is repeated."""
        found = self._prepared.accumulator.read()
        return not self._prepared.grow({topic: one.fields for topic, one in found.items() if one.fields is not None})


JOB: Final = TransformJob
