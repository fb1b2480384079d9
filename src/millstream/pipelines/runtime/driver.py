"""The driver process: `python -m millstream.pipelines.runtime.driver OPTIONS`, started only by `runtime/child.py`.

It has one Spark session, which all pipelines of the node share fairly, and a thread for each of them. It reads the
pipelines to run from standard input, one JSON line each time, and reports on standard output. It ends when standard
input does: running steps are abandoned, which is safe. While Spark is still starting, which may take long, it exits at
once and kills the processes that it has started.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from importlib import import_module
from queue import SimpleQueue
from typing import IO, TYPE_CHECKING, Any, Final

import msgspec

from millstream.core.log_format import set_up_logging
from millstream.core.pipeline import Pipeline, PipelineKind
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.jobs.job import JOBS, JobContext, JobKind, LazyJobKind
from millstream.pipelines.runtime.claim import DRIVER_INSTANCE, Claim
from millstream.pipelines.runtime.driver_messages import (
    DRIVER_CLIENT,
    AssignedPipeline,
    DriverCommand,
    DriverEvent,
    EventWriter,
    Options,
)
from millstream.pipelines.runtime.runner import BACKOFF_S_MIN, DriverContext, HeldClaim, Runner
from millstream.pipelines.runtime.stall_watch import CANCEL_S, CHECK_INTERVAL_S, Activity, Watch, activity_of
from millstream.pipelines.source.access import NO_ACCESS, Access, TokenFiles, connection_access
from millstream.pipelines.source.link import Link
from millstream.protocol.messages.lean_kio import import_lean_kio
from millstream.protocol.wire.credentials import NODE_CREDENTIALS, adopt_node_credentials

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_logger = logging.getLogger(__name__)


class Turns:
    """Pipelines that were running when a driver died; they take turns until a step has succeeded.

    So if the driver dies again there is one suspect, not all of them.
    """

    def __init__(self) -> None:
        self._turn = threading.Lock()
        self._suspects: set[str] = set()
        self._holder = ""

    def suspect(self, name: str) -> None:
        """Make a pipeline take turns with other suspects from its next step on."""
        self._suspects.add(name)

    def acquire(self, name: str) -> None:
        """Wait for a suspect's turn, before a step."""
        if name in self._suspects:
            self._turn.acquire()
            self._holder = name

    def release(self, name: str, *, has_succeeded: bool) -> None:
        """End the turn after a step; success clears a suspect."""
        if has_succeeded:
            self._suspects.discard(name)
        if self._holder == name:
            self._holder = ""
            self._turn.release()


RESPONSE_S: Final = 30.0
REPORT_S: Final = 0.5
"""The minimum time between reports."""
RATES_S: Final = 5.0
"""How often rates are reported when nothing else changes."""
END_S: Final = 5.0
"""How long steps may take to notice that they are abandoned."""
STUCK: Final = 71
"""The exit code of a driver that has to be replaced."""


class CommandReader:
    """Reads the broker's lines, and notices from the start when it closes the pipe."""

    def __init__(self, stream: IO[bytes], leave: Callable[[], None]) -> None:
        """Read a stream; `leave` ends the process and its children if the broker exits before there is work."""
        self._stream = stream
        self._leave = leave
        self._lines: SimpleQueue[bytes] = SimpleQueue()
        self._lock = threading.Lock()
        self._is_up = False
        threading.Thread(target=self._read_lines, name="read the broker's commands", daemon=True).start()

    def lines(self) -> Iterator[bytes]:
        """Yield the lines until the broker closes the pipe."""
        with self._lock:
            self._is_up = True
        return iter(self._lines.get, b"")

    def _read_lines(self) -> None:
        for line in self._stream:
            self._lines.put(line)
        self._lines.put(b"")
        with self._lock:
            if not self._is_up:
                self._leave()


def exit_now() -> None:
    """Kill this process and the Java process that it may be starting."""
    from millstream.pipelines.runtime.spark_session import remove_scratch

    remove_scratch()
    if os.getpgrp() == os.getpid():
        # The broker starts it as the leader of a process group, which includes a Java process without a handle yet.
        os.killpg(0, signal.SIGKILL)
    os._exit(0)


class _RunningPipeline:
    def __init__(self, runner: Runner, attempt: int, *, after: _RunningPipeline | None) -> None:
        self.runner = runner
        self.attempt = attempt
        self._after = after
        self.thread = threading.Thread(target=self._run, name=f"pipeline {runner.declared.name}", daemon=True)

    def _run(self) -> None:
        if self._after is not None:
            # The previous runner of the same pipeline, which is ending: two would interfere.
            self._after.thread.join()
            self._after = None
        self.runner.run()


class Driver:
    def __init__(
        self,
        options: Options,
        spark: SparkSession | None,
        send: Callable[[DriverEvent], None],
        claim: Callable[[str, Callable[[], None]], HeldClaim],
        *,
        jobs: Mapping[PipelineKind, JobKind] = JOBS,
        report_s: float = REPORT_S,
        backoff_s: float = BACKOFF_S_MIN,
        check_interval_s: float = CHECK_INTERVAL_S,
        cancel_s: float = CANCEL_S,
        access: Access | TokenFiles = NO_ACCESS,
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        """Run pipelines; `leave` ends the process at once, with an exit code.

        Pipelines sign in with `access`; with tokens they act with the rights of their owners.
        """
        self._options = options
        self._spark: Any = spark
        self._send = send
        self._claim = claim
        self._access = access
        self._jobs = jobs
        self._report_s = report_s
        self._backoff_s = backoff_s
        self._leave = leave
        self._running: dict[str, _RunningPipeline] = {}
        self._ending: dict[str, _RunningPipeline] = {}
        self._turns = Turns()
        self._thread = threading.local()
        self._news = threading.Event()
        self._over = threading.Event()
        self._reporter = threading.Thread(target=self._report_periodically, name="reports", daemon=True)
        self._reporter.start()
        watch = Watch(
            self._runners,
            lambda: Activity() if spark is None else activity_of(spark),
            self._request_replacement,
            check_interval_s=check_interval_s,
            cancel_s=cancel_s,
        )
        threading.Thread(target=watch.run, args=(self._over,), name="watch", daemon=True).start()

    def declare(self, pipelines: list[AssignedPipeline]) -> None:
        """Run exactly these pipelines from now on."""
        by_name = {pipeline.pipeline.name: pipeline for pipeline in pipelines}
        for name in [name for name in self._running if name not in by_name]:
            self._stop_pipeline(name)
        for name, assigned in by_name.items():
            running = self._running.get(name)
            if running is not None and _is_another(running, assigned):
                self._stop_pipeline(name)
                running = None
            if running is None:
                self._start_pipeline(assigned)
            elif running.runner.declared != assigned.pipeline:
                running.runner.change(assigned.pipeline)
        self._news.set()

    def end(self) -> None:
        """Stop everything that can be stopped in time."""
        self._over.set()
        self._news.set()
        for name in list(self._running):
            self._stop_pipeline(name)
        deadline = time.monotonic() + END_S
        for thread in (*(running.thread for running in self._ending.values()), self._reporter):
            thread.join(max(0.0, deadline - time.monotonic()))

    def _start_pipeline(self, assigned: AssignedPipeline) -> None:
        name = assigned.pipeline.name
        if assigned.is_suspect:
            self._turns.suspect(name)
        runner = Runner(assigned.pipeline, self._context_for(assigned.pipeline), node=self._options.node)
        running = _RunningPipeline(runner, assigned.attempt, after=self._ending.pop(name, None))
        self._running[name] = running
        running.thread.start()

    def _stop_pipeline(self, name: str) -> None:
        running = self._running.pop(name)
        running.runner.stop()
        self._ending = {known: running for known, running in self._ending.items() if running.thread.is_alive()}
        self._ending[name] = running

    def _context_for(self, pipeline: Pipeline) -> DriverContext:
        name = pipeline.name
        return DriverContext(
            make=self._jobs[pipeline.kind],
            context=self._context,
            claim=self._claim,
            turn=lambda: self._turns.acquire(name),
            begun=lambda: self._on_step_begun(name),
            ended=lambda has_succeeded: self._on_step_ended(name, has_succeeded),
            lost=lambda: self._turns.release(name, has_succeeded=False),
            cancel=lambda: self._cancel(name),
            changed=self._news.set,
            backoff_s=self._backoff_s,
        )

    def _context(self, pipeline: Pipeline) -> JobContext:
        options, access = self._options, self._access
        tokens = access if isinstance(access, TokenFiles) else None
        return JobContext(
            spark=self._spark,
            brokers=options.kafka,
            access=access if isinstance(access, Access) else access.access_of(pipeline.owner.principal),
            node_link=None if tokens is None else tokens.link,
            lake=options.lake,
            folder=options.folder,
        )

    def _on_step_begun(self, name: str) -> None:
        if self._spark is not None and not hasattr(self._thread, "is_grouped"):
            # Both are properties of the thread, and a pool per pipeline makes the scheduler fair.
            self._spark.sparkContext.setJobGroup(name, f"pipeline {name}", interruptOnCancel=True)
            self._spark.sparkContext.setLocalProperty("spark.scheduler.pool", name)
            self._thread.is_grouped = True
        self._send(DriverEvent(begun=name))

    def _on_step_ended(self, name: str, has_succeeded: bool) -> None:
        self._send(DriverEvent(ended=name, has_succeeded=has_succeeded))
        self._turns.release(name, has_succeeded=has_succeeded)

    def _cancel(self, name: str) -> None:
        if self._spark is not None:
            # In a thread, since a hung Java process would block the caller, which serves other pipelines.
            threading.Thread(target=self._cancel_group, args=(name,), name=f"cancel {name}", daemon=True).start()

    def _cancel_group(self, name: str) -> None:
        with suppress(Exception):
            self._spark.sparkContext.cancelJobGroup(name)

    # -- stalled pipelines -----------------------------------------------------------------------------------

    def _runners(self) -> list[Runner]:
        """Return the running pipelines, including those that are ending."""
        known = (*list(self._running.values()), *list(self._ending.values()))
        return [pipeline.runner for pipeline in known if pipeline.thread.is_alive()]

    def _request_replacement(self, name: str, reason: str) -> None:
        _logger.error("the driver must be replaced", extra={"pipeline": name, "reason": reason})
        about = f"pipeline {name!r}: " if name else ""
        self._send(DriverEvent(failed=f"the driver was replaced: {about}{reason}", stuck=name))
        self._leave(STUCK)

    def _report_periodically(self) -> None:
        while not self._over.is_set():
            self._news.wait(RATES_S)
            self._news.clear()
            self._send(DriverEvent(reports=[running.runner.report() for running in list(self._running.values())]))
            self._over.wait(self._report_s)


def _is_another(running: _RunningPipeline, assigned: AssignedPipeline) -> bool:
    """Whether a pipeline was deleted and declared again under its name, or has to be retried."""
    return running.runner.declared.pipeline_id != assigned.pipeline.pipeline_id or running.attempt != assigned.attempt


def _send_heartbeats(events: EventWriter) -> None:
    """Send something regularly, even before there is anything to report: a silent driver is replaced."""
    while True:
        events.send(DriverEvent())
        time.sleep(RATES_S)


def _warm_up(spark: Any, folder: str) -> None:
    """Warm up: Java loads and compiles the classes that statements and batches need, and Python workers start."""
    for kind in (PipelineKind.LAND, PipelineKind.TRANSFORM, PipelineKind.ROUTE):
        import_module(LazyJobKind(kind).module)
    from millstream.pipelines.jobs.transform.prepared_query import try_statement

    try_statement(spark, folder)
    numbers = spark.range(0, 2, 1, 2).mapInArrow(_identity, "id long")
    numbers.createOrReplaceTempView("warm")
    spark.sql("SELECT id + 1 AS id, to_json(struct(id)) AS value FROM warm WHERE id >= 0").collect()
    spark.catalog.dropTempView("warm")


def _identity(batches: Iterator[Any]) -> Iterator[Any]:
    import millstream.pipelines.jobs.land.task
    import millstream.pipelines.source.row_producer  # noqa: F401

    yield from batches


def run(options: Options, commands: IO[bytes], events: EventWriter, *, leave: Callable[[], None] = exit_now) -> None:
    """Drive until the broker closes the pipe."""
    from millstream.pipelines.runtime.spark_session import close_session, open_session, scratch_folder

    ears = CommandReader(commands, leave)
    threading.Thread(target=_send_heartbeats, args=(events,), name="alive", daemon=True).start()
    try:
        spark = open_session(
            options.master,
            memory=options.memory,
            settings=options.spark,
            log=options.log,
            ends_with_java=True,
        )
        if options.is_spare:
            _warm_up(spark, scratch_folder())
        credentials = NODE_CREDENTIALS.get()
        link = Link(options.kafka, f"{DRIVER_CLIENT}{options.node}", RESPONSE_S, credentials=credentials)
    except Exception as error:
        events.send(DriverEvent(failed=reason_of(error)))
        raise

    def claim(group: str, on_lost: Callable[[], None]) -> HeldClaim:
        return Claim(link, group, instance_id=DRIVER_INSTANCE, on_lost=on_lost)

    tokens = TokenFiles(link, scratch_folder(), connection_access(credentials)) if options.authorizes else None
    driver = Driver(options, spark, events.send, claim, access=tokens or NO_ACCESS)
    for line in ears.lines():
        driver.declare(msgspec.json.decode(line, type=DriverCommand).pipelines)
    driver.end()
    if tokens is not None:
        tokens.close()
    close_session(spark)


def main() -> None:
    """Run with the broker's options."""
    options = Options.take()
    set_up_logging(options.log_level, options.log_format, stream=sys.stderr)
    import_lean_kio()
    adopt_node_credentials()
    # Everything else that is written to standard output goes to the log.
    events = EventWriter(os.fdopen(os.dup(sys.stdout.fileno()), "wb"))
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    code = 0
    try:
        run(options, sys.stdin.buffer, events)
    except Exception as error:
        _logger.critical("the pipelines cannot be run", extra={"error": reason_of(error)})
        code = 1
    logging.shutdown()
    # A step that hangs must not keep the process alive.
    os._exit(code)


if __name__ == "__main__":
    main()
