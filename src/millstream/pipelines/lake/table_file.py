"""The files of tables: what tasks have written, with statistics in Delta's format, and what a version of a log has.

Only columns that every message has get bounds. If a file has bounds for some columns only, `deltalake` treats the
others as empty and drops the file from filtered reads through Arrow. So a table declares which columns have bounds, and
a file has those of all or of none. Row groups have bounds for all columns, which readers use as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final, NamedTuple

import deltalake
import msgspec
import pyarrow as pa

from millstream.pipelines.lake.columns import APPEND_DAY, APPEND_HOUR


class WrittenFile(NamedTuple):
    """A file; it is sent to the driver through Arrow and JSON."""

    path: str
    """The path relative to the table."""
    rows: int
    bytes: int
    stats: str
    """Counts and bounds, as Delta's JSON."""
    partition_values: dict[str, str]


def to_json(files: Iterable[WrittenFile]) -> str:
    return json.dumps([list(file) for file in files])


def from_json(text: str) -> list[WrittenFile]:
    """Decode files; raise `msgspec.ValidationError` if the text is malformed."""
    return msgspec.json.decode(text, type=list[WrittenFile])


BOUNDED: Final = ("partition", "offset", "timestamp")
"""The columns by which files are skipped."""


def has_group_bounds(kind: pa.DataType) -> bool:
    """Whether row groups have bounds for columns of this type; those of raw bytes would waste space."""
    return not (pa.types.is_binary(kind) or pa.types.is_nested(kind))


def stats_json(metadata: Any) -> str:
    positions = {metadata.schema.column(at).path: at for at in range(metadata.num_columns)}
    bounds = {name: _bounds(metadata, positions[name]) for name in BOUNDED}
    stats: dict[str, Any] = {"numRecords": metadata.num_rows}
    if all(bounds.values()):
        known = {name: both for name, both in bounds.items() if both is not None}
        stats["minValues"] = {name: low for name, (low, _high) in known.items()}
        stats["maxValues"] = {name: high for name, (_low, high) in known.items()}
        stats["nullCount"] = dict.fromkeys(known, 0)
    return json.dumps(stats)


def _bounds(metadata: Any, position: int) -> tuple[Any, Any] | None:
    """Return the bounds of a column, unless it has nulls or unrepresentable values."""
    groups = [metadata.row_group(at).column(position).statistics for at in range(metadata.num_row_groups)]
    if any(group is None or not group.has_min_max or group.null_count != 0 for group in groups):
        return None
    try:
        low, high = min(group.min for group in groups), max(group.max for group in groups)
        return _bound(low, is_upper=False), _bound(high, is_upper=True)
    except (OverflowError, ValueError):
        # Producers send timestamps outside the range of the calendar.
        return None


def _bound(value: Any, *, is_upper: bool) -> Any:
    """Encode a bound as JSON. Times have milliseconds, rounded up for an upper bound."""
    if not isinstance(value, datetime):
        return value
    fraction = value.microsecond % 1000
    whole = value - timedelta(microseconds=fraction)
    if fraction and is_upper:
        whole = value + timedelta(microseconds=1000 - fraction)
    return whole.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"


_VALUE: Final = "partition."
"""How the columns of partition values begin in the library's list of files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ActiveFile:
    """A file that a version of a table consists of."""

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
    topic_id, separator, _rest = path.rpartition("/")[2].partition("_")
    return topic_id if separator else ""


def active_files(table: deltalake.DeltaTable) -> Iterator[ActiveFile]:
    """Return the files of a table as its handle last read it."""
    actions = pa.table(table.get_add_actions(flatten=True))
    partitioned = [name for name in actions.schema.names if name.startswith(_VALUE)]
    values = [[str(value) for value in actions.column(name).to_pylist()] for name in partitioned]
    by_file = list(zip(*values, strict=True)) if values else [()] * len(actions)
    names = [name.removeprefix(_VALUE) for name in partitioned]
    bounds = [_column(actions, f"{bound}.{name}") for name in ("partition", "offset") for bound in ("min", "max")]
    columns = [actions.column(name).to_pylist() for name in ("path", "size_bytes", "modification_time")]
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


def _column(statistics: pa.Table, name: str) -> list[int | None]:
    """Return a column of bounds, which is missing if no file has any."""
    if name in statistics.schema.names:
        values: list[int | None] = statistics.column(name).to_pylist()
        return values
    return [None] * len(statistics)
