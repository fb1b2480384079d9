"""What is known of a file without reading it: counts, smallest and largest values, as Delta wants them."""

from __future__ import annotations

import json
import math
from datetime import date, datetime, timedelta
from typing import Any, Final

import pyarrow as pa

TEXT_MAX: Final = 32
"""Longer texts get no bounds: a bound that is cut has to be raised, and nothing here is found by long texts."""


def has_bounds(kind: pa.DataType) -> bool:
    """Whether files are skipped by the values of columns of this type."""
    return bool(
        pa.types.is_integer(kind)
        or pa.types.is_floating(kind)
        or pa.types.is_string(kind)
        or pa.types.is_date(kind)
        or pa.types.is_timestamp(kind)
    )


def stats_json(schema: pa.Schema, metadata: Any) -> str:
    """The statistics of a file that was written by a schema, from the metadata of its footer."""
    nulls: dict[str, int] = {}
    lowest: dict[str, Any] = {}
    highest: dict[str, Any] = {}
    positions = {metadata.schema.column(at).path: at for at in range(metadata.num_columns)}
    for field in schema:
        position = positions.get(field.name)
        if position is None or not has_bounds(field.type):
            continue
        groups = [metadata.row_group(at).column(position).statistics for at in range(metadata.num_row_groups)]
        if any(group is None or group.null_count is None for group in groups):
            continue
        nulls[field.name] = sum(group.null_count for group in groups)
        bounds = _bounds(groups)
        if bounds is not None:
            lowest[field.name], highest[field.name] = bounds
    stats = {"numRecords": metadata.num_rows, "minValues": lowest, "maxValues": highest, "nullCount": nulls}
    return json.dumps(stats)


def _bounds(groups: list[Any]) -> tuple[Any, Any] | None:
    """The smallest and the largest value in all groups of rows, unless one of them cannot say."""
    filled = [group for group in groups if group.num_values > 0]
    if not filled or not all(group.has_min_max for group in filled):
        return None
    low, high = min(group.min for group in filled), max(group.max for group in filled)
    if any(isinstance(bound, float) and not math.isfinite(bound) for bound in (low, high)):
        return None
    if isinstance(low, str) and max(len(low), len(high)) > TEXT_MAX:
        return None
    return _text(low, is_upper=False), _text(high, is_upper=True)


def _text(value: Any, *, is_upper: bool) -> Any:
    """A bound as JSON has it. Times have milliseconds, and those of an upper bound are rounded up."""
    if isinstance(value, datetime):
        fraction = value.microsecond % 1000
        whole = value - timedelta(microseconds=fraction)
        if fraction and is_upper:
            whole += timedelta(milliseconds=1)
        return whole.strftime("%Y-%m-%dT%H:%M:%S.") + f"{whole.microsecond // 1000:03d}Z"
    if isinstance(value, date):
        return value.isoformat()
    return value
