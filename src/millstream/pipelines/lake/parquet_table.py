"""A topic as plain Parquet files in folders by day and hour, for readers that support nothing else.

Folders of files have no commits. Tasks therefore write to a staging folder, where a Delta log says which files are
committed; those are then moved to where they are read. A crash in between leaves files that are committed but not
moved: the next user of the table moves them. Readers see complete committed files, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.lake.columns import Place
from millstream.pipelines.lake.delta_log import CONFIGURATION, DeltaLog
from millstream.pipelines.lake.delta_table import DeltaTable, Rows, landed_since
from millstream.pipelines.lake.rewriting import SMALL_BYTES, Compacted, Run, Widening, first_name
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import GRACE, TopicPartition
from millstream.pipelines.lake.table_file import Written
from millstream.pipelines.lake.task_writer import RowWriter


class FallbackFiles:
    """Opens files in either of two folders."""

    def __init__(self, one: Any, other: Any) -> None:
        self._one = one
        self._other = other

    def open_input_file(self, path: str) -> Any:
        """Open a file; raise `FileNotFoundError` if it is in neither folder."""
        shown = first_name(path)
        for place, name in ((self._one, shown), (self._other, path)):
            try:
                return place.open_input_file(name)
            except FileNotFoundError:
                continue
        # It may have been moved between the two attempts.
        return self._one.open_input_file(shown)


class ParquetTable:
    """A `LakeTable` of plain files."""

    def __init__(self, storage: Storage, *, configuration: Mapping[str, str] = CONFIGURATION) -> None:
        self.storage = storage
        staged = storage.staged()
        self._staged = DeltaTable(staged, DeltaLog(staged, configuration=configuration))

    def schema(self) -> pa.Schema | None:
        """Return the columns; None before the first commit."""
        return self._staged.schema()

    def event_time(self) -> str | None:
        """Return the event time by which the table is partitioned; see `LakeTable`."""
        return self._staged.event_time()

    def fix(self, fixed: Mapping[Place, str]) -> None:
        """Remember fields that stay long; see `LakeTable`."""
        self._staged.fix(fixed)

    def fixed(self) -> dict[Place, str]:
        """Return them; see `LakeTable`."""
        return self._staged.fixed()

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return where a step starts; see `LakeTable`."""
        found = self._staged.next_offsets(partitions)
        self._publish()
        return found

    def reached(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the same for readers; see `LakeTable`."""
        return self._staged.reached(partitions)

    def writer(
        self, schema: pa.Schema, topic_id: str, *, landed: datetime | None = None, attempt: str = ""
    ) -> RowWriter:
        """Return a writer of files for this table."""
        return self._staged.writer(schema, topic_id, landed=landed, attempt=attempt)

    def quarantine_writer(self, topic_id: str, *, landed: datetime | None = None, attempt: str = "") -> RowWriter:
        """Return a writer of files for the quarantine table."""
        return self._staged.quarantine_writer(topic_id, landed=landed, attempt=attempt)

    def commit(
        self,
        files: Sequence[Written],
        offsets: Mapping[TopicPartition, tuple[int, int]],
        *,
        schema: pa.Schema,
        quarantined: Sequence[Written] = (),
    ) -> bool:
        """Add files and advance atomically; see `LakeTable`."""
        is_mine = self._staged.commit(files, offsets, schema=schema, quarantined=quarantined)
        self._publish()
        return is_mine

    def discard(self, files: Iterable[Written], quarantined: Iterable[Written] = ()) -> None:
        """Delete files for which no commit was tried; see `LakeTable`."""
        self._staged.discard(files, quarantined)

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> Compacted:
        """Do nothing: a reader that lists files while they are replaced would see rows twice, or not at all."""
        return Compacted()

    def widen(self, places: Sequence[Place], *, run: Run, bytes_max: int) -> dict[Place, str]:
        """Make long columns double; see `LakeTable`.

        A rewritten file takes the original's name when it is moved into place, atomically: readers see every row once
        at any time, in some files still under the old type.
        """
        source = _PublishedAndStaged(self.storage, self._staged.storage)
        widening = Widening(self._staged.log, source, run=run, bytes_max=bytes_max, may_be_deleted=True)
        refused = widening.widen(places)
        self._publish()
        return refused

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete files that were never committed, once older than the grace period."""
        self._staged.recover()
        self._publish()
        return self._staged.vacuum(grace=grace)

    def scan(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition's offset range, in order."""
        return self._staged.scan_in(self._files(), Rows(topic_id, partition, start, end), columns)

    def scan_quarantined(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield quarantined rows in the same way."""
        files = self._files(QUARANTINE_SUFFIX)
        return self._staged.scan_quarantined_in(files, Rows(topic_id, partition, start, end), columns)

    def landed_since(self, moment: datetime, columns: Sequence[str]) -> Iterator[tuple[datetime, pa.RecordBatch]]:
        """Yield rows landed in the hour of a time or later, each with that hour."""
        return landed_since(self._staged.log, self._files(), moment, columns)

    def _files(self, ending: str = "") -> FallbackFiles:
        return _PublishedAndStaged(self.storage.suffixed(ending), self._staged.storage.suffixed(ending)).files()

    def _publish(self) -> None:
        """Move committed files to where they are read."""
        _publish(self._staged.log, self.storage)
        _publish(self._staged.quarantine, self.storage.suffixed(QUARANTINE_SUFFIX))


@dataclass(frozen=True)
class _PublishedAndStaged:
    """The folders that a table's files are read from: published or still staged."""

    shown: Storage
    staged: Storage

    def files(self) -> FallbackFiles:
        return FallbackFiles(self.shown.files(), self.staged.files())


def _publish(log: DeltaLog, storage: Storage) -> None:
    """Move the committed files that are still staged; usually there are none."""
    waiting = list(log.storage.data_files())
    committed = set(log.paths()) if waiting else set()
    for path in waiting:
        if path in committed:
            storage.publish(path, first_name(path))
