"""The broker's side of jobs: decides when a job runs, and runs each attempt in its own process.

A run is a row in the catalog, written before its first attempt. The node that owns the pipelines makes the attempts;
one that takes over finds a run that is not over and repeats it, so that a time is neither missed nor taken twice. The
history is in the catalog; the output of an attempt is in the data folder of the node that made it.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, Final
from uuid import UUID

import msgspec

from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.owner import PipelineOwner
from millstream.broker.pipelines.report_board import JobLog, PipelineBoard
from millstream.broker.security.rights import owner_refusal
from millstream.broker.security.state import SecurityState
from millstream.client.admin.security import create_token, revoke_token
from millstream.core.backoff import Backoff, delay_after
from millstream.core.child_process import (
    environment_without_settings,
    hang_up,
    kill_session,
    memory_of_session,
    read_events,
    send_line,
    spawn_module,
)
from millstream.core.errors import InvalidSetting, MillstreamError, UnknownPipeline
from millstream.core.job import ERROR_LENGTH_MAX, RUNS_KEPT, JobRun, RunState, code_hash, parse_memory
from millstream.core.pipeline import JobSettings, Pipeline
from millstream.core.private_file import write_private
from millstream.core.tasks import cancel_and_wait, wait_up_to, within
from millstream.pipelines.runtime.driver_messages import LAG, LOST, ROWS_READ, JobEvent, JobOrder, JobResponse, Options
from millstream.pipelines.runtime.fault import Fault
from millstream.pipelines.runtime.job_environment import PackagesFailed, install, resolve
from millstream.pipelines.runtime.runner import FAILURES_MAX, WEIGHTS
from millstream.pipelines.source.access import TOKEN_MS, connection_access
from millstream.protocol.private.pipeline_messages import PipelineReport, PipelineState
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import NODE_CREDENTIALS

_logger = logging.getLogger(__name__)

MODULE: Final = "millstream.pipelines.runtime.job_driver"
FOLDER: Final = "jobs"
"""The folder, below the data folder, of the output of runs and the packages of jobs."""
PACKAGES: Final = "packages"
STOP_S: Final = 5.0
CHECK_INTERVAL_S: Final = 5.0
CHECK_S: Final = 0.5
"""How often the memory of a run is measured."""
PROGRESS_S: Final = 10.0
"""How often progress is stored."""
PROGRESS_BYTES_MAX: Final = 1024 * 1024
LINE_BYTES_MAX: Final = 8 * 1024 * 1024
LOG_BYTES_MAX: Final = 8 * 1024 * 1024
"""At least the last this many bytes of a run's output are kept."""
RETRY_S_MAX: Final = 300.0
INTERRUPTIONS_MAX: Final = 3
"""How many attempts beyond its retries a run gets when nodes die during it."""
LOST_S: Final = 15.0
"""How long to wait before looking again at a run that another node has taken over."""
SETTLED_S: Final = 60.0
"""A continuous job that ran for this long counts as healthy."""
OVERHEAD_BYTES: Final = 1024**3
"""The memory of Java outside its heap, and of the Python processes before the code begins."""
PIN: Final = "pin"


@dataclass(frozen=True, slots=True, kw_only=True)
class _Outcome:
    succeeded: bool = False
    error: str = ""
    fault: Fault = Fault.UNKNOWN
    is_lost: bool = False
    """Whether another node makes an attempt at the same run."""
    is_parked: bool = False
    """Whether its driver has tried often enough."""


class _Log:
    """The output of one run, in two alternating files."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def write(self, data: bytes) -> None:
        """Append text; the oldest beyond the limit is dropped."""
        self._path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with suppress(FileNotFoundError):
            if self._path.stat().st_size > LOG_BYTES_MAX:
                self._path.replace(self._earlier)
        with open(os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab") as file:
            file.write(data)

    def read(self, bytes_max: int) -> JobLog | None:
        content, is_truncated = b"", False
        for path in (self._path, self._earlier):
            with suppress(FileNotFoundError), open(path, "rb") as file:
                size = file.seek(0, os.SEEK_END)
                length = min(size, bytes_max - len(content))
                file.seek(size - length)
                content, is_truncated = file.read(length) + content, length < size
        if not content and not self._path.exists():
            return None
        return JobLog(content.decode(errors="replace"), is_truncated)

    def remove(self) -> None:
        for path in (self._path, self._earlier):
            path.unlink(missing_ok=True)

    @property
    def _earlier(self) -> Path:
        return self._path.with_suffix(".log.1")


def _now_ms() -> int:
    return int(time.time() * 1000)


class JobsChild:
    def __init__(
        self,
        options: Options,
        data: str,
        declared: Pipelines,
        board: PipelineBoard,
        owner: PipelineOwner,
        *,
        missing: Callable[[], str],
        security: SecurityState | None = None,
        module: str = MODULE,
    ) -> None:
        """`missing` returns why no job can run here; with `security`, jobs have the rights of their owners."""
        self.options = options
        self.folder = Path(data, FOLDER)
        self.declared = declared
        self.security = security
        self.module = module
        self._board = board
        self._owner = owner
        self._missing = missing
        self._idle_reason = ""
        self._jobs: dict[UUID, _Job] = {}
        self._known: dict[UUID, str] = {}
        self._stopping = asyncio.Event()
        self._news = asyncio.Event()
        board.jobs = self
        declared.on_change(self._news.set)
        owner.on_change(self._news.set)
        if security is not None:
            security.on_change(self._news.set)

    async def run(self) -> None:
        """Run jobs until `stop`; a background task of the broker."""
        async with asyncio.TaskGroup() as group:
            while not self._stopping.is_set():
                self._news.clear()
                self._apply_declared(group)
                await wait_up_to(CHECK_INTERVAL_S if self._idle_reason else None, self._news)
            for job in self._jobs.values():
                job.leave()

    async def stop(self) -> None:
        """End the runs in progress; another node, or the next start of this one, repeats them."""
        self._stopping.set()
        self._news.set()
        for job in list(self._jobs.values()):
            job.leave()
        await asyncio.gather(*(job.ended.wait() for job in list(self._jobs.values())))

    def cancel(self, name: str) -> int | None:
        named = next((job for job in self._jobs.values() if job.pipeline.name == name), None)
        return None if named is None else named.cancel()

    async def read_log(self, pipeline_id: UUID, run: int, bytes_max: int) -> JobLog | None:
        """Return the end of a run's output; None if it did not run here."""
        return await asyncio.to_thread(self.log_of(pipeline_id, run).read, bytes_max)

    def log_of(self, pipeline_id: UUID, run: int) -> _Log:
        return _Log(self.folder / str(pipeline_id) / f"run-{run}.log")

    def locks(self) -> list[str]:
        jobs = [pipeline for pipeline in self.declared.all() if pipeline.has_own_driver]
        return [lock for job in jobs if (lock := job.overrides.get("lock", ""))]

    def changed(self) -> None:
        is_here = self._owner.is_this_node or (bool(self._idle_reason) and not self._owner.is_elsewhere)
        reports = [job.report() for job in self._jobs.values() if not job.is_leaving] if is_here else []
        known = {report.name for report in reports}
        waiting = (
            [pipeline for pipeline in self._due() if pipeline.name not in known]
            if is_here and self._idle_reason
            else []
        )
        now = _now_ms()
        reports += [
            PipelineReport(
                name=pipeline.name,
                state="waiting",
                last_error=self._idle_reason,
                last_error_ms=now,
                node=self.options.node,
            )
            for pipeline in waiting
        ]
        self._board.take_jobs(reports)

    def _due(self) -> list[Pipeline]:
        return [pipeline for pipeline in self.declared.all() if pipeline.has_own_driver and pipeline.is_due]

    def _apply_declared(self, group: asyncio.TaskGroup) -> None:
        """Start, change and end tasks after a change of the pipelines or their owner."""
        due = {pipeline.pipeline_id: pipeline for pipeline in self._due()}
        self._idle_reason = self._missing() if due else ""
        if due and not self._idle_reason:
            self._owner.become_candidate()
        if not self._owner.is_this_node or self._idle_reason:
            runnable: dict[UUID, Pipeline] = {}
        else:
            runnable = due
        self._jobs = {key: job for key, job in self._jobs.items() if not job.ended.is_set()}
        for key, job in self._jobs.items():
            if key in runnable:
                job.change(runnable[key])
            elif self._owner.is_this_node and not self._idle_reason:
                # The job is no longer due.
                job.stop()
            else:
                job.leave()
        for key, pipeline in runnable.items():
            if key not in self._jobs:
                self._jobs[key] = job = _Job(self, pipeline)
                group.create_task(job.run(), name=f"job {pipeline.name}")
        self._forget_deleted()
        self.changed()

    def _forget_deleted(self) -> None:
        declared = {pipeline.pipeline_id: pipeline.name for pipeline in self.declared.all()}
        for gone in self._known.keys() - declared.keys():
            loop = asyncio.get_running_loop()
            loop.run_in_executor(None, partial(shutil.rmtree, self.folder / str(gone), ignore_errors=True))
        self._known = declared


class _Job:
    def __init__(self, child: JobsChild, pipeline: Pipeline) -> None:
        self._child = child
        self.pipeline = pipeline
        self.ended = asyncio.Event()
        self.is_leaving = False
        """Whether the run in progress is left for another node, or another start."""
        self._is_stopped = False
        self._is_cancelled = False
        self._restarts_run = False
        self._news = asyncio.Event()
        self._end_attempt = asyncio.Event()
        """Set to end the attempt in progress."""
        self._run: JobRun | None = None
        self._last: JobRun | None = None
        self._state: PipelineState = "starting"
        self._error = ""
        self._error_ms = 0
        self._failing_ms = 0
        self._next_ms = 0
        self._restarts = 0
        self._failures = 0
        """Failures of a continuous job in a row, by weight."""
        self._driver_report: PipelineReport | None = None
        """The last report of the process about itself, if it is a transform's."""

    # -- called by `JobsChild` -------------------------------------------------------------------------------

    def change(self, pipeline: Pipeline) -> None:
        """Apply a new declaration: a continuous job restarts, a run in progress finishes unchanged."""
        before, self.pipeline = self.pipeline, pipeline
        if before == pipeline:
            return
        # State that the node itself stores is no reason to restart.
        is_other = {**before.overrides, "lock": ""} != {**pipeline.overrides, "lock": ""}
        if is_other and pipeline.job_settings.continuous:
            self._restarts_run = True
            self._end_attempt.set()
        self._news.set()

    def stop(self) -> None:
        """End permanently: the job was stopped, parked or deleted."""
        self._is_stopped = True
        self._end_attempt.set()
        self._news.set()

    def leave(self) -> None:
        """End without ending the run."""
        self.is_leaving = True
        self._end_attempt.set()
        self._news.set()

    def cancel(self) -> int | None:
        """End the run in progress; return its number."""
        if self._run is None:
            return None
        self._is_cancelled = True
        self._end_attempt.set()
        self._news.set()
        return self._run.number

    def report(self) -> PipelineReport:
        run = self._run or self._last
        progress = {} if run is None else run.progress
        if self._driver_report is not None:
            # A transform with functions: report the counts of its driver, while it runs and afterwards.
            report = self._driver_report
            return msgspec.structs.replace(
                report,
                state=report.state if self._state == "running" else self._state,
                restarts=report.restarts + self._restarts,
                last_error=self._error or report.last_error,
                last_error_ms=self._error_ms or report.last_error_ms,
                failing_ms=self._failing_ms or report.failing_ms,
                node=self._child.options.node,
                run=0 if run is None else run.number,
            )
        return PipelineReport(
            name=self.pipeline.name,
            state=self._state,
            rows=_as_integer(progress.get("rows", progress.get(ROWS_READ))) or 0,
            lag=_as_integer(progress.get(LAG)) if self._state == "running" else None,
            batches=0 if run is None else run.number - (run.state is RunState.RUNNING),
            restarts=self._restarts,
            last_error=self._error,
            last_error_ms=self._error_ms,
            failing_ms=self._failing_ms,
            node=self._child.options.node,
            run=0 if run is None else run.number,
            next_run_ms=self._next_ms,
        )

    # -- the task -------------------------------------------------------------------------------------------

    async def run(self) -> None:
        backoff = Backoff(first_s=1.0, max_s=60.0)
        try:
            while not self._is_over:
                try:
                    await self._await_and_run()
                    backoff.reset()
                except UnknownPipeline:
                    return
                except Exception as error:
                    # The catalog may be unavailable; no error of a job may end the node.
                    known = isinstance(error, MillstreamError | OSError)
                    self._record_error(str(error))
                    _logger.warning(
                        "a job has to wait",
                        extra={"pipeline": self.pipeline.name, "error": str(error)},
                        exc_info=None if known else error,
                    )
                    self._set_state("retrying")
                    await self._wait(backoff.take_s())
        finally:
            self.ended.set()
            self._child._news.set()

    @property
    def _is_over(self) -> bool:
        return self._is_stopped or self.is_leaving

    async def _await_and_run(self) -> None:
        pipeline, settings = self.pipeline, self.pipeline.job_settings
        if self._child.security is not None:
            refusal = owner_refusal(self._child.security, pipeline.owner)
            if refusal:
                await self._park(refusal)
                return
        runs = await self._child.declared.runs(pipeline, limit=1)
        self._last = last = runs[0] if runs else None
        if last is not None and not last.is_over:
            await self._repeat(last, settings)
            return
        if last is not None and not settings.continuous:
            self._show_end(last)
        now_ms = _now_ms()
        if settings.continuous or pipeline.requests > (0 if last is None else last.request):
            due_ms: int | None = now_ms
        else:
            due_ms = settings.schedule().due_ms(
                None if last is None else last.scheduled_ms, created_ms=pipeline.created_ms, now_ms=now_ms
            )
        self._next_ms = due_ms or 0
        if due_ms is None or due_ms > now_ms:
            self._set_state("idle")
            await self._wait(None if due_ms is None else (due_ms - now_ms) / 1000)
            return
        pin = None if last is None or last.state is RunState.SUCCEEDED else last.progress.get(PIN)
        new = JobRun(
            pipeline_id=pipeline.pipeline_id,
            number=1 if last is None else last.number + 1,
            state=RunState.RUNNING,
            scheduled_ms=due_ms,
            started_ms=now_ms,
            node=self._child.options.node,
            version=pipeline.version,
            code_hash=code_hash(settings.code, settings.lock),
            request=pipeline.requests,
            # A failed run is repeated with the same messages, so that nothing is written twice.
            progress={} if pin is None else {PIN: pin},
        )
        if await self._child.declared.begin_run(new):
            self._child.log_of(new.pipeline_id, new.number - RUNS_KEPT).remove()
            await self._execute(new, settings)

    async def _repeat(self, last: JobRun, settings: JobSettings) -> None:
        """Make another attempt at a run that was interrupted."""
        error = f"node {last.node} ended during attempt {last.attempt}"
        limit = settings.retries + INTERRUPTIONS_MAX
        if not settings.continuous and last.attempt > limit:
            await self._finish(last, RunState.FAILED, f"{error}, and there were {last.attempt} attempts")
            return
        again = replace(last, attempt=last.attempt + 1, node=self._child.options.node, error=error)
        if await self._child.declared.update_run(last, again):
            self._restarts += 1
            await self._execute(again, settings)

    async def _execute(self, run: JobRun, settings: JobSettings) -> None:
        """Attempt a run until it has ended, or has to be abandoned."""
        self._run = run
        self._next_ms = 0
        self._is_cancelled = False
        self._failures = 0
        try:
            while self._run is not None:
                started = time.monotonic()
                self._restarts_run = False
                outcome = await self._attempt(self._run, settings)
                if outcome.is_lost:
                    # Two nodes may briefly both consider themselves the owner of the jobs.
                    self._set_state("waiting")
                    await self._wait(LOST_S)
                    return
                if self.is_leaving and not outcome.succeeded:
                    return
                if outcome.succeeded:
                    self._failing_ms, self._error = 0, ""
                    await self._finish(self._run, RunState.SUCCEEDED, "")
                elif self._is_cancelled or self._is_stopped or self._restarts_run:
                    why = "cancelled" if self._is_cancelled else "stopped" if self._is_stopped else "changed"
                    await self._finish(self._run, RunState.CANCELLED, f"it was {why}")
                else:
                    await self._handle_failure(self._run, settings, outcome, time.monotonic() - started)
        finally:
            self._run = None

    async def _handle_failure(self, run: JobRun, settings: JobSettings, outcome: _Outcome, took_s: float) -> None:
        """Decide whether a failed run is tried again, and wait until then."""
        self._record_error(outcome.error)
        self._restarts += 1
        _logger.warning(
            "a run of a job failed",
            extra={"pipeline": self.pipeline.name, "run": run.number, "attempt": run.attempt, "error": outcome.error},
        )
        if settings.continuous:
            if took_s > SETTLED_S:
                self._failures = 0
            self._failures += WEIGHTS[outcome.fault]
            if self._failures >= FAILURES_MAX or outcome.is_parked:
                await self._finish(run, RunState.FAILED, outcome.error)
                await self._park(outcome.error)
                return
        elif outcome.fault is Fault.DECLARED or run.attempt > settings.retries:
            await self._finish(run, RunState.FAILED, outcome.error)
            return
        self._set_state("retrying")
        tries = self._failures if settings.continuous else run.attempt - 1
        self._end_attempt.clear()
        await wait_up_to(delay_after(tries, first_s=settings.retry_ms / 1000, max_s=RETRY_S_MAX), self._end_attempt)
        if self._is_over and not self._is_stopped:
            self._run = None
            return
        if self._is_cancelled or self._is_stopped:
            await self._finish(run, RunState.CANCELLED, outcome.error)
            return
        again = replace(run, attempt=run.attempt + 1, error=outcome.error)
        self._run = again if await self._child.declared.update_run(run, again) else None

    async def _finish(self, run: JobRun, state: RunState, error: str) -> None:
        progress = {name: value for name, value in run.progress.items() if name != PIN or state != RunState.SUCCEEDED}
        over = replace(run, state=state, ended_ms=_now_ms(), error=error[:ERROR_LENGTH_MAX], progress=progress)
        # While its end is being stored, the run can no longer be cancelled.
        self._last = over
        self._run = None
        self._next_ms = 0
        backoff = Backoff(first_s=1.0, max_s=30.0)
        while True:
            try:
                await self._child.declared.update_run(run, over)
                break
            except MillstreamError as failed:
                # Otherwise the run would be repeated, which is harmless but takes time.
                _logger.warning("the end of a run is not stored yet", extra={"error": str(failed)})
                if self.is_leaving:
                    return
                await backoff.pause()
        _logger.info(
            "a run of a job is over", extra={"pipeline": self.pipeline.name, "run": run.number, "state": str(state)}
        )

    # -- one attempt ----------------------------------------------------------------------------------------

    async def _attempt(self, run: JobRun, settings: JobSettings) -> _Outcome:
        """Run the code in a process until it exits or is stopped."""
        self._end_attempt.clear()
        if self._is_over or self._is_cancelled:
            return _Outcome(error="it was stopped")
        self._set_state("starting")
        log = self._child.log_of(run.pipeline_id, run.number)
        began = f"{datetime.now(UTC):%Y-%m-%d %H:%M:%S} UTC"
        header = f"--- run {run.number}, attempt {run.attempt}, on node {run.node} at {began}\n"
        await asyncio.to_thread(log.write, header.encode())
        try:
            packages = await self._packages(settings)
            # Only now: the hash includes the packages.
            await asyncio.to_thread(log.write, f"--- code {(self._run or run).code_hash}\n".encode())
            async with self._access() as access:
                outcome = await self._in_process(run, settings, log, packages, access)
        except PackagesFailed as error:
            outcome = _Outcome(error=str(error), fault=Fault.OUTSIDE)
        except (InvalidSetting, OSError) as error:
            outcome = _Outcome(error=str(error), fault=Fault.DECLARED)
        if outcome.error:
            reason = "it was cancelled" if self._is_cancelled else "it was stopped" if self._is_over else ""
            await asyncio.to_thread(log.write, f"--- {reason or f'it failed: {outcome.error}'}\n".encode())
        return outcome

    async def _packages(self, settings: JobSettings) -> str:
        if not settings.requirements.strip():
            return ""
        lock = self.pipeline.overrides.get("lock", "")
        if not lock:
            lock = await resolve(settings.requirements)
            self.pipeline = await self._child.declared.lock_requirements(self.pipeline, lock)
            if self._run is not None:
                # The packages are known only now.
                await self.keep(replace(self._run, code_hash=code_hash(settings.code, lock)))
        return await install(lock, self._child.folder / PACKAGES, needed=self._child.locks())

    @asynccontextmanager
    async def _access(self) -> AsyncIterator[dict[str, str]]:
        """Yield the credentials of the process: a token of the job's owner, renewed while it is used."""
        base = connection_access(NODE_CREDENTIALS.get())
        if self._child.security is None:
            yield base.as_options()
            return
        path = self._child.folder / f"token-{self.pipeline.pipeline_id}"
        made: list[str] = []

        async def renew() -> None:
            async with Client.connect(self._child.options.kafka, client_id="millstream-jobs", timeout_s=10.0) as client:
                token = await create_token(client, owner=self.pipeline.owner.principal, lifetime_ms=TOKEN_MS)
            await asyncio.to_thread(write_private, path, token.token.encode(), replace=True)
            made.append(token.token_id)

        async def keep_renewing() -> None:
            while True:
                await asyncio.sleep(TOKEN_MS / 2000)
                with suppress(MillstreamError, OSError):
                    await renew()

        await renew()
        renewing = asyncio.get_running_loop().create_task(keep_renewing(), name="token of a job")
        try:
            yield replace(base, token_file=str(path)).as_options()
        finally:
            await cancel_and_wait(renewing)
            await asyncio.to_thread(path.unlink, missing_ok=True)
            with suppress(MillstreamError, OSError):
                async with Client.connect(
                    self._child.options.kafka, client_id="millstream-jobs", timeout_s=10.0
                ) as client:
                    for token_id in made:
                        await revoke_token(client, token_id)

    async def _in_process(
        self, run: JobRun, settings: JobSettings, log: _Log, packages: str, access: Mapping[str, str]
    ) -> _Outcome:
        options = self._child.options
        order = JobOrder(
            pipeline=self.pipeline,
            run=run.number,
            attempt=run.attempt,
            scheduled_ms=run.scheduled_ms,
            pin=run.progress.get(PIN),
            node=options.node,
            kafka=options.kafka,
            lake=options.lake,
            folder=options.folder,
            master=options.master,
            spark=options.spark,
            packages=packages,
            access=dict(access),
            log_level=options.log_level,
        )
        process = await spawn_module(self._child.module, stderr=PIPE, limit=LINE_BYTES_MAX, env=clean_environment())
        watching = _AttemptWatch(self, process, settings)
        loop = asyncio.get_running_loop()
        tasks: list[asyncio.Task[Any]] = [
            loop.create_task(watching.read_events(), name="events of a job"),
            loop.create_task(_copy(process, log), name="log of a job"),
            loop.create_task(watching.keep_bounds(), name="bounds of a job"),
        ]
        try:
            await send_line(process, order)
            ending = loop.create_task(self._end_attempt.wait(), name="end of a job")
            tasks.append(ending)
            # The process reports how it ended; do not wait for Java and workers that hold its output open.
            await asyncio.wait([tasks[0], ending], return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                hang_up(process)
            code = await _wait_or_kill(process)
        finally:
            await asyncio.to_thread(kill_session, process.pid)
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
            for task in tasks:
                if task is not tasks[1]:
                    task.cancel()
            with suppress(TimeoutError):
                await within(STOP_S, asyncio.gather(*tasks, return_exceptions=True))
        return watching.outcome(code)

    async def keep(self, run: JobRun) -> bool:
        """Store the input and progress of the run; return whether this node still owns it."""
        before = self._run
        if before is None:
            return False
        is_kept = await self._child.declared.update_run(before, run)
        if is_kept:
            self.show(run)
        return is_kept

    @property
    def current(self) -> JobRun | None:
        return self._run

    def show(self, run: JobRun) -> None:
        """Show progress, which need not be stored yet."""
        self._run = run
        self._child.changed()

    def began(self) -> None:
        self._set_state("running")

    def take_report(self, report: PipelineReport) -> None:
        """Process a report of a transform's driver; a successful batch resets its failures."""
        self._driver_report = report
        if report.batches:
            self._failing_ms, self._error, self._error_ms = 0, "", 0
        self._child.changed()

    def end_attempt(self) -> None:
        self._end_attempt.set()

    # -- internals ------------------------------------------------------------------------------------------

    async def _park(self, reason: str) -> None:
        await self._child.declared.park(self.pipeline, reason)
        self._is_stopped = True

    async def _wait(self, seconds: float | None) -> None:
        """Wait for a while, or until something has changed."""
        self._news.clear()
        if not self._is_over:
            await wait_up_to(seconds, self._news)

    def _record_error(self, error: str) -> None:
        self._error = error[:ERROR_LENGTH_MAX]
        self._error_ms = _now_ms()
        self._failing_ms = self._failing_ms or self._error_ms

    def _show_end(self, run: JobRun) -> None:
        """Report how the last run ended, and no earlier error."""
        self._error, self._error_ms = run.error, run.ended_ms if run.error else 0
        self._failing_ms = (self._failing_ms or run.ended_ms) if run.state is RunState.FAILED else 0

    def _set_state(self, state: PipelineState) -> None:
        self._state = state
        self._child.changed()


def _as_integer(value: object) -> int | None:
    return value if isinstance(value, int) else None


class _AttemptWatch:
    def __init__(self, job: _Job, process: Process, settings: JobSettings) -> None:
        self._job = job
        self._process = process
        self._timeout_s = 0 if settings.continuous else settings.timeout_ms / 1000
        python = parse_memory(settings.python_memory, name="python.memory")
        self._bytes_max = parse_memory(settings.memory, name="memory") + 2 * python + OVERHEAD_BYTES
        self._ended: JobEvent | None = None
        self._stored_at = 0.0
        self._killed = ""

    def outcome(self, code: int) -> _Outcome:
        if code == LOST:
            return _Outcome(is_lost=True)
        if self._ended is not None and self._ended.succeeded:
            return _Outcome(succeeded=True)
        if self._killed:
            return _Outcome(error=self._killed)
        if self._ended is not None:
            fault = Fault(self._ended.fault or "unknown")
            return _Outcome(error=self._ended.failed, fault=fault, is_parked=self._ended.parked)
        if code == -signal.SIGKILL:
            return _Outcome(error="its process was killed, perhaps because the machine ran out of memory")
        ended = f"signal {-code}" if code < 0 else f"exit code {code}"
        logs = f"millstream pipeline logs {self._job.pipeline.name}"
        return _Outcome(error=f"its process ended with {ended}; its output may say why: {logs}")

    async def read_events(self) -> None:
        """Read the reports of the process until it ends."""
        async for event in read_events(self._process, JobEvent, name="a job"):
            if event.started:
                self._job.began()
            if event.report is not None:
                self._job.take_report(event.report)
            if event.pin is not None:
                await self._store_pin(event.pin)
            if event.progress is not None:
                await self._store_progress(event.progress)
            if event.succeeded or event.failed:
                self._ended = event
                return

    async def _store_pin(self, pin: dict[str, Any]) -> None:
        run, is_kept = self._job.current, False
        if run is not None and len(msgspec.json.encode(pin)) <= PROGRESS_BYTES_MAX:
            try:
                is_kept = await self._job.keep(replace(run, progress={**run.progress, PIN: pin}))
            except MillstreamError as error:
                _logger.warning("the input of a run is not stored yet", extra={"error": str(error)})
        await send_line(self._process, JobResponse(pinned=is_kept))

    async def _store_progress(self, progress: dict[str, Any]) -> None:
        run = self._job.current
        if run is None or len(msgspec.json.encode(progress)) > PROGRESS_BYTES_MAX // 16:
            return
        after = replace(run, progress={**progress, **({PIN: run.progress[PIN]} if PIN in run.progress else {})})
        now = time.monotonic()
        if now - self._stored_at < PROGRESS_S:
            self._job.show(after)
            return
        self._stored_at = now
        with suppress(MillstreamError):
            await self._job.keep(after)

    async def keep_bounds(self) -> None:
        """End an attempt that takes too long or too much memory."""
        deadline = time.monotonic() + self._timeout_s if self._timeout_s else None
        while True:
            await asyncio.sleep(CHECK_S)
            if deadline is not None and time.monotonic() > deadline:
                self._kill(f"it took longer than timeout.ms, {self._timeout_s:g} s")
                return
            used = await asyncio.to_thread(memory_of_session, self._process.pid)
            if used > self._bytes_max:
                mib = 2**20
                self._kill(
                    f"it took {used // mib:,} MiB of memory, more than the {self._bytes_max // mib:,} MiB that memory "
                    "and python.memory give it"
                )
                return

    def _kill(self, reason: str) -> None:
        self._killed = reason
        kill_session(self._process.pid)
        self._job.end_attempt()


async def _copy(process: Process, log: _Log) -> None:
    while process.stderr is not None:
        data = await process.stderr.read(64 * 1024)
        if not data:
            return
        with suppress(OSError):
            await asyncio.to_thread(log.write, data)


async def _wait_or_kill(process: Process) -> int:
    try:
        return await within(STOP_S, process.wait())
    except TimeoutError:
        await asyncio.to_thread(kill_session, process.pid)
        with suppress(ProcessLookupError):
            process.kill()
        return await process.wait()


def clean_environment() -> dict[str, str]:
    # Arrow's allocator would otherwise take a gigabyte of `python.memory` at once.
    return {"MIMALLOC_ARENA_EAGER_COMMIT": "0", **environment_without_settings()}
