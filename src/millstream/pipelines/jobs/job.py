"""The interface of jobs: the driver runs one batch after the other, in a thread per pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.protocol.private.transactions import GroupMember

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

    from millstream.pipelines.source.link import Link


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The result of one batch, and when the next is due."""

    rows: int = 0
    """Messages that were read."""
    lag: int = 0
    """Messages that are not read yet."""
    wait_s: float = 0.0
    """How long there is nothing to do, as far as known; 0 if there is more."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counts of the batch by name (files, quarantined rows …), which are summed up."""
    levels: Mapping[str, int] = field(default_factory=dict)
    """Numbers that hold until the next ones, by name (what the last audit found …)."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """What else is worth knowing now, by name (the columns of tables …); a new text replaces the one before."""
    is_open: bool = False
    """Whether a batch continues after the step and has finished nothing yet, which does not count as progress."""


class TimeWindow(NamedTuple):
    """The messages that a backfill reads, by their timestamps: from the first time on, before the second."""

    since_ms: int
    until_ms: int


class Job(Protocol):
    """A running pipeline. Everything it did is durable when `step` returns, or can be repeated."""

    def step(self) -> Step:
        """Run one batch; called repeatedly by one thread."""

    def close(self) -> None:
        """Release everything; called once, by the same thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What a job may use."""

    spark: SparkSession
    brokers: str
    """The bootstrap servers."""
    access: Access = NO_ACCESS
    """What the job signs in by: as the owner of its pipeline."""
    node_link: Link | None = None
    """The link of a driver that acts for its node, where jobs do not; None where they have the same rights."""
    lake: str
    """The folder or URL of the tables, unless the pipeline sets its own."""
    folder: str
    """The folder of checkpoints and other state; shared by all nodes of a cluster."""
    member: Callable[[], GroupMember] = GroupMember
    """Returns the job's current member of the pipeline's group, which committed offsets carry."""
    lake_is_shared: bool = True
    """Whether the lake is the nodes' own, and not one chosen for a manual run."""
    window: TimeWindow | None = None
    """What to read, for a backfill; None for everything from where the pipeline is."""
    rules: tuple[Rule, ...] = ()
    """The rules of a route; changed rules come with a new context."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the job has to end; every wait includes it."""
    idle: Callable[[], None] = lambda: None
    """Called when a step has found nothing to do and only waits: it cannot be the cause of a driver's death."""
    progress: Callable[[], None] = lambda: None
    """Called by any thread when a part of a step is done that Spark does not see; long steps have many."""


class JobKind(Protocol):
    """Makes jobs of one kind."""

    def __call__(self, pipeline: Pipeline, context: JobContext) -> Job:
        """Make a job for a pipeline; raise an error of `core/errors.py` if it cannot be run as declared."""


class LazyJobKind:
    """A kind of job that is imported when the first one is made."""

    def __init__(self, kind: PipelineKind) -> None:
        self.module = f"millstream.pipelines.jobs.{kind}.job"

    def __call__(self, pipeline: Pipeline, context: JobContext) -> Job:
        kind: JobKind = import_module(self.module).JOB
        return kind(pipeline, context)


JOBS: Final[Mapping[PipelineKind, JobKind]] = {
    kind: LazyJobKind(kind) for kind in PipelineKind if kind is not PipelineKind.JOB
}
"""The pipeline kinds: each is the class `JOB` of `pipelines/jobs/<kind>/job.py`, imported when one is run.

Users' own jobs are not among them: each has its own process, `runtime/job_driver.py`.
"""
