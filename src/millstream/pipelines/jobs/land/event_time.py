"""Event times of rows, for tables that are partitioned by them.

A time is a timestamp, a date, a text in ISO 8601 or a number of milliseconds since 1970. Times without a zone are in
UTC. A row without one has no place in the table, and goes to the quarantine.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.payload_columns import HOUR, EventTime
from millstream.pipelines.lake.columns import EVENT_COLUMNS, EVENT_DAY, EVENT_HOUR, values_at

NO_TIME: Final = ", and the table is partitioned by it"
"""How the reason for a row without an event time ends."""

FOLDERS_MAX: Final = 1000
"""The most days or hours of one task, not counting those around the present: each becomes a file that is synced."""

TOO_MANY: Final = ", more than it may write folders for"
"""How the reason for a row ends whose event time would be one folder too many."""

_PRESENT_HOURS: Final = 7 * 24
"""Times this close to the present always get a folder, so that no producer can use up the limit for the others."""

_UTC: Final = pa.timestamp("us", tz="UTC")
_FIRST_US: Final = -62_135_596_800_000_000
_LAST_US: Final = 253_402_300_799_999_999
"""The years 1 to 9999: folder names cannot represent others."""
_MILLISECONDS_MIN: Final = 100_000_000_000
"""Smaller numbers are more likely seconds than milliseconds of 1973 or before."""
_HOUR_US: Final = 3_600_000_000
_FINER: Final = r"(\.[0-9]{6})[0-9]+"
"""The digits of a time beyond microseconds."""
_LEAP_YEAR: Final = r"(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)"
_DAY: Final = (
    r"(?:[0-9]{4}-(?:(?:0[1-9]|1[0-2])-(?:0[1-9]|1[0-9]|2[0-8])|(?:0[13-9]|1[0-2])-(?:29|30)|(?:0[13578]|1[02])-31)"
    rf"|{_LEAP_YEAR}-02-29)"
)
_CLOCK: Final = r"(?:[ T](?:[01][0-9]|2[0-3])(?::[0-5][0-9](?::[0-5][0-9](?:\.[0-9]{1,6})?)?)?)"
_UNZONED: Final = rf"^{_DAY}{_CLOCK}?$"
_ZONED: Final = rf"^{_DAY}{_CLOCK}(?:Z|[+-](?:[01][0-9]|2[0-3])(?::?[0-5][0-9])?)$"
"""Exactly the texts that Arrow can parse: one other text would make it refuse all of them."""
_SHOWN_MAX: Final = 60


@dataclass(frozen=True, slots=True)
class EventTimeRule:
    """The rule that derives the partition columns of rows from their event time."""

    event_time: EventTime

    def apply(self, rows: pa.RecordBatch, reasons: pa.Array) -> tuple[pa.RecordBatch, pa.Array]:
        """Add the partition columns, and reasons for rows that have no event time."""
        values = self._values(rows)
        times = event_times(values)
        hours = _floor(times, _HOUR_US)
        days = pc.cast(_floor(times, 24 * _HOUR_US), pa.int32()).cast(pa.date32())
        columns = {EVENT_DAY: days}
        if self.event_time.unit == HOUR:
            by_day = np.asarray(hours.fill_null(0).to_numpy()) % 24
            columns[EVENT_HOUR] = pa.array(by_day, pa.int32())
        for field in EVENT_COLUMNS[self.event_time.unit]:
            rows = rows.append_column(field, columns[field.name])
        return rows, self._reasons(values, times, reasons)

    def _values(self, rows: pa.RecordBatch) -> pa.Array:
        """Return the column, whose name is found in any case; nulls if the rows have none."""
        first, *inner = self.event_time.column.split(".")
        name = next((name for name in rows.schema.names if name.lower() == first.lower()), None)
        values = None if name is None else values_at(rows.column(name), tuple(inner))
        return pa.nulls(len(rows)) if values is None else values

    def _reasons(self, values: pa.Array, times: pa.Array, reasons: pa.Array) -> pa.Array:
        lacking = pc.and_(pc.is_null(times), pc.is_null(reasons))
        texts: list[str | None] = [None] * len(times)
        for row in np.flatnonzero(lacking.to_numpy(zero_copy_only=False)).tolist():
            texts[row] = f"{self.event_time.column}{_describe_problem(values[row].as_py())}{NO_TIME}"
        return reasons if lacking.true_count == 0 else pc.coalesce(reasons, pa.array(texts, pa.string()))


class EventFolders:
    """The folders that one task writes to: producers choose the times, so their number is limited."""

    def __init__(self, unit: str, now: Callable[[], float] = time.time) -> None:
        self._unit = unit
        self._now = now
        self._further: set[int] = set()
        """The hours since 1970 that are not around the present."""

    def limit(self, rows: pa.RecordBatch, reasons: pa.Array) -> pa.Array:
        """Add reasons for rows whose folder would exceed the limit; folders with many rows take precedence."""
        hours = rows.column(EVENT_DAY).cast(pa.int32()).fill_null(0).to_numpy().astype(np.int64) * 24
        if EVENT_HOUR in rows.schema.names:
            hours = hours + rows.column(EVENT_HOUR).to_numpy()
        is_landed = pc.is_null(reasons).to_numpy(zero_copy_only=False)
        is_further = is_landed & (np.abs(hours - int(self._now() // 3600)) > _PRESENT_HOURS)
        further, counts = np.unique(hours[is_further], return_counts=True)
        by_count = further[np.argsort(-counts, kind="stable")].tolist()
        new = [hour for hour in by_count if hour not in self._further]
        room = FOLDERS_MAX - len(self._further)
        self._further.update(new[:room])
        if len(new) <= room:
            return reasons
        is_refused = is_further & np.isin(hours, new[room:])
        text = f"the event times of one task are in more than {FOLDERS_MAX:,} {self._unit}s{TOO_MANY}"
        return pc.if_else(pa.array(is_refused), pa.scalar(text, pa.string()), reasons)


def _describe_problem(value: Any) -> str:
    if value is None:
        return " is missing or null"
    text = json.dumps(value, default=str, ensure_ascii=False)
    shown = text if len(text) <= _SHOWN_MAX else f"{text[:_SHOWN_MAX]}…"
    if isinstance(value, int | float) and not isinstance(value, bool):
        return f": {shown} is not a time in milliseconds since 1970"
    return f": {shown} is not a time"


def event_times(values: pa.Array) -> pa.Array:
    """Return values of a column as timestamps in UTC; null for those that are not."""
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        times = _from_text(pc.replace_substring_regex(values, _FINER, r"\1"))
    elif pa.types.is_timestamp(kind):
        times = values.cast(pa.timestamp("us", kind.tz), safe=False)
    elif pa.types.is_date(kind):
        times = values.cast(pa.timestamp("us"), safe=False)
    elif pa.types.is_integer(kind) or pa.types.is_floating(kind) or pa.types.is_decimal(kind):
        times = _from_milliseconds(values)
    else:
        times = pa.nulls(len(values), _UTC)
    numbers = times.cast(pa.int64())
    is_time = pc.and_(pc.greater_equal(numbers, _FIRST_US), pc.less_equal(numbers, _LAST_US))
    return pc.if_else(is_time, numbers, pa.scalar(None, pa.int64())).cast(_UTC)


def _from_milliseconds(values: pa.Array) -> pa.Array:
    numbers = values.cast(pa.float64(), safe=False)
    is_time = pc.and_(
        pc.greater_equal(numbers, float(_MILLISECONDS_MIN)), pc.less_equal(numbers, float(_LAST_US // 1000))
    )
    kept = pc.if_else(is_time, numbers, pa.scalar(None, pa.float64()))
    return pc.multiply(pc.cast(pc.floor(kept), pa.int64()), 1000).cast(_UTC)


def _from_text(texts: pa.Array) -> pa.Array:
    """Parse texts with or without a zone; others become null."""
    nothing = pa.scalar(None, texts.type)
    zoned, unzoned = (
        pc.if_else(pc.match_substring_regex(texts, pattern), texts, nothing).cast(kind).cast(pa.int64())
        for pattern, kind in ((_ZONED, _UTC), (_UNZONED, pa.timestamp("us")))
    )
    return pc.coalesce(zoned, unzoned).cast(_UTC)


def _floor(times: pa.Array, unit_us: int) -> pa.Array:
    """Return the number of whole units since 1970, also of earlier times."""
    numbers = times.cast(pa.int64())
    floored = np.floor_divide(numbers.fill_null(0).to_numpy(), unit_us)
    return pc.if_else(pc.is_valid(numbers), pa.array(floored, pa.int64()), pa.scalar(None, pa.int64()))
