"""The columns of lake tables: the fixed ones, and how inferred ones are added without ever blocking landing.

A value is found by a path of names: a column, a field of a struct, the elements of an array. It is a tuple, since a
name may contain dots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import ColumnMismatch, StalePlan
from millstream.core.payload_columns import DAY, HOUR

FieldPath = tuple[str, ...]
ELEMENT: Final = "[]"
"""The step from an array to its elements."""

EXACT_MAX: Final = 2**53
"""Doubles hold every integer up to here."""


def inexact_reason(number: int) -> str:
    """Return why a long column with this number does not become double."""
    return f"it has {number}, which doubles cannot hold exactly"


def paths_of_type(schema: pa.DataType | pa.Schema, target: pa.DataType, above: FieldPath = ()) -> Iterator[FieldPath]:
    kind = _kind(schema)
    if pa.types.is_struct(kind):
        for field in kind:
            yield from paths_of_type(field.type, target, (*above, field.name))
    elif pa.types.is_list(kind):
        yield from paths_of_type(kind.value_type, target, (*above, ELEMENT))
    elif kind == target:
        yield above


def leaf_paths(schema: pa.DataType | pa.Schema, above: FieldPath = ()) -> Iterator[FieldPath]:
    """Yield the paths of plain values, of any type; those that have only been null or empty are left out."""
    kind = _kind(schema)
    if pa.types.is_struct(kind):
        for field in kind:
            yield from leaf_paths(field.type, (*above, field.name))
    elif pa.types.is_list(kind):
        yield from leaf_paths(kind.value_type, (*above, ELEMENT))
    elif not pa.types.is_null(kind):
        yield above


def widened_paths(
    known: pa.DataType | pa.Schema, target: pa.DataType | pa.Schema, above: FieldPath = ()
) -> Iterator[FieldPath]:
    """Yield the paths that are long in the known type and double in the target."""
    one, other = _kind(known), _kind(target)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        for field in one:
            position = other.get_field_index(field.name)
            if position >= 0:
                yield from widened_paths(field.type, other.field(position).type, (*above, field.name))
    elif pa.types.is_list(one) and pa.types.is_list(other):
        yield from widened_paths(one.value_type, other.value_type, (*above, ELEMENT))
    elif pa.types.is_int64(one) and pa.types.is_float64(other):
        yield above


def retyped(schema: pa.Schema, places: Collection[FieldPath], kind: pa.DataType) -> pa.Schema:
    """Return a schema with a type at some of its paths; unknown paths are ignored."""
    if not places:
        return schema
    paths = frozenset(places)
    return pa.schema([field.with_type(_retyped(field.type, paths, kind, (field.name,))) for field in schema])


def _retyped(known: pa.DataType, paths: frozenset[FieldPath], kind: pa.DataType, above: FieldPath) -> pa.DataType:
    if above in paths:
        return kind
    if pa.types.is_struct(known):
        fields = [field.with_type(_retyped(field.type, paths, kind, (*above, field.name))) for field in known]
        return pa.struct(fields)
    if pa.types.is_list(known):
        inner = _retyped(known.value_type, paths, kind, (*above, ELEMENT))
        return pa.list_(known.value_field.with_type(inner))
    return known


def values_at(column: pa.Array, path: FieldPath) -> pa.Array | None:
    """Return the values at a path of a column; None if the column has no such path."""
    if not path:
        return column
    if pa.types.is_list(column.type) and path[0] == ELEMENT:
        return values_at(column.flatten(), path[1:])
    position = column.type.get_field_index(path[0]) if pa.types.is_struct(column.type) else -1
    return None if position < 0 else values_at(column.flatten()[position], path[1:])


def is_inexact(integers: pa.Array) -> bool:
    """Whether doubles cannot hold some of the integers."""
    ends = pc.min_max(integers)
    return any(abs(end.as_py()) > EXACT_MAX for end in ends.values() if end.is_valid)


def completed(rows: pa.StructArray | pa.RecordBatch | pa.Table, schema: pa.Schema) -> list[Any]:
    """Return the columns of a schema; those that the rows do not have are null."""
    arrays = rows.flatten() if isinstance(rows, pa.StructArray) else rows.columns
    names = [field.name for field in (rows.type if isinstance(rows, pa.StructArray) else rows.schema)]
    arrays_by_name = dict(zip(names, arrays, strict=True))
    return [
        (
            arrays_by_name[field.name]
            if arrays_by_name[field.name].type == field.type
            else arrays_by_name[field.name].cast(field.type)
        )
        if field.name in arrays_by_name
        else pa.nulls(len(rows), field.type)
        for field in schema
    ]


def path_text(path: FieldPath) -> str:
    """Format a path for messages to users."""
    return ".".join(path).replace(f".{ELEMENT}", ELEMENT)


def _kind(what: pa.DataType | pa.Schema) -> pa.DataType:
    return pa.struct(list(what)) if isinstance(what, pa.Schema) else what


APPEND_DAY: Final = "append_day"
APPEND_HOUR: Final = "append_hour"
TOPIC_ID: Final = "topic_id"
"""The topic of a message: a topic recreated under its old name has other messages at the same offsets."""
PARTITION_COLUMNS: Final = (APPEND_DAY, APPEND_HOUR)
EVENT_DAY: Final = "event_day"
EVENT_HOUR: Final = "event_hour"
EVENT_COLUMNS: Final = {
    DAY: (pa.field(EVENT_DAY, pa.date32()),),
    HOUR: (pa.field(EVENT_DAY, pa.date32()), pa.field(EVENT_HOUR, pa.int32())),
}
"""The partition columns of a table that is partitioned by event time, by its unit."""

_HEADERS: Final = pa.list_(pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())]))
_APPENDED: Final = [
    pa.field(TOPIC_ID, pa.string()),
    pa.field(APPEND_DAY, pa.date32()),
    pa.field(APPEND_HOUR, pa.int32()),
]

RAW: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("timestamp_type", pa.int32()),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", _HEADERS),
        *_APPENDED,
    ]
)
"""The columns of every table: the message, its topic, and the hour in which it was landed."""

QUARANTINE: Final = pa.schema(
    [
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", _HEADERS),
        pa.field("reason", pa.string()),
        *_APPENDED,
    ]
)
"""The columns of a quarantine table."""

UNREADABLE_BATCH: Final = "unreadable batch: "
"""The prefix of the reason in a quarantine row that represents a whole batch instead of a message."""


def partition_columns(schema: pa.Schema) -> tuple[str, ...]:
    """Return the partition columns of a table: the event time if it has one, otherwise the hour of landing."""
    if EVENT_DAY in schema.names:
        return (EVENT_DAY, EVENT_HOUR) if EVENT_HOUR in schema.names else (EVENT_DAY,)
    return PARTITION_COLUMNS


def file_schema(schema: pa.Schema) -> pa.Schema:
    """Return the columns stored in files; partition columns are in the folder names."""
    left_out = partition_columns(schema)
    return pa.schema([field for field in schema if field.name not in left_out])


def widest(kind: pa.DataType) -> pa.DataType:
    """Return the type under which values are stored: with few types, columns rarely have to be widened."""
    if pa.types.is_integer(kind):
        return pa.int64()
    if pa.types.is_floating(kind):
        return pa.float64()
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", tz="UTC")
    if pa.types.is_null(kind) or pa.types.is_large_string(kind):
        return pa.string()
    if pa.types.is_large_binary(kind):
        return pa.binary()
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(field.name, widest(field.type)) for field in kind])
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        return pa.list_(pa.field("element", widest(kind.value_type)))
    if pa.types.is_map(kind):
        return pa.map_(widest(kind.key_type), widest(kind.item_type))
    return kind


def extended(schema: pa.Schema, inferred: pa.Schema) -> pa.Schema:
    """Add inferred columns, each under its widest type.

    The first type wins: an inferred column of another type changes nothing, and the decoder reports values that do not
    fit. Fields of structs are added like columns.
    """
    columns = {field.name: field for field in schema}
    for field in inferred:
        known = columns.get(field.name)
        kind = widest(field.type) if known is None else _joined(known.type, field.type)
        columns[field.name] = pa.field(field.name, kind)
    return pa.schema(list(columns.values()))


def _joined(known: pa.DataType, inferred: pa.DataType) -> pa.DataType:
    """Add the struct fields of another type."""
    if pa.types.is_struct(known) and pa.types.is_struct(inferred):
        inner = extended(pa.schema(list(known)), pa.schema(list(inferred)))
        return pa.struct(list(inner))
    if pa.types.is_list(known) and pa.types.is_list(inferred):
        return pa.list_(pa.field(known.value_field.name, _joined(known.value_type, inferred.value_type)))
    return known


def added_columns(table: pa.Schema, target: pa.Schema) -> list[pa.Field]:
    """Return the columns that a table has to gain, itself or in structs, before files of a schema are committed.

    Raise `ColumnMismatch` if the table has one of them under another type: such files cannot be read as part of it.
    Files with long payload columns where the table has double raise `StalePlan`: another run has widened the column.
    """
    added = []
    for field in target:
        position = table.get_field_index(field.name)
        if position < 0:
            added.append(field)
            continue
        known = table.field(position).type
        if not same_type(_joined(known, field.type), known):
            added.append(pa.field(field.name, _joined(known, field.type)))
        _check_fits(field.name, known, field.type)
    return added


def _check_fits(name: str, known: pa.DataType, written: pa.DataType) -> None:
    """Raise `ColumnMismatch` unless files with this type can be read under the other, apart from missing fields."""
    if pa.types.is_struct(known) and pa.types.is_struct(written):
        for field in written:
            position = known.get_field_index(field.name)
            if position >= 0:
                _check_fits(f"{name}.{field.name}", known.field(position).type, field.type)
    elif pa.types.is_list(known) and pa.types.is_list(written):
        _check_fits(f"{name}[]", known.value_type, written.value_type)
    elif not same_type(known, written):
        is_widened = pa.types.is_float64(known) and pa.types.is_int64(written) and name not in RAW.names
        kind = StalePlan if is_widened else ColumnMismatch
        raise kind(f"column {name!r} is {known} in the table and {written} in the files")


def same_type(one: pa.DataType, other: pa.DataType) -> bool:
    """Whether two types are equal, ignoring the names of list and map elements."""
    if pa.types.is_list(one) and pa.types.is_list(other):
        return same_type(one.value_type, other.value_type)
    if pa.types.is_map(one) and pa.types.is_map(other):
        return same_type(one.key_type, other.key_type) and same_type(one.item_type, other.item_type)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        return [field.name for field in one] == [field.name for field in other] and all(
            same_type(mine.type, its.type) for mine, its in zip(one, other, strict=True)
        )
    return bool(one == other)
