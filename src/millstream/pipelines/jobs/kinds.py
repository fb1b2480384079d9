"""The jobs there are. Each is imported when one of its kind is run, since all of them stand on Spark."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Final

from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import Job, JobContext, JobKind


class LazyJobKind:
    """A kind of job by where it stands."""

    def __init__(self, module: str, name: str) -> None:
        self._module = module
        self._name = name

    def __call__(self, pipeline: Pipeline, context: JobContext) -> Job:
        """Make a job, having imported what makes it."""
        kind: JobKind = getattr(import_module(self._module), self._name)
        return kind(pipeline, context)


JOBS: Final[Mapping[PipelineKind, JobKind]] = {
    PipelineKind.LAND: LazyJobKind("millstream.pipelines.jobs.land.job", "LandJob"),
    PipelineKind.TRANSFORM: LazyJobKind("millstream.pipelines.jobs.transform.job", "TransformJob"),
    PipelineKind.ROUTE: LazyJobKind("millstream.pipelines.jobs.route.job", "RouteJob"),
}
