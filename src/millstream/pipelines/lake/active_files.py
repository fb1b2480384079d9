"""The files of a Delta table at a version of its log, with what is known of each without opening it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

import deltalake
import pyarrow as pa

from millstream.pipelines.lake.columns import APPEND_DAY, APPEND_HOUR


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveFile:
    """One file."""

    path: str
    bytes: int
    partitions: tuple[int, int] | None
    """The smallest and largest partition number in it."""
    offsets: tuple[int, int] | None
    day: date
    hour: int

    @property
    def topic_id(self) -> str:
        """Return the id of the topic whose rows it holds, from the file name; empty if another program wrote the
        file.
        """
        return topic_of(self.path)

    @property
    def hour_start(self) -> datetime:
        """Return the hour in which it was landed."""
        return datetime(self.day.year, self.day.month, self.day.day, tzinfo=UTC) + timedelta(hours=self.hour)

    @property
    def partition_values(self) -> dict[str, str | None]:
        """Return its partition values, as the log has them."""
        return {APPEND_DAY: self.day.isoformat(), APPEND_HOUR: str(self.hour)}


def topic_of(path: str) -> str:
    """Return the topic id in a file name; empty if another program wrote the file."""
    topic_id, found, _rest = path.rpartition("/")[2].partition("_")
    return topic_id if found else ""


def active_files(table: deltalake.DeltaTable) -> Iterator[ActiveFile]:
    """Return the files of a table as its handle last read it."""
    found = pa.table(table.get_add_actions(flatten=True))
    names = ("path", "size_bytes", f"partition.{APPEND_DAY}", f"partition.{APPEND_HOUR}")
    bounds = [_column(found, f"{bound}.{name}") for name in ("partition", "offset") for bound in ("min", "max")]
    columns = [found.column(name).to_pylist() for name in names]
    for path, size, day, hour, *ends in zip(*columns, *bounds, strict=True):
        yield ActiveFile(
            path=path,
            bytes=size,
            partitions=None if ends[0] is None or ends[1] is None else (ends[0], ends[1]),
            offsets=None if ends[2] is None or ends[3] is None else (ends[2], ends[3]),
            day=day,
            hour=hour,
        )


def _column(found: pa.Table, name: str) -> list[int | None]:
    """Return a column of bounds, which is missing if no file has any."""
    if name in found.schema.names:
        values: list[int | None] = found.column(name).to_pylist()
        return values
    return [None] * len(found)
