"""Writes the rows of one topic to Parquet files in a task; a later commit makes them part of the table."""

from __future__ import annotations

import contextlib
import itertools
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millstream.pipelines.lake.columns import APPEND_DAY, APPEND_HOUR, TOPIC_ID, file_schema
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.written_file import Written, has_group_bounds, stats_json

_LOWEST: Final = -(2**62)

_HIGHEST: Final = 2**62

BATCH_ROWS: Final = 64 * 1024


@dataclass(frozen=True, slots=True)
class RowGroup:
    """One row group, and the bounds of its rows by partition and offset."""

    path: str
    index: int
    low: tuple[int, int]
    high: tuple[int, int]


def row_groups(files: Any, paths: Iterable[str]) -> list[RowGroup]:
    """Return the row groups of files, from their footers."""
    found = []
    for path in paths:
        footer = pq.read_metadata(files.open_input_file(path))
        positions = {footer.schema.column(at).path: at for at in range(footer.num_columns)}
        for index in range(footer.num_row_groups):
            group = footer.row_group(index)
            partitions = _bounds(group, positions.get("partition"))
            offsets = _bounds(group, positions.get("offset"))
            found.append(RowGroup(path, index, (partitions[0], offsets[0]), (partitions[1], offsets[1])))
    return found


def _bounds(group: Any, position: int | None) -> tuple[int, int]:
    """Return the bounds of a column in a row group; unbounded if it has none."""
    statistics = None if position is None else group.column(position).statistics
    if statistics is None or not statistics.has_min_max:
        return _LOWEST, _HIGHEST
    return int(statistics.min), int(statistics.max)


def ordered(files: Any, groups: Iterable[RowGroup], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield all rows by partition and offset, with the columns of a schema, which includes these two.

    Row groups written by tasks hold one partition each and are in order, so one group is held at a time. Overlapping
    groups, as other programs may leave them, are held and sorted together.
    """
    for together in _apart(groups):
        table = pa.concat_tables([read_group(files, group, schema) for group in together])
        if len(together) > 1 or together[0].low[0] != together[0].high[0]:
            table = table.sort_by([("partition", "ascending"), ("offset", "ascending")])
        yield from table.to_batches(max_chunksize=BATCH_ROWS)


def _apart(groups: Iterable[RowGroup]) -> Iterator[list[RowGroup]]:
    """Yield groups in order, overlapping ones together."""
    together: list[RowGroup] = []
    high = (_LOWEST, _LOWEST)
    for group in sorted(groups, key=lambda group: (group.low, group.path, group.index)):
        if together and group.low > high:
            yield together
            together = []
        high = max(high, group.high)
        together.append(group)
    if together:
        yield together


def read_group(files: Any, group: RowGroup, schema: pa.Schema) -> pa.Table:
    """Read one row group; columns added later are null in it."""
    with files.open_input_file(group.path) as source:
        file = pq.ParquetFile(source)
        there = [name for name in schema.names if name in file.schema_arrow.names]
        table = file.read_row_group(group.index, columns=there)
    columns = [
        table.column(field.name).cast(field.type) if field.name in there else pa.nulls(len(table), field.type)
        for field in schema
    ]
    return pa.Table.from_arrays(columns, schema=schema)


FILE_BYTES: Final = 128 * 1024 * 1024

GROUP_BYTES: Final = 64 * 1024 * 1024

GROUP_ROWS: Final = 1024 * 1024

_COUNTED: Final = ("offset", "timestamp")
"""Mostly ascending columns, for which delta encoding is smallest."""

_REPEATED: Final = ("partition", "timestamp_type", "reason", TOPIC_ID)
"""Columns with few values. Dictionaries of keys and payloads would be started and given up."""


class RowWriter(Protocol):
    """Writes rows to files in a task; it can be pickled until the first batch."""

    @property
    def storage(self) -> Storage:
        """Return the storage of its files."""

    @property
    def folder(self) -> str:
        """Return the folder of its files."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows in the order of their offsets."""

    def close(self) -> list[Written]:
        """Finish and return the files, which are durable but invisible until committed."""

    def abort(self) -> None:
        """Delete what was written, as far as possible."""

    def discard(self, written: Iterable[Written]) -> None:
        """Delete returned files that will not be committed."""


class TaskWriter:
    """Takes batches, and returns at the end which files they are in.

    It can be pickled until the first batch. File names are unique, so attempts at one task never collide. A row group
    holds one partition only, in the order in which its rows came: scans rely on it.
    """

    def __init__(
        self,
        storage: Storage,
        schema: pa.Schema,
        topic_id: str,
        *,
        landed: datetime | None = None,
        attempt: str = "",
        file_bytes: int = FILE_BYTES,
    ) -> None:
        self._storage = storage
        self._schema = file_schema(schema)
        self._topic_id = topic_id
        self._attempt = attempt
        moment = (landed or datetime.now(UTC)).astimezone(UTC)
        self._values = {APPEND_DAY: moment.date().isoformat(), APPEND_HOUR: str(moment.hour)}
        self._file_bytes = file_bytes
        self._rows: list[pa.RecordBatch] = []
        self._rows_bytes = 0
        self._partition: int | None = None
        self._file: OpenFile | None = None
        self._written: list[Written] = []

    @property
    def storage(self) -> Storage:
        """Return the storage of its files."""
        return self._storage

    @property
    def folder(self) -> str:
        """Return the folder of the hour of its files."""
        return "/".join(f"{name}={value}" for name, value in self._values.items())

    @property
    def prefix(self) -> str:
        """Return the prefix of its file names, unique if there is an attempt."""
        return f"{self._topic_id}_{self._attempt}"

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows in the order of their offsets; missing columns are null, unknown ones are refused.

        Rows without a topic id get the writer's.
        """
        for partition, rows in _by_partition(shaped(self._with_topic(batch), self._schema)):
            if partition != self._partition:
                self._end_group()
                self._partition = partition
            self._rows.append(rows)
            self._rows_bytes += rows.nbytes
            if self._rows_bytes >= GROUP_BYTES or sum(map(len, self._rows)) >= GROUP_ROWS:
                self._end_group()

    def _with_topic(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        if TOPIC_ID not in self._schema.names or not self._topic_id:
            return batch
        if TOPIC_ID not in batch.schema.names:
            return batch.append_column(TOPIC_ID, pa.repeat(pa.scalar(self._topic_id, pa.string()), len(batch)))
        at = batch.schema.get_field_index(TOPIC_ID)
        topic_ids = batch.column(at)
        return batch.set_column(at, TOPIC_ID, topic_ids.fill_null(self._topic_id)) if topic_ids.null_count else batch

    def close(self) -> list[Written]:
        """Finish and return the files, which are durable but invisible until committed. More may be written after."""
        self._end_group()
        self._end_file()
        written, self._written = self._written, []
        self._partition = None
        return written

    def abort(self) -> None:
        """Delete what was written, as far as possible; the rest is left to the vacuum."""
        written, self._written = self._written, []
        self._rows, self._rows_bytes, self._partition = [], 0, None
        if self._file is not None:
            self._file.abort()
            self._file = None
        self.discard(written)

    def discard(self, written: Iterable[Written]) -> None:
        """Delete returned files that will not be committed: they would keep a full disk full."""
        for file in written:
            self._storage.delete(file.path)

    def _end_group(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_batches(self._rows, schema=self._schema)
        self._rows, self._rows_bytes = [], 0
        if self._file is None:
            path = f"{self.folder}/{self.prefix}{uuid.uuid4().hex[len(self._attempt) :]}.parquet"
            self._file = OpenFile(self._storage, path, self._schema)
        self._file.write_group(table)
        if self._file.bytes >= self._file_bytes:
            self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._written.append(self._file.close(self._values))
            self._file = None


class OpenFile:
    """A file being written."""

    def __init__(self, storage: Storage, path: str, schema: pa.Schema) -> None:
        self._storage = storage
        self._path = path
        self._schema = schema
        self._footers: list[Any] = []
        storage.make_parent(path)
        self._stream = storage.files().open_output_stream(path)
        names = set(schema.names)
        try:
            self._writer = pq.ParquetWriter(
                self._stream,
                schema,
                compression="zstd",
                use_dictionary=[name for name in _REPEATED if name in names],
                column_encoding={name: "DELTA_BINARY_PACKED" for name in _COUNTED if name in names},
                write_statistics=[field.name for field in schema if has_group_bounds(field.type)],
                metadata_collector=self._footers,
            )
        except BaseException:
            self._delete()
            raise

    @property
    def bytes(self) -> int:
        """Return its size so far."""
        return int(self._stream.tell())

    def write_group(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=max(1, len(rows)))

    def close(self, values: dict[str, str]) -> Written:
        """Finish it durably; `values` are those of its folders."""
        self._writer.close()
        size = self.bytes
        self._stream.close()
        self._storage.sync(self._path)
        (footer,) = self._footers
        return Written(self._path, footer.num_rows, size, stats_json(footer), dict(values))

    def abort(self) -> None:
        """Delete it."""
        # The footer is not needed, and could not be written on a full disk.
        self._writer.is_open = False
        self._delete()

    def _delete(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._stream.close()
        self._storage.delete(self._path)


def shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of a schema; further columns are a mistake of the caller."""
    if batch.schema.equals(schema):
        return batch
    besides = set(batch.schema.names) - set(schema.names)
    if besides:
        raise ValueError(f"rows have columns that the table does not have: {', '.join(sorted(besides))}")
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _by_partition(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split a batch by partition; almost always it is one piece."""
    if not len(batch):
        return
    partitions = batch.column("partition")
    bounds = pc.min_max(partitions)
    if bounds["min"] == bounds["max"]:
        yield bounds["min"].as_py(), batch
        return
    numbers = partitions.to_numpy(zero_copy_only=False)
    starts = [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(batch)]
    for start, end in itertools.pairwise(starts):
        yield int(numbers[start]), batch.slice(start, end - start)
