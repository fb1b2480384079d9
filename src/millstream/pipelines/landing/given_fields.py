"""The columns of payloads that a pipeline is given, as a table has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from millstream.lake.columns import widest
from millstream.model.payload_columns import ColumnType, PayloadColumn, check_landed, parse_columns

_SIMPLE: Final[Mapping[str, pa.DataType]] = {
    "boolean": pa.bool_(),
    "tinyint": pa.int8(),
    "smallint": pa.int16(),
    "int": pa.int32(),
    "bigint": pa.int64(),
    "float": pa.float32(),
    "double": pa.float64(),
    "string": pa.string(),
    "date": pa.date32(),
    "timestamp": pa.timestamp("us", tz="UTC"),
    "timestamp_ntz": pa.timestamp("us"),
}


def given_fields(text: str) -> pa.Schema:
    """The fields that a text names; raise `InvalidSetting` for what is no schema, or none that tables can have.

    Whole numbers become long and others double, as where fields are found: a column cannot be widened later.
    """
    columns = parse_columns(text)
    check_landed(columns)
    return pa.schema([_field(column) for column in columns])


def _field(column: PayloadColumn) -> pa.Field:
    return pa.field(column.name, widest(_arrow_type(column.type)))


def _arrow_type(kind: ColumnType) -> pa.DataType:
    if kind.name == "decimal":
        return pa.decimal128(*kind.numbers)
    if kind.name == "struct":
        return pa.struct([_field(part) for part in kind.parts])
    if kind.name == "array":
        return pa.list_(_field(kind.parts[0]))
    return _SIMPLE[kind.name]
