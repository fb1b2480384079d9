"""What a job is to the driver: something that does one batch after the other, in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, Protocol

from millstream.core.pipeline import Pipeline, Rule

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What one batch did, and when the next is due."""

    rows: int = 0
    """Messages that were taken."""
    lag: int = 0
    """Messages that are there and were not taken yet."""
    wait_s: float = 0.0
    """How long there is nothing to do, as far as is known; 0 when there is more."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """More numbers of this batch, by name: files, quarantined rows and such. They are summed up."""
    is_open: bool = False
    """Whether a batch goes on beyond the step, of which nothing is done yet: no sign that the job gets on."""


class GroupMember(NamedTuple):
    """Who runs a pipeline, as its consumer group knows it; the group refuses offsets of anybody else.

    As it stands here it is nobody, whom a group without members takes offsets from.
    """

    member_id: str = ""
    generation: int = -1
    instance_id: str | None = None


class Job(Protocol):
    """A pipeline that runs. Everything it did is durable when `step` returns, or can be done again."""

    def step(self) -> Step:
        """Do one batch of what there is; called again and again by one thread."""

    def close(self) -> None:
        """Let go of everything; called once, by the same thread."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobContext:
    """What a job may use."""

    spark: SparkSession
    brokers: str
    """Where the broker is, as clients write it."""
    lake: str
    """Where tables are, unless the pipeline says so itself: a folder or a URL."""
    folder: str
    """Where a job keeps what it must find again, such as checkpoints; shared by all nodes of a cluster."""
    member: Callable[[], GroupMember] = GroupMember
    """Who the job is in the group of its pipeline, now; offsets that are committed say it."""
    lake_is_shared: bool = True
    """Whether the lake is that of the nodes, and no other one that somebody who runs a job by hand wants."""
    rules: tuple[Rule, ...] = ()
    """The rules of a route; a job whose rules change is told so by a new context."""
    stopping: threading.Event = field(default_factory=threading.Event)
    """Set when the job is to end: whoever waits, waits for this."""
    progress: Callable[[], None] = lambda: None
    """Called, by any thread, when a part of a step is done of which Spark does not know; long steps have many."""


class JobKind(Protocol):
    """Makes jobs of one kind."""

    def __call__(self, pipeline: Pipeline, context: JobContext) -> Job:
        """A job for a pipeline; raises an error of the tree in `core/errors.py` when it cannot be run as declared."""
