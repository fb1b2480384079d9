"""A topic as plain Parquet files in folders by day and hour, for readers that know nothing else.

Folders of files have no commits. So tasks write to a folder beside, where a log as that of a Delta table says which
files are committed; those are then moved to where they are read. A crash in between leaves files that are committed and
not moved: whoever uses the table next moves them. Readers see whole files that are committed, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import pyarrow as pa

from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.lake.column_path import Place
from millstream.pipelines.lake.compaction import SMALL_BYTES, Compacted
from millstream.pipelines.lake.delta_log import DeltaLog
from millstream.pipelines.lake.delta_table import DeltaTable, landed_since
from millstream.pipelines.lake.rewriting import Run, first_name
from millstream.pipelines.lake.scan import Rows
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import GRACE, TopicPartition
from millstream.pipelines.lake.task_writer import TaskWriter
from millstream.pipelines.lake.widening import Widening
from millstream.pipelines.lake.written_file import Written


class FallbackFiles:
    """Opens files wherever they are now."""

    def __init__(self, one: Any, other: Any) -> None:
        self._one = one
        self._other = other

    def open_input_file(self, path: str) -> Any:
        """A file for reading; raises `FileNotFoundError` when it is nowhere."""
        shown = first_name(path)
        for place, name in ((self._one, shown), (self._other, path)):
            try:
                return place.open_input_file(name)
            except FileNotFoundError:
                continue
        # It may have been moved between the two looks.
        return self._one.open_input_file(shown)


class ParquetTable:
    """A `LakeTable` of plain files."""

    def __init__(self, storage: Storage) -> None:
        self.storage = storage
        self._staged = DeltaTable(storage.staged())

    def schema(self) -> pa.Schema | None:
        """The columns; None before the first commit."""
        return self._staged.schema()

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Where a step begins; see `LakeTable`."""
        found = self._staged.next_offsets(partitions)
        self._publish()
        return found

    def reached(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The same for whoever only reads; see `LakeTable`."""
        return self._staged.reached(partitions)

    def writer(
        self, schema: pa.Schema, topic_id: str, *, landed: datetime | None = None, attempt: str = ""
    ) -> TaskWriter:
        """A writer of files for this table."""
        return self._staged.writer(schema, topic_id, landed=landed, attempt=attempt)

    def quarantine_writer(self, topic_id: str, *, landed: datetime | None = None, attempt: str = "") -> TaskWriter:
        """A writer of files for the table of quarantined messages."""
        return self._staged.quarantine_writer(topic_id, landed=landed, attempt=attempt)

    def commit(
        self,
        files: Sequence[Written],
        offsets: Mapping[TopicPartition, tuple[int, int]],
        *,
        schema: pa.Schema,
        quarantined: Sequence[Written] = (),
    ) -> bool:
        """Add files and move on, all of it or nothing; see `LakeTable`."""
        is_mine = self._staged.commit(files, offsets, schema=schema, quarantined=quarantined)
        self._publish()
        return is_mine

    def discard(self, files: Iterable[Written], quarantined: Iterable[Written] = ()) -> None:
        """Delete files that no commit was tried for; see `LakeTable`."""
        self._staged.discard(files, quarantined)

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> Compacted:
        """Nothing: whoever lists files while others take their place would see rows twice, or not at all."""
        return Compacted()

    def widen(self, places: Sequence[Place], *, run: Run, bytes_max: int) -> dict[Place, str]:
        """Make columns of whole numbers double; see `LakeTable`.

        A file that is written anew takes the name of the first one when it is moved into place, as a whole: whoever
        lists files sees every row once all the time, in some files still under the old type.
        """
        source = _PublishedAndStaged(self.storage, self._staged.storage)
        widening = Widening(self._staged.log, source, run=run, bytes_max=bytes_max, may_be_deleted=True)
        refused = widening.widen(places)
        self._publish()
        return refused

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete files that were never committed, once they are older than the grace."""
        self._staged.recover()
        self._publish()
        return self._staged.vacuum(grace=grace)

    def scan(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of one partition from an offset to before another, in their order."""
        return self._staged.scan_in(self._files(), Rows(topic_id, partition, start, end), columns)

    def scan_quarantined(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of the quarantine likewise."""
        files = self._files(QUARANTINE_SUFFIX)
        return self._staged.scan_quarantined_in(files, Rows(topic_id, partition, start, end), columns)

    def landed_since(self, moment: datetime, columns: Sequence[str]) -> Iterator[tuple[datetime, pa.RecordBatch]]:
        """Rows that were landed in the hour of a moment or later, each with that hour."""
        return landed_since(self._staged.log, self._files(), moment, columns)

    def _files(self, ending: str = "") -> FallbackFiles:
        return _PublishedAndStaged(self.storage.beside(ending), self._staged.storage.beside(ending)).files()

    def _publish(self) -> None:
        """Move what is committed to where it is read."""
        _publish(self._staged.log, self.storage)
        _publish(self._staged.quarantine, self.storage.beside(QUARANTINE_SUFFIX))


@dataclass(frozen=True)
class _PublishedAndStaged:
    """Where the files of a table are read from: where they are seen, or where they wait to be moved there."""

    shown: Storage
    staged: Storage

    def files(self) -> FallbackFiles:
        return FallbackFiles(self.shown.files(), self.staged.files())


def _publish(log: DeltaLog, storage: Storage) -> None:
    """Move the files that a log knows and that still wait; most of the time there are none."""
    waiting = list(log.storage.data_files())
    committed = set(log.paths()) if waiting else set()
    for path in waiting:
        if path in committed:
            storage.publish(path, first_name(path))
