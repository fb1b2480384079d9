"""Frames, headers and bodies: bytes to kio's message classes and back.

A frame is a 32-bit size, a header and a body. Headers are coded by hand, since every request has one; bodies are
kio's dataclasses, whose modules are imported when a version of an API is first used. Which versions are
"flexible" (compact lengths, tagged fields) is a table here, so that reading a header imports nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import Field, fields
from datetime import datetime, timedelta
from functools import cache
from importlib import import_module
from operator import attrgetter
from typing import Any, Final, NamedTuple
from uuid import UUID

from millstream.core.errors import InvalidRequest, ProtocolViolation
from millstream.protocol.messages.guard import BoundedBuffer, guard_of
from millstream.protocol.messages.primitives import Buffer, Reader, Writer
from millstream.protocol.messages.shape import default_of, is_entity, item_of, unwrapped

# Encodes messages, compiled once per message class.
#
# kio writes a message field by field through checked types, which makes a long list of partitions slow enough to stall
# the event loop. Here each class becomes a short list of steps: neighbouring numbers are packed in one call, and
# nothing is checked that `struct` does not check anyway. Tests compare the bytes with kio's own writer.

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
        return _number(_identity, struct.Struct(">" + _FORMATS[kafka_type]).pack)
    if kafka_type == "string":
        return _compact_text if flexible else _legacy_text
    if kafka_type in ("bytes", "records"):
        return _compact_bytes if flexible else _legacy_bytes
    return _CONVERTED[kafka_type]


def _identity(value: Any) -> Any:
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


API_VERSIONS_KEY: Final = 18
PRIVATE_KEY_MIN: Final = 32000
"""API keys from here on are Millstream's own; they are flexible in every version."""


class Limits(NamedTuple):
    """The largest body that is decoded into message objects; Produce and Fetch, which carry data, never are."""

    body_bytes: int
    items: int
    """The number of items of all arrays together, since each becomes an object."""


REQUEST_LIMITS: Final = Limits(body_bytes=8 * 1024 * 1024, items=250_000)
RESPONSE_LIMITS: Final = Limits(body_bytes=64 * 1024 * 1024, items=2_000_000)

FLEXIBLE_SINCE: Final[dict[int, int]] = {
    0: 9,  # Produce
    1: 12,  # Fetch
    2: 6,  # ListOffsets
    3: 9,  # Metadata
    8: 8,  # OffsetCommit
    9: 6,  # OffsetFetch
    10: 3,  # FindCoordinator
    11: 6,  # JoinGroup
    12: 4,  # Heartbeat
    13: 4,  # LeaveGroup
    14: 4,  # SyncGroup
    15: 5,  # DescribeGroups
    16: 3,  # ListGroups
    18: 3,  # ApiVersions
    19: 5,  # CreateTopics
    20: 4,  # DeleteTopics
    21: 2,  # DeleteRecords
    22: 2,  # InitProducerId
    23: 4,  # OffsetForLeaderEpoch
    24: 3,  # AddPartitionsToTxn
    25: 3,  # AddOffsetsToTxn
    26: 3,  # EndTxn
    27: 1,  # WriteTxnMarkers
    28: 3,  # TxnOffsetCommit
    29: 2,  # DescribeAcls
    30: 2,  # CreateAcls
    31: 2,  # DeleteAcls
    32: 4,  # DescribeConfigs
    33: 2,  # AlterConfigs
    34: 2,  # AlterReplicaLogDirs
    35: 2,  # DescribeLogDirs
    36: 2,  # SaslAuthenticate
    37: 2,  # CreatePartitions
    38: 2,  # CreateDelegationToken
    39: 2,  # RenewDelegationToken
    40: 2,  # ExpireDelegationToken
    41: 2,  # DescribeDelegationToken
    42: 2,  # DeleteGroups
    43: 2,  # ElectLeaders
    44: 1,  # IncrementalAlterConfigs
    48: 1,  # DescribeClientQuotas
    49: 1,  # AlterClientQuotas
    53: 1,  # BeginQuorumEpoch
    54: 1,  # EndQuorumEpoch
}
"""The first flexible version by API key; APIs not listed are flexible from 0, except those below."""

NEVER_FLEXIBLE: Final = frozenset({17, 47})
"""SaslHandshake and OffsetDelete stayed with fixed lengths."""

_FIXED_HEADER: Final = struct.Struct(">hhi")
_FIXED_HEADER_AND_CLIENT: Final = struct.Struct(">hhih")
_SIZE_AND_CORRELATION: Final = struct.Struct(">ii")
_INT32: Final = struct.Struct(">i")


class RequestHeader(NamedTuple):
    """The header of a request. A named tuple, since every request creates one."""

    api_key: int
    version: int
    correlation_id: int
    client_id: str | None
    body_at: int
    """The position of the body in the frame."""
    flexible: bool
    """Whether the body has compact lengths and tagged fields."""


def is_flexible(api_key: int, version: int) -> bool:
    """Return whether a version of an API has compact lengths and tagged fields."""
    return api_key not in NEVER_FLEXIBLE and version >= FLEXIBLE_SINCE.get(api_key, 0)


def read_request_header(frame: Buffer) -> RequestHeader:
    """Read the header of a request from a frame without its size."""
    try:
        api_key, version, correlation_id, length = _FIXED_HEADER_AND_CLIENT.unpack_from(frame)
        flexible = is_flexible(api_key, version)
        end = 10 + length
        if length < 0 or (flexible and frame[end]):
            return read_any_request_header(frame)
        client_id = str(frame[10:end], "utf-8")
    except (struct.error, IndexError, UnicodeDecodeError):
        return read_any_request_header(frame)
    if end > len(frame):
        return read_any_request_header(frame)
    return RequestHeader(api_key, version, correlation_id, client_id, end + flexible, flexible)


def read_any_request_header(frame: Buffer) -> RequestHeader:
    """Read any header: without a client id, with tagged fields, or broken."""
    if len(frame) < _FIXED_HEADER.size:
        raise ProtocolViolation(f"a request of {len(frame)} bytes is too short for a header")
    api_key, version, correlation_id = _FIXED_HEADER.unpack_from(frame)
    flexible = is_flexible(api_key, version)
    reader = Reader(frame, _FIXED_HEADER.size, flexible=flexible)
    client_id = reader.legacy_nullable_string()
    reader.skip_tags()
    return RequestHeader(api_key, version, correlation_id, client_id, reader.position, flexible)


def response_head(api_key: int, version: int, correlation_id: int, body_bytes: int) -> bytes:
    """Build the header of a response, including the frame's size."""
    if is_flexible(api_key, version) and api_key != API_VERSIONS_KEY:
        return _SIZE_AND_CORRELATION.pack(body_bytes + 5, correlation_id) + b"\0"
    return _SIZE_AND_CORRELATION.pack(body_bytes + 4, correlation_id)


def response_body_at(api_key: int, version: int, frame: Buffer) -> int:
    """Return the position of the body of a response, in a frame without its size."""
    reader = Reader(frame, 4, flexible=is_flexible(api_key, version) and api_key != API_VERSIONS_KEY)
    reader.skip_tags()
    return reader.position


def read_correlation_id(frame: Buffer) -> int:
    """Return the correlation id of a response, from a frame without its size."""
    if len(frame) < 4:
        raise ProtocolViolation(f"a response of {len(frame)} bytes is too short for a header")
    correlation_id: int = _INT32.unpack_from(frame)[0]
    return correlation_id


def read_request(api_key: int, version: int, buffer: Buffer, position: int) -> Any:
    """Decode the body of a request into kio's class for that version."""
    return _read_entity(load_request_class(api_key, version), buffer, position, REQUEST_LIMITS)


def read_response(api_key: int, version: int, frame: Buffer) -> Any:
    """Decode a response into kio's class for that version, from a frame without its size."""
    position = response_body_at(api_key, version, frame)
    return _read_entity(load_response_class(api_key, version), frame, position, RESPONSE_LIMITS)


def write_response(api_key: int, version: int, correlation_id: int, response: Any) -> bytes:
    """Build the frame of a response, including its size."""
    body = write_entity(response)
    return response_head(api_key, version, correlation_id, len(body)) + body


def request_head(api_key: int, version: int, correlation_id: int, client_id: str | None) -> bytes:
    """Build the header of a request, without the frame's size."""
    writer = Writer(flexible=is_flexible(api_key, version), buffer=bytearray())
    writer.buffer += _FIXED_HEADER.pack(api_key, version, correlation_id)
    writer.legacy_string(client_id)
    writer.no_tags()
    return bytes(writer.buffer)


def write_entity(entity: Any) -> bytes:
    """Encode one message without any header."""
    buffer = bytearray()
    entity_type: Any = type(entity)
    try:
        encoder_of(entity_type)(buffer, entity)
    except struct.error as error:
        raise InvalidRequest(
            f"{entity_type.__name__} does not fit into version {entity.__version__}: {error}"
        ) from None
    return bytes(buffer)


@cache
def load_request_class(api_key: int, version: int) -> type[Any]:
    """Import kio's request class of a version; raise `ProtocolViolation` if there is none."""
    from kio.index import KioIndexError, load_request_schema

    try:
        return load_request_schema(api_key, version)
    except KioIndexError:
        raise ProtocolViolation(f"API {api_key} has no version {version}") from None


def build_request(api: str, version: int, **values: Any) -> Any:
    """Build a request from plain values, as in `build_request("create_topics", 7, topics=[{"name": "orders"}])`.

    Dicts become nested messages, and fields that are left out have Kafka's defaults.
    """
    module = import_module(f"kio.schema.{api}.v{version}.request")
    return build_message(getattr(module, f"{api.title().replace('_', '')}Request"), values)


def build_message(entity: Any, values: Mapping[str, Any]) -> Any:
    """Build a message from plain values, as `build_request` does."""
    known = {field.name: field for field in fields(entity)}
    built = {name: _build_value(known[name].type, value) for name, value in values.items()}
    return entity(**{name: default_of(field) for name, field in known.items() if name not in built}, **built)


def _build_value(field_type: Any, value: Any) -> Any:
    kind, _ = unwrapped(field_type)
    item = item_of(kind)
    if item is not None and value is not None:
        return tuple(_build_value(item, element) for element in value)
    return build_message(kind, value) if isinstance(value, dict) else value


@cache
def load_response_class(api_key: int, version: int) -> type[Any]:
    """Import kio's response class of a version; raise `ProtocolViolation` if there is none."""
    from kio.index import KioIndexError, load_response_schema

    try:
        return load_response_schema(api_key, version)
    except KioIndexError:
        raise ProtocolViolation(f"API {api_key} has no version {version}") from None


def _read_entity(entity_type: Any, buffer: Buffer, position: int, limits: Limits) -> Any:
    view = memoryview(buffer).toreadonly()  # kio reads from nothing else.
    size = len(view) - position
    if size > limits.body_bytes:
        raise ProtocolViolation(f"{entity_type.__name__} has {size} bytes, at most {limits.body_bytes} are read")
    guard_of(entity_type)(BoundedBuffer(view, items_max=limits.items), position)
    try:
        entity, _ = _reader_of(entity_type)(view, position)
    except Exception as error:
        # Any failure of kio's native reader is caused by the bytes; its errors belong to several families.
        raise ProtocolViolation(f"{entity_type.__name__} v{entity_type.__version__}: {error}") from error
    return entity


@cache
def _reader_of(entity_type: type[Any]) -> Callable[[memoryview, int], tuple[Any, int]]:
    from kio.serial import entity_reader

    return entity_reader(entity_type)
