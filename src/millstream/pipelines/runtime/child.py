"""The broker's side of pipelines: a driver process that runs while a pipeline is due and this node owns them.

It is a client of the broker like any other, so that Spark never stalls the log.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from asyncio.subprocess import Process
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Final
from uuid import UUID

import msgspec

from millstream.broker.pipelines.declared import Pipelines
from millstream.broker.pipelines.owner import PipelineOwner
from millstream.broker.pipelines.report_board import PipelineBoard
from millstream.broker.security.rights import owner_refusal
from millstream.broker.security.state import SecurityState
from millstream.client.admin.backlog import Backlogs, Reader, reader_of
from millstream.client.admin.groups import describe_group
from millstream.client.admin.pipelines import PipelineClient, storage_in
from millstream.core.child_process import SupervisedChild, read_events, spawn_module
from millstream.core.config import Config
from millstream.core.errors import MillstreamError, UnknownGroup, UnknownPipeline
from millstream.core.pipeline import GROUP_PREFIX, Pipeline, PipelineKind
from millstream.core.scratch import REMOVE_S_MAX, remove_left_behind
from millstream.core.tasks import cancel_and_wait, wait_up_to
from millstream.pipelines.runtime.driver_messages import (
    DRIVER_CLIENT,
    AssignedPipeline,
    DriverCommand,
    DriverEvent,
    Options,
)
from millstream.pipelines.runtime.spark_session import DIED, missing_packages
from millstream.protocol.private.pipeline_messages import PipelineReport, PipelineState
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import child_environment

_logger = logging.getLogger(__name__)

MODULE = "millstream.pipelines.runtime.driver"
LOG_NAME: Final = "spark.log"
"""Spark's output in the data folder: it is long, and not in the node's log format."""
STOP_S: Final = 12.0
"""How long stopping may take: slightly longer than the driver gives its steps and Java."""
BACKOFF_S_MIN: Final = 1.0
PARK_PAUSE_S: Final = 5.0
CHECK_INTERVAL_S: Final = 5.0
"""How often to check whether missing packages have been installed."""
SILENT_S: Final = 60.0
"""A driver sends something every few seconds; one that is silent for this long is considered hung."""
SILENCE_CHECKS: Final = 6
LINE_BYTES_MAX: Final = 64 * 1024 * 1024
SPARE_S: Final = 30.0
"""How long the start of a spare driver is delayed at most, until all pipelines have done a step: two starts at once
would delay both."""


def driver_options(config: Config, kafka: str) -> Options:
    """Return the driver options of a node, which it reaches at the given address; other machines may not."""
    data = os.path.abspath(config.data)
    is_local = config.pipelines_master.partition("[")[0] in ("", "local")
    places = storage_in(data, lake=config.pipelines_lake, folder=config.pipelines_folder)
    return Options(
        kafka=kafka if is_local else config.advertise or kafka,
        node=config.node_id,
        authorizes=config.authorizes,
        lake=places.lake,
        folder=places.folder,
        log=os.path.join(data, LOG_NAME),
        master=config.pipelines_master,
        memory=config.pipelines_memory,
        spark=config.spark_settings(),
        log_level=config.log_level,
        log_format=config.log_format,
    )


def idle_reason_of(config: Config) -> str:
    """Return, as a sentence, why a node runs no pipelines; empty if it does."""
    return missing_packages() if config.pipelines_enabled else "this node runs no pipelines: pipelines-enabled is off"


class PipelineChild(SupervisedChild):
    """Runs the driver while there is something to run."""

    name = "the pipeline driver"

    def __init__(
        self,
        options: Options,
        declared: Pipelines,
        board: PipelineBoard,
        owner: PipelineOwner,
        *,
        missing: Callable[[], str],
        security: SecurityState | None = None,
        module: str = MODULE,
        backoff_min_s: float = BACKOFF_S_MIN,
        spare_s: float | None = None,
    ) -> None:
        """`missing` returns why nothing can be run here: what has to be installed or set.

        With `security`, pipelines run with the rights of their owners. With `spare_s`, a second driver is started when
        all pipelines run in the first, or after that time, and replaces the first when it dies.
        """
        super().__init__(backoff_min_s=backoff_min_s)
        self._options = options
        self._declared = declared
        self._board = board
        self._owner = owner
        self._missing = missing
        self._security = security
        self._module = module
        self._silent_s = SILENT_S
        self._spare_s = spare_s
        self._spare: Process | None = None
        self._stepped: set[str] = set()
        """The pipelines that have done a step in the running driver."""
        self._settled = asyncio.Event()
        """Set when all running pipelines have done a step."""
        self._promotions = 0
        self._driver_reports = DriverReports(options.node)
        self._due: list[Pipeline] = []
        self._idle_reason = ""
        self._warned_of = ""
        self._lags = LagWatch(options.kafka, self._measured, board.take_lags)
        self._groups = LeftoverGroups(options.kafka, lambda name: declared.get(name) is not None)
        self._attempts: Counter[str] = Counter()
        self._parked: dict[str, tuple[Pipeline, str]] = {}
        """Parked pipelines that are not recorded in the catalog yet."""
        self._news = asyncio.Event()
        self._to_park = asyncio.Event()
        declared.on_change(self._refresh)
        owner.on_change(self._refresh)
        if security is not None:
            security.on_change(self._refresh)
        self._refresh()

    @property
    def spare_pid(self) -> int | None:
        """Return the process id of the driver that is kept ready, if any."""
        return None if self._spare is None or self._spare.returncode is not None else self._spare.pid

    @property
    def stop_s(self) -> float:
        return STOP_S

    async def run(self) -> None:
        """Run the driver while it is needed, until `stop`; a background task of the broker."""
        try:
            async with asyncio.TaskGroup() as group:
                parking = group.create_task(self._store_parked(), name="park pipelines")
                looking = group.create_task(self._lags.run(), name="lag of pipelines")
                tidying = group.create_task(self._groups.run(), name="groups of deleted pipelines")
                await super().run()
                for task in (parking, looking, tidying):
                    task.cancel()
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def stop(self) -> None:
        """Stop the driver, and let another node run the pipelines."""
        self._stopping.set()
        self._news.set()
        await self._end_spare()
        await super().stop()
        # A driver that did not end in time was killed, and could not remove its temporary files.
        await asyncio.to_thread(remove_left_behind, REMOVE_S_MAX)
        await self._owner.resign()

    @property
    def _is_needed(self) -> bool:
        return bool(self._due) and self._owner.is_this_node and not self._idle_reason and not self._stopping.is_set()

    async def _wait_until_needed(self) -> None:
        while not self._is_needed and not self._stopping.is_set():
            self._news.clear()
            if not await wait_up_to(CHECK_INTERVAL_S if self._idle_reason else None, self._news):
                self._refresh()

    async def _spawn(self) -> Process:
        self._update_board(is_running=True)
        spare, self._spare = self._spare, None
        if spare is not None and spare.returncode is None:
            _logger.info("the spare driver takes over", extra={"pid": spare.pid})
            self._promotions += 1
            return spare
        return await self._start(self._options)

    async def _start(self, options: Options) -> Process:
        environment = child_environment() | options.environment
        return await spawn_module(self._module, options.argument, limit=LINE_BYTES_MAX, env=environment)

    async def _maintain_spare(self) -> None:
        """Start a driver without pipelines once the other one has settled, and again if it ends.

        Its few bytes of heartbeats stay in the pipe and are read when it takes over.
        """
        if self._spare_s is None:
            return
        # The driver that runs the pipelines may have been a spare itself, and keeps its log.
        stem, suffix = os.path.splitext(self._options.log)
        log = f"{stem}-spare{self._promotions % 2}{suffix}"
        options = msgspec.structs.replace(self._options, log=log, is_spare=True)
        await wait_up_to(self._spare_s, self._settled)
        while True:
            try:
                self._spare = spare = await self._start(options)
                await spare.wait()
            except OSError as error:
                _logger.warning("no spare driver could be started", extra={"reason": str(error)})
            await asyncio.sleep(self._spare_s)

    async def _end_spare(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None and spare.returncode is None:
            self._kill(spare)
            await spare.wait()

    def _kill(self, process: Process) -> None:
        """Kill a driver and its Java process: it leads its own process group."""
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)

    async def _wait_for_exit(self, process: Process) -> int:
        self._stepped.clear()
        self._settled.clear()
        sending = asyncio.get_running_loop().create_task(
            self._send_commands(process, self._news, self._command), name="send pipelines to the driver"
        )
        sparing = asyncio.get_running_loop().create_task(self._maintain_spare(), name="keep a spare driver")
        code, is_over = -1, True
        try:
            await self._read_events(process)
            code = await process.wait()
            is_over = self._is_dismissed or self._stopping.is_set()
            return code
        finally:
            await cancel_and_wait(sending, sparing)
            if is_over:
                await self._end_spare()
            # A hung Java process would stay behind; its group id is not reused while it runs.
            self._kill(process)
            self._driver_ended(code)

    def _driver_ended(self, code: int) -> None:
        is_death = not (self._is_dismissed or self._stopping.is_set())
        self._driver_reports.driver_ended(code, is_death=is_death)
        if is_death:
            self._board.restarts = self.restarts + 1
        for name, reason in self._driver_reports.blamed():
            self._park(name, f"the driver died {DEATHS_MAX} times in a row while it ran this pipeline: {reason}")
        self._update_board(is_running=False)

    def _command(self) -> DriverCommand | None:
        return DriverCommand([self._assign(pipeline) for pipeline in self._due]) if self._is_needed else None

    def _assign(self, pipeline: Pipeline) -> AssignedPipeline:
        return AssignedPipeline(
            pipeline, attempt=self._attempts[pipeline.name], is_suspect=self._driver_reports.is_suspect(pipeline.name)
        )

    async def _read_events(self, process: Process) -> None:
        if process.stdout is None:
            return
        read_line = partial(self._read_line, process, process.stdout)
        async for event in read_events(process, DriverEvent, name=self.name, read_line=read_line):
            self._driver_reports.apply(event)
            if event.has_succeeded:
                self._stepped.add(event.ended)
                if self._stepped.issuperset(pipeline.name for pipeline in self._due):
                    self._settled.set()
            for report in event.reports or ():
                if report.state == "parked":
                    self._park(report.name, report.last_error)
            if event.reports is not None:
                self._update_board(is_running=True)
                self._lags.measure_soon()

    async def _read_line(self, process: Process, stream: asyncio.StreamReader) -> bytes:
        """Return the driver's next line; kill a driver that stays silent."""
        # Checked several times, so that a broker that was itself suspended reads what was sent meanwhile.
        for _ in range(SILENCE_CHECKS):
            with suppress(TimeoutError):
                async with asyncio.timeout(self._silent_s / SILENCE_CHECKS):
                    return await stream.readline()
        _logger.error("the pipeline driver hangs and is killed", extra={"pid": process.pid})
        self._driver_reports.apply(
            DriverEvent(failed=f"the driver was silent for {self._silent_s:.0f} s, and was killed")
        )
        self._kill(process)
        return await stream.readline()

    # -- pipelines to run ------------------------------------------------------------------------------------

    def _refresh(self) -> None:
        """Follow a change of the pipelines or of their owner."""
        declared = self._declared.all()
        self._driver_reports.forget(pipeline.name for pipeline in declared)
        self._groups.take(pipeline.name for pipeline in declared)
        # Pipelines that run users' code have their own drivers: see `jobs_child.py`.
        declared = [pipeline for pipeline in declared if not pipeline.has_own_driver]
        due = [pipeline for pipeline in declared if pipeline.is_due and not self._is_parked_here(pipeline)]
        if self._owner.is_this_node:
            due = [pipeline for pipeline in due if not self._is_refused(pipeline)]
        # Missing packages may have been installed since; this is only checked when there is something to run.
        self._idle_reason = self._missing() if due else ""
        if due and not self._idle_reason:
            self._owner.become_candidate()
        self._due = due
        self._warn()
        self._update_board(is_running=self._process is not None)
        self._news.set()
        self._lags.measure_soon()

    @property
    def _reports_here(self) -> bool:
        return self._owner.is_this_node or (bool(self._idle_reason) and not self._owner.is_elsewhere)

    def _measured(self) -> list[Pipeline]:
        """Return the pipelines whose lag this node reports, stopped and parked ones included."""
        declared = self._declared.all() if self._reports_here else []
        return [pipeline for pipeline in declared if pipeline.kind is not PipelineKind.JOB]

    def _warn(self) -> None:
        """Log once why pipelines are not run."""
        idle_reason = self._idle_reason if self._reports_here else ""
        if idle_reason and idle_reason != self._warned_of:
            _logger.warning("pipelines are declared but not run", extra={"reason": idle_reason})
        self._warned_of = idle_reason

    def _update_board(self, *, is_running: bool) -> None:
        if self._reports_here:
            due = {pipeline.name for pipeline in self._due}
            rest = [pipeline for pipeline in self._declared.all() if pipeline.name not in due]
            reports = self._driver_reports.reports(self._due, is_running=is_running, idle_reason=self._idle_reason)
            self._board.take([*reports, *self._driver_reports.last_reports(rest)])
        else:
            self._board.clear()

    # -- parking --------------------------------------------------------------------------------------------

    def _park(self, name: str, reason: str) -> None:
        """Stop running a pipeline, and record it in the catalog."""
        pipeline = next((pipeline for pipeline in self._due if pipeline.name == name), None)
        if pipeline is not None:
            self._attempts[name] += 1
            self._parked[name] = (pipeline, reason)
            self._to_park.set()
            self._refresh()

    async def _store_parked(self) -> None:
        while True:
            await self._to_park.wait()
            self._to_park.clear()
            for name, (pipeline, reason) in list(self._parked.items()):
                try:
                    await self._declared.park(pipeline, reason)
                except UnknownPipeline:
                    _logger.debug("a pipeline was deleted before it was parked", extra={"pipeline": name})
                except MillstreamError as error:
                    _logger.warning(
                        "a pipeline could not be marked as parked in the catalog yet",
                        extra={"pipeline": name, "error": str(error)},
                    )
                    await asyncio.sleep(PARK_PAUSE_S)
                    self._to_park.set()
                    break
                del self._parked[name]
                self._refresh()

    def _is_refused(self, pipeline: Pipeline) -> bool:
        """Whether a pipeline is parked because its owner lacks rights."""
        reason = "" if self._security is None else owner_refusal(self._security, pipeline.owner)
        if reason:
            self._parked[pipeline.name] = (pipeline, reason)
            self._to_park.set()
        return bool(reason)

    def _is_parked_here(self, pipeline: Pipeline) -> bool:
        parked = self._parked.get(pipeline.name)
        return parked is not None and parked[0] == pipeline


LAG_CLIENT_ID: Final = "millstream-pipeline-lag"
LAG_INTERVAL_S: Final = 5.0
PAUSE_S_MIN: Final = 1.0
"""The minimum time between measurements, however often something changes."""
SHARE_MAX: Final = 10
"""The pause after a slow measurement, as a multiple of its duration."""
PAUSE_S_MAX: Final = 30.0
"""The longest pause: a measurement may have been slow because a node did not respond."""
TIMEOUT_S: Final = 10.0


class LagWatch:
    """Measures the lag of every pipeline at the brokers every few seconds, whether or not it is running.

    The lag in a driver's report is from its last batch; a pipeline that fails, is parked or was stopped reports none.
    """

    def __init__(
        self,
        brokers: str,
        declared: Callable[[], Sequence[Pipeline]],
        take: Callable[[Mapping[str, int]], None],
    ) -> None:
        """Measure the pipelines that `declared` returns, and pass the lags to `take`."""
        self._brokers = brokers
        self._declared = declared
        self._take = take
        self._news = asyncio.Event()
        self._lags: dict[str, int] = {}
        self._read: dict[tuple[UUID, int], Reader | None] = {}
        """The readers of each version of a pipeline; statements and rules may be long."""

    def measure_soon(self) -> None:
        self._news.set()

    async def run(self) -> None:
        """Measure until cancelled; a background task of the broker."""
        while True:
            # Without pipelines, no connection is opened.
            while not self._declared():
                self._lags.clear()
                await self._wait(None)
            try:
                async with Client.connect(self._brokers, client_id=LAG_CLIENT_ID, timeout_s=TIMEOUT_S) as client:
                    await self._measure_lags(client)
            except (MillstreamError, OSError) as error:
                _logger.debug("the lag of pipelines is unknown", extra={"error": str(error)})
                await asyncio.sleep(LAG_INTERVAL_S)

    async def _measure_lags(self, client: Client) -> None:
        backlogs = Backlogs(client)
        while declared := self._declared():
            started = time.monotonic()
            lags = await backlogs.lags(self._readers(declared))
            names = {pipeline.name for pipeline in declared}
            # Keep the last known lag of pipelines that could not be measured.
            self._lags = {name: lag for name, lag in {**self._lags, **lags}.items() if name in names}
            if self._declared():
                # Otherwise another node reports the lag by now.
                self._take(dict(self._lags))
            took_s = time.monotonic() - started
            await asyncio.sleep(min(max(PAUSE_S_MIN, took_s * SHARE_MAX), PAUSE_S_MAX))
            await self._wait(LAG_INTERVAL_S - PAUSE_S_MIN)

    def _readers(self, declared: Iterable[Pipeline]) -> list[Reader]:
        known = self._read
        self._read = {}
        for pipeline in declared:
            key = (pipeline.pipeline_id, pipeline.version)
            self._read[key] = known[key] if key in known else reader_of(pipeline)
        return [reader for reader in self._read.values() if reader is not None]

    async def _wait(self, seconds: float | None) -> None:
        await wait_up_to(seconds, self._news)
        self._news.clear()


GROUPS_CLIENT_ID: Final = "millstream-pipeline-groups"
PAUSE_S: Final = 12.0
"""Slightly longer than a driver's session."""


class LeftoverGroups:
    """Deletes the groups of deleted pipelines; runs on every node, since the one that ran them may be gone.

    A run deletes its pipeline's group when it learns of the deletion, and deleting a pipeline that is not running
    deletes the group at once. But a driver that was killed stays a member until its session expires.
    """

    def __init__(self, brokers: str, is_declared: Callable[[str], bool], *, pause_s: float = PAUSE_S) -> None:
        self._brokers = brokers
        self._is_declared = is_declared
        self._pause_s = pause_s
        self._known: frozenset[str] = frozenset()
        self._undeclared: set[str] = set()
        self._news = asyncio.Event()

    def take(self, declared: Iterable[str]) -> None:
        """Compare with the declared pipelines; missing ones were deleted."""
        before, self._known = self._known, frozenset(declared)
        self._undeclared |= before - self._known
        if self._undeclared:
            self._news.set()

    async def run(self) -> None:
        """Delete groups until cancelled; a background task of the broker."""
        while True:
            await self._news.wait()
            await asyncio.sleep(self._pause_s)
            self._news.clear()
            try:
                async with Client.connect(self._brokers, client_id=GROUPS_CLIENT_ID, timeout_s=TIMEOUT_S) as client:
                    for name in sorted(self._undeclared):
                        await self._settle(client, name)
            except (MillstreamError, OSError) as error:
                _logger.debug("groups of deleted pipelines will be checked again", extra={"error": str(error)})
            if self._undeclared:
                self._news.set()

    async def _settle(self, client: Client, name: str) -> None:
        try:
            if await self._is_settled(client, name):
                self._undeclared.discard(name)
        except MillstreamError as error:
            # The group's coordinator is unavailable; those of other groups may be available.
            _logger.debug("a group will be checked again", extra={"pipeline": name, "error": str(error)})

    async def _is_settled(self, client: Client, name: str) -> bool:
        """Whether nothing is left of a deleted pipeline, or its group has another owner."""
        if self._is_declared(name):
            return True
        try:
            group = await describe_group(client, f"{GROUP_PREFIX}{name}")
        except UnknownGroup:
            return True
        if group.members:
            # A manual run of an undeclared pipeline keeps its progress.
            return not all(member.client_id.startswith(DRIVER_CLIENT) for member in group.members)
        await PipelineClient(client).forget_deleted(name)
        return True


DEATHS_MAX: Final = 3


class DriverReports:
    """The state of the pipelines that the node's driver runs, across restarts of the driver.

    A driver counts from its own start; the counts of earlier ones are added here. The pipelines that were running when
    a driver died are remembered too: three deaths in a row, without a successful step in between, are blamed on the
    pipeline.
    """

    def __init__(self, node: int) -> None:
        self._node = node
        self._reports: dict[str, PipelineReport] = {}
        self._earlier: dict[str, PipelineReport] = {}
        self._kept: frozenset[str] | None = None
        """The declared pipelines, once known."""
        self._under_way: set[str] = set()
        self._deaths: Counter[str] = Counter()
        self._failed = ""
        self._stuck = ""
        self._ended = ("", 0)
        self._down_ms = 0
        """The time since which drivers have died without reporting anything."""

    def apply(self, event: DriverEvent) -> None:
        if event.reports is not None:
            reports = {report.name: report for report in event.reports}
            for name, known in self._reports.items():
                if name not in reports or _was_restarted(known, reports[name]):
                    self._carry_counts(known)
            self._reports = reports
            self._ended = ("", 0)
            self._down_ms = 0
        if event.begun:
            self._under_way.add(event.begun)
        if event.ended:
            self._under_way.discard(event.ended)
            if event.has_succeeded:
                del self._deaths[event.ended]
        if event.failed:
            self._failed = event.failed
            self._stuck = event.stuck

    def _carry_counts(self, report: PipelineReport) -> None:
        """Keep the counts of a run that was stopped, parked or restarted."""
        if self._kept is None or report.name in self._kept:
            self._earlier[report.name] = self._with_earlier(report)

    def driver_ended(self, code: int, *, is_death: bool) -> None:
        """Record the end of the driver; an unexpected one makes the running pipelines suspects.

        A driver that was replaced because of one pipeline has reported it, and the others are not suspected.
        """
        under_way, self._under_way = self._under_way, set()
        reason, self._failed = self._failed, ""
        stuck, self._stuck = self._stuck, ""
        if is_death and stuck:
            self._deaths[stuck] += 1
        elif is_death:
            self._deaths = Counter({name: self._deaths[name] + 1 for name in under_way})
        if is_death:
            self._ended = (reason or _describe_exit(code), int(time.time() * 1000))
            self._down_ms = self._down_ms or self._ended[1]
        for name, report in self._reports.items():
            total = self._with_earlier(report)
            self._earlier[name] = self._ended_with(total) if is_death else total
        self._reports = {}

    def is_suspect(self, name: str) -> bool:
        """Whether it was running when the last driver died."""
        return self._deaths[name] > 0

    def blamed(self) -> list[tuple[str, str]]:
        """Return the pipelines with too many deaths, with the last reason; each once."""
        names = [name for name, deaths in self._deaths.items() if deaths >= DEATHS_MAX]
        for name in names:
            del self._deaths[name]
        return [(name, self._ended[0]) for name in names]

    def forget(self, names: Iterable[str]) -> None:
        self._kept = kept = frozenset(names)
        for known in (self._earlier, self._deaths):
            for name in [name for name in known if name not in kept]:
                del known[name]

    def reports(self, due: Iterable[Pipeline], *, is_running: bool, idle_reason: str) -> list[PipelineReport]:
        """Return a report for each pipeline; one without a driver's report is waiting, with the reason if there is
        one.
        """
        return [self._report_of(pipeline, is_running=is_running, idle_reason=idle_reason) for pipeline in due]

    def last_reports(self, declared: Iterable[Pipeline]) -> list[PipelineReport]:
        """Return the last reports of pipelines that ran here and no longer do."""
        return [
            self._with_earlier(
                PipelineReport(
                    name=pipeline.name, state="parked" if pipeline.is_enabled else "stopped", node=self._node
                )
            )
            for pipeline in declared
            if pipeline.name in self._earlier
        ]

    def _report_of(self, pipeline: Pipeline, *, is_running: bool, idle_reason: str) -> PipelineReport:
        report = self._reports.get(pipeline.name)
        if report is not None:
            return self._with_earlier(report)
        reason, at_ms = self._ended
        state: PipelineState = "starting" if is_running or not reason else "retrying"
        if idle_reason:
            state, reason, at_ms = "waiting", idle_reason, int(time.time() * 1000)
        blank = PipelineReport(name=pipeline.name, state=state, node=self._node)
        total = self._with_earlier(blank)
        if not reason:
            return total
        return msgspec.structs.replace(total, last_error=reason, last_error_ms=at_ms, failing_ms=self._down_ms)

    def _ended_with(self, report: PipelineReport) -> PipelineReport:
        """Mark a report as interrupted by the death of its driver."""
        reason, at_ms = self._ended
        return msgspec.structs.replace(report, restarts=report.restarts + 1, last_error=reason, last_error_ms=at_ms)

    def _with_earlier(self, report: PipelineReport) -> PipelineReport:
        before = self._earlier.get(report.name)
        if before is None:
            return report
        return msgspec.structs.replace(
            report,
            rows=report.rows + before.rows,
            batches=report.batches + before.batches,
            restarts=report.restarts + before.restarts,
            stalls=report.stalls + before.stalls,
            counts=dict(Counter(report.counts) + Counter(before.counts)),
            levels={**before.levels, **report.levels},
            last_error=report.last_error or before.last_error,
            last_error_ms=report.last_error_ms or before.last_error_ms,
        )


def _was_restarted(known: PipelineReport, report: PipelineReport) -> bool:
    """Whether a report belongs to a later run in the same driver, whose counts start at zero."""
    return (report.rows, report.batches, report.restarts, report.stalls) != (
        max(known.rows, report.rows),
        max(known.batches, report.batches),
        max(known.restarts, report.restarts),
        max(known.stalls, report.stalls),
    )


def _describe_exit(code: int) -> str:
    if code == DIED:
        return "the driver's Java died: killed, or out of memory; spark.log in the node's data folder may say why"
    return f"the driver ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
