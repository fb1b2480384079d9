"""The interface of jobs: the driver runs one batch after the other, in a thread per pipeline."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol
from uuid import UUID

from millstream.core.pipeline import Pipeline, PipelineKind, Rule
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.protocol.wire.group_offsets import GroupMember

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
    """How long the job expects to be idle; 0 if messages are waiting."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counts of the batch by name (files, quarantined rows …), which are summed up."""
    levels: Mapping[str, int] = field(default_factory=dict)
    """Gauges by name, each valid until the next value (what the last audit found …)."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Other information by name (the columns of tables …); a new text replaces the previous one."""
    is_open: bool = False
    """Whether a batch is still in progress after the step, which does not count as progress of the pipeline."""


class TimeWindow(NamedTuple):
    """The messages that a backfill reads, by timestamp: from the start (inclusive) to the end (exclusive)."""

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
    spark: SparkSession
    brokers: str
    """The bootstrap servers."""
    access: Access = NO_ACCESS
    """The credentials of the job, which acts as the owner of its pipeline."""
    node_link: Link | None = None
    """A link with the rights of the node, if jobs have only those of their owner; otherwise None."""
    lake: str
    """The folder or URL of the tables, unless the pipeline sets its own."""
    folder: str
    """The folder of checkpoints and other state; shared by all nodes of a cluster."""
    member: Callable[[], GroupMember] = GroupMember
    """Returns the job's current member of the pipeline's group, which committed offsets carry."""
    lake_is_shared: bool = True
    """Whether the lake is the nodes' own, and not one chosen for a manual run."""
    window: TimeWindow | None = None
    """The range that a backfill reads; None for everything from the pipeline's position on."""
    backfilled: UUID | None = None
    """The pipeline that a backfill is of, whose inferred columns it uses; None for other runs."""
    rules: tuple[Rule, ...] = ()
    """The rules of a route; changed rules come with a new context."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the job has to end; every wait includes it."""
    idle: Callable[[], None] = lambda: None
    """Called when a step only waits for messages, so that it is not blamed if the driver dies."""
    progress: Callable[[], None] = lambda: None
    """Called by any thread after a part of a step that Spark's metrics do not show; long steps have many."""


class JobKind(Protocol):
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
