"""Reads a range of offsets out of a table, in order: what a log has given up is still there.

Nothing is written, so that whoever may only read can do it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import deltalake
import pyarrow as pa
import pyarrow.compute as pc

from millstream.pipelines.lake.active_files import ActiveFile, active_files, topic_of
from millstream.pipelines.lake.columns import TOPIC_ID, file_schema
from millstream.pipelines.lake.task_writer import RowGroup, ordered, row_groups


class Rows(NamedTuple):
    """Rows of one partition from an offset to before another."""

    topic_id: str
    partition: int
    start: int
    end: int

    def may_be_in(self, file: ActiveFile) -> bool:
        """Whether a file can have any of them."""
        if file.topic_id not in (self.topic_id, ""):
            return False
        if file.partitions is not None and not file.partitions[0] <= self.partition <= file.partitions[1]:
            return False
        return file.offsets is None or (file.offsets[0] < self.end and self.start <= file.offsets[1])

    def may_be_of(self, group: RowGroup) -> bool:
        """Whether a group of rows can have any of them."""
        if not group.low[0] <= self.partition <= group.high[0]:
            return False
        return group.low[1] < self.end and self.start <= group.high[1]

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Those of a batch."""
        offsets = batch.column("offset")
        within = pc.and_(pc.greater_equal(offsets, self.start), pc.less(offsets, self.end))
        wanted = pc.and_(pc.equal(batch.column("partition"), self.partition), within)
        if TOPIC_ID in batch.schema.names:
            # Rows from before there was this column do not say it.
            wanted = pc.and_(wanted, pc.equal(batch.column(TOPIC_ID).fill_null(self.topic_id), self.topic_id))
        return batch if pc.all(wanted).as_py() else batch.filter(wanted)


def paths_of(table: deltalake.DeltaTable, rows: Rows) -> list[str]:
    """The files of a table that can have some of the rows."""
    return [file.path for file in active_files(table) if rows.may_be_in(file)]


def scan(
    files: Any, paths: Sequence[str], schema: pa.Schema, rows: Rows, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Rows that are in some files, which a table of a schema has."""
    stored = file_schema(schema)
    wanted = list(columns) if columns is not None else stored.names
    needed = {*wanted, "partition", "offset"}
    if not all(map(topic_of, paths)):
        # Another program has put files together, which may be of several topics.
        needed.add(TOPIC_ID)
    groups = [group for group in row_groups(files, paths) if rows.may_be_of(group)]
    for batch in ordered(files, groups, pa.schema([field for field in stored if field.name in needed])):
        found = rows.of(batch)
        if len(found):
            yield found.select(wanted)
