"""Lands past messages again while the pipeline runs: a time range of the log, or the quarantined messages.

A backfill never moves the next offsets of a table, which belong to the pipeline: it lands messages before them. In a
table of every message it skips those that the table or its quarantine has, so that it can be repeated and interrupted
at will. In a table with one row per key all changes but the quarantined ones are merged again, which is idempotent.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Final, NamedTuple
from uuid import uuid4

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millstream.core.errors import InvalidPipeline
from millstream.core.pipeline import UPSERT, LandSettings, Pipeline
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.jobs.land.inference import RECORD_NAMES
from millstream.pipelines.jobs.land.job import LandJob
from millstream.pipelines.jobs.land.sources import PartitionPlan, Source
from millstream.pipelines.jobs.land.task import Landing, Report, TopicWork
from millstream.pipelines.jobs.land.topic_batch import TopicBatch
from millstream.pipelines.jobs.land.upsert import UpsertJob, keyed
from millstream.pipelines.lake.columns import UNREADABLE_BATCH
from millstream.pipelines.lake.parquet_table import ParquetTable
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import LakeTable, Mark
from millstream.pipelines.lake.table_file import ActiveFile, WrittenFile
from millstream.pipelines.lake.task_writer import BATCH_ROWS
from millstream.pipelines.source.access import Access
from millstream.pipelines.source.options import BROKERS, read_options

MARK: Final = "millstream/backfilled"
"""The application version that every backfill and every requarantine changes."""


def make_backfill(pipeline: Pipeline, context: JobContext) -> LandJob:
    if LandSettings.from_strings(pipeline.overrides).mode == UPSERT:
        return _UpsertBackfill(pipeline, context)
    return _Backfill(pipeline, context)


def make_requarantine(pipeline: Pipeline, context: JobContext) -> LandJob:
    """Make the job that decodes the quarantined messages of a pipeline again."""
    if LandSettings.from_strings(pipeline.overrides).mode == UPSERT:
        return _UpsertRequarantine(pipeline, context)
    return _Requarantine(pipeline, context)


@dataclass(slots=True, kw_only=True)
class _BackfillBatch(TopicBatch):
    """A batch that does not change the next offsets of its table."""

    mark: Mark
    requarantined: Sequence[ActiveFile] = ()

    def moves(self) -> dict[tuple[str, int], tuple[int, int]]:
        return {}

    def commit(self) -> bool:
        files = [file for report in self.reports for file in report.files]
        quarantined = [file for report in self.reports for file in report.quarantined]
        if not files and not quarantined and not self.requarantined:
            return True
        return _delta(self).commit(
            files,
            {},
            schema=self.table_schema(),
            quarantined=quarantined,
            requarantined=self.requarantined,
            mark=self.mark,
        )


class _BackfillJob(LandJob):
    """A job that lands messages before the table's next offsets."""

    def _batch(self, source: Source) -> TopicBatch:
        batch = super()._batch(source)
        if batch.schema is None:
            raise InvalidPipeline(f"the table of {batch.topic!r} does not exist yet; run its pipeline first")
        return _as_backfill(batch)

    def _commit(self, batches: Iterable[TopicBatch]) -> list[TopicBatch]:
        listed = list(batches)
        ids = self._sources.ids([batch.topic for batch in listed]) if listed else {}
        same = [batch for batch in listed if ids.get(batch.topic) == batch.source.topic_id]
        self._discard(batch for batch in listed if ids.get(batch.topic) != batch.source.topic_id)
        return [batch for batch, is_done in zip(same, map(self._commit_one, same), strict=True) if is_done]

    def _commit_group_offsets(self, batches: Sequence[TopicBatch]) -> None:
        """Do nothing: the position of the pipeline does not change."""

    def _compact_and_vacuum_all(self, batches: Iterable[TopicBatch]) -> None:
        """Do nothing: the pipeline compacts its tables itself."""


class _Backfill(_BackfillJob):
    """Lands the messages of a time range that the table does not have."""

    def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
        super().__init__(pipeline, context)
        if context.window is None:
            raise ValueError("a backfill needs a time range")
        if self._settings.format != "delta":
            raise InvalidPipeline("a backfill needs a table with format=delta")
        self._window = context.window
        self._reached: dict[tuple[str, int], int] = {}
        """The next offset of each partition that this run has not read, by topic id."""

    def _batch(self, source: Source) -> TopicBatch:
        batch = super()._batch(source)
        starts, ends = self._offsets(source)
        plans = {}
        for number, plan in batch.plans.items():
            # The pipeline itself lands everything after the table's position.
            end = min(ends[number], plan.start or 0)
            first = max(starts[number], source.first[number], self._reached.get((source.topic_id, number), 0))
            plans[number] = PartitionPlan(first, first, max(first, end))
        batch.plans = plans
        batch.source = replace(source, end={number: plan.end for number, plan in plans.items()})
        return batch

    def _offsets(self, source: Source) -> tuple[dict[int, int], dict[int, int]]:
        link = self._sources.link
        ranges = []
        for time_ms in self._window:
            listed = link.call(link.client.list_offsets(source.topic, dict.fromkeys(source.end, time_ms)))
            ranges.append({n: int(found.offset) if found.offset >= 0 else source.end[n] for n, found in listed.items()})
        return ranges[0], ranges[1]

    def _leave_out(self, batch: TopicBatch) -> None:
        """Also omit the messages that the table or its quarantine has."""
        super()._leave_out(batch)
        topic_id = batch.source.topic_id
        found = {}
        for number, plan in batch.plans.items():
            place = (topic_id, number, plan.first, plan.end)
            rows = [*self._landed(batch, place), *batch.table.scan_quarantined(*place, ("offset",))]
            offsets = [row.column("offset") for row in rows] if len(plan) else []
            if number in batch.left_out:
                # Messages whose id the table has.
                offsets.append(batch.left_out[number])
            if offsets:
                found[number] = pc.unique(pa.concat_arrays(offsets))
            self._context.progress()
        batch.left_out = found

    def _landed(self, batch: TopicBatch, place: tuple[str, int, int, int]) -> Iterable[pa.RecordBatch]:
        """Return the rows of an offset range that the table has."""
        return batch.table.scan(*place, ("offset",))

    def _commit(self, batches: Iterable[TopicBatch]) -> list[TopicBatch]:
        done = super()._commit(batches)
        for batch in done:
            for number, plan in batch.plans.items():
                self._reached[batch.source.topic_id, number] = plan.end
        return done


class _UpsertBackfill(_Backfill, UpsertJob):
    """Merges the changes of a time range again."""

    def _landed(self, batch: TopicBatch, place: tuple[str, int, int, int]) -> Iterable[pa.RecordBatch]:
        """Return none: merging a change again has no effect."""
        return ()


class _Requarantine(_BackfillJob):
    """Decodes quarantined messages with the current settings, and lands those that fit now."""

    def _batch(self, source: Source) -> TopicBatch:
        batch = super()._batch(source)
        batch.plans = {}
        batch.evolves = False
        return batch

    def step(self) -> Step:
        """Decode everything that was quarantined when the run began."""
        counts: Counter[str] = Counter()
        rows = 0
        batches = [self._batch(source) for source in self._topics()]
        for batch in batches:
            self._decode(batch)
            try:
                self._prepare_again(batch)
            except BaseException:
                self._discard([batch])
                raise
        for batch in self._commit(batches):
            rows += batch.rows
            batch_counts = batch.counts()
            counts.update(batch_counts)
            counts["landed"] += batch.rows - batch_counts["quarantined"]
        return Step(rows=rows, counts=counts)

    def _prepare_again(self, batch: TopicBatch) -> None:
        """Finish the decoded messages before the commit."""

    def _decode(self, batch: TopicBatch) -> None:
        files = _delta(batch).quarantine_files(batch.source.topic_id)
        if not files or not isinstance(batch, _BackfillBatch):
            return
        attempt = uuid4().hex[:16]
        work = _DecodeQuarantined(
            topic=batch.topic,
            work=batch.work(datetime.now(UTC), attempt),
            quarantine=_delta(batch).quarantine.storage,
            attempt=attempt,
            brokers=self._context.brokers,
            access=self._task_access([batch]),
        )
        results = [msgspec.json.decode(text, type=_DecodedFile) for text in self._with_files(work, files).values()]
        batch.reports = [
            Report(
                topic=batch.topic,
                rows=result.rows,
                files=tuple(result.files),
                quarantined=tuple(result.quarantined),
                counts=result.counts,
            )
            for result in results
        ]
        batch.requarantined = files


class _UpsertRequarantine(_Requarantine, UpsertJob):
    """Decodes quarantined messages again for a table with one row per key."""

    def _decode(self, batch: TopicBatch) -> None:
        keyed(batch).route(0.0, self._settings.bucket_bytes)
        super()._decode(batch)

    def _prepare_again(self, batch: TopicBatch) -> None:
        self._merge(batch)


class _DecodedFile(NamedTuple):
    """The result for one file of a quarantine, as it is sent to the driver."""

    rows: int
    files: list[WrittenFile]
    quarantined: list[WrittenFile]
    counts: dict[str, int]


@dataclass(frozen=True, kw_only=True)
class _DecodeQuarantined:
    """The work of a task: decodes the messages of one quarantine file again."""

    topic: str
    work: TopicWork
    quarantine: Storage
    attempt: str
    brokers: str
    access: Access
    """How to reach the schema registry for the schemas that payloads name."""

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        writers = (self.work.writer, self.work.quarantine)
        return [(writer.storage, writer.folder) for writer in writers]

    def __call__(self, file: ActiveFile) -> str:
        """Return a `_DecodedFile` as JSON."""
        reader_options = {BROKERS: self.brokers, "subscribe": self.topic, "columns": ",".join(RECORD_NAMES)}
        landing = Landing(self.topic, self.work, read_options(reader_options, self.access))
        try:
            for batch in self._messages(file, landing):
                landing.begin(None)
                landing.take(batch)
            report = landing.report()
        except BaseException:
            landing.abort()
            raise
        return json.dumps(_DecodedFile(report.rows, list(report.files), list(report.quarantined), dict(report.counts)))

    def _messages(self, file: ActiveFile, landing: Landing) -> Iterator[pa.RecordBatch]:
        """Yield the messages of a file; rows that represent unreadable batches stay in the quarantine."""
        with self.quarantine.files().open_input_file(file.path) as opened:
            for batch in pq.ParquetFile(opened).iter_batches(BATCH_ROWS):
                is_batch = pc.starts_with(batch.column("reason"), UNREADABLE_BATCH)
                landing.keep_quarantined(batch.filter(is_batch))
                messages = batch.filter(pc.invert(is_batch))
                for part in _by_partition(messages):
                    kinds = pa.repeat(pa.scalar(0, pa.int32()), len(part))
                    yield part.drop_columns(["reason", "topic_id"]).append_column("timestamp_type", kinds)

    def discard(self, results: Iterable[str]) -> None:
        for result in results:
            decoded = msgspec.json.decode(result, type=_DecodedFile)
            self.work.writer.discard(decoded.files)
            self.work.quarantine.discard(decoded.quarantined)


def _by_partition(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    for number in pc.unique(batch.column("partition")).to_pylist():
        yield batch.filter(pc.equal(batch.column("partition"), number))


def _as_backfill(batch: TopicBatch) -> _BackfillBatch:
    values = {field.name: getattr(batch, field.name) for field in fields(batch)}
    return _BackfillBatch(**values, mark=_delta(batch).mark(MARK))


def _delta(batch: TopicBatch) -> LakeTable:
    if not isinstance(batch.table, LakeTable) or isinstance(batch.table, ParquetTable):
        raise InvalidPipeline(f"the table of {batch.topic!r} is not a Delta table; this needs format=delta")
    return batch.table
