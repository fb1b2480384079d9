"""Reads an offset range from a table, in order, including what the log has deleted.

Nothing is written, so read-only access suffices.
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
    """The rows of one partition's offset range."""

    topic_id: str
    partition: int
    start: int
    end: int

    def may_be_in(self, file: ActiveFile) -> bool:
        if file.topic_id not in (self.topic_id, ""):
            return False
        if file.partitions is not None and not file.partitions[0] <= self.partition <= file.partitions[1]:
            return False
        return file.offsets is None or (file.offsets[0] < self.end and self.start <= file.offsets[1])

    def may_be_of(self, group: RowGroup) -> bool:
        if not group.low[0] <= self.partition <= group.high[0]:
            return False
        return group.low[1] < self.end and self.start <= group.high[1]

    def of(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Select them from a batch."""
        offsets = batch.column("offset")
        within = pc.and_(pc.greater_equal(offsets, self.start), pc.less(offsets, self.end))
        wanted = pc.and_(pc.equal(batch.column("partition"), self.partition), within)
        if TOPIC_ID in batch.schema.names:
            # Rows from before the column existed have no topic id.
            wanted = pc.and_(wanted, pc.equal(batch.column(TOPIC_ID).fill_null(self.topic_id), self.topic_id))
        return batch if pc.all(wanted).as_py() else batch.filter(wanted)


def paths_of(table: deltalake.DeltaTable, rows: Rows) -> list[str]:
    """Return the files of a table that can have some of the rows."""
    return [file.path for file in active_files(table) if rows.may_be_in(file)]


def scan(
    files: Any, paths: Sequence[str], schema: pa.Schema, rows: Rows, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of some files of a table."""
    stored = file_schema(schema)
    wanted = list(columns) if columns is not None else stored.names
    needed = {*wanted, "partition", "offset"}
    if not all(map(topic_of, paths)):
        # Another program has merged files, possibly of several topics.
        needed.add(TOPIC_ID)
    groups = [group for group in row_groups(files, paths) if rows.may_be_of(group)]
    for batch in ordered(files, groups, pa.schema([field for field in stored if field.name in needed])):
        found = rows.of(batch)
        if len(found):
            yield found.select(wanted)
