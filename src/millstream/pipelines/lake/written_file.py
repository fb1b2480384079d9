"""Files that tasks wrote and that no table knows of yet, as tasks tell the driver of them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

import msgspec
import pyarrow as pa


class Written(NamedTuple):
    """One file. It goes through Arrow and JSON as it is."""

    path: str
    """Where it is, seen from the folder of its table."""
    rows: int
    bytes: int
    stats: str
    """Counts, smallest and largest values, as Delta keeps them: JSON."""
    partition_values: dict[str, str]


def to_json(files: Iterable[Written]) -> str:
    """Files as a text."""
    return json.dumps([list(file) for file in files])


def from_json(text: str) -> list[Written]:
    """The files of such a text; raises `msgspec.ValidationError` for what is none."""
    return msgspec.json.decode(text, type=list[Written])


BOUNDED: Final = ("partition", "offset", "timestamp")
"""The columns by which files are skipped."""


def has_group_bounds(kind: pa.DataType) -> bool:
    """Whether groups of rows have bounds for columns of this type; those of raw bytes would take room for nothing."""
    return not (pa.types.is_binary(kind) or pa.types.is_nested(kind))


def stats_json(metadata: Any) -> str:
    """The statistics of a file from the metadata of its footer."""
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
    """The smallest and the largest value of a column, unless it has nulls or values that cannot be told."""
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
    """A bound as JSON has it. Times have milliseconds, and those of an upper bound are rounded up."""
    if not isinstance(value, datetime):
        return value
    fraction = value.microsecond % 1000
    whole = value - timedelta(microseconds=fraction)
    if fraction and is_upper:
        whole = value + timedelta(microseconds=1000 - fraction)
    return whole.replace(tzinfo=None).isoformat(timespec="milliseconds") + "Z"
