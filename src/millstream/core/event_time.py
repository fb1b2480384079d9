"""The event time by which a landed table is partitioned: the day or the hour of one of its columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from millstream.core.errors import InvalidSetting
from millstream.core.payload_columns import PayloadColumn

DAY: Final = "day"
HOUR: Final = "hour"
MESSAGE_TIME: Final = "timestamp"
"""The column with the timestamp of the message itself."""

_WRITTEN: Final = re.compile(r"(?:(?P<unit>\w+)\s*\((?P<of>[^()]+)\)|(?P<alone>[^()]+))", re.IGNORECASE)
_TIMES: Final = ("timestamp", "timestamp_ntz", "date", "string", "bigint", "int", "double", "decimal")
"""The types of columns that can hold a time."""


@dataclass(frozen=True, slots=True)
class EventTime:
    """The day or the hour of a column."""

    unit: str
    column: str
    """A column of the table; dots lead into objects."""

    @classmethod
    def parse(cls, text: str) -> EventTime:
        """Parse `day(created_at)`, `hour(created_at)` or `created_at`; raise `InvalidSetting` for anything else."""
        found = _WRITTEN.fullmatch(text.strip())
        unit = DAY if found is None else (found["unit"] or DAY).lower()
        column = "" if found is None else (found["of"] or found["alone"]).strip()
        if unit not in (DAY, HOUR) or not all(column.split(".")):
            raise InvalidSetting(
                f"`partition.by` is day(COLUMN), hour(COLUMN) or COLUMN, as in day(created_at), not {text!r}"
            )
        return cls(unit, column)

    def __str__(self) -> str:
        return f"{self.unit}({self.column})"

    def check_columns(self, columns: Iterable[PayloadColumn]) -> None:
        """Raise `InvalidSetting` unless its column is one of the given ones, with a type that holds times."""
        if self.column == MESSAGE_TIME:
            return
        found: PayloadColumn | None = None
        parts: Iterable[PayloadColumn] = columns
        for name in self.column.split("."):
            # A field with the name of a column of every table has a prefix in the table.
            names = (name.lower(), name.lower().removeprefix("payload_"))
            found = next((one for one in parts if one.name.lower() in names), None)
            parts = () if found is None or found.type.name != "struct" else found.type.parts
        if found is None:
            raise InvalidSetting(f"`partition.by` names {self.column!r}, which `schema` does not have")
        if found.type.name not in _TIMES:
            raise InvalidSetting(
                f"`partition.by` names {self.column!r}, which `schema` declares as {found.type.name}; a time is a "
                "timestamp, a date, a text in ISO 8601, or a number of milliseconds since 1970"
            )
