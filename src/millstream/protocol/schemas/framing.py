"""Schema ids of messages: in front of the content, or in a header of the record, as Confluent's clients write them.

    content:  0, the id in 4 bytes, message indexes (Protobuf only), the encoded value
    header:   0, the id in 4 bytes, message indexes; or 1, the guid in 16 bytes, message indexes

A header takes precedence. Message indexes say which message of a Protobuf file is meant: how many, then the index on
each level, as zigzag varints; a single 0 means the first message.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final, NamedTuple
from uuid import UUID

from millstream.core.errors import SchemaMismatch

VALUE_HEADER: Final = "__value_schema_id"
KEY_HEADER: Final = "__key_schema_id"
HEADERS: Final = {"key": KEY_HEADER, "value": VALUE_HEADER}
"""The header that holds the id of each field of a record."""
ID_MAGIC, GUID_MAGIC = 0, 1
PREFIX_BYTES: Final = 5
GUID_BYTES: Final = 17
INDEXES_MAX: Final = 64
NO_SCHEMA_ID: Final = "it does not start with a schema id (a zero byte and four bytes)"
_VARINT_BYTES_MAX: Final = 5


class Framed(NamedTuple):
    """A value and the id or guid of its schema."""

    schema_id: int | None
    guid: str | None
    content: bytes
    indexes: bytes | None
    """Message indexes of Protobuf, if they are not in front of the content."""

    @property
    def named(self) -> str:
        """Return the id or guid of the schema, for error messages."""
        return f"id {self.schema_id}" if self.guid is None else f"guid {self.guid}"


def unframe(payload: bytes, header: bytes | None = None) -> Framed:
    """Split a payload into content and schema id; raise `SchemaMismatch` if it names no schema."""
    if header is not None:
        if len(header) >= GUID_BYTES and header[0] == GUID_MAGIC:
            guid = str(UUID(bytes=bytes(header[1:GUID_BYTES])))
            return Framed(None, guid, payload, bytes(header[GUID_BYTES:]))
        if len(header) >= PREFIX_BYTES and header[0] == ID_MAGIC:
            number = int.from_bytes(header[1:PREFIX_BYTES], "big")
            return Framed(number, None, payload, bytes(header[PREFIX_BYTES:]))
        raise SchemaMismatch("the header for the schema id holds neither an id nor a guid")
    if len(payload) < PREFIX_BYTES or payload[0] != ID_MAGIC:
        raise SchemaMismatch(NO_SCHEMA_ID)
    return Framed(int.from_bytes(payload[1:PREFIX_BYTES], "big"), None, payload[PREFIX_BYTES:], None)


def schema_header(headers: Iterable[tuple[str, bytes | None]], field: str) -> bytes | None:
    """Return the header that names the schema of the key or the value, the last one if there are more."""
    header_name = HEADERS[field]
    contents = [content for name, content in headers if name == header_name]
    return contents[-1] if contents else None


def prefix(schema_id: int) -> bytes:
    return b"\0" + schema_id.to_bytes(4, "big")


def read_indexes(content: bytes) -> tuple[tuple[int, ...], int]:
    """Read message indexes; return them and where they end."""
    count, at = _read_varint(content, 0)
    if count == 0:
        return (0,), at
    if not 0 < count <= INDEXES_MAX:
        raise SchemaMismatch(f"it has {count} message indexes; 1 to {INDEXES_MAX} are possible")
    indexes = []
    for _ in range(count):
        index, at = _read_varint(content, at)
        indexes.append(index)
    return tuple(indexes), at


def write_indexes(indexes: Sequence[int]) -> bytes:
    if tuple(indexes) == (0,):
        return b"\0"
    return b"".join(_varint(number) for number in (len(indexes), *indexes))


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(_VARINT_BYTES_MAX):
        if at >= len(content):
            break
        byte = content[at]
        at += 1
        value |= (byte & 0x7F) << 7 * shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at
    raise SchemaMismatch("its Protobuf message indexes are cut off")


def _varint(value: int) -> bytes:
    value <<= 1
    written = bytearray()
    while value > 0x7F:
        written.append(value & 0x7F | 0x80)
        value >>= 7
    written.append(value)
    return bytes(written)
