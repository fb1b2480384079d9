"""A topic as a Delta table with one row per key: copy-on-write in buckets by key hash.

A step has two halves. Tasks decode messages into changes and write them to staged files, sorted by bucket. Then, for
exactly one version of the table, other tasks merge the changes of each bucket with the file that it has and write
another file; one commit replaces the files and carries the next offsets. A step that is repeated, concurrently or after
a crash, is in the table once, because the commit is only for the version that was read.

Deletes are remembered in a second file per bucket, under the same name in `_deleted`: it is part of the table
whenever the bucket's file is. The name says whether there is one.
"""

from __future__ import annotations

import json
import math
import time
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq
from deltalake.transaction import RemoveAction

from millstream.core.errors import CorruptState, InvalidSetting, StalePlan
from millstream.pipelines.lake.columns import APPEND_DAY, FieldPath, values_at
from millstream.pipelines.lake.delta_log import CONFIGURATION, DeltaLog, added
from millstream.pipelines.lake.merging import (
    DELETED,
    DEPTH_MAX,
    KEY,
    ORDER,
    ROOT,
    Bucket,
    MergedBucket,
    MergeRule,
    bucket_of,
    canonical_keys,
    completed,
    key_hashes,
    tombstone_schema,
)
from millstream.pipelines.lake.rewriting import SMALL_BYTES, CompactionResult, Run, compact
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import (
    GRACE,
    LakeTable,
    Mark,
    TopicPartition,
    is_done,
    next_offset_key,
    next_offsets,
)
from millstream.pipelines.lake.table_file import ActiveFile, WrittenFile
from millstream.pipelines.lake.task_writer import (
    GROUP_BYTES,
    FileWriter,
    OpenFile,
    RowWriter,
    read_group,
    row_groups,
    shaped,
)

BUCKETS: Final = "buckets"
STAGED: Final = "changes"
TOMBSTONES: Final = "_deleted"
"""The folders of bucket files, of staged changes (next to the table), and of remembered deletes."""

REPLACED_RETENTION: Final = timedelta(hours=1)
"""How long replaced files are kept for running queries; a table is rewritten too often to keep them for a week."""
STAGED_KEPT: Final = timedelta(days=1)
"""After this, staged files and remembered deletes that no commit names are deleted."""

GROUP_ROWS: Final = 256 * 1024

KEEPS_TYPES: Final = "the columns of a table with one row per key keep their types"
"""Why a column stays long."""

_CONFIGURATION: Final = {
    **CONFIGURATION,
    # Every commit replaces files, so the log grows fast, and old versions cannot be read anyway.
    "delta.logRetentionDuration": "interval 2 days",
    "delta.deletedFileRetentionDuration": "interval 1 days",
}
_REMEMBERS: Final = ".d.parquet"


class StoredBucket(NamedTuple):
    bucket: Bucket
    path: str
    bytes: int


class KeyedTable(LakeTable):
    def __init__(self, storage: Storage, *, replaced_retention: timedelta = REPLACED_RETENTION) -> None:
        super().__init__(storage)
        self.log = DeltaLog(storage, partition_by=(), configuration=_CONFIGURATION)
        self._staged = storage.staged()
        self._replaced_retention = replaced_retention
        self._merging: int | None = None
        """The version that the merge in progress is for."""
        self.routes: list[Bucket] = [ROOT]
        """The buckets by which the next step's changes are divided."""

    def stored(self) -> list[StoredBucket]:
        """Return the buckets at the version that was last read; raise `InvalidSetting` for other tables."""
        table = self.log.loaded
        if table is None:
            return []
        actions = pa.table(table.get_add_actions(flatten=True))
        names = set(pa.schema(table.schema().to_arrow()).names)
        if APPEND_DAY in names:
            raise InvalidSetting(
                f"the table at {self.storage.url} holds every message (mode=append); move it away to build one row "
                "per key there, or give the pipeline another lake"
            )
        buckets = []
        for path, size in zip(
            actions.column("path").to_pylist(), actions.column("size_bytes").to_pylist(), strict=True
        ):
            bucket = bucket_of(path)
            if bucket is None:
                raise CorruptState(
                    f"the table at {self.storage.url} has the file {path}, which another program wrote: a table with "
                    "one row per key has no other writer; restore its earlier version, or delete it to build it again"
                )
            buckets.append(StoredBucket(bucket, path, size))
        return sorted(buckets, key=lambda stored: stored.bucket.start)

    def route(self, incoming_bytes: float, bucket_bytes: int) -> None:
        """Choose the buckets for the next step's changes: those of the table, split where they grow too large."""
        sizes = {stored_bucket.bucket: stored_bucket.bytes for stored_bucket in self.stored()}
        buckets = completed(sizes)
        # Rows take about a quarter of their JSON in Parquet.
        share = incoming_bytes / 4
        routes = []
        for bucket in buckets:
            expected = sizes.get(bucket, 0) + share * (bucket.end - bucket.start) / ROOT.end
            levels = max(0, math.ceil(math.log2(expected / bucket_bytes))) if expected > 0 else 0
            routes += bucket.divided(min(levels, max(0, DEPTH_MAX - bucket.depth)))
        self.routes = routes

    def writer(
        self, schema: pa.Schema, topic_id: str, *, landed: datetime | None = None, attempt: str = ""
    ) -> RowWriter:
        return StagedWriter(self._staged, schema, topic_id, tuple(self.routes), attempt=attempt)

    def begin_merge(
        self, staged: Sequence[WrittenFile], offsets: Mapping[TopicPartition, tuple[int, int]], schema: pa.Schema
    ) -> list[MergeUnit]:
        """Return the merges that apply staged changes to the table; the commit is for its current version.

        Raise `StalePlan` if the table has moved since the changes were planned.
        """
        table = self.log.require(schema)
        self._add_missing_quarantined(table)
        if is_done(next_offsets(table, offsets), offsets):
            raise StalePlan(f"another run has merged the same changes into {self.storage.url}")
        stored = self.stored()
        self._merging = table.version()
        slices: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        sizes: dict[int, int] = {}
        for file in staged:
            index = msgspec.json.decode(file.stats, type=dict[int, list[int]])
            for number, batches in index.items():
                slices.setdefault(number, []).append((file.path, tuple(batches)))
                sizes[number] = sizes.get(number, 0) + file.bytes // max(1, len(index))
        units = []
        for number, bucket in enumerate(self.routes):
            source = next((stored_bucket for stored_bucket in stored if stored_bucket.bucket.holds(bucket)), None)
            if source is None and any(bucket.holds(stored_bucket.bucket) for stored_bucket in stored):
                raise StalePlan(f"another run has split buckets of {self.storage.url}")
            is_split = source is not None and source.bucket != bucket
            if number in slices or is_split:
                units.append(
                    MergeUnit(
                        bucket=bucket, stored=source, slices=tuple(slices.get(number, ())), new=sizes.get(number, 0)
                    )
                )
        return units

    def commit(
        self,
        files: Sequence[WrittenFile],
        offsets: Mapping[TopicPartition, tuple[int, int]],
        *,
        schema: pa.Schema,
        quarantined: Sequence[WrittenFile] = (),
        requarantined: Sequence[ActiveFile] = (),
        mark: Mark | None = None,
    ) -> bool:
        """Replace the files of merged buckets and advance atomically."""
        merging, self._merging = self._merging, None
        if not files:
            return super().commit(
                files, offsets, schema=schema, quarantined=quarantined, requarantined=requarantined, mark=mark
            )
        table = self.log.loaded
        if table is None or merging is None or table.version() != merging:
            raise StalePlan(f"the table at {self.storage.url} was changed during a merge")
        new = [bucket for file in files if (bucket := bucket_of(file.path)) is not None]
        replaced = [
            stored_bucket
            for stored_bucket in self.stored()
            if any(stored_bucket.bucket.holds(bucket) for bucket in new)
        ]
        now = int(time.time() * 1000)
        removed = [RemoveAction(bucket.path, True, now, bucket.bytes, {}) for bucket in replaced]
        versions = {next_offset_key(partition): end for partition, (_start, end) in offsets.items()}
        if mark is not None:
            # The version is the one that was read, so nothing else has changed it.
            versions[mark.name] = table.version() + 1
        if self._commit_with(quarantined, [*removed, *added(files)], versions, table, requarantined):
            self._known.update(offsets)
            return True
        if self.log.holds(files):
            # The store's response was lost, but the commit exists.
            self._add_missing_quarantined(self.log.refresh() or table)
            return True
        raise StalePlan(f"another run has changed the table at {self.storage.url}")

    def discard(self, files: Iterable[WrittenFile], quarantined: Iterable[WrittenFile] = ()) -> None:
        for file in files:
            delete_written(self.storage, file)
        super().discard((), quarantined)

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> CompactionResult:
        """Compact only the quarantine: a bucket has one file."""
        if self.recover() is None:
            return CompactionResult()
        return compact(self.quarantine, before=before, small_bytes=small_bytes, progress=progress)

    def widen(self, places: Sequence[FieldPath], *, run: Run, bytes_max: int) -> dict[FieldPath, str]:
        """Widen nothing."""
        return dict.fromkeys(places, KEEPS_TYPES)

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete replaced files after an hour, and files that no commit names after the grace period."""
        table = self.recover()
        if table is None:
            return 0
        hours = math.ceil(self._replaced_retention / timedelta(hours=1))
        replaced = table.vacuum(retention_hours=hours, dry_run=False, enforce_retention_duration=False)
        deleted = len(replaced) + super().vacuum(grace=grace)
        self.log.refresh()
        active = {bucket.path.rpartition("/")[2] for bucket in self.stored()}
        old = datetime.now(UTC) - STAGED_KEPT
        deleted += _delete_old(self.storage, TOMBSTONES, old, kept=active)
        return deleted + _delete_old(self._staged, STAGED, old, kept=set())


class StagedWriter(FileWriter):
    """Writes changes to files in a task, each file divided by bucket.

    Rows have the columns of the table, `KEY`, `DELETED`, and `ORDER` where there is one.
    """

    def __init__(
        self, storage: Storage, schema: pa.Schema, topic_id: str, routes: tuple[Bucket, ...], *, attempt: str
    ) -> None:
        super().__init__(storage, schema, topic_id, attempt)
        self._routes = routes
        self._rows: list[pa.RecordBatch] = []
        self._rows_bytes = 0
        self._path = ""
        self._stream: Any = None
        self._writer: Any = None
        self._index: dict[int, list[int]] = {}
        self._batches = 0
        self._count = 0

    @property
    def folder(self) -> str:
        return STAGED

    def write(self, batch: pa.RecordBatch) -> None:
        if not len(batch):
            return
        topic = pa.repeat(pa.scalar(self._topic_id, pa.string()), len(batch))
        rows = batch.append_column("topic_id", topic)
        order = rows.schema.field(ORDER) if ORDER in rows.schema.names else pa.field(ORDER, pa.int64())
        extra = [pa.field(KEY, pa.binary()), order, pa.field(DELETED, pa.bool_())]
        self._rows.append(shaped(rows, pa.schema([*self._schema, *extra])))
        self._rows_bytes += self._rows[-1].nbytes
        if self._rows_bytes >= GROUP_BYTES:
            self._flush()

    def _flush(self) -> None:
        """Write the rows taken so far, bucket by bucket."""
        if not self._rows:
            return
        table = pa.Table.from_batches(self._rows).combine_chunks()
        self._rows, self._rows_bytes = [], 0
        starts = np.array([bucket.start for bucket in self._routes], np.int64)
        numbers = np.searchsorted(starts, key_hashes(table.column(KEY).combine_chunks()), side="right") - 1
        order = np.argsort(numbers, kind="stable")
        ordered = table.take(pa.array(order)).combine_chunks()
        if self._writer is None:
            self._path = f"{STAGED}/changes_{self._attempt}{uuid.uuid4().hex[len(self._attempt) :]}.arrow"
            self.storage.make_parent(self._path)
            self._stream = self.storage.files().open_output_stream(self._path)
            self._writer = pa.ipc.new_file(
                self._stream, ordered.schema, options=pa.ipc.IpcWriteOptions(compression="zstd")
            )
        buckets, firsts = np.unique(numbers[order], return_index=True)
        for number, start, end in zip(
            buckets.tolist(), firsts.tolist(), [*firsts.tolist()[1:], len(ordered)], strict=True
        ):
            (batch,) = ordered.slice(start, end - start).combine_chunks().to_batches()
            self._writer.write_batch(batch)
            self._index.setdefault(number, []).append(self._batches)
            self._batches += 1
        self._count += len(ordered)

    def close(self) -> list[WrittenFile]:
        """Finish the file, if there is one. It need not survive a crash, which restarts the step."""
        self._flush()
        if self._writer is None:
            return []
        self._writer.close()
        size = int(self._stream.tell())
        self._stream.close()
        index = json.dumps(self._index)
        written = WrittenFile(self._path, self._count, size, index, {})
        self._writer = None
        self._index, self._batches, self._count = {}, 0, 0
        return [written]

    def abort(self) -> None:
        self._rows, self._rows_bytes = [], 0
        if self._writer is not None:
            self._writer = None
            try:
                self._stream.close()
            finally:
                self.storage.delete(self._path)


@dataclass(frozen=True, slots=True, kw_only=True)
class MergeUnit:
    bucket: Bucket
    stored: StoredBucket | None
    """The file that has its rows; several units share it if the bucket is split."""
    slices: tuple[tuple[str, tuple[int, ...]], ...]
    """The staged files that have changes, each with the numbers of their record batches."""
    new: int = 0
    """About how many bytes the changes have."""

    @property
    def path(self) -> str:
        return self.bucket.stem

    @property
    def bytes(self) -> int:
        return self.new + (0 if self.stored is None else self.stored.bytes)


class MergeResult(NamedTuple):
    """The result of one unit, as it is sent to the driver."""

    files: list[WrittenFile]
    upserted: int
    deleted: int
    late: int


def merge_result(text: str) -> MergeResult:
    return msgspec.json.decode(text, type=MergeResult)


@dataclass(frozen=True, kw_only=True)
class BucketMerge:
    """The work of tasks: merges staged changes into the file of a bucket and writes another one."""

    storage: Storage
    schema: pa.Schema
    """The columns of the table."""
    rule: MergeRule
    key: tuple[FieldPath, ...]
    """The paths of the key's fields in a stored row."""
    order: FieldPath | None
    """The path of the order value in a stored row."""
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        return [(self.storage, BUCKETS), (self.storage, TOMBSTONES)]

    def __call__(self, file: MergeUnit) -> str:
        """Merge one bucket and return a `MergeResult` as JSON."""
        changes = self._changes(file)
        stored, tombstones = self._stored(file, changes.schema.field(ORDER).type)
        merged = self.rule.merge(self.schema, stored, tombstones, changes)
        written = self._write(file.bucket, merged)
        return msgspec.json.encode(MergeResult([written], merged.upserted, merged.deleted, merged.late)).decode()

    def discard(self, results: Iterable[str]) -> None:
        for result in results:
            for file in merge_result(result).files:
                delete_written(self.storage, file)

    def _changes(self, unit: MergeUnit) -> pa.Table:
        files = self.storage.staged().files()
        batches: list[pa.RecordBatch] = []
        for path, numbers in unit.slices:
            with files.open_input_file(path) as opened:
                reader = pa.ipc.open_file(opened)
                batches += [reader.get_batch(number) for number in numbers]
        if not batches:
            order_column = (
                None if self.order is None else values_at(pa.array([], pa.struct(list(self.schema))), self.order)
            )
            order = pa.int64() if order_column is None else order_column.type
            extra = [pa.field(KEY, pa.binary()), pa.field(ORDER, order), pa.field(DELETED, pa.bool_())]
            return pa.schema([*self.schema, *extra]).empty_table()
        return pa.Table.from_batches(batches)

    def _stored(self, unit: MergeUnit, order: pa.DataType) -> tuple[pa.Table, pa.Table]:
        """Return the stored rows of the bucket with their keys and order values, and the remembered deletes."""
        if unit.stored is None:
            extra = [pa.field(KEY, pa.binary()), pa.field(ORDER, order)]
            return pa.schema([*self.schema, *extra]).empty_table(), tombstone_schema(order).empty_table()
        source = self.storage.files()
        groups = row_groups(source, [unit.stored.path])
        tables = [read_group(source, group, self.schema) for group in groups] or [self.schema.empty_table()]
        rows = pa.concat_tables(tables).combine_chunks()
        whole = pa.StructArray.from_arrays([_combine(column) for column in rows.columns], fields=list(rows.schema))
        keys = canonical_keys([_value_at(whole, place) for place in self.key])
        # Without a row, a table has no column for it yet.
        order_column = None if self.order is None else values_at(whole, self.order)
        values = pa.nulls(len(rows), order) if order_column is None else order_column.cast(order)
        rows = rows.append_column(KEY, keys).append_column(pa.field(ORDER, order), values)
        tombstones = tombstone_schema(order).empty_table()
        if unit.stored.path.endswith(_REMEMBERS):
            with source.open_input_file(_tombstones_path(unit.stored.path)) as opened:
                tombstones = pq.read_table(opened).cast(tombstone_schema(order))
        if unit.stored.bucket == unit.bucket:
            return rows, tombstones
        return _of_bucket(rows, unit.bucket), _of_bucket(tombstones, unit.bucket)

    def _write(self, bucket: Bucket, merged: MergedBucket) -> WrittenFile:
        ending = _REMEMBERS if len(merged.tombstones) else ".parquet"
        name = f"{bucket.stem}{self.attempt}{uuid.uuid4().hex[len(self.attempt) :]}{ending}"
        path = f"{BUCKETS}/{name}"
        if len(merged.tombstones):
            beside = _tombstones_path(path)
            self.storage.make_parent(beside)
            with self.storage.files().open_output_stream(beside) as stream:
                pq.write_table(merged.tombstones, stream, compression="zstd")
            self.storage.sync(beside)
        opened = OpenFile(self.storage, path, self.schema)
        try:
            for start in range(0, max(1, len(merged.rows)), GROUP_ROWS):
                opened.write_group(merged.rows.slice(start, GROUP_ROWS))
            return opened.close({})
        except BaseException:
            opened.abort()
            self.storage.delete(_tombstones_path(path))
            raise


def delete_written(storage: Storage, file: WrittenFile) -> None:
    """Delete a file of a keyed table that was never committed, with its file of remembered deletes."""
    if file.path.startswith(f"{STAGED}/"):
        storage.staged().delete(file.path)
        return
    storage.delete(file.path)
    if file.path.endswith(_REMEMBERS):
        storage.delete(_tombstones_path(file.path))


def _tombstones_path(path: str) -> str:
    """Return the file of remembered deletes that belongs to a bucket's file."""
    return f"{TOMBSTONES}/{path.rpartition('/')[2]}"


def _of_bucket(rows: pa.Table, bucket: Bucket) -> pa.Table:
    if not len(rows):
        return rows
    hashes = key_hashes(_combine(rows.column(KEY)))
    return rows.filter(pa.array((hashes >= bucket.start) & (hashes < bucket.end)))


def _combine(column: pa.ChunkedArray) -> pa.Array:
    combined = column.combine_chunks()
    return (
        combined if isinstance(combined, pa.Array) else pa.concat_arrays(combined.chunks or [pa.array([], column.type)])
    )


def _value_at(rows: pa.StructArray, path: FieldPath) -> pa.Array:
    column = values_at(rows, path)
    if column is None:
        raise InvalidSetting(f"the table has no column {'.'.join(path)}")
    return column


def _delete_old(storage: Storage, folder: str, before: datetime, *, kept: set[str]) -> int:
    """Delete files of a folder that were written before a time, except some."""
    selector = pyarrow.fs.FileSelector(folder, allow_not_found=True)
    old = [
        entry
        for entry in storage.files().get_file_info(selector)
        if entry.type == pyarrow.fs.FileType.File and entry.base_name not in kept and entry.mtime < before
    ]
    for entry in old:
        storage.delete(entry.path)
    return len(old)
