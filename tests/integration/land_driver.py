"""Lands topics until nothing is left, for the trials of landing, and exits at a given point.

  python land_driver.py '{"master": …, "brokers": …, "lake": …, "settings": {…}, "fault": …, "folder": …, "landed": …}'

`fault` is where the process kills itself: `before-commit`, when all files are written; `between-topics`, when one of
several tables has its commit; `before-quarantine`, when a table has its commit and its quarantine does not;
`before-compaction` and `after-compaction`, around the commit of one; `before-widening` and `after-widening`, around the
commit of a column that takes fractions from now on; `after-condition` and `after-rewriting`, when all of its files were
looked into, or rewritten; `before-merge`, when changes of a table with keys are staged, and `after-commit`, when a
commit was made and nothing else; `in-vacuum`, when one of two tables has lost its old files. Or it strikes a task that
has written its files and not reported them yet: `kill-worker` kills its process, `kill-executor` the executor,
`kill-rewriting` the process of one that rewrites files. Everything is landed as of the moment `landed`, an hour
before, so that there is something to compact.

With `until` it goes on until there is such a file and nothing is left, whatever else fails meanwhile; `more` are the
settings of other pipelines that take turns with the first.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterable, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import psutil
from pyspark import TaskContext

from millstream.core.errors import MillstreamError
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import JobContext
from millstream.pipelines.jobs.land import job as land
from millstream.pipelines.jobs.land.file_tasks import FileTasks
from millstream.pipelines.jobs.land.job import LandJob, make_job
from millstream.pipelines.jobs.land.task import LandTasks, Report
from millstream.pipelines.jobs.land.upsert import UpsertJob
from millstream.pipelines.lake import rewriting
from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.keyed_table import BucketMerge
from millstream.pipelines.lake.rewriting import InexactIntegers, Rewrite
from millstream.pipelines.source.ranges import Range
from millstream.spark.session import session


def die() -> None:
    """Kill -9."""
    os.kill(os.getpid(), signal.SIGKILL)


def dying(wrapped: Callable[..., Any], *, after: bool, when: Callable[..., bool] = lambda *_, **__: True) -> Any:
    """Wrap a function so that the process dies before or after its work."""

    def called(*arguments: Any, **named: Any) -> Any:
        strikes = when(*arguments, **named)
        if strikes and not after:
            die()
        response = wrapped(*arguments, **named)
        if strikes and response:
            die()
        return response

    return called


def struck_tasks(folder: str, fault: str) -> type[LandTasks]:
    """Tasks, one of which is killed once when its files are written."""

    class Struck(LandTasks):
        def _land(self, topic: str, topic_ranges: Iterable[Range]) -> Report:
            report = super()._land(topic, topic_ranges)
            context = TaskContext.get()
            mark = Path(folder, f"struck-{fault}")
            if context is not None and context.partitionId() == 0 and not mark.exists():
                mark.touch()
                worker = psutil.Process()
                # The process forks from a daemon, whose parent is the executor.
                victim = worker if fault == "kill-worker" else worker.parent().parent()
                if victim is not None:
                    victim.kill()
                die()
            return report

    return Struck


def struck_file_tasks(folder: str, fault: str) -> type[FileTasks[Any]]:
    """File tasks, one of which fails once after it has rewritten a file."""

    class Struck(FileTasks[Any]):
        def _done(self, files: Sequence[Any]) -> list[str]:
            results = super()._done(files)
            mark = Path(folder, f"struck-{fault}")
            if isinstance(self._work, Rewrite | BucketMerge) and not mark.exists():
                mark.touch()
                die()
            return results

    return Struck


def plant_in_widening(fault: str, folder: str) -> None:
    """Plant a fault where columns are widened."""
    if fault == "kill-rewriting":
        setattr(land, "FileTasks", struck_file_tasks(folder, fault))  # noqa: B010
    elif fault.endswith("-widening"):
        replace_all = dying(DeltaLog.replace_all, after=fault.startswith("after"))
        DeltaLog.replace_all = replace_all  # type: ignore[method-assign]
    else:
        struck = InexactIntegers if fault == "after-look" else Rewrite
        is_struck = lambda _job, work, _files: isinstance(work, struck)  # noqa: E731
        LandJob._with_files = dying(LandJob._with_files, after=True, when=is_struck)  # type: ignore[method-assign]


def plant(fault: str, folder: str) -> None:
    """Plant a fault at its place."""
    if fault == "before-commit":
        LandJob._commit = dying(LandJob._commit, after=False)  # type: ignore[method-assign]
    elif fault == "between-topics":
        LandJob._commit_one = dying(LandJob._commit_one, after=True)  # type: ignore[method-assign]
    elif fault == "before-quarantine":
        has_quarantine = lambda *_, metadata=None, **__: metadata is not None  # noqa: E731
        DeltaLog.commit = dying(DeltaLog.commit, after=True, when=has_quarantine)  # type: ignore[method-assign]
    elif fault.endswith("-compaction"):
        rewriting._replaced = dying(rewriting._replaced, after=fault.startswith("after"))
    elif fault == "before-merge":
        UpsertJob._merge = dying(UpsertJob._merge, after=False)  # type: ignore[method-assign]
    elif fault == "after-commit":
        DeltaLog.commit = dying(DeltaLog.commit, after=True)  # type: ignore[method-assign]
    elif fault == "in-vacuum":
        DeltaLog.vacuum = dying(DeltaLog.vacuum, after=True)  # type: ignore[method-assign]
    elif fault.endswith(("-widening", "-look", "-rewriting")):
        plant_in_widening(fault, folder)
    elif fault.startswith("kill-"):
        setattr(land, "LandTasks", struck_tasks(folder, fault))  # noqa: B010


def opened(settings: dict[str, str], context: JobContext, moment: datetime) -> LandJob:
    """A job that lands everything as of a moment."""
    pipeline = Pipeline(pipeline_id=uuid.uuid4(), name="trial", kind=PipelineKind.LAND, overrides=settings)
    job = make_job(pipeline, context)
    write = job._reports
    job._reports = lambda batches, landed: write(batches, moment)  # type: ignore[method-assign]
    return job


def main() -> None:
    """Land everything."""
    arguments = json.loads(sys.argv[1])
    plant(arguments["fault"], arguments["folder"])
    spark = session("land-trial", master=arguments["master"], settings=arguments.get("spark", {}))
    spark.sparkContext.setLogLevel("WARN")
    context = JobContext(spark=spark, brokers=arguments["brokers"], lake=arguments["lake"], folder="")
    moment = datetime.fromisoformat(arguments["landed"])
    jobs = [opened(settings, context, moment) for settings in (arguments["settings"], *arguments.get("more", []))]
    until = Path(arguments["until"]) if "until" in arguments else None
    while True:
        is_last = until is None or until.exists()
        try:
            steps = [job.step() for job in jobs]
        except MillstreamError as error:
            # The broker is down; a task that fails because of it ends the program, which is restarted.
            if until is None:
                raise
            print(error, flush=True)
            continue
        print(steps, flush=True)
        if is_last and not any(step.lag or step.rows for step in steps):
            break
    for job in jobs:
        job.close()
    spark.stop()


if __name__ == "__main__":
    main()
