"""Lake tables: a topic as a Delta table, with its quarantined messages in another one next to it.

The table is the source of truth for its contents. Its commits carry, for each partition of each topic, the next offset
that is not in it, and a commit is accepted only if the table is still where the plan of the step started. A step that
runs twice, at the same time or after a crash, is therefore in the table once.

Two tables have no common commit. The commit of the first therefore names the files of the second, and the next user of
the table adds them there before anything else: a crash in between loses nothing, and the second table stores the
version of the first, so that nothing is added twice.
"""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import deltalake
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.fs
import pyarrow.parquet as pq
from deltalake.transaction import AddAction, RemoveAction

from millstream.core.errors import Conflict, CorruptState, InvalidSetting, StalePlan
from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.lake.columns import (
    APPEND_DAY,
    APPEND_HOUR,
    EVENT_DAY,
    PARTITION_COLUMNS,
    QUARANTINE,
    TOPIC_ID,
    FieldPath,
    file_schema,
)
from millstream.pipelines.lake.delta_log import CONFIGURATION, EVENT_TIME, FIXED, DeltaLog, added, schema_of
from millstream.pipelines.lake.rewriting import SMALL_BYTES, CompactionResult, Run, Widening, compact
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table_file import ActiveFile, WrittenFile, active_files, from_json, to_json, topic_of
from millstream.pipelines.lake.task_writer import EventTimeWriter, RowGroup, RowWriter, TaskWriter, ordered, row_groups

GRACE: Final = timedelta(days=7)

TopicPartition = tuple[str, int]
"""A topic id and a partition number."""


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
        offsets = batch.column("offset")
        within = pc.and_(pc.greater_equal(offsets, self.start), pc.less(offsets, self.end))
        condition = pc.and_(pc.equal(batch.column("partition"), self.partition), within)
        if TOPIC_ID in batch.schema.names:
            condition = pc.and_(condition, pc.equal(batch.column(TOPIC_ID), self.topic_id))
        return batch if pc.all(condition).as_py() else batch.filter(condition)


def paths_of(table: deltalake.DeltaTable, rows: Rows) -> list[str]:
    """Return the files of a table that can have some of the rows."""
    return [file.path for file in active_files(table) if rows.may_be_in(file)]


def scan(
    files: Any, paths: Sequence[str], schema: pa.Schema, rows: Rows, columns: Sequence[str] | None = None
) -> Iterator[pa.RecordBatch]:
    """Yield the rows of some files of a table; read-only access suffices."""
    stored = file_schema(schema)
    selected = list(columns) if columns is not None else stored.names
    needed = {*selected, "partition", "offset"}
    if not all(map(topic_of, paths)):
        # Another program has merged files, possibly of several topics.
        needed.add(TOPIC_ID)
    groups = [group for group in row_groups(files, paths) if rows.may_be_of(group)]
    for batch in ordered(files, groups, pa.schema([field for field in stored if field.name in needed])):
        row = rows.of(batch)
        if len(row):
            yield row.select(selected)


def landed_since(
    log: DeltaLog, files: Any, moment: datetime, columns: Sequence[str]
) -> Iterator[tuple[datetime, pa.RecordBatch]]:
    """Yield rows of a log that were landed in the hour of a time or later, each with its hour."""
    table = log.refresh()
    if table is None:
        return
    in_files = [name for name in PARTITION_COLUMNS if name not in table.metadata().partition_columns]
    for file in sorted(active_files(table), key=lambda file: file.hour_start, reverse=True):
        if file.hour_start + timedelta(hours=1) <= moment:
            continue
        with files.open_input_file(file.path) as opened:
            for batch in pq.ParquetFile(opened).iter_batches(columns=[*columns, *in_files]):
                if not in_files:
                    yield file.hour_start, batch
                    continue
                for hour, rows in _by_hour(batch):
                    if hour + timedelta(hours=1) > moment:
                        yield hour, rows.select(columns)


def _by_hour(batch: pa.RecordBatch) -> Iterator[tuple[datetime, pa.RecordBatch]]:
    """Divide rows by the hour in which they were landed."""
    hours = pc.add(pc.multiply(batch.column(APPEND_DAY).cast(pa.int32()), 24), batch.column(APPEND_HOUR))
    for hour in pc.unique(hours).to_pylist():
        yield datetime.fromtimestamp(hour * 3600, UTC), batch.filter(pc.equal(hours, hour))


ATTEMPTS_MAX: Final = 100

_PAUSE_S: Final = 0.05

_QUARANTINED: Final = "millstream/quarantined"
"""The version of the last commit that names quarantined files."""

_MANIFEST: Final = "millstream.quarantined"
_REMOVED: Final = "millstream.requarantined"


class Mark(NamedTuple):
    """An application version that all commits of one kind change, so that each detects the others."""

    name: str
    version: int | None


class LakeTable:
    """A topic as a table, with a quarantine table. It may not exist yet."""

    def __init__(self, storage: Storage, log: DeltaLog | None = None) -> None:
        self.storage = storage
        self.log = log or DeltaLog(storage)
        self.sealed: Callable[[deltalake.DeltaTable], Mapping[str, str]] = lambda _table: {}
        """Returns the metadata of a commit after a version."""
        self.quarantine = DeltaLog(storage.suffixed(QUARANTINE_SUFFIX))
        self._known: set[TopicPartition] = set()
        """The partitions seen in the table; if they disappear, the table was replaced."""

    def schema(self) -> pa.Schema | None:
        """Return the columns, partition columns included; None before the first commit."""
        return self.log.schema()

    def event_time(self) -> str | None:
        """Return the event time by which it is partitioned, as in `day(created_at)`; empty if it is the hour of
        landing, None before the first commit.
        """
        table = self.log.loaded or self.log.refresh()
        return None if table is None else table.metadata().configuration.get(EVENT_TIME, "")

    def fix(self, fixed: Mapping[FieldPath, str]) -> None:
        """Remember fields whose columns never become double, with the reasons, if the table does not exist yet."""
        self.log.configure(FIXED, json.dumps(list(fixed.items())) if fixed else None)

    def fixed(self) -> dict[FieldPath, str]:
        """Return the value that `fix` has stored with the table."""
        table = self.log.loaded or self.log.refresh()
        text = "[]" if table is None else table.metadata().configuration.get(FIXED, "[]")
        return {tuple(place): reason for place, reason in json.loads(text)}

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the next offset that is not in the table, for those of the partitions that have one.

        This is where a step starts. Work that a crash left half done is completed first: a committed step is in the
        table and in its quarantine when this returns.
        """
        requested = set(partitions)
        table = self.recover()
        offsets_in_table = {} if table is None else next_offsets(table, requested)
        self._known = (self._known - requested) | offsets_in_table.keys()
        return offsets_in_table

    def reached(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the next offsets for readers: nothing is written, and unfinished commits are not completed."""
        table = self.log.refresh()
        return {} if table is None else next_offsets(table, partitions)

    def writer(
        self, schema: pa.Schema, topic_id: str, *, landed: datetime | None = None, attempt: str = ""
    ) -> RowWriter:
        """Return a writer of files for this table; it can be pickled for use in tasks.

        `schema` is the table's with what `commit` is to add (see `columns.extended`). Files are laid out by the time
        `landed`, in UTC: give all tasks of a step the same. A writer is for the rows of one topic. File names contain
        the `attempt`, so that what an attempt left can be found.
        """
        kind = EventTimeWriter if EVENT_DAY in schema.names else TaskWriter
        return kind(self.storage, schema, topic_id, landed=landed, attempt=attempt)

    def quarantine_writer(self, topic_id: str, *, landed: datetime | None = None, attempt: str = "") -> TaskWriter:
        """Return a writer of files for the quarantine table (columns: `columns.QUARANTINE`)."""
        return TaskWriter(self.quarantine.storage, QUARANTINE, topic_id, landed=landed, attempt=attempt)

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
        """Add files and advance each partition from the first offset to the second, atomically.

        The first is what `next_offsets` returned, even where the log starts later by now; for a partition without one
        any number will do. The second is the next offset that is not in the files, and may come without files. Missing
        columns of the schema are added first. Quarantined files are part of the same commit: they are in their table
        when this returns, or as soon as the table is used again after a crash.

        Return True if this run did it, even if the store's response was lost; False if another run has done all of it:
        its rows are there, and these files are garbage for `vacuum`, never for the caller to delete. Raise `StalePlan`
        if the table is at another position, so that the step has to be planned again, and `ColumnMismatch` if it has a
        column under another type.

        `requarantined` are files of the quarantine whose rows are in these files now. With a mark, the commit is
        refused (`StalePlan`) if another one with the same mark came since it was read.
        """
        for attempt in range(ATTEMPTS_MAX):
            table = self.log.require(schema)
            self._add_missing_quarantined(table)
            current = next_offsets(table, offsets)
            if any(partition in self._known and partition not in current for partition in offsets):
                raise StalePlan(f"the table at {self.storage.url} was deleted during a step")
            if is_done(current, offsets):
                # The previous attempt may have succeeded although its response was lost.
                return attempt > 0 and self.log.holds(files)
            if attempt and files and self.log.holds(files):
                return True
            versions = {next_offset_key(partition): end for partition, (_start, end) in offsets.items()}
            if mark is not None:
                if table.transaction_version(mark.name) != mark.version:
                    raise StalePlan(f"another run has changed the table at {self.storage.url} in the same way")
                versions[mark.name] = table.version() + 1
            if self._commit_with(quarantined, added(files), versions, table, requarantined, self.sealed(table)):
                self._known.update(offsets)
                return True
            time.sleep(random.uniform(0, _PAUSE_S))
        raise Conflict(f"{ATTEMPTS_MAX} commits to {self.storage.url} came too late: other writers keep committing")

    def mark(self, name: str) -> Mark:
        """Return a mark at the version that was last read."""
        table = self.log.loaded
        return Mark(name, None if table is None else table.transaction_version(name))

    def quarantine_files(self, topic_id: str) -> list[ActiveFile]:
        self.recover()
        quarantine = self.quarantine.refresh()
        return [] if quarantine is None else [file for file in active_files(quarantine) if file.topic_id == topic_id]

    def _commit_with(
        self,
        quarantined: Sequence[WrittenFile],
        actions: Sequence[AddAction | RemoveAction],
        versions: Mapping[str, int],
        table: deltalake.DeltaTable,
        requarantined: Sequence[ActiveFile] = (),
        sealed: Mapping[str, str] | None = None,
    ) -> bool:
        """Commit for the version after the one that was read, naming quarantined files; False if it is too late."""
        metadata = dict(sealed or {})
        if quarantined or requarantined:
            versions = {**versions, _QUARANTINED: table.version() + 1}
            metadata[_MANIFEST] = to_json(quarantined)
        if requarantined:
            metadata[_REMOVED] = json.dumps([file.path for file in requarantined])
        if not self.log.commit(actions, versions, metadata=metadata or None):
            return False
        self._add_missing_quarantined(table)
        return True

    def discard(self, files: Iterable[WrittenFile], quarantined: Iterable[WrittenFile] = ()) -> None:
        """Delete files for which no commit was ever tried, if possible."""
        for file in files:
            self.storage.delete(file.path)
        for file in quarantined:
            self.quarantine.storage.delete(file.path)

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> CompactionResult:
        """Compact the small files of hours that ended before a time, in both tables; readers see no difference.

        It may take long; `progress` is called after each piece.
        """
        if self.recover() is None:
            return CompactionResult()
        done = compact(self.log, before=before, small_bytes=small_bytes, progress=progress)
        return done.plus(compact(self.quarantine, before=before, small_bytes=small_bytes, progress=progress))

    def widen(self, places: Sequence[FieldPath], *, run: Run, bytes_max: int) -> dict[FieldPath, str]:
        """Make long columns, or fields in them, double; return the reasons for those that stay long.

        `run` rewrites all files, and one commit replaces the originals. Nothing else changes: rows, folders and offsets
        are the same. A table larger than the limit stays as it is, and so does a column with numbers that a double
        cannot hold. Files that others land meanwhile under the old columns are refused (`StalePlan`).
        """
        return Widening(self.log, self.storage, run=run, bytes_max=bytes_max).widen(places)

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete files of both tables that are unreferenced or were replaced, once older than the grace period.

        The grace period has to exceed the duration of any step and any reader. Return how many there were.
        """
        self.recover()
        return self.log.vacuum(grace) + self.quarantine.vacuum(grace)

    def scan(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition's offset range, in order, without partition columns.

        Nothing is written, even if a crash left work half done.
        """
        table, rows = self.log.refresh(), Rows(topic_id, partition, start, end)
        if table is None:
            return iter(())
        return scan(self._files(self.log), paths_of(table, rows), schema_of(table), rows, columns)

    def scan_quarantined(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield quarantined rows in the same way, including those that a crash kept from being added."""
        rows = Rows(topic_id, partition, start, end)
        table = self.log.refresh()
        quarantine = self.quarantine.refresh()
        paths = [] if quarantine is None else paths_of(quarantine, rows)
        if table is not None:
            paths += [file.path for file in self._waiting(table, quarantine) if topic_of(file.path) == rows.topic_id]
        return scan(self._files(self.quarantine), paths, QUARANTINE, rows, columns)

    def landed_since(self, moment: datetime, columns: Sequence[str]) -> Iterator[tuple[datetime, pa.RecordBatch]]:
        """Yield rows landed in the hour of a time or later, each with that hour, in no order."""
        return landed_since(self.log, self._files(self.log), moment, columns)

    def _files(self, log: DeltaLog) -> Any:
        """Return where the files of the table or of its quarantine are read."""
        return log.storage.files()

    def recover(self) -> deltalake.DeltaTable | None:
        """Return the current table, after adding missing quarantined files."""
        table = self.log.refresh()
        if table is not None:
            self._add_missing_quarantined(table)
        return table

    def _add_missing_quarantined(self, table: deltalake.DeltaTable) -> None:
        """Add quarantined files that a commit names and a crash left out."""
        version = table.transaction_version(_QUARANTINED)
        if version is None:
            return
        while True:
            quarantine = self.quarantine.require(QUARANTINE)
            if _has(quarantine, table, version):
                return
            removed = self._removed(quarantine, version)
            actions: list[AddAction | RemoveAction] = [*removed, *added(self._waiting(table, quarantine))]
            if self.quarantine.commit(actions, {_source(table): version}):
                return

    def _removed(self, quarantine: deltalake.DeltaTable, version: int) -> list[RemoveAction]:
        """Return the removal of files whose messages a version of the table took over from the quarantine."""
        paths = frozenset(json.loads(self.log.commit_info(version).get(_REMOVED, "[]")))
        now = int(time.time() * 1000)
        return [
            RemoveAction(file.path, True, now, file.bytes, file.partition_values)
            for file in (active_files(quarantine) if paths else ())
            if file.path in paths
        ]

    def _waiting(self, table: deltalake.DeltaTable, quarantine: deltalake.DeltaTable | None) -> list[WrittenFile]:
        """Return the quarantined files that the table names but the quarantine lacks.

        Every run adds them before it commits, so they can only be those of the last such commit.
        """
        version = table.transaction_version(_QUARANTINED)
        if version is None or (quarantine is not None and _has(quarantine, table, version)):
            return []
        if quarantine is not None and quarantine.transaction_version(_source(table)) is not None:
            return _manifest(self.log, version)
        # The quarantine never had files of this table, unless it was deleted: then its files are gone as well.
        files = self.quarantine.storage.files()
        return [file for file in _manifest(self.log, version, is_old=True) if _exists(files, file.path)]


def _source(table: deltalake.DeltaTable) -> str:
    """Return the application id under which a quarantine stores its position in a table."""
    return f"millstream/{table.metadata().id}"


def _has(quarantine: deltalake.DeltaTable, table: deltalake.DeltaTable, version: int) -> bool:
    return (quarantine.transaction_version(_source(table)) or 0) >= version


def _exists(files: Any, path: str) -> bool:
    return bool(files.get_file_info(path).type == pyarrow.fs.FileType.File)


def next_offset_key(partition: TopicPartition) -> str:
    """Return the application id under which a table stores the next offset of a partition."""
    return f"millstream/{partition[0]}/{partition[1]}"


def next_offsets(table: deltalake.DeltaTable, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    offsets = {partition: table.transaction_version(next_offset_key(partition)) for partition in partitions}
    return {partition: offset for partition, offset in offsets.items() if offset is not None}


def is_done(current: Mapping[TopicPartition, int], offsets: Mapping[TopicPartition, tuple[int, int]]) -> bool:
    """Whether a table has all of a step; raise `StalePlan` unless it has all or nothing of it."""
    moving = {partition: span for partition, span in offsets.items() if span[0] != span[1] or partition not in current}
    if moving and all(current.get(partition, -1) >= end for partition, (_start, end) in moving.items()):
        return True
    for partition, (start, _end) in offsets.items():
        if current.get(partition, start) != start:
            raise StalePlan(
                f"the table continues at offset {current[partition]} of partition {partition[1]}, not at {start}"
            )
    return False


def _manifest(log: DeltaLog, version: int, *, is_old: bool = False) -> list[WrittenFile]:
    """Return the quarantined files that a commit names; none if the commit is so old that it may have been deleted."""
    properties = log.commit_info(version)
    if _MANIFEST not in properties:
        if is_old:
            return []
        raise CorruptState(f"version {version} of {log.storage.url} does not list its quarantined files")
    return from_json(str(properties[_MANIFEST]))


def open_table(
    url: str, *, format: str = "delta", options: Mapping[str, str] | None = None, event_time: str = ""
) -> LakeTable:
    """Open the table at a folder or URL, which may not exist yet; then it is partitioned by the given event time.

    Object stores are configured by the usual environment variables (`AWS_ACCESS_KEY_ID`, `AWS_REGION`,
    `AWS_ENDPOINT_URL` …) and by options of the same names. A table belongs to one thread; open one per thread.
    """
    storage = Storage.at(url, options)
    configuration = {**CONFIGURATION, EVENT_TIME: event_time} if event_time else CONFIGURATION
    if format == "delta":
        return LakeTable(storage, DeltaLog(storage, configuration=configuration))
    if format == "parquet":
        # It is a Delta table that moves its files.
        from millstream.pipelines.lake.parquet_table import ParquetTable

        return ParquetTable(storage, configuration=configuration)
    raise InvalidSetting(f"the format of a table must be delta or parquet, not {format!r}")
