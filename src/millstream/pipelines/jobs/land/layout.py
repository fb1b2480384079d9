"""The columns of landed tables: those of every record, those of the hour it was landed in, and decoded payloads."""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from millstream.pipelines.lake.columns import RAW

RECORD_NAMES: Final = ("partition", "offset", "timestamp", "timestampType", "key", "value", "headers")
"""What is read of records for them, by the names that records have it under."""

_PREFIX: Final = "payload_"
_TAKEN: Final = frozenset(RAW.names)


def column_of(field: str) -> str:
    """The column for a field of payloads: its name, unless a column of every record has that name."""
    return _PREFIX + field if _is_taken(field) else field


def field_of(column: str) -> str:
    """The field of payloads that a column has."""
    rest = column.removeprefix(_PREFIX)
    return rest if rest != column and _is_taken(rest) else column


def payload_fields(schema: pa.Schema | None) -> pa.Schema:
    """The fields of payloads that a table has columns for, under the names that payloads give them."""
    if schema is None:
        return pa.schema([])
    return pa.schema([field.with_name(field_of(field.name)) for field in schema if field.name not in _TAKEN])


def table_schema(fields: pa.Schema) -> pa.Schema:
    """The columns of a table with these fields of payloads."""
    return pa.schema([*RAW, *(field.with_name(column_of(field.name)) for field in fields)])


def _is_taken(field: str) -> bool:
    name = field.lower()
    while name not in _TAKEN and name.startswith(_PREFIX):
        name = name.removeprefix(_PREFIX)
    return name in _TAKEN
