"""The columns of payloads that a pipeline is given, as a table has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import pyarrow as pa

from millstream.core.payload_columns import ColumnType, PayloadColumn, check_landed, parse_columns
from millstream.pipelines.lake.columns import widest

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

    Whole numbers become long and others double, as where fields are found.
    """
    columns = parse_columns(text)
    check_landed(columns)
    return pa.schema([_field(column) for column in columns])


def laid_over(known: pa.Schema, given: pa.Schema) -> pa.Schema:
    """The fields that are given, under the names and types that a table has them with.

    Where the table has whole numbers and double is given they are double, and fields of structs are added; it is for
    the table to become so.
    """
    return pa.schema(_over(list(known), list(given), besides=False))


def _over(known: list[pa.Field], given: list[pa.Field], *, besides: bool) -> list[pa.Field]:
    """Given fields over known ones, with those `besides` that only the table has."""
    wanted = {field.name.lower(): field for field in given}
    there = {field.name.lower(): field for field in known}
    fields = [*known, *(field for field in given if field.name.lower() not in there)] if besides else given
    return [_one_over(there.get(field.name.lower()), wanted.get(field.name.lower()) or field) for field in fields]


def _one_over(known: pa.Field | None, given: pa.Field) -> pa.Field:
    return given if known is None else known.with_type(_type_over(known.type, given.type))


def _type_over(known: pa.DataType, given: pa.DataType) -> pa.DataType:
    if pa.types.is_struct(known) and pa.types.is_struct(given):
        return pa.struct(_over(list(known), list(given), besides=True))
    if pa.types.is_list(known) and pa.types.is_list(given):
        return pa.list_(known.value_field.with_type(_type_over(known.value_type, given.value_type)))
    return given if pa.types.is_int64(known) and pa.types.is_float64(given) else known


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
