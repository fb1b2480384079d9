"""A driver without Spark: `python -m millstream_testing.scripted_driver OPTIONS`, as the real one is started.

The setting `topics` of a pipeline selects its behaviour: `idle` waits, `failing` fails, `deadly` kills the process,
`hanging` never ends, and anything else takes one message with each step.
"""

from __future__ import annotations

import os
import signal
import sys
import threading

import msgspec

from millstream.core.errors import InvalidRequest
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.job import Job, JobContext, Step
from millstream.pipelines.runtime.driver import Driver
from millstream.pipelines.runtime.driver_messages import DriverCommand, EventWriter, Options
from millstream_testing.pipeline_script import UncontendedClaim

PAUSE_S = 0.05
POLL_S = 0.01


class OneWordJob:
    """Behaves as one word selects."""

    def __init__(self, word: str, context: JobContext) -> None:
        self._word = word
        self._context = context

    def step(self) -> Step:
        """Do it once."""
        if self._word == "deadly":
            os.kill(os.getpid(), signal.SIGKILL)
        if self._word == "failing":
            raise InvalidRequest("the script fails this step")
        if self._word == "hanging":
            threading.Event().wait()
        if self._word == "idle":
            return Step(wait_s=60.0)
        return Step(rows=1, wait_s=PAUSE_S, counts={"files": 1})

    def close(self) -> None:
        """Do nothing: nothing has to be released."""


def make(pipeline: Pipeline, context: JobContext) -> Job:
    return OneWordJob(pipeline.overrides["topics"], context)


def main() -> None:
    """Run until the broker closes the pipe."""
    options = Options.take()
    driver = Driver(
        options,
        None,
        EventWriter(sys.stdout.buffer).send,
        lambda _group, _on_lost: UncontendedClaim(),
        jobs={PipelineKind.LAND: make},
        report_s=PAUSE_S,
        backoff_s=0.001,
        check_interval_s=POLL_S,
        cancel_s=2 * POLL_S,
    )
    for line in sys.stdin.buffer:
        driver.declare(msgspec.json.decode(line, type=DriverCommand).pipelines)
    driver.end()


if __name__ == "__main__":
    main()
