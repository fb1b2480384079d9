"""Landing jobs in this process, and the program that lands in its own and can be killed."""

from __future__ import annotations

import json
import signal
import sys
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from subprocess import Popen
from typing import TYPE_CHECKING, Any, Final

from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import Job, JobContext, JobKind, Step, TimeWindow
from millstream.pipelines.jobs.land.job import make_job
from millstream_testing.spark_cluster import WAIT_S, environment, running

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

STEPS_MAX: Final = 100


def land_job(
    spark: SparkSession,
    brokers: str,
    lake: Path,
    settings: Mapping[str, str],
    make: JobKind = make_job,
    *,
    window: TimeWindow | None = None,
) -> Any:
    """Return the job of a pipeline that is not declared; underscores in the names of settings stand for dots."""
    given = {name.replace("_", "."): text for name, text in settings.items()}
    name = f"land-{uuid.uuid4().hex[:8]}"
    pipeline = Pipeline(pipeline_id=uuid.uuid4(), name=name, kind=PipelineKind.LAND, overrides=given)
    return make(pipeline, JobContext(spark=spark, brokers=brokers, lake=str(lake), folder="", window=window))


def run(job: Job) -> list[Step]:
    """Step until nothing is left."""
    steps = [job.step()]
    while steps[-1].lag:
        assert len(steps) < STEPS_MAX
        steps.append(job.step())
    return steps


def run_and_close(job: Job) -> list[Step]:
    try:
        return run(job)
    finally:
        job.close()


class LandProgram:
    """A program that lands topics, started with a fault that it plants in itself."""

    def __init__(self, program: Path, brokers: str, folder: Path, settings: Mapping[str, str]) -> None:
        self.folder = folder
        self.landed = datetime.now(UTC)
        """The time of landing, by which files are placed."""
        self._program = program
        self._brokers = brokers
        self._settings = settings

    @contextmanager
    def driver(self, fault: str = "", master: str = "local[2,4]", **settings: str) -> Iterator[Popen[bytes]]:
        """The program, started."""
        given = {
            "master": master,
            "brokers": self._brokers,
            "lake": str(self.folder / "lake"),
            "folder": str(self.folder),
            "fault": fault,
            "landed": self.landed.isoformat(),
            "settings": {**self._settings, **settings},
        }
        command = [sys.executable, str(self._program), json.dumps(given)]
        with running(command, self.log(fault), environment()) as process:
            yield process

    def log(self, fault: str) -> Path:
        return self.folder / f"driver-{fault}.log"

    def land(self, fault: str = "", **more: str) -> None:
        """Run the program to its end."""
        with self.driver(fault, **more) as process:
            self.check_end(process, fault)

    def die(self, fault: str) -> None:
        """Run the program until it kills itself."""
        with self.driver(fault) as process:
            self.check_end(process, fault, code=-signal.SIGKILL)

    def check_end(self, process: Popen[bytes], fault: str, *, code: int = 0) -> None:
        """Wait for the end of the program, and check its exit code."""
        assert process.wait(WAIT_S) == code, self.log(fault).read_text(errors="replace")[-3000:]
