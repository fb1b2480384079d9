"""Reads a range of offsets out of a table, in order: what a log has given up is still there."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millstream.lake.active_files import ActiveFile, active_files
from millstream.lake.columns import file_schema
from millstream.lake.delta_log import DeltaLog, schema_of
from millstream.lake.row_groups import RowGroup, ordered, row_groups
from millstream.lake.storage import Storage


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
        return batch if pc.all(wanted).as_py() else batch.filter(wanted)


def scan(log: DeltaLog, storage: Storage, rows: Rows, columns: Sequence[str] | None = None) -> Iterator[pa.RecordBatch]:
    """Rows that a log knows of, from files that are in a storage."""
    table = log.refresh()
    if table is None:
        return
    schema = file_schema(schema_of(table))
    wanted = list(columns) if columns is not None else schema.names
    needed = pa.schema([field for field in schema if field.name in {*wanted, "partition", "offset"}])
    paths = [file.path for file in active_files(table) if rows.may_be_in(file)]
    files = storage.files()
    groups = [group for group in row_groups(files, paths) if rows.may_be_of(group)]
    for batch in ordered(files, groups, needed):
        found = rows.of(batch)
        if len(found):
            yield found.select(wanted)
