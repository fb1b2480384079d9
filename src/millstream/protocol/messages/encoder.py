"""Encodes messages, compiled once per message class.

kio writes a message field by field through checked types, which makes a long list of partitions slow enough to stall
the event loop. Here each class becomes a short list of steps: neighbouring numbers are packed in one call, and nothing
is checked that `struct` does not check anyway. Tests compare the bytes with kio's own writer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import Field, fields
from datetime import datetime, timedelta
from functools import cache
from operator import attrgetter
from typing import Any, Final
from uuid import UUID

from millstream.protocol.messages.shape import default_of, is_entity, item_of, unwrapped

Write = Callable[[bytearray, Any], None]
"""Appends one value to the buffer."""

_FORMATS: Final = {
    "bool": "?",
    "int8": "b",
    "uint8": "B",
    "int16": "h",
    "uint16": "H",
    "error_code": "h",
    "int32": "i",
    "uint32": "I",
    "int64": "q",
    "uint64": "Q",
    "float64": "d",
}
_INT8: Final = struct.Struct(">b")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_MILLISECOND: Final = timedelta(milliseconds=1)
_NO_ID: Final = bytes(16)


@cache
def encoder_of(entity_type: Any) -> Write:
    """Compile the steps that append one message (or nested entity)."""
    steps: list[Write] = []
    tagged: dict[int, tuple[str, Any, Write]] = {}
    run: list[Field[Any]] = []
    flexible = entity_type.__flexible__
    for field in fields(entity_type):
        if "tag" in field.metadata:
            write = _value_writer(field, flexible, tagged=True)
            tagged[field.metadata["tag"]] = (field.name, default_of(field), write)
        elif _is_number(field):
            run.append(field)
        else:
            _close_run(run, steps)
            steps.append(_field(field.name, _value_writer(field, flexible, tagged=False)))
    _close_run(run, steps)
    if flexible:
        steps.append(_tags(dict(sorted(tagged.items()))) if tagged else _no_tags)
    return steps[0] if len(steps) == 1 else _sequence(tuple(steps))


def _is_number(field: Field[Any]) -> bool:
    kind, _ = unwrapped(field.type)
    return item_of(kind) is None and not is_entity(kind) and field.metadata["kafka_type"] in _FORMATS


def _close_run(run: list[Field[Any]], steps: list[Write]) -> None:
    """Turn the numbers collected so far into one step."""
    if not run:
        return
    pack = struct.Struct(">" + "".join(_FORMATS[field.metadata["kafka_type"]] for field in run)).pack
    get = attrgetter(*(field.name for field in run))
    steps.append(_number(get, pack) if len(run) == 1 else _numbers(get, pack))
    run.clear()


def _value_writer(field: Field[Any], flexible: bool, *, tagged: bool) -> Write:
    kind, nullable = unwrapped(field.type)
    item = item_of(kind)
    if item is not None:
        kafka_type = field.metadata.get("kafka_type", "")
        if kafka_type in _FORMATS and not is_entity(item):
            return _number_array(_FORMATS[kafka_type], flexible)
        return _array(encoder_of(item) if is_entity(item) else _primitive(kafka_type, flexible), flexible)
    if is_entity(kind):
        write = encoder_of(kind)
        return _nullable_entity(write) if nullable and not tagged else write
    return _primitive(field.metadata["kafka_type"], flexible)


def _primitive(kafka_type: str, flexible: bool) -> Write:
    if kafka_type in _FORMATS:
        return _number(_itself, struct.Struct(">" + _FORMATS[kafka_type]).pack)
    if kafka_type == "string":
        return _compact_text if flexible else _legacy_text
    if kafka_type in ("bytes", "records"):
        return _compact_bytes if flexible else _legacy_bytes
    return _CONVERTED[kafka_type]


def _itself(value: Any) -> Any:
    return value


def _sequence(steps: tuple[Write, ...]) -> Write:
    def write(buffer: bytearray, entity: Any) -> None:
        for step in steps:
            step(buffer, entity)

    return write


def _field(name: str, write_value: Write) -> Write:
    get = attrgetter(name)

    def write(buffer: bytearray, entity: Any) -> None:
        write_value(buffer, get(entity))

    return write


def _number(get: Callable[[Any], Any], pack: Callable[..., bytes]) -> Write:
    def write(buffer: bytearray, entity: Any) -> None:
        buffer.extend(pack(get(entity)))

    return write


def _numbers(get: Callable[[Any], Any], pack: Callable[..., bytes]) -> Write:
    def write(buffer: bytearray, entity: Any) -> None:
        buffer.extend(pack(*get(entity)))

    return write


def _array(write_item: Write, flexible: bool) -> Write:
    write_length = _compact_length if flexible else _legacy_length

    def write(buffer: bytearray, items: tuple[Any, ...] | None) -> None:
        write_length(buffer, -1 if items is None else len(items))
        for item in items or ():
            write_item(buffer, item)

    return write


def _number_array(letter: str, flexible: bool) -> Write:
    write_length = _compact_length if flexible else _legacy_length

    def write(buffer: bytearray, items: tuple[Any, ...] | None) -> None:
        write_length(buffer, -1 if items is None else len(items))
        if items:
            buffer.extend(struct.pack(f">{len(items)}{letter}", *items))

    return write


def _nullable_entity(write_entity: Write) -> Write:
    def write(buffer: bytearray, entity: Any) -> None:
        buffer.extend(_INT8.pack(-1 if entity is None else 1))
        if entity is not None:
            write_entity(buffer, entity)

    return write


def _no_tags(buffer: bytearray, entity: Any) -> None:
    buffer.append(0)


def _tags(tagged: dict[int, tuple[str, Any, Write]]) -> Write:
    def write(buffer: bytearray, entity: Any) -> None:
        content = bytearray()
        count = 0
        for tag, (name, default, write_value) in tagged.items():
            value = getattr(entity, name)
            if value == default:
                continue
            encoded = bytearray()
            write_value(encoded, value)
            _uvarint(content, tag)
            _uvarint(content, len(encoded))
            content.extend(encoded)
            count += 1
        _uvarint(buffer, count)
        buffer.extend(content)

    return write


def _compact_text(buffer: bytearray, value: str | None) -> None:
    _compact_bytes(buffer, None if value is None else value.encode())


def _compact_bytes(buffer: bytearray, value: bytes | None) -> None:
    if value is None:
        buffer.append(0)
        return
    _uvarint(buffer, len(value) + 1)
    buffer.extend(value)


def _legacy_text(buffer: bytearray, value: str | None) -> None:
    if value is None:
        buffer.extend(_INT16.pack(-1))
        return
    encoded = value.encode()
    buffer.extend(_INT16.pack(len(encoded)))
    buffer.extend(encoded)


def _legacy_bytes(buffer: bytearray, value: bytes | None) -> None:
    _legacy_length(buffer, -1 if value is None else len(value))
    if value is not None:
        buffer.extend(value)


def _compact_length(buffer: bytearray, length: int) -> None:
    _uvarint(buffer, length + 1)


def _legacy_length(buffer: bytearray, length: int) -> None:
    buffer.extend(_INT32.pack(length))


def _uvarint(buffer: bytearray, value: int) -> None:
    while value > 0x7F:
        buffer.append((value & 0x7F) | 0x80)
        value >>= 7
    buffer.append(value)


def _uuid(buffer: bytearray, value: UUID | None) -> None:
    buffer.extend(_NO_ID if value is None else value.bytes)


def _timedelta_i32(buffer: bytearray, value: timedelta) -> None:
    buffer.extend(_INT32.pack(value // _MILLISECOND))


def _timedelta_i64(buffer: bytearray, value: timedelta) -> None:
    buffer.extend(_INT64.pack(value // _MILLISECOND))


def _datetime_i64(buffer: bytearray, value: datetime | None) -> None:
    buffer.extend(_INT64.pack(-1 if value is None else round(value.timestamp() * 1000)))


_CONVERTED: Final[dict[str, Write]] = {
    "uuid": _uuid,
    "timedelta_i32": _timedelta_i32,
    "timedelta_i64": _timedelta_i64,
    "datetime_i64": _datetime_i64,
}
