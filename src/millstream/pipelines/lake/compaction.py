"""Compacts the small files of past hours, with one commit of removes and adds per partition of the table.

The commit is for exactly the version of the log in which all replaced files were seen, so concurrent compactions
replace them once, and files landed meanwhile are left alone.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from datetime import datetime, timedelta
from typing import Final, NamedTuple

import pyarrow as pa
from deltalake.transaction import RemoveAction

from millstream.pipelines.lake.active_files import ActiveFile, active_files
from millstream.pipelines.lake.columns import file_schema
from millstream.pipelines.lake.delta_log import DeltaLog, added
from millstream.pipelines.lake.task_writer import FILE_BYTES, TaskWriter, ordered, row_groups
from millstream.pipelines.lake.written_file import Written

SMALL_BYTES: Final = FILE_BYTES // 2
ROUND_BYTES_MAX: Final = 8 * FILE_BYTES
ROUND_FILES_MAX: Final = 1000
ATTEMPTS_MAX: Final = 100


class Compacted(NamedTuple):
    """The result of a compaction."""

    files_before: int = 0
    files_after: int = 0
    rows: int = 0

    def plus(self, other: Compacted) -> Compacted:
        """Return the sum of both."""
        return Compacted(*(mine + its for mine, its in zip(self, other, strict=True)))


def compact(
    log: DeltaLog, *, before: datetime, small_bytes: int, progress: Callable[[], None] = lambda: None
) -> Compacted:
    """Compact the files of hours that ended before a time; `progress` is called from time to time."""
    table = log.refresh()
    total = Compacted()
    if table is None:
        return total
    schema = log.schema()
    for files in list(_rounds(list(active_files(table)), before, small_bytes)):
        written = _rewritten(log, files, schema, progress)
        if _replaced(log, files, written):
            total = total.plus(Compacted(len(files), len(written), sum(file.rows for file in written)))
    return total


def _rounds(files: list[ActiveFile], before: datetime, small_bytes: int) -> Iterator[list[ActiveFile]]:
    """Yield the small files of a partition of the table and a topic that one commit compacts."""
    folders: dict[tuple[tuple[tuple[str, str], ...], str], list[ActiveFile]] = defaultdict(list)
    for file in files:
        if file.bytes < small_bytes and file.hour_start + timedelta(hours=1) <= before:
            folders[file.values, file.topic_id].append(file)
    for _folder, small in sorted(folders.items()):
        taken: list[ActiveFile] = []
        for file in sorted(small, key=lambda file: (file.offsets or (0, 0), file.path)):
            if sum(each.bytes for each in taken) + file.bytes > ROUND_BYTES_MAX or len(taken) >= ROUND_FILES_MAX:
                yield taken
                taken = []
            taken.append(file)
        if len(taken) > 1:
            yield taken


def _rewritten(
    log: DeltaLog, files: list[ActiveFile], schema: pa.Schema, progress: Callable[[], None]
) -> list[Written]:
    """Write the rows of files, in order, to new ones."""
    writer = TaskWriter(log.storage, schema, files[0].topic_id, values=dict(files[0].values))
    source = log.storage.files()
    try:
        for batch in ordered(source, row_groups(source, [file.path for file in files]), file_schema(schema)):
            writer.write(batch)
            progress()
        return writer.close()
    except BaseException:
        writer.abort()
        raise


def _replaced(log: DeltaLog, files: list[ActiveFile], written: list[Written]) -> bool:
    """Replace files by others; False if one of them is not part of the table any more."""
    paths = {file.path for file in files}
    for _attempt in range(ATTEMPTS_MAX):
        log.refresh()
        if not paths <= set(log.paths()):
            return log.holds(written)
        now = int(time.time() * 1000)
        removed = [RemoveAction(file.path, False, now, file.bytes, file.partition_values) for file in files]
        if log.commit([*removed, *added(written, data_change=False)], {}):
            return True
    return log.holds(written)
