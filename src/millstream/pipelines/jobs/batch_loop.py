"""Batches from topics to topics, exactly once and without a checkpoint: the commit of a batch is the source of truth.

One record at the coordinator makes the rows of a batch and the offsets of the pipeline's group valid, and stores the
number of the batch. A run therefore asks for both when it starts and continues from there, on any machine, whatever
happened to the one before. It asks for the number first: if another run commits a batch in between, the number is taken
and this run's batch is not committed.
"""

from __future__ import annotations

import logging
import os
import pickle
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from math import ceil
from threading import BoundedSemaphore
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

import msgspec
import pyarrow as pa

from millstream.core.errors import (
    CorruptState,
    MillstreamError,
    OffsetOutOfRange,
    TransactionRejected,
)
from millstream.core.pipeline import LATEST, SKIP, Pipeline, TopicToTopicSettings
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.runtime.fault import kind_in
from millstream.pipelines.source.access import Access, may_read
from millstream.pipelines.source.batch_commit import (
    OFFSETS_TASK,
    Batch,
    Part,
    abort_batch,
    abort_undecided,
    next_batch,
    prepare_offsets,
)
from millstream.pipelines.source.link import Link, task_link
from millstream.pipelines.source.offset_resolver import OffsetResolver, Partitions
from millstream.pipelines.source.options import (
    BROKERS,
    Offsets,
    ReadOptions,
    SourceOffsets,
    StartingTimestamp,
    WriteOptions,
    read_options,
)
from millstream.pipelines.source.ranges import Range, admitted, ranges_between, stable_offsets
from millstream.pipelines.source.row_producer import write_with_offsets
from millstream.protocol.private.transactions import TransactionalProducer, Transactions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger(__name__)

WAIT_S: Final = 0.5
"""How long a step waits for messages at a time; stopping waits for it."""

IDLE_S: Final = 2.0
"""How long a step waits in total if the previous one waited too; the next one looks for new partitions."""

PARTITIONS_S: Final = 1.0
"""How long the partitions of topics are cached; new ones are noticed after that."""

TASK_ROWS_MIN: Final = 5000
"""The fewest records that are worth a task, unless a partition has fewer."""

ROWS_HERE_MAX: Final = 500
"""The driver processes up to this many messages itself if it can: starting a Spark job would take longer."""

TIMEOUT_S: Final = 60.0
"""How long requests may take, for reading and writing alike, so that one client serves both."""

HERE_AT_ONCE: Final = max(2, min(4, os.cpu_count() or 2))
"""How many pipelines process messages in the driver at a time; Python uses few cores, however many there are."""

TURN_S_MAX: Final = 1.0
"""How long a pipeline waits for its turn at most: one that hangs must not stop the others."""

PART_SCHEMA: Final = "part binary"
CLIENT_ID: Final = "millstream-pipeline"


@dataclass(frozen=True, slots=True)
class Plan:
    """A batch: its number and its offset ranges."""

    batch: Batch
    ranges: tuple[Range, ...]
    """At most one range per partition, which keeps the order within partitions."""
    end: Offsets
    rows: int
    lag: int
    lost: int = 0
    """Offsets before the batch that retention deleted unread."""

    def counts(self, **more: int) -> dict[str, int]:
        """Return the counts to add when the batch is committed."""
        return {**more, "lost": self.lost} if self.lost else more

    def numbers(self, spark: SparkSession) -> DataFrame:
        """Return the numbers of the ranges as rows, spread over as many tasks as pay off."""
        return numbers_of(spark, self.ranges)

    def of(self, topic: str) -> list[Range]:
        return [offset_range for offset_range in self.ranges if offset_range.topic == topic]


@dataclass(slots=True)
class _CommittedState:
    """The state after this loop's last commit, kept to avoid a request to the coordinator."""

    number: int
    offsets: dict[str, dict[int, int]]


def query_of(pipeline_id: UUID) -> str:
    """Return the name of a pipeline's batches at the coordinator."""
    return f"pipeline/{pipeline_id}"


def stream_of(pipeline_id: UUID) -> str:
    """Return the part that the transactional ids of a pipeline's streams share; each stream is its own query."""
    return pipeline_id.hex


class BatchLoop:
    """Plans batches over topics and commits them."""

    def __init__(self, pipeline: Pipeline, context: JobContext, settings: TopicToTopicSettings) -> None:
        self._pipeline = pipeline
        self._context = context
        self._settings = settings
        self._query = query_of(pipeline.pipeline_id)
        self._committed_state: _CommittedState | None = None
        self._is_alone = False
        """Whether undecided transactions of earlier runs have been searched for and aborted."""
        self._sources: tuple[Sequence[str], Partitions] = (), {}
        self._targets: dict[str, int] = {}
        """The number of partitions of topics that are written here."""
        self._looked_up_at = -PARTITIONS_S
        self._is_idle = False
        self.options = WriteOptions(
            brokers=context.brokers, access=context.access, client_id=CLIENT_ID, timeout_s=TIMEOUT_S
        )

    @property
    def link(self) -> Link:
        return task_link(self.options)

    def options_for(self, topic: str) -> WriteOptions:
        return replace(self.options, topic=topic)

    def reading_access(self, topics: Iterable[str]) -> Access:
        return self.options.access.for_tasks(self.options.brokers, may_read(topics))

    def resolver(self, topics: Sequence[str]) -> OffsetResolver:
        return OffsetResolver(reading_options(self._context.brokers, tuple(topics), self._context.access))

    def plan(self, topics: Sequence[str]) -> Plan:
        """Plan the next batch of some topics; it has no rows if there are no messages."""
        resolver = self.resolver(topics)
        known = self._committed_state or self._fetch_committed()
        partitions = self._partitions(resolver, topics)
        try:
            return self._build_plan(resolver, known, partitions)
        except BaseException:
            self._looked_up_at = -PARTITIONS_S
            raise

    def _partitions(self, resolver: OffsetResolver, topics: Sequence[str]) -> Partitions:
        """Return the partitions of topics, as of now or a moment ago."""
        now, named = time.monotonic(), tuple(topics)
        if self._committed_state is None or self._sources[0] != named or now - self._looked_up_at >= PARTITIONS_S:
            self._sources = named, resolver.partitions()
            self._targets.clear()
            self._looked_up_at = now
        return self._sources[1]

    def _build_plan(self, resolver: OffsetResolver, known: _CommittedState, partitions: Partitions) -> Plan:
        latest = self._at_time(resolver, partitions, resolver.latest(partitions), is_end=True)
        start, lost = self._start(resolver, known, partitions, latest)
        self._committed_state = known
        end = admitted(start, latest, self._settings.batch_max)
        batch = Batch(self._query, known.number, uuid4().hex[:12])
        ranges = tuple(ranges_between(start, end))
        return Plan(batch, ranges, end, sum(map(len, ranges)), sum(map(len, ranges_between(end, latest))), lost)

    def _start(
        self, resolver: OffsetResolver, known: _CommittedState, partitions: Partitions, latest: Offsets
    ) -> tuple[Offsets, int]:
        """Return the offset at which the batch starts, and how many offsets it skips."""
        has_all = all(n in known.offsets.get(topic, {}) for topic, numbers in partitions.items() for n in numbers)
        skips = self._settings.on_lost == SKIP
        # A fetch reports known offsets that no longer exist, unless lost ones are skipped.
        earliest = latest if has_all and not skips else resolver.earliest(partitions)
        first = self._at_time(resolver, partitions, earliest, is_end=False)
        start: dict[str, dict[int, int]] = {}
        for topic, numbers in partitions.items():
            committed = known.offsets.get(topic, {})
            # A partition added to a topic that is already being read starts at its first message.
            at_end = not committed and self._settings.start == LATEST and self._context.window is None
            otherwise = (latest if at_end else first)[topic]
            start[topic] = {number: committed.get(number, otherwise[number]) for number in numbers}
        _check_reached(start, latest)
        return skip_deleted(start, earliest) if skips else (start, 0)

    def _at_time(self, resolver: OffsetResolver, partitions: Partitions, offsets: Offsets, *, is_end: bool) -> Offsets:
        """Return the start or end of a backfill within the log; the offsets given for a run without limits."""
        window = self._context.window
        if window is None:
            return offsets
        time_ms = window.until_ms if is_end else window.since_ms
        starting = resolver.resolve(StartingTimestamp(time_ms, or_latest=True), partitions, "starting")
        choose = min if is_end else max
        return {
            topic: {number: choose(offset, starting[topic][number]) for number, offset in numbers.items()}
            for topic, numbers in offsets.items()
        }

    def is_new(self, plan: Plan) -> bool:
        """Whether a plan has partitions without a committed offset: they are committed even without rows.

        Otherwise a later run that starts at the end would skip messages that arrive before the first batch.
        """
        known = self._committed_state.offsets if self._committed_state is not None else {}
        return any(number not in known.get(topic, {}) for topic, numbers in plan.end.items() for number in numbers)

    def commit(
        self, plan: Plan, write: Callable[[], Sequence[Part]] = tuple, may_commit: Callable[[], bool] = lambda: True
    ) -> int | None:
        """Write the parts of a batch and commit them with the offsets.

        Return the number of rows written; None if another run has committed the batch, or if `may_commit` returned
        false after all rows were written.
        """
        offsets = self.link.start(self.prepare_offsets(plan.batch, plan.end))

        def prepare() -> tuple[list[TransactionalProducer], int] | None:
            parts = write()
            if not may_commit():
                return None
            return [*members_of(parts), offsets.result()], sum(part.rows for part in parts)

        def abort_prepared() -> None:
            self.abort_prepared(plan.batch, offsets)

        return self._commit(plan, prepare, abort_prepared)

    def commit_here(self, plan: Plan, options: WriteOptions, rows: Iterable[pa.RecordBatch]) -> int | None:
        """Write the rows of a small batch in this process and commit them, as one transaction with the offsets.

        Return the number of rows written; None if another run has committed the batch.
        """
        source = SourceOffsets(self._pipeline.group, plan.end, self._context.member())

        def prepare() -> tuple[list[TransactionalProducer], int]:
            part = write_with_offsets(options, plan.batch, rows, source, self._targets)
            return members_of([part]), part.rows

        return self._commit(plan, prepare, lambda: self._abort(plan.batch))

    def _commit(
        self,
        plan: Plan,
        prepare: Callable[[], tuple[list[TransactionalProducer], int] | None],
        abort_prepared: Callable[[], None],
    ) -> int | None:
        """Prepare and commit the members of a batch; return how many rows they have, None if already committed."""
        known, self._is_idle = self._committed_state, False
        # The state is unknown until the commit has succeeded.
        self._committed_state = None
        link = self.link
        try:
            prepared = prepare()
            if prepared is None:
                abort_prepared()
                return None
            members, rows = prepared
            done = link.call(Transactions(link.client).complete_batch(plan.batch.query, plan.batch.number, members))
        except BaseException as error:
            abort_prepared()
            if is_refused(error) and self.is_taken(plan.batch):
                return None
            raise
        if done and known is not None:
            merged = {topic: {**known.offsets.get(topic, {}), **numbers} for topic, numbers in plan.end.items()}
            self._committed_state = _CommittedState(plan.batch.number + 1, {**known.offsets, **merged})
        elif not done and not self._is_committed(plan):
            return None
        return rows

    def wait(self, plan: Plan) -> Step:
        """Wait a moment for messages if there are none."""
        self._context.idle()
        resolver, deadline = self.resolver(list(plan.end)), time.monotonic() + (IDLE_S if self._is_idle else 0.0)
        self._is_idle = True
        # Planning another batch would find nothing but new partitions.
        while not resolver.wait_for_more(plan.end, WAIT_S):
            if self._context.stopping.is_set() or time.monotonic() >= deadline:
                break
        return Step()

    def committed(self) -> Offsets:
        """Return the group's committed offsets, after aborting undecided transactions of earlier runs."""
        return self._fetch_committed().offsets

    async def prepare_offsets(self, batch: Batch, end: Offsets) -> TransactionalProducer:
        """Prepare the member of a batch that commits its end offsets, if this run still owns the pipeline."""
        source = SourceOffsets(self._pipeline.group, end, self._context.member())
        transactions = Transactions(self.link.client)
        return await prepare_offsets(transactions, batch.new_attempt(OFFSETS_TASK), source)

    def is_taken(self, batch: Batch) -> bool:
        """Whether a batch of this number is committed: another run has continued from here."""
        return self.last_batch(batch.query) >= batch.number

    def last_batch(self, query: str) -> int:
        """Return the number of a query's last committed batch; -1 if none is known."""
        return self.link.call(Transactions(self.link.client).last_batch(query))

    def abort_prepared(self, batch: Batch, offsets: Future[TransactionalProducer]) -> None:
        """Abort the prepared members of a batch if possible; otherwise the next run aborts them."""
        with suppress(MillstreamError):
            offsets.result()
        self._abort(batch)

    def _abort(self, batch: Batch) -> None:
        with suppress(MillstreamError):
            abort_batch(self.options, batch)

    # -- internals ------------------------------------------------------------------------------------------------

    def _fetch_committed(self) -> _CommittedState:
        if not self._is_alone:
            # An undecided transaction of an earlier stream would block the offsets forever.
            self._is_alone = abort_undecided(self.options, stream_of(self._pipeline.pipeline_id))
        number = next_batch(self.link, self._query)
        return _CommittedState(number, self.link.call(stable_offsets(self.link.client, self._pipeline.group)))

    def _is_committed(self, plan: Plan) -> bool:
        """Whether the committed batch is this one: the response to its commit may have been lost."""
        self._committed_state = known = self._fetch_committed()
        ends = {topic: known.offsets.get(topic, {}) for topic in plan.end}
        return known.number == plan.batch.number + 1 and all(
            ends[topic].get(number) == offset
            for topic, numbers in plan.end.items()
            for number, offset in numbers.items()
        )


_here = BoundedSemaphore(HERE_AT_ONCE)


@contextmanager
def small_batch_slot() -> Iterator[None]:
    """Limit how many threads plan and process small batches at a time.

    A message of a topic is often work for many pipelines at once. If all run at once, all finish as late as the last
    one; one after the other, they finish in half that time on average.
    """
    is_acquired = _here.acquire(timeout=TURN_S_MAX)
    try:
        yield
    finally:
        if is_acquired:
            _here.release()


@lru_cache(maxsize=64)
def reading_options(brokers: str, topics: tuple[str, ...], access: Access) -> ReadOptions:
    """Return the options with which jobs read topics: unreadable batches are skipped."""
    options = {
        BROKERS: brokers,
        "subscribe": ",".join(topics),
        "kafka.client.id": CLIENT_ID,
        "kafka.request.timeout.ms": f"{TIMEOUT_S * 1000:.0f}",
        "failOnUnreadable": "false",
    }
    return read_options(options, access)


def members_of(parts: Iterable[Part]) -> list[TransactionalProducer]:
    return [part.member for part in parts if part.member is not None]


def numbers_of(spark: SparkSession, ranges: Sequence[Range]) -> DataFrame:
    """Return the numbers of ranges as rows; few records form one task, since starting tasks costs more."""
    rows = sum(map(len, ranges))
    tasks = min(ceil(rows / TASK_ROWS_MIN), spark.sparkContext.defaultParallelism * 2)
    return spark.range(0, len(ranges), 1, max(1, min(len(ranges), tasks)))


_JOB_PROPERTY: Final = "millstream.batch"


class JobBatch(msgspec.Struct, array_like=True):
    """The batch of a job, passed to its tasks separately from the plan, so that one plan serves many batches."""

    query: str
    number: int
    run: str
    ranges: list[tuple[str, int, int, int]]

    @property
    def batch(self) -> Batch:
        return Batch(self.query, self.number, self.run)

    def of(self, topic: str) -> list[Range]:
        return [Range(*offset_range) for offset_range in self.ranges if offset_range[0] == topic]


def set_job_batch(spark: SparkSession, plan: Plan) -> None:
    """Set the batch of the next job of this thread, for its tasks."""
    ranges = [
        (offset_range.topic, offset_range.partition, offset_range.start, offset_range.end)
        for offset_range in plan.ranges
    ]
    batch = JobBatch(plan.batch.query, plan.batch.number, plan.batch.run, ranges)
    spark.sparkContext.setLocalProperty(_JOB_PROPERTY, msgspec.json.encode(batch).decode())


def batch_of_job() -> JobBatch:
    from pyspark import TaskContext

    context = TaskContext.get()
    text = None if context is None else context.getLocalProperty(_JOB_PROPERTY)
    if text is None:
        raise CorruptState("a task has no batch")
    return msgspec.json.decode(text, type=JobBatch)


def parts_of(frame: DataFrame) -> list[Part]:
    """Run a job whose rows are the parts of a batch."""
    return [read_part(row.part) for row in frame.collect()]


def as_row(part: Part) -> Iterator[pa.RecordBatch]:
    """Encode the part that a task has written as its only row."""
    yield pa.RecordBatch.from_pydict({"part": pa.array([pickle.dumps(part)], pa.binary())})


def read_part(row: bytes | bytearray) -> Part:
    """Decode the part that a task of this job has encoded."""
    part = pickle.loads(bytes(row))
    if not isinstance(part, Part):
        raise TypeError(f"a task returned {type(part).__name__} instead of a part of a batch")
    return part


def is_refused(error: BaseException) -> bool:
    """Whether a batch failed because its coordinator refused it, here or in a task."""
    kind = kind_in(error)
    return kind is not None and issubclass(kind, TransactionRejected)


def skip_deleted(start: Offsets, earliest: Offsets) -> tuple[Offsets, int]:
    """Return the first offset after deleted ones, and the number of skipped offsets."""
    moved = {
        topic: {number: max(offset, earliest[topic][number]) for number, offset in offsets.items()}
        for topic, offsets in start.items()
    }
    return moved, sum(map(len, ranges_between(start, moved)))


def _check_reached(start: Offsets, latest: Offsets) -> None:
    for topic, offsets in start.items():
        for number, offset in offsets.items():
            end = latest[topic][number]
            if offset > end:
                raise OffsetOutOfRange(
                    f"{topic}-{number} ends at {end}, but the pipeline has read up to {offset}: the topic was "
                    "recreated, or lost its end; move the pipeline's group with `millstream group reset`",
                    start=0,
                    end=end,
                )
