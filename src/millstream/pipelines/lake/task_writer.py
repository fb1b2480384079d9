"""Writes the rows of one topic to Parquet files in a task; a later commit makes them part of the table."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import uuid
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millstream.pipelines.lake.columns import (
    APPEND_DAY,
    APPEND_HOUR,
    EVENT_DAY,
    EVENT_HOUR,
    TOPIC_ID,
    completed,
    file_schema,
    partition_columns,
)
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table_file import WrittenFile, has_group_bounds, stats_json, topic_of

_LOWEST: Final = -(2**62)

_HIGHEST: Final = 2**62

BATCH_ROWS: Final = 64 * 1024

MERGED_ROWS: Final = 4 * 1024

MERGED_BYTES: Final = 1024 * 1024
"""How many rows, and about how many bytes, of a row group are held while it is merged with others."""

MERGED_MAX: Final = 64
"""How many row groups are merged at once. If more overlap, some are first merged into a temporary file."""

_BUFFER_BYTES: Final = 64 * 1024

_ORDER: Final = [("partition", "ascending"), ("offset", "ascending")]


@dataclass(frozen=True, slots=True)
class RowGroup:
    """A row group, and the bounds of its rows by partition and offset."""

    path: str
    index: int
    low: tuple[int, int]
    high: tuple[int, int]

    @property
    def is_in_order(self) -> bool:
        """Whether its rows are those of one partition by offset, which is so if Millstream wrote it."""
        return bool(topic_of(self.path)) and self.low[0] == self.high[0]


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

    Row groups written by tasks hold one partition each and are in order, so one group is held at a time. Groups that
    overlap, because the table is partitioned by event time or because other programs wrote them, are merged.
    """
    for together in _overlapping(groups):
        if len(together) > 1:
            yield from _merge_groups(files, together, schema)
        else:
            yield from _sorted_group(files, together[0], schema)


def _sorted_group(files: Any, group: RowGroup, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one group, held as a whole."""
    table = read_group(files, group, schema)
    if not group.is_in_order:
        table = table.sort_by(_ORDER)
    yield from table.to_batches(max_chunksize=BATCH_ROWS)


def _merge_groups(files: Any, groups: Iterable[RowGroup], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Merge groups, given by their lower bounds; only a few rows of each are held."""
    waiting = deque(groups)
    begun: list[_Cursor] = []
    while waiting or begun:
        if not begun:
            begun.append(_cursor(files, waiting.popleft(), schema))
        while waiting and waiting[0].low <= min(cursor.last for cursor in begun):
            if len(begun) >= MERGED_MAX:
                begun = _merge_by_level(begun, schema)
            else:
                begun.append(_cursor(files, waiting.popleft(), schema))
        yield from _next_rows(begun, schema)


def _cursor(files: Any, group: RowGroup, schema: pa.Schema) -> _Cursor:
    """Begin with a group; one that has to be sorted is held as a whole only until it is."""
    if group.is_in_order:
        return _Cursor(streamed_group(files, group, schema))
    return _Cursor(_spill(_sorted_group(files, group, schema), schema))


def _next_rows(cursors: list[_Cursor], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of cursors, in order, up to the last row that all cursors have reached; drop exhausted cursors."""
    reached = min(cursor.last for cursor in cursors)
    parts = [part for cursor in cursors for part in cursor.take(reached)]
    cursors[:] = [cursor for cursor in cursors if not cursor.is_over]
    table = pa.Table.from_batches(parts, schema=schema)
    if len(parts) > 1:
        table = table.sort_by(_ORDER).combine_chunks()
    yield from table.to_batches(max_chunksize=BATCH_ROWS)


def _merge_by_level(cursors: list[_Cursor], schema: pa.Schema) -> list[_Cursor]:
    """Merge the remaining files of the most common merge level into a temporary file; all if no two share a level."""
    ((passes, count),) = Counter(cursor.passes for cursor in cursors).most_common(1)
    merged = [cursor for cursor in cursors if count == 1 or cursor.passes == passes]
    others = [cursor for cursor in cursors if cursor not in merged]

    def rows() -> Iterator[pa.RecordBatch]:
        while merged:
            yield from _next_rows(merged, schema)

    return [*others, _Cursor(_spill(rows(), schema), passes + 1)]


def _spill(rows: Iterable[pa.RecordBatch], schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Write rows to a temporary file at once, and return an iterator that reads them back."""
    file = tempfile.TemporaryFile()  # noqa: SIM115 - open until its rows were read
    with pa.ipc.new_stream(file, schema, options=pa.ipc.IpcWriteOptions(compression="lz4")) as stream:
        for batch in rows:
            count = _merged_rows(batch.nbytes, len(batch))
            for start in range(0, len(batch), count):
                stream.write_batch(batch.slice(start, count))
    file.seek(0)

    def batches() -> Iterator[pa.RecordBatch]:
        with file, pa.ipc.open_stream(file) as stream:
            yield from stream

    return batches()


def _merged_rows(size: int, rows: int) -> int:
    """Return how many rows to hold, given their size."""
    return max(1, min(MERGED_ROWS, MERGED_BYTES * rows // max(1, size)))


class _Cursor:
    """The position of a merge in one row group, or in several that were merged before."""

    def __init__(self, rows: Iterable[pa.RecordBatch], passes: int = 0) -> None:
        self.passes = passes
        """How often its rows were merged before."""
        self._batches = (batch for batch in rows if len(batch))
        self._rest: pa.RecordBatch | None = next(self._batches, None)

    @property
    def is_over(self) -> bool:
        return self._rest is None

    @property
    def last(self) -> tuple[int, int]:
        """Return the partition and offset up to which its rows are known."""
        if self._rest is None:
            return _HIGHEST, _HIGHEST
        return self._rest.column("partition")[-1].as_py(), self._rest.column("offset")[-1].as_py()

    def take(self, reached: tuple[int, int]) -> Iterator[pa.RecordBatch]:
        """Return the rows up to a partition and offset, which is no later than the last known."""
        batch = self._rest
        if batch is None:
            return
        partitions, offsets = (batch.column(name).to_numpy() for name in ("partition", "offset"))
        is_taken = (partitions < reached[0]) | ((partitions == reached[0]) & (offsets <= reached[1]))
        count = int(np.count_nonzero(is_taken))
        self._rest = batch.slice(count) if count < len(batch) else next(self._batches, None)
        if count:
            yield batch.slice(0, count)


def _overlapping(groups: Iterable[RowGroup]) -> Iterator[list[RowGroup]]:
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
        names = [name for name in schema.names if name in file.schema_arrow.names]
        table = file.read_row_group(group.index, columns=names)
    return pa.Table.from_arrays(completed(table, schema), schema=schema)


def streamed_group(files: Any, group: RowGroup, schema: pa.Schema) -> Iterator[pa.RecordBatch]:
    """Yield the rows of one row group, a few at a time; columns added later are null in them."""
    with files.open_input_file(group.path) as source:
        # The defaults would read the whole group before the first row.
        file = pq.ParquetFile(source, pre_buffer=False, buffer_size=_BUFFER_BYTES)
        names = [name for name in schema.names if name in file.schema_arrow.names]
        stored = file.metadata.row_group(group.index)
        count = _merged_rows(stored.total_byte_size, stored.num_rows)
        for batch in file.iter_batches(count, [group.index], names):
            yield pa.RecordBatch.from_arrays(completed(batch, schema), schema=schema)


FILE_BYTES: Final = 128 * 1024 * 1024

GROUP_BYTES: Final = 64 * 1024 * 1024

GROUP_ROWS: Final = 1024 * 1024

_COUNTED: Final = ("offset", "timestamp")
"""Mostly ascending columns, for which delta encoding is smallest."""

_REPEATED: Final = ("partition", "timestamp_type", "reason", TOPIC_ID)
"""Columns with few distinct values. For keys and payloads, dictionaries would be started and abandoned."""


class RowWriter(Protocol):
    """Takes the rows of a task; it can be pickled until the first batch."""

    @property
    def storage(self) -> Storage:
        """Return the storage of its files."""

    @property
    def folder(self) -> str:
        """Return the folder of its files."""

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows in the order of their offsets."""

    def close(self) -> list[WrittenFile]:
        """Finish and return the files, which are durable but invisible until committed."""

    def abort(self) -> None:
        """Delete the written files, as far as possible."""

    def discard(self, written: Iterable[WrittenFile]) -> None:
        """Delete returned files that will not be committed."""


class FileWriter:
    """Writes rows to files; names of files are unique, so attempts at one task never collide."""

    def __init__(self, storage: Storage, schema: pa.Schema, topic_id: str, attempt: str) -> None:
        self.storage = storage
        self._schema = schema
        self._topic_id = topic_id
        self._attempt = attempt

    def discard(self, written: Iterable[WrittenFile]) -> None:
        """Delete returned files that will not be committed, which would otherwise fill the disk."""
        for file in written:
            self.storage.delete(file.path)


class TaskWriter(FileWriter):
    """Writes rows to the files of one folder.

    A row group holds one partition only, in the order in which its rows came: scans rely on it.
    """

    def __init__(
        self,
        storage: Storage,
        schema: pa.Schema,
        topic_id: str,
        *,
        landed: datetime | None = None,
        attempt: str = "",
        values: Mapping[str, str] | None = None,
    ) -> None:
        """Write to the folder of partition values, by default those of the hour of landing."""
        super().__init__(storage, file_schema(schema), topic_id, attempt)
        self._values = dict(_hour_values(landed) if values is None else values)
        self._rows: list[pa.RecordBatch] = []
        self._rows_bytes = 0
        self._partition: int | None = None
        self._file: OpenFile | None = None
        self._written: list[WrittenFile] = []

    @property
    def folder(self) -> str:
        return "/".join(f"{name}={value}" for name, value in self._values.items())

    @property
    def prefix(self) -> str:
        """Return the prefix of its file names, unique if there is an attempt."""
        return f"{self._topic_id}_{self._attempt}"

    def write(self, batch: pa.RecordBatch) -> None:
        """Write rows in the order of their offsets; missing columns are null, unknown ones are refused.

        Without the column of the topic id, they get the writer's.
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
        if TOPIC_ID not in self._schema.names or TOPIC_ID in batch.schema.names:
            return batch
        return batch.append_column(TOPIC_ID, pa.repeat(pa.scalar(self._topic_id, pa.string()), len(batch)))

    @property
    def held_bytes(self) -> int:
        """Return the size of the rows that are in no file yet."""
        return self._rows_bytes

    @property
    def is_open(self) -> bool:
        return self._file is not None

    def flush(self) -> None:
        """Write the rows that are held to its file."""
        self._end_group()

    def end_file(self) -> None:
        """Finish the file being written; further rows go to another one."""
        self._end_group()
        self._end_file()

    def close(self) -> list[WrittenFile]:
        """Finish and return the files, which are durable but invisible until committed. More may be written after."""
        self.end_file()
        written, self._written = self._written, []
        self._partition = None
        return written

    def abort(self) -> None:
        """Delete the written files, as far as possible; the vacuum deletes the others."""
        written, self._written = self._written, []
        self._rows, self._rows_bytes, self._partition = [], 0, None
        if self._file is not None:
            self._file.abort()
            self._file = None
        self.discard(written)

    def _end_group(self) -> None:
        if not self._rows:
            return
        table = pa.Table.from_batches(self._rows, schema=self._schema)
        self._rows, self._rows_bytes = [], 0
        if self._file is None:
            path = f"{self.folder}/{self.prefix}{uuid.uuid4().hex[len(self._attempt) :]}.parquet"
            self._file = OpenFile(self.storage, path, self._schema)
        self._file.write_group(table)
        if self._file.bytes >= FILE_BYTES:
            self._end_file()

    def _end_file(self) -> None:
        if self._file is not None:
            self._written.append(self._file.close(self._values))
            self._file = None


OPEN_FILES_MAX: Final = 64
"""The most files that one task has open for a table that is partitioned by event time."""


class EventTimeWriter(FileWriter):
    """Writes rows to the folders of their event time, each like `TaskWriter`.

    Rows come with the partition columns. The hour of landing, which is a folder otherwise, is stored as columns. All
    folders together hold no more rows in memory than one row group has, and keep a bounded number of files open,
    however many days the rows are of.
    """

    def __init__(
        self,
        storage: Storage,
        schema: pa.Schema,
        topic_id: str,
        *,
        landed: datetime | None = None,
        attempt: str = "",
        held_bytes: int = GROUP_BYTES,
        open_files: int = OPEN_FILES_MAX,
    ) -> None:
        super().__init__(storage, schema, topic_id, attempt)
        self._names = partition_columns(schema)
        self._landed = _hour_values(landed)
        self._held_max = held_bytes
        self._open_max = open_files
        self._writers: dict[int, TaskWriter] = {}
        """The writers by hours since 1970; those with an open file are in the order of their last use."""
        self._written: list[WrittenFile] = []

    @property
    def folder(self) -> str:
        return ""

    def write(self, batch: pa.RecordBatch) -> None:
        for hour, rows in self._by_hour(batch):
            if hour not in self._writers:
                self._writers[hour] = self._opened(hour)
            self._writers[hour].write(rows)
        while sum(writer.held_bytes for writer in self._writers.values()) > self._held_max:
            self._flush(max(self._writers, key=lambda hour: self._writers[hour].held_bytes))

    def _by_hour(self, batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
        """Divide rows by event time, with copies: a slice would keep all other rows of its batch in memory."""
        if not len(batch):
            return
        hours = batch.column(EVENT_DAY).cast(pa.int32()).to_numpy().astype(np.int64) * 24
        if EVENT_HOUR in self._names:
            hours = hours + batch.column(EVENT_HOUR).to_numpy()
        rows = batch.drop_columns(list(self._names))
        for name, kind in ((APPEND_DAY, pa.date32()), (APPEND_HOUR, pa.int32())):
            landed = pa.array([self._landed[name]]).cast(kind)[0]
            rows = rows.append_column(name, pa.repeat(landed, len(rows)))
        distinct = np.unique(hours)
        if len(distinct) == 1:
            yield int(distinct[0]), rows
            return
        order = np.argsort(hours, kind="stable")
        ends = np.searchsorted(hours[order], distinct, side="right").tolist()
        for hour, start, end in zip(distinct.tolist(), [0, *ends[:-1]], ends, strict=True):
            yield hour, rows.take(pa.array(order[start:end]))

    def _opened(self, hour: int) -> TaskWriter:
        moment = datetime(1970, 1, 1, tzinfo=UTC) + timedelta(hours=hour)
        values = dict(zip((EVENT_DAY, EVENT_HOUR), (moment.date().isoformat(), str(moment.hour)), strict=True))
        return TaskWriter(
            self.storage,
            self._schema,
            self._topic_id,
            attempt=self._attempt,
            values={name: values[name] for name in self._names},
        )

    def _flush(self, hour: int) -> None:
        """Write the rows held for an hour, and finish the least recently written file."""
        writer = self._writers.pop(hour)
        self._writers[hour] = writer
        writer.flush()
        opened = [other for other in self._writers.values() if other.is_open]
        for other in opened[: max(0, len(opened) - self._open_max)]:
            other.end_file()

    def close(self) -> list[WrittenFile]:
        """Finish and return the files, which are durable but invisible until committed. More may be written after."""
        for hour in list(self._writers):
            self._written.extend(self._writers[hour].close())
            del self._writers[hour]
        written, self._written = self._written, []
        return written

    def abort(self) -> None:
        """Delete the written files, as far as possible; the vacuum deletes the others."""
        writers, self._writers = self._writers, {}
        written, self._written = self._written, []
        for writer in writers.values():
            writer.abort()
        self.discard(written)


def _hour_values(landed: datetime | None) -> dict[str, str]:
    """Return the partition values of an hour of landing, by default the current one."""
    moment = (landed or datetime.now(UTC)).astimezone(UTC)
    return {APPEND_DAY: moment.date().isoformat(), APPEND_HOUR: str(moment.hour)}


class OpenFile:
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
        return int(self._stream.tell())

    def write_group(self, rows: pa.Table) -> None:
        self._writer.write_table(rows, row_group_size=max(1, len(rows)))

    def close(self, values: dict[str, str]) -> WrittenFile:
        """Finish it durably; `values` are those of its folders."""
        self._writer.close()
        size = self.bytes
        self._stream.close()
        self._storage.sync(self._path)
        (footer,) = self._footers
        return WrittenFile(self._path, footer.num_rows, size, stats_json(footer), dict(values))

    def abort(self) -> None:
        # The footer is not needed, and could not be written on a full disk.
        self._writer.is_open = False
        self._delete()

    def _delete(self) -> None:
        with contextlib.suppress(OSError, pa.ArrowException):
            self._stream.close()
        self._storage.delete(self._path)


def shaped(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Return a batch with the columns of a schema; additional columns are an error."""
    if batch.schema.equals(schema):
        return batch
    unknown = set(batch.schema.names) - set(schema.names)
    if unknown:
        raise ValueError(f"rows have columns that the table does not have: {', '.join(sorted(unknown))}")
    columns = [
        batch.column(field.name).cast(field.type)
        if field.name in batch.schema.names
        else pa.nulls(len(batch), field.type)
        for field in schema
    ]
    return pa.RecordBatch.from_arrays(columns, schema=schema)


def _by_partition(batch: pa.RecordBatch) -> Iterator[tuple[int, pa.RecordBatch]]:
    """Split a batch by partition; it almost always has only one."""
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
