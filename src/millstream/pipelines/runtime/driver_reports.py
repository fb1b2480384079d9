"""The broker's knowledge of the pipelines that its driver runs, across several drivers.

A driver counts from its own start; the counts of earlier ones are added here. The pipelines that were running when a
driver died are remembered too: three deaths in a row, without a successful step in between, are blamed on the pipeline.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterable
from typing import Final

import msgspec

from millstream.broker.pipelines.report_board import PipelineReport, State
from millstream.core.pipeline import Pipeline
from millstream.pipelines.runtime.driver_messages import DriverEvent
from millstream.pipelines.runtime.spark_session import DIED

DEATHS_MAX: Final = 3


class DriverReports:
    """The pipelines of a node's driver."""

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
        """Since when drivers have died without one that reported in between."""

    def apply(self, event: DriverEvent) -> None:
        if event.reports is not None:
            reports = {one.name: one for one in event.reports}
            for name, known in self._reports.items():
                if name not in reports or _was_restarted(known, reports[name]):
                    self._keep(known)
            self._reports = reports
            self._ended = ("", 0)
            self._down_ms = 0
        if event.begun:
            self._under_way.add(event.begun)
        if event.ended:
            self._under_way.discard(event.ended)
            if event.is_well:
                del self._deaths[event.ended]
        if event.failed:
            self._failed = event.failed
            self._stuck = event.stuck

    def _keep(self, report: PipelineReport) -> None:
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
            self._ended = (reason or _end(code), int(time.time() * 1000))
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
        found = [name for name, deaths in self._deaths.items() if deaths >= DEATHS_MAX]
        for name in found:
            del self._deaths[name]
        return [(name, self._ended[0]) for name in found]

    def forget(self, names: Iterable[str]) -> None:
        """Forget pipelines that were deleted."""
        self._kept = kept = frozenset(names)
        for known in (self._earlier, self._deaths):
            for name in [name for name in known if name not in kept]:
                del known[name]

    def reports(self, due: Iterable[Pipeline], *, is_running: bool, idle_reason: str) -> list[PipelineReport]:
        """Return a report for each pipeline; one without a driver's report is waiting, with the reason if there is
        one.
        """
        return [self._report_of(one, is_running=is_running, idle_reason=idle_reason) for one in due]

    def reports_of_rest(self, declared: Iterable[Pipeline]) -> list[PipelineReport]:
        """Return the last reports of pipelines that are not run any more, as far as they ran here."""
        return [
            self._with_earlier(
                PipelineReport(name=one.name, state="parked" if one.is_wanted else "stopped", node=self._node)
            )
            for one in declared
            if one.name in self._earlier
        ]

    def _report_of(self, pipeline: Pipeline, *, is_running: bool, idle_reason: str) -> PipelineReport:
        report = self._reports.get(pipeline.name)
        if report is not None:
            return self._with_earlier(report)
        reason, at_ms = self._ended
        state: State = "starting" if is_running or not reason else "retrying"
        if idle_reason:
            state, reason, at_ms = "waiting", idle_reason, int(time.time() * 1000)
        blank = PipelineReport(name=pipeline.name, state=state, node=self._node)
        total = self._with_earlier(blank)
        if not reason:
            return total
        return msgspec.structs.replace(total, last_error=reason, last_error_ms=at_ms, failing_ms=self._down_ms)

    def _ended_with(self, report: PipelineReport) -> PipelineReport:
        """Mark a report as restarted because its driver died."""
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
    """Whether a report is of a later run in the same driver, which counts from its own start."""
    return (report.rows, report.batches, report.restarts, report.stalls) != (
        max(known.rows, report.rows),
        max(known.batches, report.batches),
        max(known.restarts, report.restarts),
        max(known.stalls, report.stalls),
    )


def _end(code: int) -> str:
    if code == DIED:
        return "the driver's Java died: killed, or out of memory; spark.log in the node's data folder may say why"
    return f"the driver ended with {f'signal {-code}' if code < 0 else f'exit code {code}'}"
