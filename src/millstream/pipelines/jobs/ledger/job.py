"""Lands the events of deliveries in the ledger's table, and audits them from time to time.

The events are the deltas that the broker writes to `__subscriptions` for itself. As in landing, the table
is the source of truth for its progress, so every event is in it once, even if a run fails.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final
from uuid import uuid4

import pyarrow as pa

from millstream.core.errors import MillstreamError, StalePlan
from millstream.core.pipeline import LedgerSettings, Pipeline
from millstream.core.topic import SUBSCRIPTIONS
from millstream.pipelines.jobs.job import JobContext, Step
from millstream.pipelines.jobs.land.job import report_landed
from millstream.pipelines.jobs.land.sources import PartitionPlan, Source, Sources, plans, tasks, topic_ranges
from millstream.pipelines.jobs.land.task import RangeReader, log_start
from millstream.pipelines.jobs.ledger.audit import (
    HARMLESS,
    AuditReport,
    LedgerLocation,
    SparkTasks,
    TaskRunner,
    audit,
    mark,
)
from millstream.pipelines.jobs.ledger.events import decode_events, unreadable_event
from millstream.pipelines.jobs.ledger.table import AUDITED, FAULTS, DamagedLedger, LedgerTable, ledger_storage
from millstream.pipelines.lake.storage import environment_options
from millstream.pipelines.lake.table_file import WrittenFile, from_json, to_json
from millstream.pipelines.lake.task_writer import RowWriter
from millstream.pipelines.source.access import Access, may_read
from millstream.pipelines.source.options import BROKERS, read_options
from millstream.pipelines.source.ranges import Range, admitted, commit_offsets
from millstream.pipelines.source.rows import read_range
from millstream.pipelines.source.shape import default_schema, shape_of

_logger = logging.getLogger(__name__)

FRAME_BYTES: Final = 500.0
"""The assumed size of a record of `__subscriptions`."""
SORTED_ROWS: Final = 200_000
"""How many events a task sorts at a time: row groups hold one partition each."""
FINDINGS_LOGGED: Final = 100
"""How many findings of an audit are logged."""
REPORT_COLUMNS: Final = "rows long, lost long, files string"
_REPORT: Final = pa.schema([pa.field("rows", pa.int64()), pa.field("lost", pa.int64()), pa.field("files", pa.string())])
_ORDER: Final = [(name, "ascending") for name in ("partition", "topic_id", "subscription_id", "sequence", "row")]


class LedgerTasks:
    """The function of `mapInArrow` that maps task numbers to the files they wrote."""

    def __init__(self, brokers: str, shares: Sequence[Sequence[Range]], writer: RowWriter, access: Access) -> None:
        self._brokers = brokers
        self._shares = shares
        self._writer = writer
        self._access = access

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                rows, lost, files = self._land(self._shares[number])
                report = {"rows": rows, "lost": lost, "files": to_json(files)}
                yield pa.RecordBatch.from_pylist([report], schema=_REPORT)

    def _land(self, ranges: Sequence[Range]) -> tuple[int, int, list[WrittenFile]]:
        options = read_options(
            {BROKERS: self._brokers, "subscribe": SUBSCRIPTIONS, "columns": "key,value,offset,timestamp"}, self._access
        )
        shape = shape_of(default_schema(options), options)
        rows = waiting_rows = 0
        waiting: list[pa.RecordBatch] = []

        def read(offset_range: Range) -> Iterator[pa.RecordBatch]:
            return read_range(
                offset_range,
                options,
                shape,
                skip=lambda lost: waiting.append(unreadable_event(lost, offset_range.partition)),
            )

        reading = RangeReader(read, log_start(options))
        try:
            for offset_range in ranges:
                for records in reading.batches(offset_range):
                    events = decode_events(records, offset_range.partition)
                    rows += records.num_rows
                    waiting_rows += events.num_rows
                    waiting.append(events)
                    if waiting_rows >= SORTED_ROWS:
                        self._write(waiting)
                        waiting, waiting_rows = [], 0
            self._write(waiting)
            return rows, reading.lost, self._writer.close()
        except BaseException:
            self._writer.abort()
            raise

    def _write(self, waiting: Sequence[pa.RecordBatch]) -> None:
        if not any(batch.num_rows for batch in waiting):
            return
        for batch in pa.Table.from_batches(waiting).sort_by(_ORDER).combine_chunks().to_batches():
            self._writer.write(batch)


class LedgerJob:
    def __init__(self, pipeline: Pipeline, context: JobContext, runner: TaskRunner | None = None) -> None:
        """Run tasks with the given runner; by default with the context's Spark."""
        settings = pipeline.settings
        if not isinstance(settings, LedgerSettings):
            raise TypeError("a ledger job takes a ledger pipeline")
        self._pipeline = pipeline
        self._context = context
        self._runner = SparkTasks(context.spark) if runner is None else runner
        self._settings = settings
        self._sources = Sources(context.brokers, [SUBSCRIPTIONS], "", context.access)
        self._lake = settings.lake or context.lake
        self._options = {**environment_options(), **settings.storage_options()}
        self._table = LedgerTable(ledger_storage(self._lake, self._options))

    def step(self) -> Step:
        """Land the events since the last step, and audit if an audit is due."""
        started = time.monotonic()
        sources = self._sources.now()
        if not sources:
            # The topic is created with the first subscription that is used.
            return Step(wait_s=self._settings.every_ms / 1000)
        (source,) = sources
        try:
            return self._step(source, started)
        except DamagedLedger as damaged:
            # Nothing can be landed until someone repairs or deletes the table; the broker keeps the events meanwhile.
            _logger.error("pipeline %s: nothing is landed: %s", self._pipeline.name, damaged)
            lag = sum(plan.end - plan.first for plan in plans(source, {}, from_latest=False).values())
            return Step(lag=lag, wait_s=self._settings.every_ms / 1000, levels={FAULTS: len(damaged.damage)})

    def _step(self, source: Source, began: float) -> Step:
        planned = self._plan(source)
        rows, counts = self._land(source, planned)
        self._report(source, planned)
        lag = sum(max(0, source.end[number] - plan.end) for number, plan in planned.items())
        if not lag and self._audit_if_due():
            counts["audits"] = 1
        waits_s = max(0.0, self._settings.every_ms / 1000 - (time.monotonic() - began))
        return Step(rows=rows, lag=lag, wait_s=0.0 if lag else waits_s, counts=counts, levels=self._table.last_audit())

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _plan(self, source: Source) -> dict[int, PartitionPlan]:
        landed = self._table.next_offsets([(source.topic_id, number) for number in source.end])
        planned = plans(source, {number: offset for (_id, number), offset in landed.items()}, from_latest=False)
        starts = {SUBSCRIPTIONS: {number: plan.first for number, plan in planned.items()}}
        ends = {SUBSCRIPTIONS: {number: plan.end for number, plan in planned.items()}}
        allowed = admitted(starts, ends, self._settings.batch_max)[SUBSCRIPTIONS]
        return {number: PartitionPlan(plan.start, plan.first, allowed[number]) for number, plan in planned.items()}

    def _land(self, source: Source, planned: Mapping[int, PartitionPlan]) -> tuple[int, dict[str, int]]:
        ranges = topic_ranges(SUBSCRIPTIONS, planned)
        lost = sum(plan.lost for plan in planned.values())
        if not ranges and not lost:
            return 0, {}
        rows, lost_meanwhile, files = self._run(source, ranges)
        offsets = {
            (source.topic_id, number): (plan.first if plan.start is None else plan.start, plan.end)
            for number, plan in planned.items()
        }
        try:
            if not self._table.commit(files, offsets):
                self._table.discard(files)
        except StalePlan as stale:
            _logger.info("pipeline %s: another run has landed the events: %s", self._pipeline.name, stale)
            self._table.discard(files)
            return 0, {}
        lost += lost_meanwhile
        if lost:
            _logger.error("pipeline %s: %d records were deleted before they had landed", self._pipeline.name, lost)
        counts = {"files": len(files), "events": sum(file.rows for file in files), "lost": lost}
        return rows, {name: number for name, number in counts.items() if number}

    def _run(self, source: Source, ranges: Sequence[Range]) -> tuple[int, int, list[WrittenFile]]:
        if not ranges:
            return 0, 0, []
        shares = tasks(ranges, {SUBSCRIPTIONS: FRAME_BYTES}, parallelism=self._runner.parallelism)
        access = self._context.access.for_tasks(self._context.brokers, may_read([SUBSCRIPTIONS]))
        writer = self._table.writer(source.topic_id, uuid4().hex[:16])
        work = LedgerTasks(self._context.brokers, shares, writer, access)
        reports = self._runner.run(work, len(shares), REPORT_COLUMNS)
        self._context.progress()
        files = [file for report in reports for file in from_json(report["files"])]
        return sum(report["rows"] for report in reports), sum(report["lost"] for report in reports), files

    def _report(self, source: Source, planned: Mapping[int, PartitionPlan]) -> None:
        """Allow nodes to delete landed events, and report the progress as the group's offsets."""
        ends = {number: plan.end for number, plan in planned.items()}
        link = self._sources.link
        try:
            if self._context.lake_is_shared or self._settings.lake:
                reports = self._context.node_link or link
                place = {"lake": self._settings.lake, "format": self._settings.format}
                landed = {source.topic_id: ends}
                reports.call(report_landed(reports.client, self._pipeline, landed, **place))
            offsets = {SUBSCRIPTIONS: ends}
            link.call(commit_offsets(link.client, self._pipeline.group, offsets, self._context.member()))
        except MillstreamError as error:
            _logger.warning("progress was not committed to group %s: %s", self._pipeline.group, error)

    # -- the audit ----------------------------------------------------------------------------------------------

    def catch_up(self) -> None:
        """Land all events so far, without the pipeline's group, which another run may hold."""
        while sources := self._sources.now():
            (source,) = sources
            planned = self._plan(source)
            self._land(source, planned)
            if all(plan.end >= source.end[number] for number, plan in planned.items()):
                return

    def size_bytes(self) -> int:
        """Return about how many bytes an audit reads: the table, and events not landed yet; 0 if it cannot be read."""
        try:
            return self._size_bytes()
        except DamagedLedger:
            return 0

    def _size_bytes(self) -> int:
        waiting = sum(plan.end - plan.first for source in self._sources.now() for plan in self._plan(source).values())
        return self._table.size_bytes() + int(waiting * FRAME_BYTES)

    def audit(self, names: Sequence[str] | None = None, since_ms: int | None = None) -> AuditReport:
        """Account for every message up to now, as far as the table can be read."""
        started = time.monotonic()
        try:
            report = self._audit(names, since_ms)
        except DamagedLedger as damaged:
            report = AuditReport(damage=damaged.damage, is_counted=False)
        report.seconds = time.monotonic() - started
        return report

    def _audit(self, names: Sequence[str] | None, since_ms: int | None) -> AuditReport:
        context = self._context
        place = LedgerLocation(brokers=context.brokers, access=context.access, storage=self._table.storage)
        marked = mark(place, names)
        self.catch_up()
        return audit(self._runner, place, marked=marked, names=names, since_ms=since_ms)

    def _audit_if_due(self) -> bool:
        """Audit if one is due; the result is stored in the table, for later drivers."""
        every_s, now_s = self._settings.audit_every_ms // 1000, int(time.time())
        if not self._settings.audit_every_ms or now_s < self._table.last_audit().get(AUDITED, 0) + every_s:
            return False
        report = self.audit()
        self._table.record_audit({AUDITED: now_s, **report.levels()})
        for finding in [finding for finding in report.findings if finding["kind"] not in HARMLESS][:FINDINGS_LOGGED]:
            _logger.error("pipeline %s: the audit found: %s", self._pipeline.name, finding)
        for damaged in report.damage[:FINDINGS_LOGGED]:
            _logger.error("pipeline %s: the ledger was changed: %s", self._pipeline.name, damaged)
        return True


JOB: Final = LedgerJob
