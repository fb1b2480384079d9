"""A manual run of one pipeline in the calling thread: until nothing is left, or indefinitely."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from millstream.core.errors import GroupNotEmpty
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import JOBS, Job, JobContext, JobKind
from millstream.pipelines.runtime.runner import HeldClaim, Progress, Stalled, Tally, stall_s_of
from millstream.pipelines.runtime.spark_session import kill_java
from millstream.pipelines.runtime.stall_watch import CANCEL_S, CHECK_INTERVAL_S, Watch, activity_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

END_S: Final = 5.0
"""How long a run may take to notice that Java has ended."""


class ManualRun:
    """A run of a pipeline whose claim is held; its counts are in `tally`, even if it fails."""

    def __init__(
        self,
        pipeline: Pipeline,
        context: JobContext,
        claim: HeldClaim,
        *,
        on_step: Callable[[Tally], None] = lambda _tally: None,
        cancel: Callable[[], None] = lambda: None,
        jobs: Mapping[PipelineKind, JobKind] = JOBS,
    ) -> None:
        """The claim sets `context.stopping` when it is lost; `cancel` cancels Spark's jobs."""
        self._pipeline = pipeline
        self.progress = Progress()
        self._context = replace(context, rules=pipeline.rules, member=claim.member, progress=self.progress.record)
        self._claim = claim
        self._on_step = on_step
        self._cancel = cancel
        self._given_up = ""
        self._jobs = jobs
        self.tally = Tally()

    def run(self, *, once: bool) -> None:
        """Run steps; `once` ends after everything that existed at the start.

        Raise `Stalled` if the watch cancelled a step.
        """
        self.progress.work()
        job = self._jobs[self._pipeline.kind](self._pipeline, self._context)
        try:
            self._steps(job, once=once)
        except Exception:
            if not self._given_up:
                raise
            # A cancelled step's own error explains nothing.
            raise Stalled(self._given_up) from None
        finally:
            self.progress.rest()
            # Resources that could not be released end with the process.
            with suppress(Exception):
                job.close()

    def _steps(self, job: Job, *, once: bool) -> None:
        remaining: int | None = None
        stopping = self._context.stopping
        while not stopping.is_set():
            step = job.step()
            self.tally.add(step)
            if step.is_open and self._given_up:
                raise Stalled(self._given_up)
            if not step.is_open:
                self.progress.record()
            if remaining is None:
                remaining = step.rows + step.lag
            self._on_step(self.tally)
            if once and (not step.lag or self.tally.rows >= remaining > 0):
                return
            self._pause(step.wait_s)
        if not self._claim.is_held:
            raise GroupNotEmpty(f"another run has taken over pipeline {self._pipeline.name!r}")

    def _pause(self, seconds: float) -> None:
        if seconds:
            self.progress.rest()
            self._context.stopping.wait(seconds)
            self.progress.work()

    # -- for the watch ----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._pipeline.name

    @property
    def is_ending(self) -> bool:
        return self._context.stopping.is_set()

    @property
    def stall_s(self) -> float:
        return stall_s_of(self._pipeline)

    def cancel_step(self, reason: str) -> None:
        self._given_up = reason
        # In a thread, since a hung Java process would block the caller.
        threading.Thread(target=self._try_to_cancel, name="cancel", daemon=True).start()

    def _try_to_cancel(self) -> None:
        with suppress(Exception):
            self._cancel()

    def request_end(self, reason: str) -> None:
        """Set the reason before the run is ended."""
        self._given_up = reason


class ManualRunWatch:
    """Watches a manual run as a driver is watched, in its own thread, while entered."""

    def __init__(
        self,
        running: ManualRun,
        spark: SparkSession,
        leave: Callable[[str], None],
        *,
        check_interval_s: float = CHECK_INTERVAL_S,
        cancel_s: float = CANCEL_S,
    ) -> None:
        """Watch a run; `leave` ends the process, the only way to end a step that hangs although Java has ended."""
        self._running = running
        self._spark = spark
        self._leave = leave
        self._over = threading.Event()
        self._watch = Watch(
            lambda: [running],
            lambda: activity_of(spark),
            self._end_run,
            check_interval_s=check_interval_s,
            cancel_s=cancel_s,
        )

    def __enter__(self) -> None:
        threading.Thread(target=self._watch.run, args=(self._over,), name="watch", daemon=True).start()

    def __exit__(self, *_: object) -> None:
        self._over.set()

    def _end_run(self, _name: str, reason: str) -> None:
        self._running.request_end(reason)
        kill_java(self._spark)
        if not self._over.wait(END_S):
            self._leave(reason)
