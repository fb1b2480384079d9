"""The files of a Delta table at a version of its log, with what is known of each without opening it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

import deltalake
import pyarrow as pa

from millstream.pipelines.lake.columns import APPEND_DAY, APPEND_HOUR

_VALUE: Final = "partition."
"""How the columns of partition values begin in the library's list of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveFile:
    """One file."""

    path: str
    bytes: int
    partitions: tuple[int, int] | None
    """The smallest and largest partition number in it."""
    offsets: tuple[int, int] | None
    values: tuple[tuple[str, str], ...]
    """Its partition values by column, as the log has them."""
    added: datetime
    """When it was added to the table."""

    @property
    def topic_id(self) -> str:
        """Return the id of the topic whose rows it holds, from the file name; empty if another program wrote the
        file.
        """
        return topic_of(self.path)

    @property
    def hour_start(self) -> datetime:
        """Return the hour in which its rows were landed; the latest, if the table is partitioned by event time."""
        values = dict(self.values)
        if APPEND_DAY not in values:
            return self.added.replace(minute=0, second=0, microsecond=0)
        return datetime.fromisoformat(values[APPEND_DAY]).replace(hour=int(values[APPEND_HOUR]), tzinfo=UTC)

    @property
    def partition_values(self) -> dict[str, str | None]:
        """Return its partition values, as the log has them."""
        return dict(self.values)


def topic_of(path: str) -> str:
    """Return the topic id in a file name; empty if another program wrote the file."""
    topic_id, found, _rest = path.rpartition("/")[2].partition("_")
    return topic_id if found else ""


def active_files(table: deltalake.DeltaTable) -> Iterator[ActiveFile]:
    """Return the files of a table as its handle last read it."""
    found = pa.table(table.get_add_actions(flatten=True))
    partitioned = [name for name in found.schema.names if name.startswith(_VALUE)]
    values = [[str(value) for value in found.column(name).to_pylist()] for name in partitioned]
    by_file = list(zip(*values, strict=True)) if values else [()] * len(found)
    names = [name.removeprefix(_VALUE) for name in partitioned]
    bounds = [_column(found, f"{bound}.{name}") for name in ("partition", "offset") for bound in ("min", "max")]
    columns = [found.column(name).to_pylist() for name in ("path", "size_bytes", "modification_time")]
    for path, size, added, valued, *ends in zip(*columns, by_file, *bounds, strict=True):
        yield ActiveFile(
            path=path,
            bytes=size,
            partitions=None if ends[0] is None or ends[1] is None else (ends[0], ends[1]),
            offsets=None if ends[2] is None or ends[3] is None else (ends[2], ends[3]),
            values=tuple(zip(names, valued, strict=True)),
            added=_moment(added),
        )


def _moment(added: datetime | int) -> datetime:
    """Return the time at which a file was added, however the library reports it."""
    if isinstance(added, int):
        return datetime.fromtimestamp(added / 1000, UTC)
    return added.replace(tzinfo=UTC) if added.tzinfo is None else added.astimezone(UTC)


def _column(found: pa.Table, name: str) -> list[int | None]:
    """Return a column of bounds, which is missing if no file has any."""
    if name in found.schema.names:
        values: list[int | None] = found.column(name).to_pylist()
        return values
    return [None] * len(found)
