"""Work of tasks on single files of a table whose columns are widened: checking and rewriting them.

Both can be pickled, and return a result as text.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol, TypeVar

import msgspec
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from millstream.pipelines.lake.active_files import ActiveFile
from millstream.pipelines.lake.column_path import Place, values_at
from millstream.pipelines.lake.columns import file_schema
from millstream.pipelines.lake.storage import Storage
from millstream.pipelines.lake.task_writer import BATCH_ROWS, OpenFile, read_group, row_groups
from millstream.pipelines.lake.written_file import Written, from_json, to_json

EXACT_MAX: Final = 2**53
"""Doubles hold every integer up to here."""
_OWN: Final = re.compile(r"[^.]+(?:\.[0-9a-f]{16})?\.parquet")
"""The names of files that Millstream wrote or rewrote."""


class Files(Protocol):
    """The source of files."""

    def files(self) -> Any:
        """Return an Arrow file system, or an object that opens files like one."""


class FileShare(Protocol):
    """One of the pieces that work is divided into."""

    @property
    def path(self) -> str:
        """Return its file, or what else identifies it."""

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
class Look:
    """Finds integers that a double cannot hold, at the paths that are to become double."""

    source: Files
    places: tuple[Place, ...]
    attempt: str = ""

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        """Nothing is written."""
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
        """Nothing to undo."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """Rewrites files under another schema; names contain the original file and the attempt."""

    source: Files
    storage: Storage
    """Where the new files go."""
    schema: pa.Schema
    may_be_deleted: bool = False
    """Whether missing files were deleted on purpose."""
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    @property
    def output_folders(self) -> list[tuple[Storage, str]]:
        """Return the whole table."""
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
        """Delete the rewritten files."""
        for result in results:
            self.delete(from_json(result))

    def delete(self, files: Iterable[Written]) -> None:
        """Delete files that no commit names."""
        for file in files:
            self.storage.delete(file.path)


def numbers_found(result: str) -> list[int | None]:
    """Decode the result of a check."""
    return msgspec.json.decode(result, type=list[int | None])


def renamed(path: str, attempt: str) -> str:
    """Return the path of a rewritten file."""
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


def _inexact(file: pq.ParquetFile, place: Place) -> int | None:
    """Return a number in a file that a double cannot hold; None if there is none."""
    if place[0] not in file.schema_arrow.names:
        return None
    position = file.schema_arrow.get_field_index(place[0])
    for index in range(file.metadata.num_row_groups):
        group = file.metadata.row_group(index)
        bounds = _bounds(group, place[0]) if pa.types.is_int64(file.schema_arrow.field(position).type) else None
        if bounds is None:
            batches = file.iter_batches(BATCH_ROWS, [index], [place[0]])
            found = [_farthest(batch.column(0), place[1:]) for batch in batches]
        else:
            found = [max(bounds, key=abs)]
        for number in found:
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


def _farthest(column: pa.Array, way: Place) -> int | None:
    """Return the number farthest from zero at a path of a column."""
    values = values_at(column, way)
    if values is None or not pa.types.is_integer(values.type):
        return None
    bounds = pc.min_max(values)
    ends = [end for end in (bounds["min"].as_py(), bounds["max"].as_py()) if end is not None]
    return max(ends, key=abs, default=None)
