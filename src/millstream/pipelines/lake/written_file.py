"""Files that tasks wrote and that no table has yet, with their statistics in Delta's format.

Only columns that every message has get bounds. `deltalake` takes a column without bounds, in a file that has some for
others, for one without values, and drops the file from filtered reads through Arrow. So a table declares which columns
have bounds, and a file has those of all or of none. Row groups have bounds for all columns, which readers use as well.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa


class Written(NamedTuple):
    """One file; it is sent to the driver through Arrow and JSON."""

    path: str
    """The path relative to the table."""
    rows: int
    bytes: int
    stats: str
    """Counts and bounds, as Delta's JSON."""
    partition_values: dict[str, str]


def to_json(files: Iterable[Written]) -> str:
    """Encode files."""
    return json.dumps([list(file) for file in files])


def from_json(text: str) -> list[Written]:
    """Decode files; raise `msgspec.ValidationError` if the text is malformed."""
    return msgspec.json.decode(text, type=list[Written])


BOUNDED: Final = ("partition", "offset", "timestamp")
"""The columns by which files are skipped."""


def has_group_bounds(kind: pa.DataType) -> bool:
    """Whether row groups have bounds for columns of this type; those of raw bytes would waste space."""
    return not (pa.types.is_binary(kind) or pa.types.is_nested(kind))


def stats_json(metadata: Any) -> str:
    """Return the statistics of a file from its footer."""
    positions = {metadata.schema.column(at).path: at for at in range(metadata.num_columns)}
    bounds = {name: _bounds(metadata, positions[name]) for name in BOUNDED}
    stats: dict[str, Any] = {"numRecords": metadata.num_rows}
    if all(bounds.values()):
        found = {name: both for name, both in bounds.items() if both is not None}
        stats["minValues"] = {name: low for name, (low, _high) in found.items()}
        stats["maxValues"] = {name: high for name, (_low, high) in found.items()}
        stats["nullCount"] = dict.fromkeys(found, 0)
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
        # Producers send times that no calendar has.
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
