"""Batches from topics to topics, exactly once and without a checkpoint: the commit of a batch is the truth.

The rows of a batch and the offsets of the pipeline's group become valid with one record at the coordinator, which also
keeps the number of the batch. So whoever begins asks for both and goes on from there, on any machine, whatever happened
to the one before. The number is asked for first: if somebody else commits a batch in between, the number is taken
already when this one is to be committed, and it is not.
"""

from __future__ import annotations

import logging
import pickle
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from math import ceil
from typing import TYPE_CHECKING, Final
from uuid import UUID, uuid4

import pyarrow as pa

from millstream.core.errors import InvalidTransactionState, MillstreamError, OffsetOutOfRange, TransactionRejected
from millstream.core.pipeline import LATEST, SKIP, MovingSettings, Pipeline
from millstream.pipelines.jobs.group_offsets import Offsets, stable_offsets
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.runtime.fault import kind_in
from millstream.pipelines.source.batch_commit import (
    OFFSETS_TASK,
    Batch,
    Part,
    abort_batch,
    abort_undecided,
    prepare_offsets,
    writing_link,
)
from millstream.pipelines.source.link import Link
from millstream.pipelines.source.offset_resolver import OffsetResolver, Partitions
from millstream.pipelines.source.options import BROKERS, SourceOffsets, WriteOptions, read_options
from millstream.pipelines.source.ranges import Range, admitted, ranges_between
from millstream.protocol.private.transactions import GroupMember, TransactionalProducer, Transactions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_logger = logging.getLogger(__name__)

WAIT_S: Final = 0.5
"""How long a step waits for messages when there are none; whoever is to stop waits for that."""

TASK_ROWS_MIN: Final = 5000
"""A task is worth so many records, unless a partition has fewer."""

PART_SCHEMA: Final = "part binary"
CLIENT_ID: Final = "millstream-pipeline"


@dataclass(frozen=True, slots=True)
class Plan:
    """One batch: its number, and from where to where it goes."""

    batch: Batch
    ranges: tuple[Range, ...]
    """What is read, at most one range of each partition, so that the order within partitions is kept."""
    end: Offsets
    rows: int
    lag: int
    lost: int = 0
    """How many offsets lie before it that retention has deleted unread."""

    def counts(self, **more: int) -> dict[str, int]:
        """What is counted of it when it is committed."""
        return {**more, "lost": self.lost} if self.lost else more

    def numbers(self, spark: SparkSession) -> DataFrame:
        """The numbers of the ranges, shared out among so many tasks as are worth it."""
        return numbers_of(spark, self.ranges)

    def of(self, topic: str) -> list[Range]:
        """What is read of one topic."""
        return [one for one in self.ranges if one.topic == topic]


@dataclass(slots=True)
class _Known:
    """What the last commit of this loop has left behind, so that it need not be asked for."""

    number: int
    offsets: dict[str, dict[int, int]]


def query_of(pipeline_id: UUID) -> str:
    """What the coordinator knows the batches of a pipeline by."""
    return f"pipeline/{pipeline_id}"


def stream_of(pipeline_id: UUID) -> str:
    """What the attempts of a pipeline's streams have in their names: each of these is a query of its own."""
    return pipeline_id.hex


class BatchLoop:
    """Plans batches over topics, and commits them."""

    def __init__(self, pipeline: Pipeline, context: JobContext, settings: MovingSettings) -> None:
        self._pipeline = pipeline
        self._context = context
        self._settings = settings
        self._query = query_of(pipeline.pipeline_id)
        self._known: _Known | None = None
        self._is_alone = False
        """Whether what runs before this one have left undecided was looked for."""
        self.options = WriteOptions(brokers=context.brokers, client_id=CLIENT_ID)

    @property
    def link(self) -> Link:
        """The connection of this process."""
        return writing_link(self.options)

    def options_for(self, topic: str) -> WriteOptions:
        """How rows are written to one topic."""
        return replace(self.options, topic=topic)

    def survey(self, topics: Sequence[str]) -> OffsetResolver:
        """Asks about topics, as far as what is in them is committed."""
        given = {BROKERS: self._context.brokers, "subscribe": ",".join(topics), "kafka.client.id": CLIENT_ID}
        return OffsetResolver(read_options(given))

    def plan(self, topics: Sequence[str]) -> Plan:
        """The next batch of some topics; it has no rows if there are none."""
        survey = self.survey(topics)
        known = self._known or self._ask()
        partitions = survey.partitions()
        latest = survey.latest(partitions)
        start, lost = self._start(survey, known, partitions, latest)
        self._known = known
        end = admitted(start, latest, self._settings.batch_max)
        batch = Batch(self._query, known.number, uuid4().hex[:12])
        ranges = tuple(ranges_between(start, end))
        return Plan(batch, ranges, end, sum(map(len, ranges)), sum(map(len, ranges_between(end, latest))), lost)

    def _start(
        self, survey: OffsetResolver, known: _Known, partitions: Partitions, latest: Offsets
    ) -> tuple[Offsets, int]:
        """Where the batch begins, and how many offsets it leaves out."""
        has_all = all(n in known.offsets.get(topic, {}) for topic, numbers in partitions.items() for n in numbers)
        skips = self._settings.on_lost == SKIP
        # Whether offsets are still there that are known is found out when they are fetched, unless that may be so.
        earliest = latest if has_all and not skips else survey.earliest(partitions)
        start: dict[str, dict[int, int]] = {}
        for topic, numbers in partitions.items():
            committed = known.offsets.get(topic, {})
            # A partition that comes to a topic which is read already begins with its first message.
            at_end = not committed and self._settings.start == LATEST
            otherwise = (latest if at_end else earliest)[topic]
            start[topic] = {number: committed.get(number, otherwise[number]) for number in numbers}
        _check_reached(start, latest)
        return skipping(start, earliest) if skips else (start, 0)

    def is_new(self, plan: Plan) -> bool:
        """Whether a plan names partitions that the group has no offset for yet: they are committed even without rows.

        Else what comes before the first batch would be skipped by a run that begins at the end again.
        """
        known = self._known.offsets if self._known is not None else {}
        return any(number not in known.get(topic, {}) for topic, numbers in plan.end.items() for number in numbers)

    def commit(self, plan: Plan, frame: DataFrame | None, is_good: Callable[[], bool] = lambda: True) -> int | None:
        """Run the job whose rows are the parts of a batch, and commit these and the offsets.

        The answer is how many rows were written; None if nothing was, since somebody else has committed the batch or,
        when all rows were written, it `is_good` no more.
        """
        known = self._known
        # What is known counts for nothing until this has gone well.
        self._known = None
        link = self.link
        offsets = link.start(self.prepare_offsets(plan.batch, plan.end))
        try:
            parts = [] if frame is None else [read_part(row.part) for row in frame.collect()]
            if not is_good():
                self.give_up(plan.batch, offsets)
                return None
            members = [part.member for part in parts if part.member is not None]
            members.append(offsets.result())
            done = link.call(Transactions(link.client).complete_batch(plan.batch.query, plan.batch.number, members))
        except BaseException as error:
            self.give_up(plan.batch, offsets)
            if is_refused(error) and self.is_taken(plan.batch):
                return None
            raise
        if done and known is not None:
            merged = {topic: {**known.offsets.get(topic, {}), **numbers} for topic, numbers in plan.end.items()}
            self._known = _Known(plan.batch.number + 1, {**known.offsets, **merged})
        elif not done and not self._was_done(plan):
            return None
        return sum(part.rows for part in parts)

    def wait(self, plan: Plan) -> Step:
        """Wait a moment for messages, when there are none."""
        self.survey(list(plan.end)).wait_for_more(plan.end, WAIT_S)
        return Step()

    def committed(self) -> Offsets:
        """What the group has committed, when all that runs before this one have left undecided is taken back."""
        return self._ask().offsets

    async def prepare_offsets(self, batch: Batch, end: Offsets) -> TransactionalProducer:
        """The member of a batch that commits where it ends, if this one still runs the pipeline."""
        member = GroupMember(*self._context.member())
        source = SourceOffsets(self._pipeline.group, end, member)
        transactions = Transactions(self.link.client)
        return await prepare_offsets(transactions, batch.new_attempt(OFFSETS_TASK), source)

    def is_taken(self, batch: Batch) -> bool:
        """Whether there is a batch of this number: somebody else has gone on from here."""
        return self.last_batch(batch.query) >= batch.number

    def last_batch(self, query: str) -> int:
        """The number of the last batch of a query that was committed; -1 if none is known."""
        return self.link.call(Transactions(self.link.client).last_batch(query))

    def give_up(self, batch: Batch, offsets: Future[TransactionalProducer]) -> None:
        """Take back what was prepared of a batch, as far as that can be done now; else the next run does it."""
        with suppress(MillstreamError):
            offsets.result()
        with suppress(MillstreamError):
            abort_batch(self.options, batch)

    # -- how ------------------------------------------------------------------------------------------------------

    def _ask(self) -> _Known:
        if not self._is_alone:
            # What a stream of this pipeline has left undecided would hold up the offsets for ever.
            self._is_alone = abort_undecided(self.options, stream_of(self._pipeline.pipeline_id))
        return self.link.call(self._look(self.link))

    def _was_done(self, plan: Plan) -> bool:
        """Whether a batch that was committed before is this one: the answer to its commit may have been lost."""
        self._known = known = self._ask()
        ends = {topic: known.offsets.get(topic, {}) for topic in plan.end}
        return known.number == plan.batch.number + 1 and all(
            ends[topic].get(number) == offset
            for topic, numbers in plan.end.items()
            for number, offset in numbers.items()
        )

    async def _look(self, link: Link) -> _Known:
        transactions = Transactions(link.client)
        while True:
            number = await transactions.last_batch(self._query) + 1
            try:
                # What a run before this one has left undecided would hold up the offsets for ever.
                await transactions.abort_batch(self._query, number)
            except InvalidTransactionState:
                # It was committed just now.
                continue
            return _Known(number, await stable_offsets(link.client, self._pipeline.group))


def numbers_of(spark: SparkSession, ranges: Sequence[Range]) -> DataFrame:
    """The numbers of ranges as rows; few records are one task, since a task costs more than they do."""
    rows = sum(map(len, ranges))
    wished = min(ceil(rows / TASK_ROWS_MIN), spark.sparkContext.defaultParallelism * 2)
    return spark.range(0, len(ranges), 1, max(1, min(len(ranges), wished)))


def as_row(part: Part) -> Iterator[pa.RecordBatch]:
    """What a task has written, as its only row."""
    yield pa.RecordBatch.from_pydict({"part": pa.array([pickle.dumps(part)], pa.binary())})


def read_part(row: bytes | bytearray) -> Part:
    """The same on the driver; only tasks of this job have made it."""
    part = pickle.loads(bytes(row))
    if not isinstance(part, Part):
        raise TypeError(f"a task gave {type(part).__name__} and not a part of a batch")
    return part


def is_refused(error: BaseException) -> bool:
    """Whether a batch failed since its coordinator refused it, here or in a task."""
    kind = kind_in(error)
    return kind is not None and issubclass(kind, TransactionRejected)


def skipping(start: Offsets, earliest: Offsets) -> tuple[Offsets, int]:
    """Where to begin without what is deleted, and how many offsets that leaves out."""
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
                    f"{topic}-{number} ends at {end}, and the pipeline has read up to {offset}: the topic was made "
                    "anew, or its end was lost; move the pipeline's group with `millstream group reset`",
                    start=0,
                    end=end,
                )
