"""Converts messages between versions of an API.

Every API is written once, against the newest version of its messages. `reshape` converts a message to the class of
another version: fields of the same name are copied, at every depth; fields that the target lacks are dropped; fields
that the source lacks get Kafka's default. The conversion is compiled once per pair of classes. Where versions differ in
structure, the API converts itself.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import MISSING, Field, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import Any, Final, TypeVar, get_args, get_origin


def unwrapped(field_type: Any) -> tuple[Any, bool]:
    """Split `X | None` into `(X, True)`, and leave `X` as `(X, False)`."""
    if get_origin(field_type) is UnionType:
        return next(part for part in get_args(field_type) if part is not NoneType), True
    return field_type, False


def item_of(kind: Any) -> Any:
    """Return the item type of an array, or None if it is not an array."""
    return get_args(kind)[0] if get_origin(kind) is tuple else None


def is_entity(kind: Any) -> bool:
    return is_dataclass(kind)


T = TypeVar("T")
Convert = Callable[[Any], Any]

_IMPLICIT: Final[dict[str, Any]] = {
    "bool": False,
    "int8": 0,
    "int16": 0,
    "int32": 0,
    "int64": 0,
    "uint8": 0,
    "uint16": 0,
    "uint32": 0,
    "uint64": 0,
    "float64": 0.0,
    "string": "",
    "bytes": b"",
    "records": b"",
    "timedelta_i32": datetime.timedelta(0),
    "timedelta_i64": datetime.timedelta(0),
    "datetime_i64": datetime.datetime.fromtimestamp(0, tz=datetime.UTC),
}


def reshape(message: Any, target: type[T]) -> T:
    """Convert a message to the class of another version of the same message."""
    source: Any = type(message)
    target_type: Any = target
    reshaped: T = message if source is target_type else reshaper(source, target_type)(message)
    return reshaped


@cache
def reshaper(source: type[Any], target: type[Any]) -> Convert:
    """Compile the conversion from one class to another."""
    known = {field.name: field for field in fields(source)}
    constants: dict[str, Any] = {}
    copied: list[str] = []
    converted: list[tuple[str, Convert]] = []
    for field in fields(target):
        if field.name not in known:
            constants[field.name] = default_of(field)
            continue
        convert = _conversion(known[field.name], field)
        if convert is None:
            copied.append(field.name)
        else:
            converted.append((field.name, convert))

    def convert_message(message: Any) -> Any:
        values = dict(constants)
        for name in copied:
            values[name] = getattr(message, name)
        for name, convert in converted:
            values[name] = convert(getattr(message, name))
        return target(**values)

    return convert_message


def default_of(field: Field[Any]) -> Any:
    """Return the default of a field: the schema's, otherwise null where allowed, otherwise empty or zero."""
    if field.default is not MISSING:
        return field.default
    kind, nullable = unwrapped(field.type)
    if nullable:
        return None
    if item_of(kind) is not None:
        return ()
    if is_entity(kind):
        nested: Any = kind
        return nested(**{inner.name: default_of(inner) for inner in fields(nested)})
    kafka_type = field.metadata["kafka_type"]
    if kafka_type == "error_code":
        from kio.schema.errors import ErrorCode

        return ErrorCode.none
    return _IMPLICIT[kafka_type]


def _conversion(source: Field[Any], target: Field[Any]) -> Convert | None:
    """Return the conversion of a field's value; None if it is copied."""
    source_kind, source_nullable = unwrapped(source.type)
    target_kind, target_nullable = unwrapped(target.type)
    convert = _kind_conversion(source, source_kind, target_kind)
    substitute = default_of(target) if source_nullable and not target_nullable else None
    if convert is None and substitute is None:
        return None
    if not source_nullable:
        return convert
    return _null_safe(convert, substitute)


def _kind_conversion(source: Field[Any], source_kind: Any, target_kind: Any) -> Convert | None:
    shapes = (_shape(source_kind), _shape(target_kind))
    if shapes == ("entity", "entity"):
        return reshaper(source_kind, target_kind)
    if shapes == ("entities", "entities"):
        return _each(reshaper(item_of(source_kind), item_of(target_kind)))
    if shapes[0] == shapes[1]:
        return None
    raise TypeError(f"field {source.name} changes from {shapes[0]} to {shapes[1]}: the API must convert it itself")


def _shape(kind: Any) -> str:
    item = item_of(kind)
    if item is not None:
        return "entities" if is_entity(item) else "values"
    return "entity" if is_entity(kind) else "value"


def _each(convert: Convert) -> Convert:
    def convert_all(items: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple([convert(item) for item in items])

    return convert_all


def _null_safe(convert: Convert | None, substitute: Any) -> Convert:
    def convert_unless_null(value: Any) -> Any:
        if value is None:
            return substitute
        return value if convert is None else convert(value)

    return convert_unless_null
