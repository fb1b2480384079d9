"""A topic as a Delta table, and its quarantined messages as another one beside it.

Two tables have no common commit. So the commit of the first names the files of the second, and whoever uses the table
next adds them there before anything else: a crash in between leaves nothing out, and the version of the first table is
kept in the second, so that nothing is added twice.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Any, Final

import deltalake
import pyarrow as pa
import pyarrow.fs
import pyarrow.parquet as pq

from millstream.core.errors import Conflict, CorruptState, StalePlan
from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.lake.active_files import active_files, topic_of
from millstream.pipelines.lake.column_path import Place
from millstream.pipelines.lake.columns import QUARANTINE
from millstream.pipelines.lake.compaction import SMALL_BYTES, Compacted, compact
from millstream.pipelines.lake.delta_log import DeltaLog, added, schema_of
from millstream.pipelines.lake.rewriting import Run
from millstream.pipelines.lake.scan import Rows, paths_of, scan
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import GRACE, TopicPartition
from millstream.pipelines.lake.task_writer import TaskWriter
from millstream.pipelines.lake.widening import Widening
from millstream.pipelines.lake.written_file import Written, from_json, to_json


def landed_since(
    log: DeltaLog, files: Any, moment: datetime, columns: Sequence[str]
) -> Iterator[tuple[datetime, pa.RecordBatch]]:
    """Rows that a log knows of and that were landed in the hour of a moment or later, each with its hour;
    the newest hour comes first.
    """
    table = log.refresh()
    if table is None:
        return
    for file in sorted(active_files(table), key=lambda file: file.hour_start, reverse=True):
        if file.hour_start + timedelta(hours=1) > moment:
            with files.open_input_file(file.path) as opened:
                for batch in pq.ParquetFile(opened).iter_batches(columns=list(columns)):
                    yield file.hour_start, batch


ATTEMPTS_MAX: Final = 100

_PAUSE_S: Final = 0.05

_QUARANTINED: Final = "millstream/quarantined"
"""The version of the last commit that names files of the quarantine."""

_MANIFEST: Final = "millstream.quarantined"


class DeltaTable:
    """A `LakeTable` in the format of Delta Lake."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self.log = DeltaLog(storage)
        self.quarantine = DeltaLog(storage.beside(QUARANTINE_SUFFIX))
        self._known: set[TopicPartition] = set()
        """The partitions that the table was seen with: one that has lost them is another table."""

    def schema(self) -> pa.Schema | None:
        """The columns; None before the first commit."""
        return self.log.schema()

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Where a step begins; see `LakeTable`."""
        asked = set(partitions)
        table = self.recover()
        found = {} if table is None else _next_offsets(table, asked)
        self._known = (self._known - asked) | found.keys()
        return found

    def reached(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The same for whoever only reads; see `LakeTable`."""
        table = self.log.refresh()
        return {} if table is None else _next_offsets(table, partitions)

    def writer(
        self, schema: pa.Schema, topic_id: str, *, landed: datetime | None = None, attempt: str = ""
    ) -> TaskWriter:
        """A writer of files for this table."""
        return TaskWriter(self.storage, schema, topic_id, landed=landed, attempt=attempt)

    def quarantine_writer(self, topic_id: str, *, landed: datetime | None = None, attempt: str = "") -> TaskWriter:
        """A writer of files for the table of quarantined messages."""
        return TaskWriter(self.quarantine.storage, QUARANTINE, topic_id, landed=landed, attempt=attempt)

    def commit(
        self,
        files: Sequence[Written],
        offsets: Mapping[TopicPartition, tuple[int, int]],
        *,
        schema: pa.Schema,
        quarantined: Sequence[Written] = (),
    ) -> bool:
        """Add files and move on, all of it or nothing; see `LakeTable`."""
        for attempt in range(ATTEMPTS_MAX):
            table = self.log.require(schema)
            self._bring_quarantined(table)
            current = _next_offsets(table, offsets)
            if any(partition in self._known and partition not in current for partition in offsets):
                raise StalePlan(f"the table at {self.storage.url} was deleted while a step was under way")
            if _is_done(current, offsets):
                # Whoever tried before may have done it and not heard of it.
                return attempt > 0 and self.log.holds(files)
            versions = {_key(partition): end for partition, (_start, end) in offsets.items()}
            metadata = None
            if quarantined:
                versions[_QUARANTINED] = table.version() + 1
                metadata = {_MANIFEST: to_json(quarantined)}
            if self.log.commit(added(files), versions, metadata=metadata):
                self._known.update(offsets)
                self._bring_quarantined(table)
                return True
            time.sleep(random.uniform(0, _PAUSE_S))
        raise Conflict(f"others commit to {self.storage.url} all the time: {ATTEMPTS_MAX} attempts came too late")

    def discard(self, files: Iterable[Written], quarantined: Iterable[Written] = ()) -> None:
        """Delete files that no commit was tried for; see `LakeTable`."""
        for file in files:
            self.storage.delete(file.path)
        for file in quarantined:
            self.quarantine.storage.delete(file.path)

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> Compacted:
        """Make small files of hours that were over before a moment into large ones, in both tables."""
        if self.recover() is None:
            return Compacted()
        done = compact(self.log, before=before, small_bytes=small_bytes, progress=progress)
        return done.plus(compact(self.quarantine, before=before, small_bytes=small_bytes, progress=progress))

    def widen(self, places: Sequence[Place], *, run: Run, bytes_max: int) -> dict[Place, str]:
        """Make columns of whole numbers double, by writing all files anew; see `LakeTable`."""
        return Widening(self.log, self.storage, run=run, bytes_max=bytes_max).widen(places)

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete what no commit knows or a compaction replaced, once it is older than the grace; from both tables."""
        self.recover()
        return self.log.vacuum(grace) + self.quarantine.vacuum(grace)

    def scan(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of one partition from an offset to before another, in their order."""
        return self.scan_in(self.storage.files(), Rows(topic_id, partition, start, end), columns)

    def scan_quarantined(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of the quarantine likewise."""
        files = self.quarantine.storage.files()
        return self.scan_quarantined_in(files, Rows(topic_id, partition, start, end), columns)

    def scan_in(self, files: Any, rows: Rows, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Rows of the table, whose files are elsewhere."""
        table = self.log.refresh()
        return iter(()) if table is None else scan(files, paths_of(table, rows), schema_of(table), rows, columns)

    def scan_quarantined_in(self, files: Any, rows: Rows, columns: Sequence[str] | None) -> Iterator[pa.RecordBatch]:
        """Rows of the quarantine, whose files are elsewhere; those too that a crash kept from being brought there."""
        table = self.log.refresh()
        quarantine = self.quarantine.refresh()
        paths = [] if quarantine is None else paths_of(quarantine, rows)
        if table is not None:
            paths += [file.path for file in self._waiting(table, quarantine) if topic_of(file.path) == rows.topic_id]
        return scan(files, paths, QUARANTINE, rows, columns)

    def landed_since(self, moment: datetime, columns: Sequence[str]) -> Iterator[tuple[datetime, pa.RecordBatch]]:
        """Rows that were landed in the hour of a moment or later, each with that hour."""
        return landed_since(self.log, self.storage.files(), moment, columns)

    def recover(self) -> deltalake.DeltaTable | None:
        """The table as it is now, once all that it says of the quarantine is there too."""
        table = self.log.refresh()
        if table is not None:
            self._bring_quarantined(table)
        return table

    def _bring_quarantined(self, table: deltalake.DeltaTable) -> None:
        """Bring files into the quarantine that a commit to the table names and that a crash left out."""
        version = table.transaction_version(_QUARANTINED)
        if version is None:
            return
        while True:
            quarantine = self.quarantine.require(QUARANTINE)
            if _has(quarantine, table, version):
                return
            if self.quarantine.commit(added(self._waiting(table, quarantine)), {_source(table): version}):
                return

    def _waiting(self, table: deltalake.DeltaTable, quarantine: deltalake.DeltaTable | None) -> list[Written]:
        """The files that the table says are in quarantine, and that were not brought there.

        Each run brings them before it commits, so that they are those of the last such commit, if any.
        """
        version = table.transaction_version(_QUARANTINED)
        if version is None or (quarantine is not None and _has(quarantine, table, version)):
            return []
        if quarantine is not None and quarantine.transaction_version(_source(table)) is not None:
            return _manifest(self.log, version)
        # The quarantine never had anything of this table, unless somebody deleted it: then its files are gone as well.
        files = self.quarantine.storage.files()
        return [file for file in _manifest(self.log, version, is_old=True) if _exists(files, file.path)]


def _source(table: deltalake.DeltaTable) -> str:
    """The name under which a quarantine has how far it has come in a table."""
    return f"millstream/{table.metadata().id}"


def _has(quarantine: deltalake.DeltaTable, table: deltalake.DeltaTable, version: int) -> bool:
    """Whether a quarantine has what a version of its table says."""
    return (quarantine.transaction_version(_source(table)) or 0) >= version


def _exists(files: Any, path: str) -> bool:
    return bool(files.get_file_info(path).type == pyarrow.fs.FileType.File)


def _key(partition: TopicPartition) -> str:
    """The name under which a table has the next offset of a partition."""
    return f"millstream/{partition[0]}/{partition[1]}"


def _next_offsets(table: deltalake.DeltaTable, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
    """The next offsets that a table has."""
    found = {partition: table.transaction_version(_key(partition)) for partition in partitions}
    return {partition: offset for partition, offset in found.items() if offset is not None}


def _is_done(current: Mapping[TopicPartition, int], offsets: Mapping[TopicPartition, tuple[int, int]]) -> bool:
    """Whether a table has all of a step already; raises `StalePlan` unless it has all of it or nothing."""
    moving = {partition: span for partition, span in offsets.items() if span[0] != span[1] or partition not in current}
    if moving and all(current.get(partition, -1) >= end for partition, (_start, end) in moving.items()):
        return True
    for partition, (start, _end) in offsets.items():
        if current.get(partition, start) != start:
            raise StalePlan(
                f"the table goes on from offset {current[partition]} of partition {partition[1]}, not from {start}"
            )
    return False


def _manifest(log: DeltaLog, version: int, *, is_old: bool = False) -> list[Written]:
    """The quarantined files that a commit names; none if it is so old that it may have been cleared away."""
    properties = log.commit_info(version)
    if _MANIFEST not in properties:
        if is_old:
            return []
        raise CorruptState(f"version {version} of {log.storage.url} does not say which files it has in quarantine")
    return from_json(str(properties[_MANIFEST]))
