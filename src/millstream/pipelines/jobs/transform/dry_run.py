"""The preview of a transform: its plan, its columns, and its rows for the newest messages.

Nothing is written or committed.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from millstream.core.errors import InvalidPipeline
from millstream.core.pipeline import Pipeline, PipelineKind, TransformSettings
from millstream.pipelines.jobs.batch_loop import BatchLoop
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.land.dry_run import shown_row
from millstream.pipelines.jobs.transform.output_rows import as_messages
from millstream.pipelines.jobs.transform.payload_schema import sample_ranges
from millstream.pipelines.jobs.transform.prepared_query import prepare

SAMPLED: Final = 100
"""The number of messages per partition in the sample."""
SHOWN: Final = 20
WRITTEN_MAX: Final = 100_000
"""The most rows that are counted."""


@dataclass(frozen=True, slots=True)
class DryRun:
    plan: str
    """Spark's explanation of its plan."""
    has_state: bool
    """Whether it keeps state, so that it runs as a stream with a checkpoint."""
    columns: Mapping[str, Mapping[str, str]]
    """The columns of every topic in the statement, with their types."""
    output: Mapping[str, str]
    """The columns of the statement."""
    rows: tuple[Mapping[str, Any], ...]
    """Some of the messages that would be written."""
    sampled: int
    """Messages in the sample."""
    written: int
    """How many messages would be written for the sample."""
    undecoded: int
    """How many payloads of the sample could not be decoded."""

    def as_document(self) -> dict[str, Any]:
        return {
            "columns": {topic: dict(columns) for topic, columns in self.columns.items()},
            "output": dict(self.output),
            "has_state": self.has_state,
            "sampled": self.sampled,
            "undecoded": self.undecoded,
            "written": self.written,
            "rows": [dict(row) for row in self.rows],
            "plan": self.plan,
        }


def dry_run(pipeline: Pipeline, context: JobContext) -> DryRun:
    """Try a transform on the newest messages; raise `InvalidSetting` with Spark's message, as a run would."""
    if pipeline.kind is not PipelineKind.TRANSFORM:
        raise InvalidPipeline(f"only transforms have a dry run; {pipeline.name!r} is of kind {pipeline.kind}")
    settings = TransformSettings.from_strings(pipeline.overrides)
    loop = BatchLoop(pipeline, context, settings)
    with tempfile.TemporaryDirectory(dir=context.folder) as scratch:
        # Findings of a dry run must not decide about the columns of a run.
        prepared = prepare(pipeline, replace(context, folder=scratch), settings, loop)
    if prepared is None:
        raise InvalidPipeline(
            "a topic of the statement has no messages yet, so its columns are unknown; declare them with `schemas`"
        )
    try:
        ranges = {topic: sample_ranges(loop, topic, SAMPLED) for topic in prepared.views}
        for topic, view in prepared.views.items():
            frame = view.frame(prepared.spark, loop, ranges[topic], prepared.accumulator)
            frame.createOrReplaceTempView(f"`{topic}`")
        result = prepared.frame()
        messages = as_messages(result, prepared.options)
        jvm: Any = prepared.spark.sparkContext._jvm
        explained = jvm.PythonSQLUtils.explainString(result._jdf.queryExecution(), "formatted")
        rows = messages.limit(WRITTEN_MAX).collect()
        return DryRun(
            plan=str(explained).strip(),
            has_state=prepared.needs_state,
            columns={topic: dict(view.types()) for topic, view in prepared.whole.items()},
            output=dict(result.dtypes),
            rows=tuple(shown_row(row.asDict(recursive=True)) for row in rows[:SHOWN]),
            sampled=sum(len(one) for listed in ranges.values() for one in listed),
            written=len(rows),
            undecoded=sum(one.undecoded for one in prepared.accumulator.read().values()),
        )
    finally:
        prepared.close()
