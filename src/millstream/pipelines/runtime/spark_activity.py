"""What Spark is doing, by pipeline: each has a pool of its own in the scheduler, under its name."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_COUNTED: Final = frozenset({"sum", "size"})
"""Kinds of numbers in Spark's plans that grow only when rows are worked on; times may grow by themselves."""


@dataclass(frozen=True, slots=True)
class Activity:
    """What was seen at one moment."""

    seen: Mapping[str, Hashable] = field(default_factory=dict)
    """For each pool that has work something that is equal as long as nothing of it moves."""
    tasks: Mapping[str, int] = field(default_factory=dict)
    """How many tasks of these pools run; none of one that waits for others."""
    orphaned: Mapping[str, int] = field(default_factory=dict)
    """How many tasks of pools run on although they were cancelled."""

    def waits_for_pool(self, pool: str) -> bool:
        """Whether a pool has work of which nothing runs, because others have taken all places."""
        taken = sum(self.tasks.values()) + sum(self.orphaned.values())
        return self.tasks.get(pool) == 0 and taken > 0


def activity_of(spark: SparkSession) -> Activity:
    """Ask Spark. What tasks have done so far is told by executors every ten seconds, unless they are set otherwise."""
    context: Any = spark.sparkContext
    store = context._jsc.sc().statusStore()
    stages = {stage.stageId(): stage for stage in _each(store.activeStages())}
    seen: dict[str, set[Hashable]] = {}
    tasks: dict[str, int] = {}
    for job in context.statusTracker().getActiveJobsIds():
        job_and_sql = store.jobWithAssociatedSql(job)
        # One that several jobs wait for is done by one of them.
        mine = [stages.pop(number) for number in _each(job_and_sql._1().stageIds()) if number in stages]
        if mine:
            pool = mine[0].schedulingPool()
            tasks[pool] = tasks.get(pool, 0) + sum(stage.numActiveTasks() for stage in mine)
            seen.setdefault(pool, set()).update((*map(_moved, mine), _counted(spark, job_and_sql._2())))
    return Activity({pool: frozenset(moved) for pool, moved in seen.items()}, tasks, _orphaned(spark, store))


def _orphaned(spark: SparkSession, store: Any) -> dict[str, int]:
    """Tasks of stages that were given up; a task that does not hear of that runs on, and keeps its place."""
    session: Any = spark
    jvm, gateway = session._jvm, session.sparkContext._gateway
    failed = jvm.java.util.List.of(jvm.org.apache.spark.status.api.v1.StageStatus.FAILED)
    details = (False, False, gateway.new_array(jvm.double, 0), jvm.java.util.List.of())
    found: dict[str, int] = {}
    for stage in _each(store.stageList(failed, *details)):
        running = stage.numActiveTasks()
        if running:
            pool = stage.schedulingPool()
            found[pool] = found.get(pool, 0) + running
    return found


def _moved(stage: Any) -> tuple[int, ...]:
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


def _counted(spark: SparkSession, number: Any) -> Hashable:
    """What the plan of a number, if there is one, has counted so far."""
    session: Any = spark
    plans = session._jsparkSession.sharedState().statusStore()
    plan = plans.execution(number.get()) if number.isDefined() else number
    if plan.isEmpty():
        return ()
    values = plans.executionMetrics(number.get())
    metrics = [one.accumulatorId() for one in _each(plan.get().metrics()) if one.metricType() in _COUNTED]
    return tuple((metric, values.apply(metric)) for metric in sorted(metrics) if values.contains(metric))


def _each(sequence: Any) -> Iterator[Any]:
    """The elements of a sequence of Scala."""
    iterator = sequence.iterator()
    while iterator.hasNext():
        yield iterator.next()
