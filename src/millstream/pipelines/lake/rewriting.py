"""Rewrites files of a table: small ones are compacted, and columns are widened.

Checking and rewriting single files for a wider column is the work of tasks: both can be pickled, and return a result as
text.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
import uuid
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple, Protocol, TypeVar

import deltalake
import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from deltalake.transaction import RemoveAction

from millstream.core.errors import Conflict
from millstream.pipelines.lake.columns import (
    EXACT_MAX,
    FieldPath,
    file_schema,
    inexact_reason,
    retyped,
    values_at,
    widened_paths,
)
from millstream.pipelines.lake.delta_log import DeltaLog, added, schema_of
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.table_file import ActiveFile, WrittenFile, active_files, from_json, to_json
from millstream.pipelines.lake.task_writer import (
    BATCH_ROWS,
    FILE_BYTES,
    OpenFile,
    TaskWriter,
    ordered,
    read_group,
    row_groups,
)

_OWN: Final = re.compile(r"[^.]+(?:\.[0-9a-f]{16})?\.parquet")
"""The names of files that Millstream wrote or rewrote."""


class Files(Protocol):
    def files(self) -> Any:
        """Return an Arrow file system, or an object that opens files like one."""


class FileShare(Protocol):
    """One of the pieces that work is divided into."""

    @property
    def path(self) -> str:
        """Return its file, or another identifier."""

    @property
    def bytes(self) -> int:
        """Return its size, by which work is divided."""


Share_contra = TypeVar("Share_contra", bound=FileShare, contravariant=True)


class FileWork(Protocol[Share_contra]):
    """Work on each of many files, in any order, by tasks anywhere."""

    @property
    def attempt(self) -> str:
        """Return the attempt, which is part of the names of written files."""

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        """Return the folders that it writes to."""

    def __call__(self, file: Share_contra) -> str:
        """Process a file and return the result."""

    def discard(self, results: Iterable[str]) -> None:
        """Undo results that will not be used."""


Run = Callable[[FileWork[ActiveFile], Sequence[ActiveFile]], Mapping[str, str]]
"""Runs work on files and returns the results by path."""


@dataclass(frozen=True, kw_only=True)
class InexactIntegers:
    """Finds integers that a double cannot hold, at the paths that are to become double."""

    source: Files
    places: tuple[FieldPath, ...]
    attempt: str = ""

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        return []

    def __call__(self, file: ActiveFile) -> str:
        """Return such a number or null for each path."""
        try:
            with self.source.files().open_input_file(file.path) as opened:
                parquet = pq.ParquetFile(opened)
                return json.dumps([_inexact(parquet, place) for place in self.places])
        except FileNotFoundError:
            # Plain files may have been deleted on purpose; a Delta table without one fails when it is rewritten.
            return json.dumps([None] * len(self.places))

    def discard(self, results: Iterable[str]) -> None:
        """Do nothing: no files were written."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """Rewrites files under another schema; names contain the original file and the attempt."""

    source: Files
    storage: Storage
    """The storage of the new files."""
    schema: pa.Schema
    may_be_deleted: bool = False
    """Whether missing files were deleted on purpose."""
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        return [(self.storage, "")]

    def __call__(self, file: ActiveFile) -> str:
        """Return the rewritten file; none if the original is gone."""
        source, schema = self.source.files(), file_schema(self.schema)
        try:
            groups = row_groups(source, [file.path])
        except FileNotFoundError:
            if self.may_be_deleted:
                return to_json([])
            raise
        opened = OpenFile(self.storage, renamed(file.path, self.attempt), schema)
        try:
            for group in groups:
                opened.write_group(read_group(source, group, schema))
            values = {name: value for name, value in file.partition_values.items() if value is not None}
            return to_json([opened.close(values)])
        except BaseException:
            opened.abort()
            raise

    def discard(self, results: Iterable[str]) -> None:
        for result in results:
            self.delete(from_json(result))

    def delete(self, files: Iterable[WrittenFile]) -> None:
        for file in files:
            self.storage.delete(file.path)


def decode_numbers(result: str) -> list[int | None]:
    return msgspec.json.decode(result, type=list[int | None])


def renamed(path: str, attempt: str) -> str:
    folder, slash, name = path.rpartition("/")
    stem = name.partition(".")[0]
    if not _OWN.fullmatch(name):
        # Other programs distinguish files by what precedes the first dot.
        stem = f"{stem}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return f"{folder}{slash}{stem}.{attempt}.parquet"


def first_name(path: str) -> str:
    """Return the path of the original file, however often it was rewritten."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}.parquet"


def _inexact(file: pq.ParquetFile, path: FieldPath) -> int | None:
    """Return a number in a file that a double cannot hold; None if doubles hold all of them."""
    if path[0] not in file.schema_arrow.names:
        return None
    position = file.schema_arrow.get_field_index(path[0])
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        bounds = _bounds(group, path[0]) if pa.types.is_int64(file.schema_arrow.field(position).type) else None
        if bounds is None:
            batches = file.iter_batches(BATCH_ROWS, [index], [path[0]])
            candidates = [_farthest(batch.column(0), path[1:]) for batch in batches]
        else:
            candidates = [max(bounds, key=abs)]
        for number in candidates:
            if number is not None and abs(number) > EXACT_MAX:
                return number
    return None


def _bounds(group: Any, column: str) -> tuple[int, int] | None:
    """Return the bounds of a column in a row group, if it has any."""
    for at in range(group.num_columns):
        chunk = group.column(at)
        if chunk.path_in_schema == column:
            statistics = chunk.statistics
            has = statistics is not None and statistics.has_min_max
            return (int(statistics.min), int(statistics.max)) if has else None
    return None


def _farthest(column: pa.Array, path: FieldPath) -> int | None:
    """Return the number farthest from zero at a path of a column."""
    values = values_at(column, path)
    if values is None or not pa.types.is_integer(values.type):
        return None
    bounds = pc.min_max(values)
    ends = [end for end in (bounds["min"].as_py(), bounds["max"].as_py()) if end is not None]
    return max(ends, key=abs, default=None)


SMALL_BYTES: Final = FILE_BYTES // 2
ROUND_BYTES_MAX: Final = 8 * FILE_BYTES
ROUND_FILES_MAX: Final = 1000
COMPACTION_ATTEMPTS_MAX: Final = 100


class CompactionResult(NamedTuple):
    files_before: int = 0
    files_after: int = 0
    rows: int = 0

    def plus(self, other: CompactionResult) -> CompactionResult:
        return CompactionResult(*(mine + its for mine, its in zip(self, other, strict=True)))


def compact(
    log: DeltaLog, *, before: datetime, small_bytes: int, progress: Callable[[], None] = lambda: None
) -> CompactionResult:
    """Compact the files of hours that ended before a time; `progress` is called from time to time.

    There is one commit of removes and adds per partition of the table, for exactly the version of the log in which all
    replaced files were seen. Concurrent compactions replace them once, and files landed meanwhile are left alone.
    """
    table = log.refresh()
    total = CompactionResult()
    if table is None:
        return total
    schema = log.schema()
    for files in list(_rounds(list(active_files(table)), before, small_bytes)):
        written = _rewritten(log, files, schema, progress)
        if _replaced(log, files, written):
            total = total.plus(CompactionResult(len(files), len(written), sum(file.rows for file in written)))
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
            if sum(file.bytes for file in taken) + file.bytes > ROUND_BYTES_MAX or len(taken) >= ROUND_FILES_MAX:
                yield taken
                taken = []
            taken.append(file)
        if len(taken) > 1:
            yield taken


def _rewritten(
    log: DeltaLog, files: list[ActiveFile], schema: pa.Schema, progress: Callable[[], None]
) -> list[WrittenFile]:
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


def _replaced(log: DeltaLog, files: list[ActiveFile], written: list[WrittenFile]) -> bool:
    """Replace files; False if one of them is no longer part of the table."""
    paths = {file.path for file in files}
    for _attempt in range(COMPACTION_ATTEMPTS_MAX):
        log.refresh()
        if not paths <= set(log.paths()):
            return log.holds(written)
        now = int(time.time() * 1000)
        removed = [RemoveAction(file.path, False, now, file.bytes, file.partition_values) for file in files]
        if log.commit([*removed, *added(written, data_change=False)], {}):
            return True
    return log.holds(written)


WIDENING_ATTEMPTS_MAX: Final = 20
_GIB: Final = 1024**3


class Widening:
    """Widens long columns to double: every file is rewritten, and one commit replaces them all.

    Current readers do not support this type change in Delta's own format. The commit, which also has the new schema, is
    for exactly the version in which the replaced files were seen. If files were landed or compacted meanwhile, it comes
    too late: then only the new files are written, and it is tried again.
    """

    def __init__(self, log: DeltaLog, source: Files, *, run: Run, bytes_max: int, may_be_deleted: bool = False) -> None:
        self._log = log
        self._source = source
        self._run = run
        self._bytes_max = bytes_max
        self._may_be_deleted = may_be_deleted
        self._written: dict[str, list[WrittenFile]] = {}
        """The rewritten files, by the path of the original."""

    def widen(self, places: Sequence[FieldPath]) -> dict[FieldPath, str]:
        """Make long paths double; return the reasons for those that stay long."""
        table = self._log.refresh()
        if table is None:
            return {}
        files = list(active_files(table))
        size = sum(file.bytes for file in files)
        if size > self._bytes_max:
            return dict.fromkeys(places, self._too_large(size))
        refused = self._inexact(files, places)
        remaining = [place for place in places if place not in refused]
        if remaining:
            self._replace(remaining)
        return refused

    def _too_large(self, size: int) -> str:
        return (
            f"its table has {size / _GIB:.1f} GiB, and the limit is {self._bytes_max / _GIB:.1f} GiB: "
            "raise widen.max.bytes of the pipeline to widen it"
        )

    def _inexact(self, files: Sequence[ActiveFile], places: Sequence[FieldPath]) -> dict[FieldPath, str]:
        """Return the paths with numbers that doubles cannot hold, with the reasons."""
        look = InexactIntegers(source=self._source, places=tuple(places))
        refused: dict[FieldPath, str] = {}
        for found in self._run(look, files).values() if files else ():
            for place, number in zip(places, decode_numbers(found), strict=True):
                if number is not None:
                    refused[place] = inexact_reason(number)
        return refused

    def _replace(self, places: Sequence[FieldPath]) -> None:
        for _attempt in range(WIDENING_ATTEMPTS_MAX):
            table = self._log.refresh()
            if table is None or not self._needs_widening(table, places):
                # Another run widened the columns, or deleted the table.
                self._discard(committed=self._log.paths())
                return
            files = list(active_files(table))
            schema = retyped(schema_of(table), places, pa.float64())
            self._rewrite([file for file in files if file.path not in self._written], schema)
            present = [new for file in files for new in self._written[file.path]]
            if self._log.replace_all(present, schema):
                self._discard(committed=[file.path for file in present])
                return
        self._log.refresh()
        self._discard(committed=self._log.paths())
        raise Conflict(f"columns of {self._log.storage.url} could not be widened: other writers keep committing")

    def _needs_widening(self, table: deltalake.DeltaTable, places: Sequence[FieldPath]) -> bool:
        schema = schema_of(table)
        return any(widened_paths(schema, retyped(schema, places, pa.float64())))

    def _rewrite(self, files: Sequence[ActiveFile], schema: pa.Schema) -> None:
        rewrite = Rewrite(
            source=self._source, storage=self._log.storage, schema=schema, may_be_deleted=self._may_be_deleted
        )
        try:
            done = self._run(rewrite, files) if files else {}
        except BaseException:
            # The commit of an earlier attempt was refused, and this one was not tried.
            self._discard(committed=self._log.paths())
            raise
        self._written.update({path: from_json(result) for path, result in done.items()})

    def _discard(self, committed: Sequence[str]) -> None:
        """Delete written files that are not part of the table: the commit that named them was refused."""
        held = set(committed)
        for files in self._written.values():
            for file in files:
                if file.path not in held:
                    self._log.storage.delete(file.path)
        self._written = {}
