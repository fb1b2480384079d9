"""Paths of values in a table's columns: a column, a field of a struct, the elements of an array.

A path is a tuple of names, since a name may contain dots.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Final

import pyarrow as pa

Place = tuple[str, ...]
ELEMENT: Final = "[]"
"""The step from an array to its elements."""


def narrower(known: pa.DataType | pa.Schema, wanted: pa.DataType | pa.Schema, above: Place = ()) -> Iterator[Place]:
    """Yield the paths that are long in one type and double in the wanted one."""
    one, other = _kind(known), _kind(wanted)
    if pa.types.is_struct(one) and pa.types.is_struct(other):
        for field in one:
            position = other.get_field_index(field.name)
            if position >= 0:
                yield from narrower(field.type, other.field(position).type, (*above, field.name))
    elif pa.types.is_list(one) and pa.types.is_list(other):
        yield from narrower(one.value_type, other.value_type, (*above, ELEMENT))
    elif pa.types.is_int64(one) and pa.types.is_float64(other):
        yield above


def retyped(schema: pa.Schema, places: Collection[Place], kind: pa.DataType) -> pa.Schema:
    """Return a schema with a type at some of its paths; unknown paths are ignored."""
    wanted = frozenset(places)
    return pa.schema([field.with_type(_retyped(field.type, wanted, kind, (field.name,))) for field in schema])


def _retyped(known: pa.DataType, places: frozenset[Place], kind: pa.DataType, above: Place) -> pa.DataType:
    if above in places:
        return kind
    if pa.types.is_struct(known):
        fields = [field.with_type(_retyped(field.type, places, kind, (*above, field.name))) for field in known]
        return pa.struct(fields)
    if pa.types.is_list(known):
        inner = _retyped(known.value_type, places, kind, (*above, ELEMENT))
        return pa.list_(known.value_field.with_type(inner))
    return known


def values_at(column: pa.Array, way: Place) -> pa.Array | None:
    """Return the values at a path of a column; None if the column has no such path."""
    if not way:
        return column
    if pa.types.is_list(column.type) and way[0] == ELEMENT:
        return values_at(column.flatten(), way[1:])
    position = column.type.get_field_index(way[0]) if pa.types.is_struct(column.type) else -1
    return None if position < 0 else values_at(column.flatten()[position], way[1:])


def path_text(place: Place) -> str:
    """Format a path for people."""
    return ".".join(place).replace(f".{ELEMENT}", ELEMENT)


def _kind(what: pa.DataType | pa.Schema) -> pa.DataType:
    return pa.struct(list(what)) if isinstance(what, pa.Schema) else what
