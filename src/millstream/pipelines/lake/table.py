"""Lake tables: the interface that landing needs, whatever the format.

The table is the source of truth for its contents. Its commits carry, for each partition of each topic, the next offset
that is not in it, and a commit is accepted only if the table is still where the plan of the step started. A step that
runs twice, at the same time or after a crash, is therefore in the table once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol

import pyarrow as pa

from millstream.pipelines.lake.columns import Place
from millstream.pipelines.lake.rewriting import SMALL_BYTES, Compacted, Run
from millstream.pipelines.lake.table_file import Written
from millstream.pipelines.lake.task_writer import RowWriter

GRACE: Final = timedelta(days=7)

TopicPartition = tuple[str, int]
"""A topic id and a partition number."""


class LakeTable(Protocol):
    """One topic as a table, with a quarantine table. It may not exist yet."""

    def schema(self) -> pa.Schema | None:
        """Return the columns, partition columns included; None before the first commit."""

    def event_time(self) -> str | None:
        """Return the event time by which it is partitioned, as in `day(created_at)`; empty if it is the hour of
        landing, None before the first commit.
        """

    def fix(self, fixed: Mapping[Place, str]) -> None:
        """Remember fields whose columns never become double, with the reasons, if the table does not exist yet."""

    def fixed(self) -> dict[Place, str]:
        """Return what `fix` has stored with the table."""

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the next offset that is not in the table, for those of the partitions that have one.

        This is where a step starts. Work that a crash left half done is completed first: a committed step is in the
        table and in its quarantine when this returns.
        """

    def reached(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """Return the same for readers: nothing is written, and half-done work is not completed."""

    def writer(
        self, schema: pa.Schema, topic_id: str, *, landed: datetime | None = None, attempt: str = ""
    ) -> RowWriter:
        """Return a writer of files for this table; it can be pickled for use in tasks.

        `schema` is the table's with what `commit` is to add (see `columns.extended`). Files are laid out by the time
        `landed`, in UTC: give all tasks of a step the same. A writer is for the rows of one topic. File names contain
        the `attempt`, so that what an attempt left can be found.
        """

    def quarantine_writer(self, topic_id: str, *, landed: datetime | None = None, attempt: str = "") -> RowWriter:
        """Return a writer of files for the quarantine table (columns: `columns.QUARANTINE`)."""

    def commit(
        self,
        files: Sequence[Written],
        offsets: Mapping[TopicPartition, tuple[int, int]],
        *,
        schema: pa.Schema,
        quarantined: Sequence[Written] = (),
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
        """

    def discard(self, files: Iterable[Written], quarantined: Iterable[Written] = ()) -> None:
        """Delete files for which no commit was ever tried, if possible."""

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> Compacted:
        """Compact the small files of hours that ended before a time; readers see no difference.

        It may take long; `progress` is called after each piece.
        """

    def widen(self, places: Sequence[Place], *, run: Run, bytes_max: int) -> dict[Place, str]:
        """Make long columns, or fields in them, double; return the reasons for those that stay long.

        `run` rewrites all files, and one commit replaces the originals. Nothing else changes: rows, folders and offsets
        are the same. A table larger than the limit stays as it is, and so does a column with numbers that a double
        cannot hold. Files that others land meanwhile under the old columns are refused (`StalePlan`).
        """

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete files that are unreferenced or were replaced by a compaction, once older than the grace period.

        The grace period has to exceed the duration of any step and any reader. Return how many there were.
        """

    def scan(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield the rows of one partition's offset range, in order, without partition columns.

        Nothing is written, even if a crash left work half done.
        """

    def scan_quarantined(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Yield quarantined rows in the same way."""

    def landed_since(self, moment: datetime, columns: Sequence[str]) -> Iterator[tuple[datetime, pa.RecordBatch]]:
        """Yield rows landed in the hour of a time or later, each with that hour, in no order."""
