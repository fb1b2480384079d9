"""A bounds check that walks over the bytes of a message before kio reads them.

kio's native reader trusts a declared array length and allocates memory for it, so a frame of nine bytes that declares
four billion items ends the process. `guard_of` compiles, once per message class, a walk that steps over the same fields
without building anything, and raises `ProtocolViolation` when a length exceeds the available bytes, or
when a message has so many items that building them would block the loop.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import Field, fields
from functools import cache
from typing import Any, Final

from millstream.core.errors import ProtocolViolation
from millstream.protocol.messages.shape import is_entity, item_of, unwrapped


class BoundedBuffer:
    """The bytes that a walk may read, and how many array items it may still pass."""

    __slots__ = ("buffer", "end", "items_left")

    def __init__(self, buffer: memoryview, *, items_max: int) -> None:
        self.buffer = buffer
        self.end = len(buffer)
        self.items_left = items_max


Walk = Callable[[BoundedBuffer, int], int]
"""Steps over one value: `(span, position) -> position after it`."""
Length = Callable[[BoundedBuffer, int], tuple[int, int]]
"""Reads a length: `(span, position) -> (length, position after it)`; -1 is null."""

_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")

_FIXED_BYTES: Final = {
    "bool": 1,
    "int8": 1,
    "uint8": 1,
    "int16": 2,
    "uint16": 2,
    "error_code": 2,
    "int32": 4,
    "uint32": 4,
    "timedelta_i32": 4,
    "int64": 8,
    "uint64": 8,
    "float64": 8,
    "timedelta_i64": 8,
    "datetime_i64": 8,
    "uuid": 16,
}
_NULL_ENTITY: Final = 0xFF


@cache
def guard_of(entity_type: Any) -> Walk:
    """Compile the walk over one message class (or nested entity)."""
    steps: list[Walk] = []
    tagged: dict[int, Walk] = {}
    fixed_bytes = 0
    for field in fields(entity_type):
        if "tag" in field.metadata:
            tagged[field.metadata["tag"]] = _field_walk(field, entity_type.__flexible__, tagged=True)
            continue
        size = _fixed_size(field)
        if size is not None:
            fixed_bytes += size
            continue
        if fixed_bytes:
            steps.append(_fixed(fixed_bytes))
            fixed_bytes = 0
        steps.append(_field_walk(field, entity_type.__flexible__, tagged=False))
    if fixed_bytes:
        steps.append(_fixed(fixed_bytes))
    if entity_type.__flexible__:
        steps.append(_tags(tagged))
    return steps[0] if len(steps) == 1 else _sequence(tuple(steps))


def _fixed_size(field: Field[Any]) -> int | None:
    kind, _ = unwrapped(field.type)
    if item_of(kind) is not None or is_entity(kind):
        return None
    return _FIXED_BYTES.get(field.metadata["kafka_type"])


def _field_walk(field: Field[Any], flexible: bool, *, tagged: bool) -> Walk:
    kind, nullable = unwrapped(field.type)
    item = item_of(kind)
    if item is not None:
        walk = _array_walk(item, field, flexible)
        return walk if nullable else _not_null(_compact_length if flexible else _legacy_length, walk)
    if is_entity(kind):
        walk = guard_of(kind)
        return _nullable_entity(walk) if nullable and not tagged else walk
    return _primitive_walk(field.metadata["kafka_type"], flexible)


def _array_walk(item_type: Any, field: Field[Any], flexible: bool) -> Walk:
    length_of = _compact_length if flexible else _legacy_length
    if is_entity(item_type):
        return _array(length_of, guard_of(item_type))
    kafka_type = field.metadata["kafka_type"]
    if kafka_type in _FIXED_BYTES:
        return _fixed_array(length_of, _FIXED_BYTES[kafka_type])
    return _array(length_of, _primitive_walk(kafka_type, flexible))


def _primitive_walk(kafka_type: str, flexible: bool) -> Walk:
    if kafka_type in _FIXED_BYTES:
        return _fixed(_FIXED_BYTES[kafka_type])
    if flexible:
        return _compact_bytes
    return _legacy_string if kafka_type == "string" else _legacy_bytes


def _fixed(size: int) -> Walk:
    def walk(span: BoundedBuffer, position: int) -> int:
        return _step(span, position, size)

    return walk


def _sequence(steps: tuple[Walk, ...]) -> Walk:
    def walk(span: BoundedBuffer, position: int) -> int:
        for step in steps:
            position = step(span, position)
        return position

    return walk


def _array(length_of: Length, item: Walk) -> Walk:
    def walk(span: BoundedBuffer, position: int) -> int:
        length, position = length_of(span, position)
        if length > span.end - position:
            raise ProtocolViolation(f"an array declares {length} items, but only {span.end - position} bytes are left")
        span.items_left -= length
        if span.items_left < 0:
            raise ProtocolViolation("the message has more items than are read at once; split it")
        for _ in range(length):
            position = item(span, position)
        return position

    return walk


def _not_null(length_of: Length, array: Walk) -> Walk:
    """Reject null where a list is required: kio would pass it on, and no handler expects it."""

    def walk(span: BoundedBuffer, position: int) -> int:
        if length_of(span, position)[0] < 0:
            raise ProtocolViolation("a required list is null")
        return array(span, position)

    return walk


def _fixed_array(length_of: Length, size: int) -> Walk:
    def walk(span: BoundedBuffer, position: int) -> int:
        length, position = length_of(span, position)
        return _step(span, position, max(length, 0) * size)

    return walk


def _nullable_entity(inner: Walk) -> Walk:
    def walk(span: BoundedBuffer, position: int) -> int:
        after = _step(span, position, 1)
        return after if span.buffer[position] == _NULL_ENTITY else inner(span, after)

    return walk


def _tags(known: dict[int, Walk]) -> Walk:
    def walk(span: BoundedBuffer, position: int) -> int:
        if position < span.end and span.buffer[position] == 0:
            return position + 1
        count, position = _uvarint(span, position)
        if count > span.end - position:
            raise ProtocolViolation(
                f"{count} tagged fields are declared, but only {span.end - position} bytes are left"
            )
        for _ in range(count):
            tag, position = _uvarint(span, position)
            size, position = _uvarint(span, position)
            after = _step(span, position, size)
            if tag in known and known[tag](span, position) != after:
                raise ProtocolViolation(f"tagged field {tag} is not {size} bytes long as declared")
            position = after
        return position

    return walk


def _compact_bytes(span: BoundedBuffer, position: int) -> int:
    length, position = _compact_length(span, position)
    return _step(span, position, max(length, 0))


def _legacy_string(span: BoundedBuffer, position: int) -> int:
    after = _step(span, position, 2)
    return _step(span, after, _checked(_INT16.unpack_from(span.buffer, position)[0]))


def _legacy_bytes(span: BoundedBuffer, position: int) -> int:
    length, position = _legacy_length(span, position)
    return _step(span, position, max(length, 0))


def _compact_length(span: BoundedBuffer, position: int) -> tuple[int, int]:
    length, position = _uvarint(span, position)
    return length - 1, position


def _legacy_length(span: BoundedBuffer, position: int) -> tuple[int, int]:
    after = _step(span, position, 4)
    length: int = _INT32.unpack_from(span.buffer, position)[0]
    _checked(length)
    return length, after


def _checked(length: int) -> int:
    if length < -1:
        raise ProtocolViolation(f"a length of {length} is negative")
    return max(length, 0)


def _uvarint(span: BoundedBuffer, position: int) -> tuple[int, int]:
    value = 0
    for shift in (0, 7, 14, 21, 28):
        after = _step(span, position, 1)
        byte = span.buffer[position]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, after
        position = after
    raise ProtocolViolation("a varint is longer than 5 bytes")


def _step(span: BoundedBuffer, position: int, size: int) -> int:
    after = position + size
    if after > span.end:
        raise ProtocolViolation(f"{size} bytes are needed, but only {span.end - position} are left")
    return after
