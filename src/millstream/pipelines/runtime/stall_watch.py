"""Detects pipelines that make no progress: a job that hangs, a statement that never ends, a silent object store.

Signs of progress are those that the pipeline reports and those of Spark: finished tasks and counted rows. A
pipeline without one for as long as its setting allows is cancelled, which counts as a failure. If it still hangs after
that, the driver must be replaced: a thread cannot be ended from outside.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final, Protocol

from millstream.pipelines.runtime.runner import Progress

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_logger = logging.getLogger(__name__)

_COUNTED: Final = frozenset({"sum", "size"})
"""Spark metrics that grow only when rows are processed; times may grow by themselves."""


@dataclass(frozen=True, slots=True)
class Activity:
    """Spark's activity at one moment, by pool; every pipeline has its own pool, under its name."""

    seen: Mapping[str, Hashable] = field(default_factory=dict)
    """For each pool with work, a value that stays the same while nothing progresses."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """The running tasks of these pools; 0 for a pool that waits for others."""
    orphaned: Mapping[str, int] = field(default_factory=dict)
    """The tasks of pools that run on although they were cancelled."""

    def waits_for_pool(self, pool: str) -> bool:
        """Whether a pool has work but no running task, because others occupy all slots."""
        taken = sum(self.tasks.values()) + sum(self.orphaned.values())
        return self.tasks.get(pool) == 0 and taken > 0


def activity_of(spark: SparkSession) -> Activity:
    """Ask Spark. Executors report the progress of tasks every ten seconds, unless configured otherwise."""
    context: Any = spark.sparkContext
    store = context._jsc.sc().statusStore()
    stages = {stage.stageId(): stage for stage in _elements(store.activeStages())}
    seen: dict[str, set[Hashable]] = {}
    tasks: dict[str, int] = {}
    for job in context.statusTracker().getActiveJobsIds():
        job_and_sql = store.jobWithAssociatedSql(job)
        # A stage that several jobs wait for is run by one of them.
        mine = [stages.pop(number) for number in _elements(job_and_sql._1().stageIds()) if number in stages]
        if mine:
            pool = mine[0].schedulingPool()
            tasks[pool] = tasks.get(pool, 0) + sum(stage.numActiveTasks() for stage in mine)
            seen.setdefault(pool, set()).update((*map(_stage_progress, mine), _query_metrics(spark, job_and_sql._2())))
    return Activity({pool: frozenset(moved) for pool, moved in seen.items()}, tasks, _orphaned_tasks(spark, store))


def _orphaned_tasks(spark: SparkSession, store: Any) -> dict[str, int]:
    """Return the tasks of cancelled stages; a task that ignores the cancellation keeps its slot."""
    session: Any = spark
    jvm, gateway = session._jvm, session.sparkContext._gateway
    failed = jvm.java.util.List.of(jvm.org.apache.spark.status.api.v1.StageStatus.FAILED)
    details = (False, False, gateway.new_array(jvm.double, 0), jvm.java.util.List.of())
    tasks_by_pool: dict[str, int] = {}
    for stage in _elements(store.stageList(failed, *details)):
        running = stage.numActiveTasks()
        if running:
            pool = stage.schedulingPool()
            tasks_by_pool[pool] = tasks_by_pool.get(pool, 0) + running
    return tasks_by_pool


def _stage_progress(stage: Any) -> tuple[int, ...]:
    return (
        stage.stageId(),
        stage.attemptId(),
        stage.numCompleteTasks(),
        stage.numFailedTasks(),
        stage.inputRecords(),
        stage.outputRecords(),
        stage.shuffleReadRecords(),
        stage.shuffleWriteRecords(),
    )


def _query_metrics(spark: SparkSession, number: Any) -> Hashable:
    session: Any = spark
    plans = session._jsparkSession.sharedState().statusStore()
    plan = plans.execution(number.get()) if number.isDefined() else number
    if plan.isEmpty():
        return ()
    values = plans.executionMetrics(number.get())
    metrics = [
        element.accumulatorId() for element in _elements(plan.get().metrics()) if element.metricType() in _COUNTED
    ]
    return tuple((metric, values.apply(metric)) for metric in sorted(metrics) if values.contains(metric))


def _elements(sequence: Any) -> Iterator[Any]:
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()


CHECK_INTERVAL_S: Final = 5.0
CANCEL_S: Final = 240.0
"""How long a cancelled or ending pipeline may take to end: requests to a silent object store are retried for three
minutes, which takes no slot."""
ORPHAN_S: Final = 60.0
"""How long cancelled tasks may take to end when others need their slots."""
JAVA_S: Final = 120.0
"""How long Java may take to report its activity; it does so at once unless it hangs as a whole."""


class WatchedPipeline(Protocol):
    """A pipeline, as the watch sees it."""

    @property
    def name(self) -> str:
        """Return its name."""

    @property
    def progress(self) -> Progress:
        """Return its progress."""

    @property
    def is_ending(self) -> bool:
        """Whether it was asked to end."""

    @property
    def stall_s(self) -> float:
        """Return the longest time it may make no progress; 0 means no limit."""

    def cancel_step(self, reason: str) -> None:
        """Cancel its work."""


class _Observation:
    """The last observations of one pipeline."""

    def __init__(self) -> None:
        self.count = -1
        self.spark: Hashable = None
        self.is_given_up = False


class Watch:
    """Watches all pipelines of a driver in its own thread."""

    def __init__(
        self,
        working: Callable[[], Iterable[WatchedPipeline]],
        activity: Callable[[], Activity],
        replace: Callable[[str, str], None],
        *,
        check_interval_s: float = CHECK_INTERVAL_S,
        cancel_s: float = CANCEL_S,
        orphan_s: float = ORPHAN_S,
        java_s: float = JAVA_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Watch pipelines; `replace` replaces the driver for a reason, because of one pipeline or of none."""
        self._working = working
        self._activity = activity
        self._replace = replace
        self._check_interval_s = check_interval_s
        self._cancel_s = cancel_s
        self._orphan_s = orphan_s
        self._java_s = java_s
        self._clock = clock
        self._looked = clock()
        self._seen: dict[WatchedPipeline, _Observation] = {}
        self._known = Activity()
        self._response: Future[Activity] | None = None
        # A hung Java process must not block the thread that has to detect it.
        self._asking = ThreadPoolExecutor(1, thread_name_prefix="ask Spark")
        self._silent_s = 0.0
        self._orphaned_s: dict[str, float] = {}

    def run(self, over: threading.Event) -> None:
        while not over.wait(self._check_interval_s):
            self.check()
        self._asking.shutdown(wait=False)

    def check(self) -> None:
        now = self._clock()
        # A process or machine that was suspended has not hung for that long.
        passed_s = min(now - self._looked, 2 * self._check_interval_s)
        self._looked = now
        self._seen = {pipeline: self._seen.get(pipeline, _Observation()) for pipeline in self._working()}
        if any(
            pipeline.progress.is_working and pipeline.progress.count == seen.count
            for pipeline, seen in self._seen.items()
        ):
            self._refresh_activity(passed_s)
            self._check_orphans(passed_s)
        for pipeline, seen in self._seen.items():
            # While Java does not respond, the culprit is unknown.
            self._check_progress(pipeline, seen, 0.0 if self._silent_s else passed_s)

    def _refresh_activity(self, passed_s: float) -> None:
        """Ask Java for its activity; if it does not respond, the last response holds."""
        if self._response is None:
            self._response = self._asking.submit(self._activity)
        try:
            self._known = self._response.result(self._check_interval_s)
        except TimeoutError:
            self._silent_s += passed_s
            if self._silent_s >= self._java_s:
                self._replace("", f"the Java process has not responded for {self._silent_s:.0f} s")
            return
        except Exception as error:
            # Java is ending, or no longer has a job that it has just listed.
            _logger.debug("Spark did not report its activity", extra={"error": str(error)})
        self._response = None
        self._silent_s = 0.0

    def _check_progress(self, pipeline: WatchedPipeline, seen: _Observation, passed_s: float) -> None:
        progress = pipeline.progress
        now = (progress.count, self._known.seen.get(pipeline.name))
        if not progress.is_working or now != (seen.count, seen.spark):
            seen.count, seen.spark = now
            seen.is_given_up = False
            progress.stalled_s = 0.0
            return
        if self._known.waits_for_pool(pipeline.name):
            return
        progress.stalled_s += passed_s
        limit_s = 0.0 if pipeline.is_ending else pipeline.stall_s
        if progress.stalled_s < limit_s or not (limit_s or pipeline.is_ending):
            return
        reason = f"it made no progress for {progress.stalled_s:.0f} s"
        if progress.stalled_s >= limit_s + self._cancel_s:
            self._replace(pipeline.name, f"{reason} and could not be cancelled")
        elif not seen.is_given_up and not pipeline.is_ending:
            seen.is_given_up = True
            pipeline.cancel_step(f"{reason} and was cancelled")

    def _check_orphans(self, passed_s: float) -> None:
        """Replace the driver if cancelled tasks run on and other pipelines need their slots."""
        remains = self._known.orphaned if any(not running for running in self._known.tasks.values()) else {}
        self._orphaned_s = {name: self._orphaned_s.get(name, 0.0) + passed_s for name in remains}
        for name, lasting_s in self._orphaned_s.items():
            if lasting_s >= self._orphan_s:
                self._replace(name, f"it was cancelled, and its tasks were still running after {lasting_s:.0f} s")
