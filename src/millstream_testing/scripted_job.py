"""A job's process without Spark: `python -m millstream_testing.scripted_job`, as the real one is started.

The code of the job is run as it is; its second argument can `report`, `take` what the run takes, and `wait`. A
transform with functions reports five rows and is parked.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from typing import Any

from millstream.core.pipeline import PipelineKind
from millstream.pipelines.runtime.driver_messages import JobEvent, JobOrder, Pipes
from millstream.pipelines.runtime.fault import Fault
from millstream.protocol.private.pipeline_messages import PipelineReport

HANG_S = 3600.0


class ScriptedApi:
    """The API object that the code receives."""

    def __init__(self, order: JobOrder, pipes: Pipes) -> None:
        self.order = order
        self._pipes = pipes

    def report(self, **progress: Any) -> None:
        self._pipes.send(JobEvent(progress=progress))

    def take(self, **topics: Any) -> dict[str, Any]:
        """Pin what the run takes, unless an earlier attempt has; return it."""
        pin = self.order.pin or {"batch": self.order.run, "topics": topics}
        self._pipes.keep_pin(pin)
        return pin

    def wait(self) -> None:
        time.sleep(HANG_S)


def main() -> None:
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    pipes = Pipes(sys.stdin.buffer, events, lambda: os._exit(0))
    order = pipes.take_order()
    pipes.send(JobEvent(started=True))
    if order.pipeline.kind is not PipelineKind.JOB:
        pipes.send(
            JobEvent(report=PipelineReport(name=order.pipeline.name, state="running", rows=5, batches=1, node=-1))
        )
        pipes.send(JobEvent(failed="a function failed", parked=True))
        os._exit(0)
    space: dict[str, Any] = {}
    try:
        exec(compile(order.pipeline.job_settings.code, "<job>", "exec"), space)
        space["run"](None, ScriptedApi(order, pipes))
        pipes.send(JobEvent(succeeded=True))
    except BaseException as error:
        traceback.print_exc()
        fault = Fault.DECLARED if isinstance(error, NameError) else Fault.UNKNOWN
        pipes.send(JobEvent(failed=f"{type(error).__name__}: {error}", fault=fault.value))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
