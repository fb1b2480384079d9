"""What tasks do with single files of a table whose columns are widened: look into them, and write them anew.

Both can be pickled, and tell what came of a file as a text.
"""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

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
"""Up to here a double holds every whole number."""
_OWN: Final = re.compile(r"[^.]+(?:\.[0-9a-f]{16})?\.parquet")
"""How files are called that Millstream wrote, once or anew."""


class Files(Protocol):
    """Where files are read from."""

    def files(self) -> Any:
        """A file system of Arrow, or what opens files as one does."""


class FileWork(Protocol):
    """What is done with each of many files, in any order, by tasks anywhere."""

    @property
    def attempt(self) -> str:
        """What the names of files have that it writes."""

    def __call__(self, file: ActiveFile) -> str:
        """Do it, and tell what came of it."""

    def discard(self, results: Iterable[str]) -> None:
        """Undo what was told of files, since nobody will hear of it."""


Run = Callable[[FileWork, Sequence[ActiveFile]], Mapping[str, str]]
"""Does work with files and gives what was told of each, by its path."""


@dataclass(frozen=True, kw_only=True)
class Look:
    """Finds whole numbers that a double does not hold, in the places that are to become double."""

    source: Files
    places: tuple[Place, ...]
    attempt: str = ""

    def __call__(self, file: ActiveFile) -> str:
        """For each place such a number, or null."""
        try:
            with self.source.files().open_input_file(file.path) as opened:
                parquet = pq.ParquetFile(opened)
                return json.dumps([_inexact(parquet, place) for place in self.places])
        except FileNotFoundError:
            # Whoever deletes plain files wants to be rid of them; a Delta table without one fails when it is rewritten.
            return json.dumps([None] * len(self.places))

    def discard(self, results: Iterable[str]) -> None:
        """Nothing was done."""


@dataclass(frozen=True, kw_only=True)
class Rewrite:
    """Writes files anew by a schema; names say of which file each is, and which attempt wrote it."""

    source: Files
    storage: Storage
    """Where they are written to."""
    schema: pa.Schema
    may_be_deleted: bool = False
    """Whether files that are not there were deleted by somebody who wants it so."""
    attempt: str = field(default_factory=lambda: uuid.uuid4().hex[:16])

    def __call__(self, file: ActiveFile) -> str:
        """The file that has its rows now; none if it is gone."""
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
        """Delete what was written."""
        for result in results:
            self.delete(from_json(result))

    def delete(self, files: Iterable[Written]) -> None:
        """Delete files that no commit names."""
        for file in files:
            self.storage.delete(file.path)


def numbers_found(result: str) -> list[int | None]:
    """What a look has told of a file."""
    return msgspec.json.decode(result, type=list[int | None])


def renamed(path: str, attempt: str) -> str:
    """The path of a file that has the rows of another."""
    folder, slash, name = path.rpartition("/")
    stem = name.partition(".")[0]
    if not _OWN.fullmatch(name):
        # Other programs tell files apart by what stands behind the first point.
        stem = f"{stem}-{hashlib.sha256(name.encode()).hexdigest()[:32]}"
    return f"{folder}{slash}{stem}.{attempt}.parquet"


def first_name(path: str) -> str:
    """The path that a file had before it was written anew, however often that was."""
    folder, slash, name = path.rpartition("/")
    return f"{folder}{slash}{name.partition('.')[0]}.parquet"


def _inexact(file: pq.ParquetFile, place: Place) -> int | None:
    """A number of a file that a double does not hold; None if there is none."""
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
    """The bounds of a column in a group of rows, if it has any."""
    for at in range(group.num_columns):
        chunk = group.column(at)
        if chunk.path_in_schema == column:
            statistics = chunk.statistics
            has = statistics is not None and statistics.has_min_max
            return (int(statistics.min), int(statistics.max)) if has else None
    return None


def _farthest(column: pa.Array, way: Place) -> int | None:
    """The number that is farthest from zero at a place of a column."""
    values = values_at(column, way)
    if values is None or not pa.types.is_integer(values.type):
        return None
    bounds = pc.min_max(values)
    ends = [end for end in (bounds["min"].as_py(), bounds["max"].as_py()) if end is not None]
    return max(ends, key=abs, default=None)
