"""The preview of a transform: its plan, its columns, and its rows for the newest messages.

Nothing is written or committed.
"""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any, Final

from millstream.core.errors import InvalidPipeline
from millstream.core.pipeline import Pipeline, PipelineKind, TransformSettings
from millstream.pipelines.jobs.batch_loop import BatchLoop
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.land.dry_run import shown_row
from millstream.pipelines.jobs.transform.payload_schema import sample_ranges
from millstream.pipelines.jobs.transform.prepared_query import as_messages, prepare

SAMPLED: Final = 100
"""The number of messages per partition in the sample."""
SHOWN: Final = 20
WRITTEN_MAX: Final = 100_000
"""The most rows that are counted."""


def dry_run(pipeline: Pipeline, context: JobContext) -> dict[str, Any]:
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
        return {
            "columns": {topic: dict(view.types()) for topic, view in prepared.whole.items()},
            "output": dict(result.dtypes),
            # One with state runs as a stream with a checkpoint.
            "has_state": prepared.needs_state,
            "sampled": sum(len(offset_range) for listed in ranges.values() for offset_range in listed),
            "undecoded": sum(counts.undecoded for counts in prepared.accumulator.read().values()),
            "written": len(rows),
            "rows": [shown_row(row.asDict(recursive=True)) for row in rows[:SHOWN]],
            "plan": str(explained).strip(),
        }
    finally:
        prepared.close()
