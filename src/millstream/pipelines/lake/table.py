"""Lake tables: what landing needs of them, whatever they are made of.

The table is the truth about what is in it. Its commits carry, for each partition of each topic, the next offset that
is not in it, and one is accepted only if the table still stands where the plan of the step began. So a step that runs
twice, at the same time or after a crash, is in the table once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta
from typing import Final, Protocol

import pyarrow as pa

from millstream.pipelines.lake.column_path import Place
from millstream.pipelines.lake.compaction import SMALL_BYTES, Compacted
from millstream.pipelines.lake.rewriting import Run
from millstream.pipelines.lake.task_writer import TaskWriter
from millstream.pipelines.lake.written_file import Written

GRACE: Final = timedelta(days=7)

TopicPartition = tuple[str, int]
"""The id of a topic, and the number of a partition."""


class LakeTable(Protocol):
    """One topic as a table, with the table of its quarantined messages beside it. It may not exist yet."""

    def schema(self) -> pa.Schema | None:
        """The columns, those of the layout included; None before the first commit."""

    def next_offsets(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The next offset that is not in the table, for those of the partitions that have any.

        This is where a step begins. What a crash left half done is done first: a step that was committed is in the
        table and in its quarantine when this returns.
        """

    def reached(self, partitions: Iterable[TopicPartition]) -> dict[TopicPartition, int]:
        """The same for whoever only reads: nothing is written, and what a crash left half done is read as it is."""

    def writer(
        self, schema: pa.Schema, topic_id: str, *, landed: datetime | None = None, attempt: str = ""
    ) -> TaskWriter:
        """A writer of files for this table; can be pickled, for use in tasks.

        The `schema` is that of the table with what `commit` is to add (see `columns.extended`). Files are laid out by
        the moment `landed`, in UTC: give all tasks of a step the same. One writer is for rows of one topic. The names
        of its files have the `attempt`, so that what an attempt left can be found.
        """

    def quarantine_writer(self, topic_id: str, *, landed: datetime | None = None, attempt: str = "") -> TaskWriter:
        """A writer of files for the table of quarantined messages (columns: `columns.QUARANTINE`)."""

    def commit(
        self,
        files: Sequence[Written],
        offsets: Mapping[TopicPartition, tuple[int, int]],
        *,
        schema: pa.Schema,
        quarantined: Sequence[Written] = (),
    ) -> bool:
        """Add files and move on from the first offset of each partition to the second, all of it or nothing.

        The first is what `next_offsets` said, also where the log begins later by now; for a partition that it did not
        name any number does. The second is the next offset that is not in the files, and may be given without files.
        Columns of the schema that the table lacks are added before. Quarantined files are part of the same commit:
        they are in their table when this returns, or as soon as the table is used again after a crash.

        True when this did it, also when the answer of the store was lost; False when all of it had been done by
        another run: its rows are there, and these files are garbage for `vacuum`, never for the caller to delete.
        Raises `StalePlan` when the table stands elsewhere, so that the step has to be planned again, and
        `ColumnMismatch` when it has a column under another type.
        """

    def discard(self, files: Iterable[Written], quarantined: Iterable[Written] = ()) -> None:
        """Delete files that writers told of and that no commit was ever tried for, as far as that can be done."""

    def compact(
        self, *, before: datetime, small_bytes: int = SMALL_BYTES, progress: Callable[[], None] = lambda: None
    ) -> Compacted:
        """Make small files of hours that were over before a moment into large ones; readers see no difference.

        It may take long; `progress` is called whenever a piece is done.
        """

    def widen(self, places: Sequence[Place], *, run: Run, bytes_max: int) -> dict[Place, str]:
        """Make columns of whole numbers, or fields in them, double; for those that stay as they are, why.

        All files are written anew by what `run` has do it, and one commit puts them in the place of the others. Nothing
        else changes: rows, folders and offsets are the same. A table of more than so many bytes stays as it is, and so
        does a column that has numbers which no double is the same as. Files that others land meanwhile by the old
        columns are refused (`StalePlan`).
        """

    def vacuum(self, *, grace: timedelta = GRACE) -> int:
        """Delete files that no commit knows, or that a compaction replaced, once they are older than the grace.

        The grace has to be longer than any step and any reader takes. Returns how many there were.
        """

    def scan(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of one partition from an offset to before another, in their order; without the columns of the layout.

        Nothing is written for it, whatever a crash left half done.
        """

    def scan_quarantined(
        self, topic_id: str, partition: int, start: int, end: int, columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of the quarantine likewise."""

    def landed_since(self, moment: datetime, columns: Sequence[str]) -> Iterator[tuple[datetime, pa.RecordBatch]]:
        """Rows that were landed in the hour of a moment or later, each with that hour; in no order."""
