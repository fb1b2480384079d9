"""The table of pipeline kinds: each kind is the class `JOB` of `pipelines/jobs/<kind>/job.py`.

A kind is declared in `core/pipeline.py` (its name and its settings). Jobs stand on Spark, so each is imported when one
of its kind is run.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import Job, JobContext, JobKind


class LazyJobKind:
    """A kind of job that is imported when the first one is made."""

    def __init__(self, kind: PipelineKind) -> None:
        self.module = f"millstream.pipelines.jobs.{kind}.job"

    def __call__(self, pipeline: Pipeline, context: JobContext) -> Job:
        kind: JobKind = import_module(self.module).JOB
        return kind(pipeline, context)


JOBS: Final[Mapping[PipelineKind, JobKind]] = {
    kind: LazyJobKind(kind) for kind in PipelineKind if kind is not PipelineKind.JOB
}
"""Users' own jobs are not among them: each has its own process, `runtime/job_driver.py`."""
