"""Landing: topics become lake tables, every message exactly once.

The table is the source of truth: its commits carry the next offset of each partition. A batch asks the tables for their
positions, plans ranges from there, runs one Spark job over the ranges of all topics, and commits the files topic by
topic. Whenever it is interrupted, a topic's table says exactly what was done, and a run that comes too late is refused
by the table.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, Final
from uuid import UUID, uuid4

import pyarrow as pa
import pyarrow.compute as pc
from deltalake.exceptions import DeltaError

from millstream.core.errors import InvalidSetting, LostData, MillstreamError, StalePlan, UnknownTopic
from millstream.core.ids import NodeId
from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.core.payload_columns import ColumnType, PayloadColumn, check_landed, parse_columns
from millstream.core.pipeline import APPEND, BY_SCHEMA, LATEST, NO_DECODING, UPSERT, LandSettings, Pipeline
from millstream.pipelines.jobs.error_reason import reason_of
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.jobs.land import duplicates, file_tasks
from millstream.pipelines.jobs.land.abandoned_files import abandoned_files_of
from millstream.pipelines.jobs.land.decoding import documents
from millstream.pipelines.jobs.land.dry_run import (
    SAMPLED,
    SAMPLED_BYTES_MAX,
    SAMPLED_TOPICS_MAX,
    LandedSample,
    SampleRows,
)
from millstream.pipelines.jobs.land.duplicates import IdTasks, RecentIds, find_repeated, keep_bounded, select_in_ranges
from millstream.pipelines.jobs.land.file_tasks import FileTasks, Share, shares_of
from millstream.pipelines.jobs.land.inference import RECORD_NAMES, decide, payload_fields, sample_ranges, shown_columns
from millstream.pipelines.jobs.land.sources import (
    MESSAGE_BYTES,
    PartitionPlan,
    Source,
    Sources,
    plans,
    tasks,
    topic_ranges,
)
from millstream.pipelines.jobs.land.task import REPORT_COLUMNS, Landing, LandTasks, Report, from_rows, read_records
from millstream.pipelines.jobs.land.topic_batch import TopicBatch
from millstream.pipelines.lake.columns import APPEND_DAY, TOPIC_ID, FieldPath, widest
from millstream.pipelines.lake.rewriting import FileWork
from millstream.pipelines.lake.storage import environment_options
from millstream.pipelines.lake.table import LakeTable, open_table
from millstream.pipelines.runtime.fault import MarkedTask, kind_in
from millstream.pipelines.source.access import Access, may_read
from millstream.pipelines.source.options import BROKERS, read_options
from millstream.pipelines.source.ranges import Range, admitted, commit_offsets, stable_offsets
from millstream.protocol.private.message import encode
from millstream.protocol.private.pipeline_messages import LandedTopic, RecordLandedRequest
from millstream.protocol.wire.client import Client

_logger = logging.getLogger(__name__)

_SIMPLE: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def declared_fields(text: str) -> pa.Schema:
    """Parse a schema; raise `InvalidSetting` for what is not one, or one that tables cannot have.

    Integers become long and other numbers double, as in inferred schemas.
    """
    columns = parse_columns(text)
    check_landed(columns)
    return pa.schema([_field(column) for column in columns])


def merge_schema(known: pa.Schema, declared: pa.Schema) -> pa.Schema:
    """Return the given fields with the names and types of the table.

    Where the table has long and double is given the result is double, and structs gain fields; widening the table is
    left to the caller.
    """
    return pa.schema(_merge_fields(list(known), list(declared), keep_others=False))


def _merge_fields(known: list[pa.Field], declared: list[pa.Field], *, keep_others: bool) -> list[pa.Field]:
    """Merge given fields into known ones; `keep_others` keeps fields that only the table has."""
    given_by_name = {field.name.lower(): field for field in declared}
    known_by_name = {field.name.lower(): field for field in known}
    fields = (
        [*known, *(field for field in declared if field.name.lower() not in known_by_name)] if keep_others else declared
    )
    return [
        _merge_field(known_by_name.get(field.name.lower()), given_by_name.get(field.name.lower()) or field)
        for field in fields
    ]


def _merge_field(known: pa.Field | None, declared: pa.Field) -> pa.Field:
    return declared if known is None else known.with_type(_merge_type(known.type, declared.type))


def _merge_type(known: pa.DataType, declared: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(known) and pa.types.is_struct(declared):
        return pa.struct(_merge_fields(list(known), list(declared), keep_others=True))
    if pa.types.is_list(known) and pa.types.is_list(declared):
        return pa.list_(known.value_field.with_type(_merge_type(known.value_type, declared.value_type)))
    return declared if pa.types.is_int64(known) and pa.types.is_float64(declared) else known


def _field(column: PayloadColumn) -> pa.Field:
    return pa.field(column.name, widest(_arrow_type(column.type)))


def _arrow_type(kind: ColumnType) -> pa.DataType:
    if kind.name == "decimal":
        return pa.decimal128(*kind.numbers)
    if kind.name == "struct":
        return pa.struct([_field(part) for part in kind.parts])
    if kind.name == "array":
        return pa.list_(_field(kind.parts[0]))
    if kind.name == "map":
        return pa.map_(pa.string(), _field(kind.parts[1]).type)
    return _SIMPLE[kind.name]


async def report_landed(
    client: Client, pipeline: Pipeline, landed: Mapping[str, Mapping[int, int]], *, lake: str, format: str
) -> None:
    """Report the next offset that is not landed in a lake to every node, by topic id and partition."""
    topics = [LandedTopic(topic_id=UUID(topic_id), offsets=dict(offsets)) for topic_id, offsets in landed.items()]
    if not topics:
        return
    report = RecordLandedRequest(pipeline_id=pipeline.pipeline_id, lake=lake, format=format, topics=topics)
    body = encode(report)
    nodes = (await client.metadata(())).nodes
    # A node that misses the report keeps data longer than necessary, until the next batch.
    await asyncio.gather(
        *(client.private(NodeId(node), RecordLandedRequest.KEY, body) for node in nodes), return_exceptions=True
    )


_DAMAGED: Final = (FileNotFoundError, ValueError)
"""Errors of tasks whose files are missing or are not Parquet."""

REPLANS_MAX: Final = 10

REPLAN_S: Final = 1.0
"""How often a batch is replanned in a row because its tasks did not find what was planned, and the pause between."""

_TABLES_AT_ONCE: Final = 8

DROPPED_MAX: Final = 10_000
"""The most fields of a topic that are reported as having no column."""

_IN_VALUE: Final = "are in `value` alone"
_NOT_IN_TABLE: Final = (
    "are not in the table; declare the columns in `schema`, or the objects that contain these fields in `maps`, and "
    "land the messages again"
)

COLUMNS_SHOWN_MAX: Final = 20
"""The most topics whose columns are reported."""


class LandJob:
    _tidies_always = False
    """Whether files are compacted even while messages are waiting."""

    def __init__(self, pipeline: Pipeline, context: JobContext) -> None:
        settings = LandSettings.from_strings(pipeline.overrides)
        self._pipeline = pipeline
        self._context = context
        self._settings = settings
        self._lake = (settings.lake or context.lake).rstrip("/")
        self._sources = Sources(context.brokers, settings.topic_names, settings.pattern, context.access)
        self._declared_fields = declared_fields(settings.schema) if settings.schema else None
        self._tables: dict[str, LakeTable] = {}
        self._message_bytes: dict[str, float] = {}
        self._recent: dict[str, RecentIds] = {}
        self._compacted_at: dict[str, datetime] = {}
        self._fixed: dict[str, dict[FieldPath, str]] = {}
        self._first_partitions: dict[str, int] = {}
        """The partitions with which batches begin since others ended before their next message, by topic id."""
        self._dropped: dict[str, set[str]] = {}
        """Fields without a column that were reported, by topic."""
        self._replans = 0
        self._leftovers = abandoned_files_of(pipeline.pipeline_id)
        self._beginning: dict[str, str] | None = None
        """The ids of the topics that existed when the pipeline started; only those may start at their end."""
        self._pool = ThreadPoolExecutor(_TABLES_AT_ONCE, thread_name_prefix="landing")

    def step(self) -> Step:
        began = time.monotonic()
        self._leftovers.sweep(self._context.progress)
        sources = self._topics()
        batches = list(self._pool.map(self._batch, sources))
        self._share(batches)
        try:
            self._prepare(batches)
        except Exception as error:
            self._replans += 1
            if kind_in(error) not in (LostData, StalePlan) or self._replans > REPLANS_MAX:
                raise
            # A topic was recreated, or retention deleted messages that the tasks must not skip: the next plan starts at
            # the log's start and counts the loss. Or another run has changed a table.
            _logger.warning("pipeline %s is replanned: %s", self._pipeline.name, reason_of(error))
            return Step(lag=sum(batch.lag for batch in batches) or 1, wait_s=REPLAN_S)
        self._replans = 0
        for batch in batches:
            self._report_dropped(batch)
        landed = self._commit(batches)
        self._commit_group_offsets(landed)
        self._remember(landed)
        lag = sum(batch.lag for batch in batches)
        if not lag or self._tidies_always:
            self._compact_and_vacuum_all(batches)
        counts: Counter[str] = Counter()
        for batch in landed:
            counts.update(batch.counts())
        waits_s = max(0.0, self._settings.every_ms / 1000 - (time.monotonic() - began))
        rows = sum(batch.rows for batch in landed)
        return Step(
            rows=rows,
            lag=lag,
            wait_s=0.0 if lag or len(landed) < len(batches) else waits_s,
            counts=counts,
            facts={
                f"columns of {batch.topic}": shown_columns(fields)
                for batch in batches[:COLUMNS_SHOWN_MAX]
                if len(fields := batch.evolution().fields)
            },
        )

    def _prepare(self, batches: Sequence[TopicBatch]) -> None:
        """Write everything to be committed; a failure leaves no files of any topic."""
        try:
            for batch in batches:
                self._sample(batch)
            self._widen(batches)
            if self._settings.dedupe_ms:
                self._read_ids([batch for batch in batches if batch.topic_ranges()])
            for batch in batches:
                self._leave_out(batch)
            self._run(batches)
        except BaseException:
            # Topics may have finished in an earlier round, and no commit was tried for any of them.
            self._discard(batches)
            raise

    def close(self) -> None:
        self._pool.shutdown()

    def dry_run(self) -> list[LandedSample]:
        """Decode the newest messages of each topic as a batch would, without Spark; nothing is written or committed."""
        return [self._try_topic(source) for source in self._topics()[:SAMPLED_TOPICS_MAX]]

    def _try_topic(self, source: Source) -> LandedSample:
        batch = self._batch(source)
        stored = topic_ranges(source.topic, plans(source, {}, from_latest=False))
        size = self._sources.message_bytes(stored) or MESSAGE_BYTES
        per_partition = max(1, min(SAMPLED, int(SAMPLED_BYTES_MAX / size) // max(1, len(source.end))))
        batch.plans = {
            number: PartitionPlan(None, max(source.first[number], end - per_partition), end)
            for number, end in source.end.items()
        }
        self._sample(batch)
        reader_options = {BROKERS: self._context.brokers, "subscribe": batch.topic, "columns": ",".join(RECORD_NAMES)}
        options = read_options(reader_options, self._task_access([batch]))
        while True:
            rows, refused = SampleRows(), SampleRows()
            landing = Landing(batch.topic, batch.work_into(rows, refused), options)
            room = SAMPLED_BYTES_MAX
            for topic_range in batch.topic_ranges():
                landing.begin(topic_range)
                for records in read_records(topic_range, options, partial(landing.quarantine, topic_range.partition)):
                    landing.take(records)
                    room -= records.nbytes
                if room <= 0:
                    break
            if batch.take([landing.report()]):
                break
            if batch.widening is not None:
                batch.doubles |= batch.new_doubles | set(batch.widening.places)
        known = set() if batch.schema is None else set(batch.schema.names)
        return LandedSample(
            topic=batch.topic,
            table=f"{self._lake}/{batch.topic}",
            exists=batch.schema is not None,
            columns=batch.table_schema(),
            added=[name for name in batch.table_schema().names if name not in known],
            dropped=sorted({name for report in batch.reports for name in report.dropped}),
            sampled=batch.rows,
            rows=rows,
            quarantined=refused,
        )

    # -- planning -------------------------------------------------------------------------------------------------

    def _topics(self) -> list[Source]:
        """Return the current topics; raise `UnknownTopic` if none exists or ever existed."""
        topics = self._sources.now()
        missing = self._sources.missing(topics)
        if self._beginning is None:
            if missing and not topics:
                raise UnknownTopic(
                    f"topic {missing[0]!r} does not exist at {self._context.brokers}; create it with: "
                    f"millstream topic create {missing[0]}"
                )
            self._beginning = {} if self._has_committed() else {source.topic: source.topic_id for source in topics}
        if missing:
            _logger.warning("pipeline %s: topic %s does not exist", self._pipeline.name, ", ".join(missing))
        names = {source.topic for source in topics}
        for name in names:
            if name + QUARANTINE_SUFFIX in names:
                raise InvalidSetting(f"topic {name + QUARANTINE_SUFFIX!r} has the name of the quarantine of {name!r}")
        return topics

    def _has_committed(self) -> bool:
        """Whether an earlier run has landed something: topics created since then start at their first message."""
        link = self._sources.link
        return self._settings.start == LATEST and bool(link.call(stable_offsets(link.client, self._pipeline.group)))

    def _batch(self, source: Source) -> TopicBatch:
        """Return the position of a topic's table and the messages beyond it."""
        table = self._tables.get(source.topic)
        if table is None:
            table = self._open(source.topic)
            self._tables[source.topic] = table
        schema = table.schema()
        if schema is not None and self._settings.mode == APPEND and APPEND_DAY not in schema.names:
            raise InvalidSetting(
                f"the table at {self._lake}/{source.topic} has one row per key (mode=upsert); move it away to land "
                "every message there, or give the pipeline another lake"
            )
        self._check_event_time(source.topic, table)
        self._context.progress()
        offsets = table.next_offsets([(source.topic_id, number) for number in source.end])
        is_recreated = schema is not None and not offsets
        if is_recreated:
            _logger.warning(
                "pipeline %s: topic %s was recreated; the column %s distinguishes its messages from the old ones",
                *(self._pipeline.name, source.topic, TOPIC_ID),
            )
        is_new = schema is None and (self._beginning or {}).get(source.topic) == source.topic_id
        return TopicBatch(
            source=source,
            table=table,
            plans=plans(
                source,
                {number: offset for (_topic_id, number), offset in offsets.items()},
                from_latest=is_new and self._settings.start == LATEST,
            ),
            fields=self._fields(schema),
            schema=schema,
            fixed=self._fixed_of(source.topic, table, schema),
            first_partition=self._first_partitions.pop(source.topic_id, -1),
            refuses_rounding=self._declared_fields is None,
            decodes=self._settings.decode != NO_DECODING,
            by_schema=self._settings.decode == BY_SCHEMA,
            evolves=self._settings.decode != NO_DECODING and self._declared_fields is None,
            is_recreated=is_recreated,
            expectations=self._settings.expectations,
            on_violation=self._settings.on_violation,
            lifts_cloud_events=self._settings.cloud_events,
            event_time=self._settings.event_time,
        )

    def _check_event_time(self, topic: str, table: LakeTable) -> None:
        """Raise `InvalidSetting` if the table exists and is partitioned in another way."""
        stored, declared = table.event_time(), self._settings.event_time
        if stored is None or stored == ("" if declared is None else str(declared)):
            return
        how = stored or "the hour of landing"
        raise InvalidSetting(
            f"the table at {self._lake}/{topic} is partitioned by {how}, not by {declared or 'the hour of landing'}: "
            "a table keeps its partitioning; change `partition.by` back, or move the table with its quarantine away "
            "to land it again, or give the pipeline another lake"
        )

    def _open(self, topic: str) -> LakeTable:
        return open_table(
            f"{self._lake}/{topic}",
            format=self._settings.format,
            options=self._storage_options(),
            event_time=str(self._settings.event_time or ""),
        )

    def _storage_options(self) -> dict[str, str]:
        return {**environment_options(), **self._settings.storage_options()}

    def _fields(self, schema: pa.Schema | None) -> pa.Schema:
        """Return the payload fields to decode, with the table's types where it has them."""
        if self._settings.decode == NO_DECODING:
            return pa.schema([])
        known = payload_fields(schema)
        if self._declared_fields is None:
            names = {field.name.lower() for field in known}
            maps = [name for name in self._settings.map_fields if name.lower() not in names]
            return pa.schema([*known, *(pa.field(name, pa.map_(pa.string(), pa.string())) for name in maps)])
        return merge_schema(known, self._declared_fields)

    def _fixed_of(self, topic: str, table: LakeTable, schema: pa.Schema | None) -> dict[FieldPath, str]:
        """Return the fields whose columns are known to stay as they are."""
        if schema is None or topic not in self._fixed:
            self._fixed[topic] = table.fixed()
        return self._fixed[topic]

    def _share(self, batches: Sequence[TopicBatch]) -> None:
        """Limit the batch; every partition gets its share."""
        starts = {batch.topic: {number: plan.first for number, plan in batch.plans.items()} for batch in batches}
        ends = {batch.topic: {number: plan.end for number, plan in batch.plans.items()} for batch in batches}
        allowed = admitted(starts, ends, self._settings.batch_max)
        for batch in batches:
            batch.admit(allowed.get(batch.topic, {}))

    # -- running --------------------------------------------------------------------------------------------------

    def _run(self, batches: Sequence[TopicBatch]) -> None:
        """Run the tasks, again for topics with new fields."""
        waiting = [batch for batch in batches if batch.topic_ranges()]
        while waiting:
            ranges = {batch.topic: batch.topic_ranges() for batch in waiting}
            reports = self._reports(waiting, datetime.now(UTC))
            waiting = [
                batch
                for batch in waiting
                if not batch.take([report for report in reports if report.topic == batch.topic])
            ]
            for batch in waiting:
                batch.make_room()
                if batch.topic_ranges() != ranges[batch.topic]:
                    self._first_partitions[batch.source.topic_id] = batch.next_partition
                    self._leave_out(batch)
            self._widen(waiting)

    def _sample(self, batch: TopicBatch) -> None:
        """Decide the columns of a table that does not exist yet by the first messages of each partition."""
        if batch.schema is not None or not batch.evolves or self._settings.decode == BY_SCHEMA:
            return
        # The log decides what is in the sample, not the size of the batch.
        waiting = {
            number: replace(plan, end=max(plan.end, batch.source.end[number])) for number, plan in batch.plans.items()
        }
        ranges = sample_ranges(topic_ranges(batch.topic, waiting))
        if not ranges:
            return
        documents = self._sample_documents(batch, ranges)
        fields = decide(documents, known=batch.fields, detects=self._settings.detect_types)
        batch.fields = fields.fields
        batch.fixed.update(fields.fixed)
        batch.table.fix(fields.fixed)
        if fields.messages:
            _logger.info(
                "pipeline %s: %d messages of %s decide its columns: %s",
                *(self._pipeline.name, fields.messages, batch.topic, shown_columns(fields.fields)),
            )

    def _sample_documents(self, batch: TopicBatch, ranges: Iterable[Range]) -> Iterator[Mapping[str, Any]]:
        """Yield the payloads of a sample that can be decoded."""
        reader_options = {BROKERS: self._context.brokers, "subscribe": batch.topic, "columns": ",".join(RECORD_NAMES)}
        options = read_options(reader_options, self._task_access([batch]))
        for offset_range in ranges:
            try:
                for records in read_records(offset_range, options, lambda _unreadable: None):
                    values = records.column("value") if batch.changes is None else batch.changes.open(records).values
                    yield from documents(values.to_pylist())
            except LostData:
                # Retention has deleted the range meanwhile; the tasks count the loss.
                continue

    def _widen(self, batches: Iterable[TopicBatch]) -> None:
        """Widen the columns of tables where values need it."""
        for batch in batches:
            try:
                batch.widen(self._with_files, self._settings.widen_max_bytes)
            except Exception as error:
                if kind_in(error) not in _DAMAGED:
                    raise
                # It would fail in every batch. Land the other topics, and the messages that fit.
                _logger.warning("columns of %s are not widened: %s", batch.topic, reason_of(error))
                batch.keep_narrow("a file of the table is missing, or cannot be read")

    def _with_files(self, work: FileWork[Share], files: Sequence[Share]) -> dict[str, str]:
        shares = shares_of(files, parallelism=self._context.spark.sparkContext.defaultParallelism)
        numbers = self._context.spark.range(0, len(shares), 1, len(shares))
        with self._leftovers.watch(work.attempt, work.output_folders, self._context.progress):
            rows = numbers.mapInArrow(MarkedTask(FileTasks(work, shares)), file_tasks.COLUMNS).collect()
        self._context.progress()
        return {row[0]: row[1] for row in rows}

    def _tasks(self, batches: Sequence[TopicBatch]) -> list[list[Range]]:
        new = {batch.topic: batch.topic_ranges() for batch in batches if batch.topic not in self._message_bytes}
        for topic, size in zip(new, self._pool.map(self._sources.message_bytes, new.values()), strict=True):
            if size is not None:
                self._message_bytes[topic] = size
        sizes = {batch.topic: self._message_bytes.get(batch.topic, MESSAGE_BYTES) for batch in batches}
        ranges = [topic_range for batch in batches for topic_range in batch.topic_ranges()]
        parallelism = self._context.spark.sparkContext.defaultParallelism
        return tasks(ranges, sizes, parallelism=parallelism)

    def _task_access(self, batches: Sequence[TopicBatch]) -> Access:
        topics = may_read(batch.topic for batch in batches)
        return self._context.access.for_tasks(self._context.brokers, topics)

    def _reports(self, batches: Sequence[TopicBatch], landed: datetime) -> list[Report]:
        shared = self._tasks(batches)
        attempt = uuid4().hex[:16]
        works = {batch.topic: batch.work(landed, attempt) for batch in batches}
        numbers = self._context.spark.range(0, len(shared), 1, len(shared))
        landing = MarkedTask(LandTasks(self._context.brokers, shared, works, self._task_access(batches)))
        writers = [writer for work in works.values() for writer in (work.writer, work.quarantine)]
        places = [(writer.storage, writer.folder) for writer in writers]
        with self._leftovers.watch(attempt, places, self._context.progress):
            rows = numbers.mapInArrow(landing, REPORT_COLUMNS).collect()
        return from_rows(tuple(row) for row in rows)

    def _report_dropped(self, batch: TopicBatch) -> None:
        """Report fields without a column once."""
        known = self._dropped.setdefault(batch.topic, set())
        dropped = {name for report in batch.reports for name in report.dropped} - known
        if dropped and len(known) < DROPPED_MAX:
            known |= dropped
            batch.dropped = dropped
            named = ", ".join(sorted(dropped)[:10]) + (", …" if len(dropped) > 10 else "")
            _logger.warning(
                "pipeline %s: %d fields of %s (%s) have no column, since their names cannot be columns or there are "
                "too many, and %s",
                *(
                    self._pipeline.name,
                    len(dropped),
                    batch.topic,
                    named,
                    _IN_VALUE if batch.changes is None else _NOT_IN_TABLE,
                ),
            )

    def _read_ids(self, batches: Sequence[TopicBatch]) -> None:
        """Read the ids of messages; this reads everything a second time."""
        if not batches:
            return
        shared = self._tasks(batches)
        numbers = self._context.spark.range(0, len(shared), 1, len(shared))
        access = self._task_access(batches)
        tasks_of_ids = IdTasks(self._context.brokers, self._settings.dedupe_header, shared, access)
        table = numbers.mapInArrow(MarkedTask(tasks_of_ids), duplicates.COLUMNS).toArrow()
        for batch in batches:
            batch.id_rows = table.filter(pc.equal(table.column("topic"), batch.topic))

    def _leave_out(self, batch: TopicBatch) -> None:
        """Omit repeated messages; if a batch ends earlier than planned, copies may remain for the next one."""
        batch.left_out = {}
        if batch.id_rows is None:
            return
        recent = self._recent.get(batch.topic)
        if recent is None:
            window = timedelta(milliseconds=self._settings.dedupe_ms)
            recent = RecentIds(batch.table, self._settings.dedupe_header, window, self._context.progress)
            self._recent[batch.topic] = recent
        known = recent.known(datetime.now(UTC), {number: plan.start for number, plan in batch.plans.items()})
        batch.left_out, batch.ids = find_repeated(select_in_ranges(batch.id_rows, batch.topic_ranges()), known)
        del known
        keep_bounded(self._recent.values())

    def _remember(self, batches: Sequence[TopicBatch]) -> None:
        now = datetime.now(UTC)
        for batch in batches:
            if batch.ids is not None:
                ends = {number: plan.end for number, plan in batch.plans.items()}
                self._recent[batch.topic].landed(now, batch.ids, ends)
        keep_bounded(self._recent.values())

    # -- afterwards -----------------------------------------------------------------------------------------------

    def _commit(self, batches: Iterable[TopicBatch]) -> list[TopicBatch]:
        """Commit the batches that advance; return those committed by this run or without changes."""
        moving = [batch for batch in batches if batch.moves()]
        try:
            # If a topic was recreated meanwhile, the messages are those of another topic.
            ids = self._sources.ids([batch.topic for batch in moving]) if moving else {}
        except BaseException:
            self._discard(moving)
            raise
        same = [batch for batch in moving if ids.get(batch.topic) == batch.source.topic_id]
        self._discard(batch for batch in moving if ids.get(batch.topic) != batch.source.topic_id)
        done = self._pool.map(self._commit_one, same)
        still = [batch for batch in batches if not batch.moves()]
        return [*still, *(batch for batch, is_done in zip(same, done, strict=True) if is_done)]

    def _discard(self, batches: Iterable[TopicBatch]) -> None:
        """Delete the files of topics for which no commit was tried; failures are left to the vacuum."""
        written = [batch for batch in batches if batch.reports]
        try:
            for _done in self._pool.map(TopicBatch.discard, written):
                self._context.progress()
        except Exception as error:
            _logger.info(
                "pipeline %s: files of a failed batch were not deleted: %s", self._pipeline.name, reason_of(error)
            )

    def _commit_one(self, batch: TopicBatch) -> bool:
        try:
            done = batch.commit()
            self._context.progress()
            return done
        except StalePlan as stale:
            _logger.info("pipeline %s: another run landed %s: %s", self._pipeline.name, batch.topic, stale)
            return False

    def _compact_and_vacuum_all(self, batches: Iterable[TopicBatch]) -> None:
        """Compact the small files of past hours, once an hour when idle."""
        hour = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
        due = [batch for batch in batches if self._compacted_at.get(batch.topic) != hour]
        if self._settings.compact and due:
            list(self._pool.map(lambda batch: self._compact_and_vacuum(batch, hour), due))

    def _compact_and_vacuum(self, batch: TopicBatch, hour: datetime) -> None:
        if self._context.stopping.is_set():
            return
        try:
            batch.table.compact(before=hour, progress=self._context.progress)
            batch.table.vacuum()
            self._context.progress()
        except (MillstreamError, DeltaError, OSError) as error:
            # Nothing depends on the compaction; it is retried in the next hour.
            _logger.warning("pipeline %s: table %s was not compacted: %s", self._pipeline.name, batch.topic, error)
        self._compacted_at[batch.topic] = hour

    def _commit_group_offsets(self, batches: Sequence[TopicBatch]) -> None:
        """Show the progress as the group's offsets; only the tables decide where the next batch starts."""
        offsets = {batch.topic: {number: plan.end for number, plan in batch.plans.items()} for batch in batches}
        if not offsets:
            return
        by_id = {batch.source.topic_id: offsets[batch.topic] for batch in batches}
        link = self._sources.link
        try:
            if self._context.lake_is_shared or self._settings.lake:
                # Only nodes may report what retention may delete.
                reports = self._context.node_link or link
                place = {"lake": self._settings.lake, "format": self._settings.format}
                reports.call(report_landed(reports.client, self._pipeline, by_id, **place))
            link.call(commit_offsets(link.client, self._pipeline.group, offsets, self._context.member()))
        except MillstreamError as error:
            _logger.warning("progress was not committed to group %s: %s", self._pipeline.group, error)


def make_job(pipeline: Pipeline, context: JobContext) -> LandJob:
    if context.window is not None:
        from millstream.pipelines.jobs.land.backfill import make_backfill

        return make_backfill(pipeline, context)
    if LandSettings.from_strings(pipeline.overrides).mode == UPSERT:
        from millstream.pipelines.jobs.land.upsert import UpsertJob

        return UpsertJob(pipeline, context)
    return LandJob(pipeline, context)


JOB: Final = make_job
