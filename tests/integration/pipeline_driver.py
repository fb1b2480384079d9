"""A program for the trials: runs a transform or a route until it is killed, with pauses at given points.

    python pipeline_driver.py '{"brokers": …, "folder": …, "pipeline": …, "pause": …}'

`pause` is `before-commit` or `after-commit`: where the driver stops in its second batch and waits to be killed, when
every task has promised its part or when the batch is decided; `in-task`, where only one task of that batch has not
written its rows yet; or `kill-worker`, which kills the process of the first task of the second batch when its rows are
written. `batch` names another batch to stop in.

What happened is left as files in the folder, or in `marks` if that is another one. A file `go` there ends a pause. With
`"ends": "on-request"` it continues until the file `enough` exists.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark import TaskContext

import millstream.pipelines.jobs.route.job as task
import millstream.pipelines.jobs.transform.prepared_query as prepared_query
import millstream.pipelines.source.row_producer as attempt
from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.pipelines.jobs.job import JOBS, JobContext
from millstream.protocol.private.transactions import Transactions
from millstream.spark.session import session

SLOW_S = 7200.0

_complete = Transactions.complete_batch


def pausing(folder: Path, pause: str, paused: int) -> Any:
    """Wrap the commit of a batch, so that it waits to be killed before or after it."""

    async def wait() -> None:
        folder.joinpath("paused").touch()
        deadline = time.monotonic() + SLOW_S
        while not folder.joinpath("go").exists() and time.monotonic() < deadline:
            await asyncio.sleep(0.05)

    async def complete(self: Transactions, query: str, batch: int, members: Any) -> bool:
        if batch == paused and pause == "before-commit":
            await wait()
        done = await _complete(self, query, batch, members)
        if batch == paused and pause == "after-commit":
            await wait()
        folder.joinpath(f"done-{batch}").touch()
        return done

    return complete


def lingering(folder: Path, paused: int) -> Any:
    """The output of a task of a transform, with a pause before the rows of the second task of one batch."""
    write_part = attempt.write_part

    def write(options: Any, batch: Any, iterator: Any) -> Any:
        context = TaskContext.get()
        if batch.number == paused and context is not None and context.partitionId() == 1:
            folder.joinpath("paused").touch()
            deadline = time.monotonic() + SLOW_S
            while not folder.joinpath("go").exists() and time.monotonic() < deadline:
                time.sleep(0.05)
        return write_part(options, batch, iterator)

    return write


def route_with_crash(folder: Path) -> Any:
    """The output of a task of a route, whose process ends after the rows of one batch."""
    routed = task.routed

    def rows(*given: Any) -> Iterator[pa.RecordBatch]:
        yield from routed(*given)
        if folder.joinpath("done-0").exists() and not folder.joinpath("struck").exists():
            folder.joinpath("struck").touch()
            os.kill(os.getpid(), signal.SIGKILL)

    return rows


def main(given: dict[str, Any]) -> None:
    """Run steps until nothing is left."""
    folder = Path(given["folder"])
    marks = Path(given.get("marks", folder))
    paused = given.get("batch", 1)
    settings = {"spark.sql.warehouse.dir": str(folder / "warehouse"), "spark.task.maxFailures": "4"}
    spark = session("trial", master="local[2,4]", settings=settings)
    spark.sparkContext.setLogLevel("ERROR")
    Transactions.complete_batch = pausing(marks, given["pause"], paused)  # type: ignore[method-assign]
    if given["pause"] == "in-task":
        prepared_query.write_part = lingering(marks, paused)  # type: ignore[attr-defined]
    if given["pause"] == "kill-worker":
        task.routed = route_with_crash(marks)
    reported = given["pipeline"]
    pipeline = Pipeline(
        pipeline_id=uuid.UUID(reported["id"]),
        name=reported["name"],
        kind=PipelineKind(reported["kind"]),
        overrides=reported["settings"],
        rules=tuple(Rule(**{**rule, "targets": tuple(rule["targets"])}) for rule in reported["rules"]),
    )
    context = JobContext(spark=spark, brokers=given["brokers"], lake="", folder=str(folder), rules=pipeline.rules)
    job = JOBS[pipeline.kind](pipeline, context)
    while True:
        step = job.step()
        is_over = "ends" not in given or marks.joinpath("enough").exists()
        if is_over and not step.rows and not step.lag:
            break
    job.close()
    spark.stop()


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
