"""The tasks of landing: fetch, decode and write files. Payloads never enter the JVM."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from typing import Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import ExpectationFailed, LostData
from millstream.core.pipeline import FAIL
from millstream.pipelines.jobs.land.changes import (
    NO_ORDER,
    TOMBSTONE_OFFSETS,
    ChangeRule,
    Deleted,
    Flags,
    condition_matches,
)
from millstream.pipelines.jobs.land.decoding import DecodedPayloads, Decoder, SchemaDecoder
from millstream.pipelines.jobs.land.dry_run import SampleRows
from millstream.pipelines.jobs.land.event_time import NO_TIME, TOO_MANY, EventFolders, EventTimeRule
from millstream.pipelines.jobs.land.inference import (
    CLOUD_EVENT,
    KEYED_NAMES,
    RECORD_NAMES,
    Evolution,
    NewFields,
    column_of,
)
from millstream.pipelines.lake.columns import QUARANTINE, UNREADABLE_BATCH, FieldPath, completed, is_inexact, values_at
from millstream.pipelines.lake.table_file import WrittenFile, from_json, to_json
from millstream.pipelines.lake.task_writer import RowWriter
from millstream.pipelines.source.access import NO_ACCESS, Access
from millstream.pipelines.source.link import task_link
from millstream.pipelines.source.options import BROKERS, OFFSET_EARLIEST, ReadOptions, read_options
from millstream.pipelines.source.ranges import Range
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.schema_decoder import SchemaRows
from millstream.pipelines.source.shape import default_schema, shape_of
from millstream.protocol.records.decoder import Skip, UnreadableBatch

_logger = logging.getLogger(__name__)

REPORT_COLUMNS: Final = (
    "topic string, rows long, lost long, files string, quarantined string, new_fields binary, widening string, "
    "fractions string, large string, counts string, dropped string"
)
"""The columns of a task's reports, in Spark's notation."""

_SCHEMA: Final = pa.schema(
    [
        pa.field("topic", pa.string()),
        pa.field("rows", pa.int64()),
        pa.field("lost", pa.int64()),
        pa.field("files", pa.string()),
        pa.field("quarantined", pa.string()),
        pa.field("new_fields", pa.binary()),
        pa.field("widening", pa.string()),
        pa.field("fractions", pa.string()),
        pa.field("large", pa.string()),
        pa.field("counts", pa.string()),
        pa.field("dropped", pa.string()),
    ]
)


class WideningNeed(NamedTuple):
    """A message that fits only if long columns become double, the first of its task."""

    partition: int
    offset: int
    places: list[FieldPath]


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of one task about one topic: the files it wrote, or new fields that it found."""

    topic: str
    rows: int = 0
    """Messages read."""
    lost: int = 0
    """Offsets that were deleted before they were read."""
    files: tuple[WrittenFile, ...] = ()
    quarantined: tuple[WrittenFile, ...] = ()
    new_fields: tuple[NewFields, ...] = ()
    """The messages with fields that have no column; the task wrote nothing then, nor with `widening`."""
    widening: WideningNeed | None = None
    """The message that needs wider columns."""
    fractions: frozenset[FieldPath] = frozenset()
    """The long columns with fractions."""
    large: frozenset[FieldPath] = frozenset()
    """The new long columns with numbers that doubles cannot hold."""
    counts: Mapping[str, int] = field(default_factory=dict)
    """Further counts by name."""
    dropped: frozenset[str] = frozenset()
    """Fields that cannot have a column."""


def to_arrow(reports: Iterable[Report]) -> pa.RecordBatch:
    rows = [
        {
            "topic": report.topic,
            "rows": report.rows,
            "lost": report.lost,
            "files": to_json(report.files),
            "quarantined": to_json(report.quarantined),
            "new_fields": _encode_new_fields(report.new_fields),
            "widening": json.dumps(report.widening),
            "fractions": json.dumps(sorted(report.fractions)),
            "large": json.dumps(sorted(report.large)),
            "counts": json.dumps(dict(report.counts)),
            "dropped": json.dumps(sorted(report.dropped)),
        }
        for report in reports
    ]
    return pa.RecordBatch.from_pylist(rows, schema=_SCHEMA)


def from_rows(rows: Iterable[tuple[str, int, int, str, str, bytes, str, str, str, str, str]]) -> list[Report]:
    return [
        Report(
            topic=topic,
            rows=count,
            lost=lost,
            files=tuple(from_json(files)),
            quarantined=tuple(from_json(quarantined)),
            new_fields=_decode_new_fields(new_fields),
            widening=msgspec.json.decode(widening, type=WideningNeed | None),
            fractions=msgspec.json.decode(fractions, type=frozenset[FieldPath]),
            large=msgspec.json.decode(large, type=frozenset[FieldPath]),
            counts=msgspec.json.decode(counts, type=dict[str, int]),
            dropped=msgspec.json.decode(dropped, type=frozenset[str]),
        )
        for topic, count, lost, files, quarantined, new_fields, widening, fractions, large, counts, dropped in rows
    ]


def _encode_new_fields(new_fields: Iterable[NewFields]) -> bytes:
    return msgspec.msgpack.encode(
        [(*new_field[:2], new_field.fields.serialize().to_pybytes()) for new_field in new_fields]
    )


def _decode_new_fields(encoded: bytes) -> tuple[NewFields, ...]:
    rows = msgspec.msgpack.decode(encoded, type=list[tuple[int, int, bytes]])
    return tuple(
        NewFields(partition, offset, pa.ipc.read_schema(pa.py_buffer(fields))) for partition, offset, fields in rows
    )


Records = Callable[[Range], Iterator[pa.RecordBatch]]
"""Reads a range, up to where offsets are missing: then it raises `LostData`."""

LogStart = Callable[[str, int], int]
"""Returns the log start offset of a partition."""


class RangeReader:
    """Reads ranges and counts the offsets that were deleted.

    Only offsets before the log start count. Offsets without messages in between, of aborted transactions and control
    records, do not.
    """

    def __init__(self, records: Records, log_start: LogStart) -> None:
        self._records: Final = records
        self._log_start: Final = log_start
        self.lost = 0

    def batches(self, offset_range: Range) -> Iterator[pa.RecordBatch]:
        """Yield the records of a range; raise `LostData` if offsets are missing that retention has not deleted."""
        rest = offset_range
        while len(rest):
            try:
                yield from self._records(rest)
                return
            except LostData as error:
                ((_topic, _partition, first, _end),) = error.lost
                start = self._log_start(offset_range.topic, offset_range.partition)
                if start <= first:
                    # The log ends before the planned end: it was recreated, or lost its end.
                    raise
                end = min(start, offset_range.end)
                _logger.warning(
                    "offsets %d to %d of %s-%d were deleted before they were landed",
                    first,
                    end - 1,
                    offset_range.topic,
                    offset_range.partition,
                )
                self.lost += end - first
                rest = Range(offset_range.topic, offset_range.partition, end, offset_range.end)


def log_start(options: ReadOptions) -> LogStart:
    """Return a function that asks the leader, over the connection that reads."""

    def ask(topic: str, partition: int) -> int:
        link = task_link(options)
        listed = link.call(link.client.list_offsets(topic, {partition: OFFSET_EARLIEST}))
        return int(listed[partition].offset)

    return ask


_RENAMED: Final = {"timestampType": "timestamp_type"}

_TOPICS_AT_ONCE: Final = 4

_QUARANTINED: Final = ("partition", "offset", "timestamp", "key", "value", "headers")
_UNREADABLE: Final = pa.schema([QUARANTINE.field(name) for name in ("partition", "offset", "timestamp", "reason")])


@dataclass(frozen=True, slots=True, kw_only=True)
class TopicWork:
    """The instructions for landing one topic in one batch."""

    writer: RowWriter
    quarantine: RowWriter
    fields: pa.Schema = field(default_factory=lambda: pa.schema([]))
    """The payload fields that have columns when the batch begins."""
    new_fields: Sequence[NewFields] = ()
    """The messages with fields that get columns."""
    doubles: frozenset[FieldPath] = frozenset()
    """The new columns that are double because of fractions after their first number."""
    first_partition: int = -1
    """The partition with which the batch begins; the others follow by their numbers."""
    new_longs: frozenset[FieldPath] = frozenset()
    """The long columns that the table does not have yet."""
    refuses_rounding: bool = False
    """Whether whole numbers that a double would round do not fit."""
    decodes: bool = False
    by_schema: bool = False
    """Whether payloads are decoded by the schemas that they name."""
    evolves: bool = False
    """Whether to look for fields without a column and for numbers that need a wider one."""
    fixed: Mapping[FieldPath, str] = field(default_factory=dict)
    """The paths whose columns stay as narrow as they are, with the reasons."""
    left_out: Mapping[int, pa.Array] = field(default_factory=dict)
    """The offsets of repeated messages, which are not landed, by partition."""
    changes: ChangeRule | None = None
    """How messages become changes of rows by key; None if each of them is a row."""
    expectations: Sequence[str] = ()
    """Conditions that messages should meet."""
    on_violation: str = "quarantine"
    lifts_cloud_events: bool = False
    """Whether attributes of CloudEvents in headers become columns."""
    event_time: EventTimeRule | None = None
    """The event time by which the table is partitioned; None if that is the hour of landing."""
    skips_lost: bool = True
    """Whether offsets that retention deletes meanwhile are skipped; otherwise the batch is replanned."""


class LandTasks:
    """The function of `mapInArrow` that maps task numbers to reports."""

    def __init__(
        self, brokers: str, tasks: Sequence[Sequence[Range]], works: Mapping[str, TopicWork], access: Access = NO_ACCESS
    ) -> None:
        self._brokers = brokers
        self._access = access
        self._tasks = tasks
        self._works = works

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        # While one topic waits for the broker or the disk, another is processed.
        with ThreadPoolExecutor(_TOPICS_AT_ONCE, thread_name_prefix="landing") as pool:
            for batch in batches:
                for number in batch.column(0).to_pylist():
                    by_topic = groupby(self._tasks[number], key=lambda offset_range: offset_range.topic)
                    parts = [(topic, list(topic_ranges)) for topic, topic_ranges in by_topic]
                    yield to_arrow(self._reports([pool.submit(self._land, *part) for part in parts]))

    def _reports(self, landings: Sequence[Future[Report]]) -> list[Report]:
        """Return the reports of all topics; if one fails, delete the files of the others, which no one will report."""
        wait(landings)
        try:
            return [landing.result() for landing in landings]
        except BaseException:
            for report in (landing.result() for landing in landings if landing.exception() is None):
                work = self._works[report.topic]
                work.writer.discard(report.files)
                work.quarantine.discard(report.quarantined)
            raise

    def _land(self, topic: str, topic_ranges: Iterable[Range]) -> Report:
        work = self._works[topic]
        reader_options = {BROKERS: self._brokers, "subscribe": topic, "columns": ",".join(RECORD_NAMES)}
        options = read_options(reader_options, self._access)
        landing = Landing(topic, work, options)

        def records(offset_range: Range) -> Iterator[pa.RecordBatch]:
            return read_records(offset_range, options, partial(landing.quarantine, offset_range.partition))

        reading = RangeReader(records, log_start(options))
        try:
            for topic_range in topic_ranges:
                landing.begin(topic_range)
                for batch in reading.batches(topic_range) if work.skips_lost else records(topic_range):
                    landing.take(batch)
            return landing.report(reading.lost)
        except BaseException:
            landing.abort()
            raise


Decode = Callable[[pa.Array, pa.RecordBatch], DecodedPayloads]
"""Decodes a column of payloads, given with their messages."""


class Landing:
    """Writes the messages of one topic; once a field has no column, it only collects fields."""

    def __init__(self, topic: str, work: TopicWork, options: ReadOptions | None = None) -> None:
        self._topic = topic
        self._work = work
        self._options = options
        self._begun: Range | None = None
        """The range that was begun, until its first tombstone."""
        self._deleted: Deleted = {}
        self._evolution = Evolution(
            work.fields, work.new_fields, doubles=work.doubles, first_partition=work.first_partition
        )
        self._fields = self._evolution.fields
        """All fields that have or get columns."""
        self._schema_rows: SchemaRows | None = None
        self._decoders: dict[int, tuple[pa.Schema, Decode]] = {}
        self._has_new_fields = False
        self._widening: WideningNeed | None = None
        self._fractions: set[FieldPath] = set()
        self._large: set[FieldPath] = set()
        self._rows = 0
        self._files: list[WrittenFile] = []
        self._counts: Counter[str] = Counter()
        self._dropped: set[str] = set()
        self._folders = None if work.event_time is None else EventFolders(work.event_time.event_time.unit)

    def begin(self, offset_range: Range | None) -> None:
        """Prepare for the messages of a range; None if they are some messages of a partition."""
        self._begun = offset_range
        self._deleted = {}

    def take(self, batch: pa.RecordBatch) -> None:
        """Write the next messages of a range."""
        self._rows += batch.num_rows
        batch = self._without_repeated(batch)
        if len(batch):
            # A message before the first one with a field is landed without it.
            for fields, part in list(self._evolution.parts(batch)):
                self._take(part, fields)

    def _take(self, batch: pa.RecordBatch, fields: pa.Schema) -> None:
        """Write messages that are decoded into these fields."""
        rule = self._work.changes
        opened = None if rule is None else rule.open(batch)
        event_columns = cloud_event_columns(batch) if self._work.lifts_cloud_events else {}
        kept = batch
        if rule is not None:
            kept = batch.select(KEYED_NAMES if self._work.decodes else (*KEYED_NAMES, "value", "headers"))
        columns, names = [*kept.columns, *event_columns.values()], [*kept.schema.names, *event_columns]
        reasons = pa.nulls(len(batch), pa.string())
        if self._work.decodes:
            values = batch.column("value") if opened is None else opened.values
            decoded = self._decoder(fields)(values, batch)
            self._record(decoded, batch)
            if self._must_repeat:
                return
            columns += completed(decoded.columns, self._fields)
            names += map(column_of, self._fields.names)
            reasons = self._expect(batch, values, decoded.reasons)
        rows = pa.RecordBatch.from_arrays(columns, names=names)
        if rule is not None and opened is not None:
            if rule.ignores_tombstones and opened.empty.any():
                self._look_back(batch, int(np.flatnonzero(opened.empty)[0]))
            changes, reasons, fits = rule.apply(batch, rows, opened, reasons, self._deleted)
            self._work.writer.write(changes.filter(pa.array(fits)))
            self._quarantine(batch, reasons)
            return
        if self._work.event_time is not None:
            rows, reasons = self._work.event_time.apply(rows, reasons)
        if self._folders is not None:
            reasons = self._folders.limit(rows, reasons)
        if reasons.null_count == len(rows):
            self._work.writer.write(rows)
            return
        fits = pc.is_null(reasons)
        self._work.writer.write(rows.filter(fits))
        self._quarantine(batch, reasons)

    def _decoder(self, fields: pa.Schema) -> Decode:
        # Fields change rarely; comparing large schemas for every batch would take longer than looking them up.
        have = self._decoders.get(id(fields))
        if have is None:
            have = self._decoders[id(fields)] = fields, self._new_decoder(fields)
        return have[1]

    def _new_decoder(self, fields: pa.Schema) -> Decode:
        work = self._work
        if work.by_schema and self._options is not None:
            self._schema_rows = self._schema_rows or SchemaRows(task_link(self._options), self._topic)
            by_schema = SchemaDecoder(
                fields,
                self._schema_rows,
                evolves=work.evolves,
                fixed=work.fixed,
                refuses_rounding=work.refuses_rounding,
            )
            return lambda values, batch: by_schema.decode(values, batch.column("headers"))
        by_fields = Decoder(fields, evolves=work.evolves, fixed=work.fixed, refuses_rounding=work.refuses_rounding)
        return lambda values, _batch: by_fields.decode(values)

    @property
    def _must_repeat(self) -> bool:
        return self._has_new_fields or self._widening is not None

    def _record(self, decoded: DecodedPayloads, batch: pa.RecordBatch) -> None:
        """Collect new fields, the first message that needs wider columns, and new columns that cannot be wider."""
        if len(self._dropped) < _DROPPED_MAX:
            self._dropped.update(decoded.dropped)
        partition, offsets = batch.column("partition")[0].as_py(), batch.column("offset")
        if decoded.new_fields:
            self._has_new_fields = True
            self._evolution.add(
                NewFields(partition, offsets[row].as_py(), fields) for row, fields in decoded.new_fields
            )
        if decoded.widening is not None:
            row, places, all_places = decoded.widening
            self._widening = self._widening or WideningNeed(partition, offsets[row].as_py(), sorted(places))
            self._fractions |= all_places
        for place in self._work.new_longs - self._large:
            numbers = values_at(decoded.columns, place)
            if numbers is not None and is_inexact(numbers):
                self._large.add(place)

    def _look_back(self, batch: pa.RecordBatch, row: int) -> None:
        """Find the deletes before a batch if the first tombstone of a range may belong to one before the range."""
        begun, self._begun = self._begun, None
        offsets = batch.column("offset")
        start = offsets[row].as_py() - TOMBSTONE_OFFSETS
        if begun is None or self._options is None or not begun.start or start >= begun.start:
            return
        start = max(start, log_start(self._options)(begun.topic, begun.partition))
        work = replace(self._work, writer=SampleRows(), quarantine=SampleRows(), evolves=False)
        judged = Landing(self._topic, replace(work, expectations=()) if work.on_violation == FAIL else work)
        if start < (end := offsets[0].as_py()):
            before = Range(begun.topic, begun.partition, start, end)
            with suppress(LostData):
                for records in read_records(before, self._options, lambda _unreadable: None):
                    judged.take(records)
                self._deleted = judged._deleted

    def _expect(self, batch: pa.RecordBatch, values: pa.Array, reasons: pa.Array) -> pa.Array:
        """Check the expectations on messages; return the reasons including those of violations."""
        if not self._work.expectations:
            return reasons
        at = batch.schema.get_field_index("value")
        messages = batch.set_column(at, "value", values)
        for expected in self._work.expectations:
            violated = condition_matches(f"NOT ({expected})", messages, self._topic)
            count = int(np.count_nonzero(violated))
            if not count:
                continue
            if self._work.on_violation == FAIL:
                offset = batch.column("offset")[int(np.flatnonzero(violated)[0])].as_py()
                partition = batch.column("partition")[0].as_py()
                raise ExpectationFailed(self._topic, partition, offset, expected)
            self._counts["violations"] += count
            if self._work.on_violation == "quarantine":
                reasons = _first_of(reasons, violated, f"{VIOLATES}{expected}")
        return reasons

    def _quarantine(self, batch: pa.RecordBatch, reasons: pa.Array) -> None:
        """Put messages that have a reason into the quarantine, and count them by its kind."""
        refused = batch.select(_QUARANTINED).append_column("reason", reasons).filter(pc.is_valid(reasons))
        if len(refused):
            self._counts.update(f"quarantined.{reason_kind(text)}" for text in refused.column("reason").to_pylist())
            self._work.quarantine.write(refused)

    def quarantine(self, partition: int, unreadable: UnreadableBatch) -> None:
        """Put a row for a batch that cannot be read into the quarantine, so that its offsets are accounted for."""
        left_out = self._work.left_out.get(partition)
        if left_out is not None and unreadable.start in left_out.to_pylist():
            return
        reason = f"{UNREADABLE_BATCH}offsets {unreadable.start} to {unreadable.end - 1}: {unreadable.reason}"
        _logger.warning("%s-%d: %s", self._topic, partition, reason)
        row = {
            "partition": partition,
            "offset": unreadable.start,
            "timestamp": unreadable.timestamp_ms * 1000 if unreadable.timestamp_ms >= 0 else None,
            "reason": reason,
        }
        self._counts[f"quarantined.{reason_kind(reason)}"] += 1
        self._work.quarantine.write(pa.RecordBatch.from_pylist([row], schema=_UNREADABLE))

    def keep_quarantined(self, rows: pa.RecordBatch) -> None:
        """Keep rows of a quarantine that is decoded again unchanged."""
        if len(rows):
            self._rows += len(rows)
            self._work.quarantine.write(rows)

    def _without_repeated(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        left_out = self._work.left_out.get(batch.column("partition")[0].as_py())
        if left_out is None:
            return batch
        return batch.filter(pc.invert(pc.is_in(batch.column("offset"), left_out)))

    def report(self, lost: int = 0) -> Report:
        large = frozenset(self._large)
        if self._must_repeat:
            self.abort()
            new_fields = tuple(message for message in self._evolution.messages if message not in self._work.new_fields)
            return Report(
                topic=self._topic,
                rows=self._rows,
                lost=lost,
                new_fields=new_fields,
                widening=self._widening,
                fractions=frozenset(self._fractions),
                large=large,
            )
        self._files.extend(self._work.writer.close())
        quarantined = tuple(self._work.quarantine.close())
        return Report(
            topic=self._topic,
            rows=self._rows,
            lost=lost,
            files=tuple(self._files),
            quarantined=quarantined,
            large=large,
            counts=self._counts,
            dropped=frozenset(self._dropped),
        )

    def abort(self) -> None:
        self._work.writer.abort()
        self._work.quarantine.abort()
        self._work.writer.discard(self._files)


_DROPPED_MAX: Final = 10_000

VIOLATES: Final = "the message violates the expectation "
"""How the reason of a violated expectation begins."""

_KINDS: Final = (
    (UNREADABLE_BATCH, "unreadable"),
    (VIOLATES, "violation"),
    ("the payload is not a change event", "not-debezium"),
    ("the payload ", "not-json"),
    ("the key ", "no-key"),
    ("the message has no key", "no-key"),
)


def reason_kind(reason: str) -> str:
    """Return a short name for the kind of a reason, by which quarantined messages are counted."""
    if reason.endswith(NO_ORDER):
        return "no-order"
    if reason.endswith(NO_TIME):
        return "no-time"
    if reason.endswith(TOO_MANY):
        return "too-many-times"
    return next((kind for start, kind in _KINDS if reason.startswith(start)), "type")


def _first_of(reasons: pa.Array, is_wrong: Flags, text: str) -> pa.Array:
    """Add a reason to rows that have none yet."""
    wrong = pc.and_(pa.array(is_wrong), pc.is_null(reasons))
    return pc.if_else(wrong, pa.scalar(text, pa.string()), reasons)


def cloud_event_columns(batch: pa.RecordBatch) -> dict[str, pa.Array]:
    """Return the attributes of CloudEvents in headers, as text; the last header of a name counts."""
    columns: dict[str, list[str | None]] = {name: [None] * len(batch) for name in CLOUD_EVENT}
    for row, headers in enumerate(batch.column("headers").to_pylist()):
        for header in headers or ():
            column = columns.get(header["key"].lower().replace("-", "_"))
            if column is not None and header["value"] is not None:
                column[row] = header["value"].decode("utf-8", "replace")
    return {name: pa.array(column, pa.string()) for name, column in columns.items()}


def read_records(offset_range: Range, options: ReadOptions, skip: Skip) -> Iterator[pa.RecordBatch]:
    """Yield the records of a range, under the column names of tables."""
    shape = shape_of(default_schema(options), options)
    for batch in read_range(offset_range, options, shape, skip=skip):
        yield batch.rename_columns([_RENAMED.get(name, name) for name in batch.schema.names])
