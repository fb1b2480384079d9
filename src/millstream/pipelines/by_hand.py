"""One pipeline that somebody runs by hand, in the thread that asks for it: until nothing is left, or without end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace

from millstream.model.errors import GroupNotEmpty
from millstream.model.pipeline import Pipeline, PipelineKind
from millstream.pipelines.job import Job, JobContext, JobKind
from millstream.pipelines.jobs import JOBS
from millstream.pipelines.runner import Held
from millstream.pipelines.tally import Tally


class RunByHand:
    """A run of a pipeline whose claim is held; what it took is in `tally`, also when it fails."""

    def __init__(
        self,
        pipeline: Pipeline,
        context: JobContext,
        claim: Held,
        *,
        when_stepped: Callable[[Tally], None] = lambda _tally: None,
        jobs: Mapping[PipelineKind, JobKind] = JOBS,
    ) -> None:
        """The claim sets `context.stopping` when it is lost."""
        self._pipeline = pipeline
        self._context = replace(context, rules=pipeline.rules, member=claim.member)
        self._claim = claim
        self._when_stepped = when_stepped
        self._jobs = jobs
        self.tally = Tally()

    def run(self, *, once: bool) -> None:
        """Do steps; `once` ends when everything that was there at the beginning is taken."""
        job = self._jobs[self._pipeline.kind](self._pipeline, self._context)
        try:
            self._steps(job, once=once)
        finally:
            # Whatever it could not let go of ends with the process.
            with suppress(Exception):
                job.close()

    def _steps(self, job: Job, *, once: bool) -> None:
        there: int | None = None
        stopping = self._context.stopping
        while not stopping.is_set():
            step = job.step()
            self.tally.add(step)
            if there is None:
                there = step.rows + step.lag
            self._when_stepped(self.tally)
            if once and (not step.lag or self.tally.rows >= there > 0):
                return
            stopping.wait(step.wait_s)
        if not self._claim.is_held:
            raise GroupNotEmpty(f"somebody else has taken over pipeline {self._pipeline.name!r}")
