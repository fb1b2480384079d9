"""The process of one attempt at a run of a job: `python -m millstream.pipelines.runtime.job_driver`.

It is started by `runtime/jobs_child.py` and by `millstream pipeline run`. The first line of standard input is the
order; reports go to standard output, and everything that the code prints to standard error. It ends when standard input
does. It holds the job's group while it runs, so that an attempt that was replaced ends and cannot commit anything.

It never has the node's credentials: it acts as the owner of the job, with a token in a file.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final, NoReturn, cast

from millstream.core.child_process import kill_session
from millstream.core.errors import GroupNotEmpty, MillstreamError
from millstream.core.job import parse_memory
from millstream.core.log_format import set_up_logging
from millstream.core.pipeline import PipelineKind, named_texts
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.runtime.driver_messages import (
    DRIVER_CLIENT,
    LAG,
    LOST,
    ROWS_READ,
    AssignedPipeline,
    DriverEvent,
    JobEvent,
    JobOrder,
    Options,
    Pipes,
)
from millstream.pipelines.runtime.fault import Fault, fault_of
from millstream.pipelines.source.access import NO_ACCESS, Access, parse_access
from millstream.pipelines.source.options import BROKERS, DEFAULTS_VARIABLE, SAMPLE_VARIABLE

if TYPE_CHECKING:
    from pyspark.sql import SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

    from millstream.pipelines.jobs.own_job import JobApi
    from millstream.pipelines.runtime.runner import HeldClaim
    from millstream.pipelines.source.link import Link

_logger = logging.getLogger("millstream.job")

RESPONSE_S: Final = 30.0
CLAIM_S: Final = 30.0
"""How long to wait for the previous attempt to end."""
PROGRESS_S: Final = 1
_OOM_FIRST: Final = "1000"


def limit_python(bytes_max: int) -> None:
    """Bound what this process may allocate from now on: the code gets a MemoryError instead of the machine's memory.

    Java has already started, and has its own limit. Address space is not bounded: the allocators of Arrow and Delta
    reserve far more of it than they use.
    """
    with suppress(OSError, ValueError), open("/proc/self/statm", encoding="ascii") as file:
        in_use = int(file.read().split()[5]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_DATA, (in_use + bytes_max, resource.RLIM_INFINITY))


def _raise_oom_score() -> None:
    """Make the kernel kill this process first, not the broker, when the machine runs out of memory."""
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write(_OOM_FIRST)


def run(order: JobOrder, pipes: Pipes) -> None:
    """Make one attempt; return when it has succeeded, raise when it has failed."""
    from millstream.pipelines.jobs.own_job import JobApi, RunContext, load_code, queries_of
    from millstream.pipelines.runtime.claim import DRIVER_INSTANCE, Claim
    from millstream.pipelines.runtime.spark_session import open_session
    from millstream.pipelines.source.link import Link

    pipeline = order.pipeline
    settings = pipeline.job_settings
    _set_environment(order)
    access = parse_access(order.access) if order.access else NO_ACCESS
    link = Link(
        order.kafka, f"{DRIVER_CLIENT}{order.node}", RESPONSE_S, patience_s=RESPONSE_S, credentials=access.credentials()
    )
    claim = Claim(link, pipeline.group, instance_id=DRIVER_INSTANCE, on_lost=_exit_at_once)
    if order.sample is None and pipeline.kind is PipelineKind.JOB:
        _acquire_claim(claim)
    spark = open_session(
        order.master,
        memory=settings.memory,
        settings={**order.spark, **_packages(order), **named_texts("spark", settings.spark)},
        log=None,
        ends_with_java=True,
        name=f"millstream job {pipeline.name}",
    )
    limit_python(parse_memory(settings.python_memory, name="python.memory"))
    if pipeline.kind is not PipelineKind.JOB:
        _run_pipeline(order, pipes, spark, link, access)
    api = JobApi(
        RunContext(
            spark=spark,
            link=link,
            brokers=order.kafka,
            access=access,
            lake=order.lake,
            folder=order.folder,
            name=pipeline.name,
            pipeline_id=pipeline.pipeline_id,
            group=pipeline.group,
            settings=settings,
            run=order.run,
            attempt=order.attempt,
            scheduled_ms=order.scheduled_ms,
            pin=order.pin,
            member=claim.member,
            keep_pin=pipes.keep_pin,
            report=lambda progress: pipes.send(JobEvent(progress=dict(progress))),
            is_dry=order.sample is not None,
        )
    )
    pipes.send(JobEvent(started=True))
    begin = load_code(settings.code, pipeline.name, f"<{pipeline.name}.py>")
    queries = queries_of(begin(spark, api))
    _watch(spark, api, queries, is_continuous=settings.continuous, is_dry=order.sample is not None)
    api.finish()
    if order.sample is None:
        claim.leave()


def _run_pipeline(order: JobOrder, pipes: Pipes, spark: SparkSession, link: Link, access: Access) -> NoReturn:
    """Run a pipeline of another kind as the shared driver would; raise once it is parked."""
    from millstream.pipelines.runtime.claim import DRIVER_INSTANCE, Claim
    from millstream.pipelines.runtime.driver import Driver

    parked: SimpleQueue[str] = SimpleQueue()

    def take(event: DriverEvent) -> None:
        for report in event.reports or ():
            pipes.send(JobEvent(report=report))
            if report.state == "parked":
                parked.put(report.last_error)
        if event.failed:
            pipes.send(JobEvent(failed=event.failed))

    def claim(group: str, on_lost: Callable[[], None]) -> HeldClaim:
        return Claim(link, group, instance_id=DRIVER_INSTANCE, on_lost=on_lost)

    options = Options(
        kafka=order.kafka,
        node=order.node,
        lake=order.lake,
        folder=order.folder,
        log="",
        master=order.master,
        memory=order.pipeline.job_settings.memory,
        spark={},
        log_level=order.log_level,
        log_format="text",
    )
    driver = Driver(options, spark, take, claim, access=access)
    pipes.send(JobEvent(started=True))
    driver.declare([AssignedPipeline(order.pipeline)])
    raise PipelineParked(parked.get())


class PipelineParked(MillstreamError):
    """A pipeline cannot run as declared."""


def _set_environment(order: JobOrder) -> None:
    options = {BROKERS: order.kafka, **order.access}
    os.environ[DEFAULTS_VARIABLE] = json.dumps(options)
    if order.sample is not None:
        os.environ[SAMPLE_VARIABLE] = str(order.sample)
    if order.packages:
        sys.path.insert(0, order.packages)
        # For the workers of Spark on this machine.
        before = os.environ.get("PYTHONPATH", "")
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (order.packages, before)))


def _packages(order: JobOrder) -> dict[str, str]:
    return {"spark.executorEnv.PYTHONPATH": order.packages} if order.packages else {}


def _acquire_claim(claim: Any) -> None:
    """Take the job's group; an attempt that was just killed still counts as its member for a while."""
    deadline = time.monotonic() + CLAIM_S
    while True:
        try:
            claim.take()
            return
        except GroupNotEmpty:
            if time.monotonic() > deadline:
                raise
            time.sleep(1.0)


def _exit_at_once() -> None:
    _logger.error("another attempt has taken over this job; this one ends")
    for handler in logging.getLogger().handlers:
        handler.flush()
    os._exit(LOST)


def _watch(
    spark: SparkSession, api: JobApi, queries: list[StreamingQuery], *, is_continuous: bool, is_dry: bool
) -> None:
    """Wait for streaming queries, reporting their progress; raise the error of the first that fails."""
    if not queries:
        if is_continuous and not is_dry:
            raise MillstreamError(
                "the job is continuous, and run returned no streaming query; return what writeStream…start() returns"
            )
        return
    for query in queries:
        if not cast("str | None", query.name):
            _logger.warning(
                "a streaming query has no name: unless it has its own checkpointLocation, its next run starts "
                "from the beginning; use millstream.write_stream, or queryName"
            )
    if is_dry:
        for query in queries:
            query.processAllAvailable()
            query.stop()
        return
    counted = [QueryProgress() for _ in queries]
    while any(query.isActive for query in queries):
        for query, counter in zip(queries, counted, strict=True):
            error = query.exception()
            if error is not None:
                raise error
            progress = counter.take(query.recentProgress)
            if progress is not None:
                lags = [counter.lag for counter in counted if counter.lag is not None]
                api.report(
                    **{f"batch of {query.name or query.id}": progress["batchId"]},
                    **{ROWS_READ: sum(counter.rows for counter in counted)},
                    **({LAG: sum(lags)} if lags else {}),
                )
            query.awaitTermination(PROGRESS_S)
    for query in queries:
        error = query.exception()
        if error is not None:
            raise error


class QueryProgress:
    """The progress of a streaming query since it started."""

    def __init__(self) -> None:
        self.rows = 0
        self.lag: int | None = None
        """The messages of its topics that it had not read at the last batch; None if a source has no offsets."""
        self._last = ""

    def take(self, recent: Sequence[Mapping[str, Any]]) -> Mapping[str, Any] | None:
        """Count the batches that are new among the recent ones; return the last one, if there is any."""
        for progress in recent:
            if progress["timestamp"] > self._last:
                self.rows += int(progress["numInputRows"])
                self._last = progress["timestamp"]
                self.lag = _lag_of(progress["sources"])
        return recent[-1] if recent else None


def _lag_of(sources: Sequence[Any]) -> int | None:
    """Return the lag of the sources in offsets, in the form that Kafka's source also uses."""
    lag = 0
    try:
        for source in sources:
            ends, latest = (json.loads(source[name]) for name in ("endOffset", "latestOffset"))
            for topic, offsets in latest.items():
                known = ends.get(topic, {})
                lag += sum(max(0, int(offset) - int(known.get(number, 0))) for number, offset in offsets.items())
    except (AttributeError, KeyError, TypeError, ValueError):
        return None
    return lag


def main() -> None:
    """Make the attempt that standard input orders."""
    _raise_oom_score()
    events = os.fdopen(os.dup(sys.stdout.fileno()), "wb")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    from millstream.pipelines.runtime.driver import exit_now

    pipes = Pipes(sys.stdin.buffer, events, exit_now)
    order = pipes.take_order()
    set_up_logging(order.log_level, "text", stream=sys.stderr)
    code = 0
    try:
        run(order, pipes)
        pipes.send(JobEvent(succeeded=True))
    except BaseException as error:
        fault = _fault_of(error)
        traceback.print_exc()
        is_parked = isinstance(error, PipelineParked)
        pipes.send(JobEvent(failed=_reason_of(error), fault=fault.value, parked=is_parked))
        code = 1
    logging.shutdown()
    sys.stdout.flush()
    from millstream.pipelines.runtime.spark_session import remove_scratch

    if os.getsid(0) == os.getpid():
        # Workers that outlive Java would print a traceback after the last line of the code.
        kill_session(os.getpid(), except_pid=os.getpid())
    remove_scratch()
    # No thread of the code may keep the process alive; its parent ends what is left.
    os._exit(code)


def _fault_of(error: BaseException) -> Fault:
    if isinstance(error, SyntaxError | ImportError | NameError | AttributeError | SystemExit):
        return Fault.DECLARED
    return fault_of(error) if isinstance(error, Exception) else Fault.UNKNOWN


def _reason_of(error: BaseException) -> str:
    """Return the reason, with the line of the code at which it happened."""
    place = ""
    for frame in traceback.extract_tb(error.__traceback__):
        if frame.filename.startswith("<") and frame.filename.endswith(".py>"):
            place = f" (line {frame.lineno}: {frame.line})" if frame.line else f" (line {frame.lineno})"
    if isinstance(error, MemoryError) and not str(error):
        return f"MemoryError: the code needs more than python.memory{place}"
    return f"{reason_of(error)}{place}"


if __name__ == "__main__":
    main()
