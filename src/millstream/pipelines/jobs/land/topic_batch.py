"""One topic in one landing batch: its table's position, its ranges and columns, and the outcome."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final

import pyarrow as pa

from millstream.core.payload_columns import EventTime
from millstream.pipelines.jobs.land.changes import ChangeRule
from millstream.pipelines.jobs.land.event_time import EventTimeRule
from millstream.pipelines.jobs.land.inference import (
    CLOUD_EVENT,
    Evolution,
    NewFields,
    field_of,
    payload_fields,
    table_schema,
)
from millstream.pipelines.jobs.land.sources import PartitionPlan, Source, topic_ranges
from millstream.pipelines.jobs.land.task import Report, TopicWork, WideningNeed
from millstream.pipelines.lake.columns import EVENT_COLUMNS, RAW, FieldPath, paths_of_type, retyped, widened_paths
from millstream.pipelines.lake.keyed_table import KEEPS_TYPES
from millstream.pipelines.lake.rewriting import Run
from millstream.pipelines.lake.table import LakeTable
from millstream.pipelines.lake.task_writer import RowWriter
from millstream.pipelines.source.ranges import Range

ROUNDS_MAX: Final = 4
"""How often a batch is repeated because of new fields, before it ends where the next ones begin."""


@dataclass(slots=True, kw_only=True)
class TopicBatch:
    source: Source
    table: LakeTable
    plans: dict[int, PartitionPlan]
    fields: pa.Schema
    """The payload fields that have columns when the batch begins."""
    new_fields: list[NewFields] = field(default_factory=list)
    """The messages with fields that get columns by the commit."""
    doubles: frozenset[FieldPath] = frozenset()
    """The long fields of such messages that are double because of later ones."""
    first_partition: int = -1
    """The partition with which the batch begins; the others follow by their numbers."""
    next_partition: int = -1
    """The partition with which the next batch begins, if this one ends before a message that needs wider columns."""
    refuses_rounding: bool = False
    """Whether whole numbers that a double would round do not fit."""
    rounds: int = 0
    """How often new fields were found."""
    schema: pa.Schema | None = None
    """The columns of the table; None if it does not exist yet."""
    fixed: dict[FieldPath, str] = field(default_factory=dict)
    """Long fields whose columns stay long, with the reasons."""
    record: pa.Schema = RAW
    """The columns of every record in the table."""
    changes: ChangeRule | None = None
    """How messages become changes of rows by key; None if each of them is a row."""
    merged: Counter[str] = field(default_factory=Counter)
    """The counts of the merge, by name."""
    expectations: Sequence[str] = ()
    on_violation: str = "quarantine"
    lifts_cloud_events: bool = False
    event_time: EventTime | None = None
    """The event time by which the table is partitioned; None if that is the hour of landing."""
    dropped: set[str] = field(default_factory=set)
    """Fields that were found in this batch for the first time, and cannot have a column."""
    decodes: bool = False
    by_schema: bool = False
    evolves: bool = False
    left_out: Mapping[int, pa.Array] = field(default_factory=dict)
    """The offsets of repeated messages, by partition."""
    is_recreated: bool = False
    """Whether the table holds only messages of an earlier topic of the same name."""
    ids: pa.Array | None = None
    """The ids of messages that are landed; None without deduplication."""
    id_rows: pa.Table | None = None
    """The messages with ids, those that are not landed too; None without deduplication."""
    widening: WideningNeed | None = None
    """The first message that needs wider columns, until `make_room`."""
    new_doubles: frozenset[FieldPath] = frozenset()
    """The new long columns with fractions, and without numbers that doubles cannot hold; with `widening`."""
    widened: int = 0
    """The number of columns that became double."""
    reports: list[Report] = field(default_factory=list)

    @property
    def topic(self) -> str:
        return self.source.topic

    @property
    def rows(self) -> int:
        """Return how many messages were read."""
        return sum(report.rows for report in self.reports)

    @property
    def lag(self) -> int:
        """Return how many offsets are left for the next batch."""
        # A new leader may report an end before the table's position.
        return sum(max(0, self.source.end[number] - plan.end) for number, plan in self.plans.items())

    def admit(self, ends: Mapping[int, int]) -> None:
        self.plans = {
            number: PartitionPlan(plan.start, plan.first, ends[number]) for number, plan in self.plans.items()
        }

    def topic_ranges(self) -> list[Range]:
        ranges = topic_ranges(self.topic, self.plans)
        return sorted(
            ranges, key=lambda offset_range: (offset_range.partition != self.first_partition, offset_range.partition)
        )

    def evolution(self) -> Evolution:
        """Return the payload fields over the messages of the batch."""
        return Evolution(self.fields, self.new_fields, doubles=self.doubles, first_partition=self.first_partition)

    def table_schema(self) -> pa.Schema:
        """Return the columns of the table, with those that the commit adds."""
        event_fields = [pa.field(name, pa.string()) for name in CLOUD_EVENT] if self.lifts_cloud_events else []
        event = () if self.event_time is None else EVENT_COLUMNS[self.event_time.unit]
        schema = table_schema(self.evolution().fields, pa.schema([*self.record, *event, *event_fields]))
        if self.changes is None or self.schema is None:
            return schema
        # A merge rewrites rows that it does not change, with the columns that the settings no longer name.
        return pa.schema([*schema, *(field for field in self.schema if field.name not in schema.names)])

    def work(self, landed: datetime, attempt: str) -> TopicWork:
        """Return the parameters of an attempt's tasks."""
        topic_id = self.source.topic_id
        return self.work_into(
            self.table.writer(self.table_schema(), topic_id, landed=landed, attempt=attempt),
            self.table.quarantine_writer(topic_id, landed=landed, attempt=attempt),
        )

    def work_into(self, writer: RowWriter, quarantine: RowWriter) -> TopicWork:
        """Return the parameters of tasks that write with these writers."""
        return TopicWork(
            writer=writer,
            quarantine=quarantine,
            fields=self.fields,
            new_fields=self.new_fields,
            doubles=self.doubles,
            first_partition=self.first_partition,
            new_longs=self._new_longs(),
            refuses_rounding=self.refuses_rounding,
            decodes=self.decodes,
            by_schema=self.by_schema,
            evolves=self.evolves,
            fixed=self.fixed if self.changes is None else self._kept_long(),
            left_out=self.left_out,
            changes=self.changes,
            expectations=self.expectations,
            on_violation=self.on_violation,
            lifts_cloud_events=self.lifts_cloud_events,
            event_time=None if self.event_time is None else EventTimeRule(self.event_time),
            # A deleted message may be the one whose duplicates were skipped.
            skips_lost=self.ids is None,
        )

    def _kept_long(self) -> dict[FieldPath, str]:
        return dict.fromkeys(paths_of_type(self.evolution().fields, pa.int64()), KEEPS_TYPES)

    def _new_longs(self) -> frozenset[FieldPath]:
        known = set(paths_of_type(payload_fields(self.schema), pa.int64()))
        return frozenset(paths_of_type(self.evolution().fields, pa.int64())) - known

    def make_room(self) -> None:
        """Make columns double for the first message that needs it, or end the batch before that message.

        Which columns of the table stay long depends on the numbers before the message. They are in the table when it is
        the first one of the next batch.
        """
        need, self.widening = self.widening, None
        if need is None:
            return
        if self.new_doubles:
            # In any order of their numbers, these columns are double in the end.
            self.doubles |= self.new_doubles
        elif self._is_first(need.partition, need.offset):
            self.fields = retyped(self.fields, need.places, pa.float64())
        else:
            self._end_before(need.partition, need.offset)

    def _is_first(self, partition: int, offset: int) -> bool:
        first = self.topic_ranges()[0]
        return (first.partition, first.start) == (partition, offset)

    def _end_before(self, partition: int, offset: int) -> None:
        """End the batch before a message, with which the next one begins."""
        evolution = self.evolution()
        self.new_fields = evolution.before(partition, offset)
        # The fractions may be beyond the end.
        self.doubles = frozenset()
        self.next_partition = partition
        last = evolution.position(partition, 0)
        self.admit(
            {
                number: offset if number == partition else plan.end if is_before else plan.first
                for number, plan in self.plans.items()
                for is_before in [evolution.position(number, 0) < last]
            }
        )

    def widen(self, run: Run, bytes_max: int) -> None:
        """Widen the table's columns where values need it, or find out why that fails."""
        places = [] if self.schema is None else list(widened_paths(self.schema, self.table_schema()))
        if not places:
            return
        refused = {
            (field_of(place[0]), *place[1:]): reason for place, reason in self._widened(places, run, bytes_max).items()
        }
        self.fixed.update(refused)
        self.fields = retyped(self.fields, refused, pa.int64())
        self.schema = self.table.schema()
        self.widened += len(places) - len(refused)

    def keep_narrow(self, reason: str) -> None:
        """Keep the type long for columns that could not be widened."""
        places = [] if self.schema is None else widened_paths(self.schema, self.table_schema())
        refused = {(field_of(place[0]), *place[1:]): reason for place in places}
        self.fixed.update(refused)
        self.fields = retyped(self.fields, refused, pa.int64())

    def _widened(self, places: list[FieldPath], run: Run, bytes_max: int) -> dict[FieldPath, str]:
        known = {place: self.fixed.get((field_of(place[0]), *place[1:])) for place in places}
        refused = {place: reason for place, reason in known.items() if reason is not None}
        allowed = [place for place in places if place not in refused]
        return {**refused, **(self.table.widen(allowed, run=run, bytes_max=bytes_max) if allowed else {})}

    def take(self, reports: Sequence[Report]) -> bool:
        """Apply the tasks' reports; False if everything has to be repeated, after `make_room`."""
        new_fields = [new_field for report in reports for new_field in report.new_fields]
        need = next((report.widening for report in reports if report.widening is not None), None)
        if not new_fields and need is None:
            self.reports.extend(reports)
            return True
        # Nothing of this topic is committed yet, and the other tasks' files lack the new fields.
        self._discard(reports)
        if new_fields:
            # What tasks found after these messages depends on the new fields.
            self._grow(new_fields)
        else:
            self.widening = need
            large = frozenset().union(*(report.large for report in reports))
            fractions = frozenset().union(*(report.fractions for report in reports))
            self.new_doubles = fractions & self._new_longs() - large
        return False

    def _grow(self, new_fields: Sequence[NewFields]) -> None:
        self.rounds += 1
        evolution = self.evolution()
        if self.rounds > ROUNDS_MAX:
            # Everything before the first of them is known.
            first = min(new_fields, key=lambda field: evolution.position(field.partition, field.offset))
            if not self._is_first(first.partition, first.offset):
                self._end_before(first.partition, first.offset)
                return
        evolution.add(new_fields)
        self.new_fields = evolution.messages

    def discard(self) -> None:
        """Delete everything that tasks wrote; only for a batch whose commit was never tried."""
        self._discard(self.reports)
        self.reports.clear()

    def _discard(self, reports: Iterable[Report]) -> None:
        for report in reports:
            self.table.discard(report.files, report.quarantined)

    def moves(self) -> dict[tuple[str, int], tuple[int, int]]:
        """Return the start and end offset of each partition that advances."""
        return {
            (self.source.topic_id, number): (plan.first if plan.start is None else plan.start, plan.end)
            for number, plan in self.plans.items()
            if plan.start is None or plan.end > plan.start
        }

    def commit(self) -> bool:
        """Commit to the table; False if another run has, which leaves these files to the vacuum."""
        files = [file for report in self.reports for file in report.files]
        quarantined = [file for report in self.reports for file in report.quarantined]
        return self.table.commit(files, self.moves(), schema=self.table_schema(), quarantined=quarantined)

    def counts(self) -> dict[str, int]:
        files = [file for report in self.reports for file in report.files]
        quarantined = [file for report in self.reports for file in report.quarantined]
        counts: Counter[str] = Counter(self.merged)
        for report in self.reports:
            counts.update(report.counts)
        return {
            **counts,
            "files": len(files) + len(quarantined),
            "bytes": sum(file.bytes for file in (*files, *quarantined)),
            "quarantined": sum(file.rows for file in quarantined),
            "duplicates": sum(map(len, self.left_out.values())),
            "recreated": int(self.is_recreated),
            "widened": self.widened,
            "dropped-fields": len(self.dropped),
            "lost": sum(plan.lost for plan in self.plans.values()) + sum(report.lost for report in self.reports),
        }
