"""A topic as plain Parquet files in folders by day and hour, for readers that support nothing else.

Folders of files have no commits. Tasks therefore write to a staging folder, where a Delta log says which files are
committed; those are then moved to where they are read. A crash in between leaves files that are committed but not
moved: the next user of the table moves them. Readers see complete committed files, each once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

from millstream.core.lake_url import QUARANTINE_SUFFIX
from millstream.pipelines.lake.columns import FieldPath
from millstream.pipelines.lake.delta_log import CONFIGURATION, DeltaLog
from millstream.pipelines.lake.rewriting import SMALL_BYTES, CompactionResult, Run, Widening, first_name
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table import GRACE, LakeTable, TopicPartition
from millstream.pipelines.lake.table_file import WrittenFile


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


class ParquetTable(LakeTable):
    """A table of plain files: a Delta table in the staging folder that moves its files."""

    def __init__(self, storage: Storage, *, configuration: Mapping[str, str] = CONFIGURATION) -> None:
        staged = storage.staged()
        super().__init__(staged, DeltaLog(staged, configuration=configuration))
        self._published = storage

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        offsets = super().next_offsets(partitions)
        self._publish()
        return offsets

    def commit(
        self, files: Sequence[WrittenFile], offsets: Mapping[TopicPartition, tuple[int, int]], **more: Any
    ) -> bool:
        """Commit as a Delta table does, and move the files."""
        is_mine = super().commit(files, offsets, **more)
        self._publish()
        return is_mine

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> CompactionResult:
        """Do nothing: a reader that lists files while they are replaced would see rows twice, or not at all."""
        return CompactionResult()

    def widen(self, places: Sequence[FieldPath], *, run: Run, bytes_max: int) -> dict[FieldPath, str]:
        """Make long columns double.

        A rewritten file takes the original's name when it is moved into place, atomically: readers see every row once
        at any time, in some files still under the old type.
        """
        source = _PublishedAndStaged(self._published, self.storage)
        widening = Widening(self.log, source, run=run, bytes_max=bytes_max, may_be_deleted=True)
        refused = widening.widen(places)
        self._publish()
        return refused

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete files that were never committed, once older than the grace period."""
        self.recover()
        self._publish()
        return super().vacuum(grace=grace)

    def _files(self, log: DeltaLog) -> FallbackFiles:
        ending = QUARANTINE_SUFFIX if log is self.quarantine else ""
        return _PublishedAndStaged(self._published.suffixed(ending), log.storage).files()

    def _publish(self) -> None:
        """Move committed files to where they are read."""
        _publish(self.log, self._published)
        _publish(self.quarantine, self._published.suffixed(QUARANTINE_SUFFIX))


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
