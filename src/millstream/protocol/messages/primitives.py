"""Hand-coded readers and writers of the protocol's primitive types, for hot paths and private requests.

A `Reader` checks every bound before it reads, so any bytes give values or a `ProtocolViolation`; only strings are
copied. A `Writer` fills one growing buffer. Both serve one message: `flexible` says whether lengths are compact (a
"flexible" version in Kafka's terms) or of fixed width.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from millstream.core.errors import InvalidRequest, ProtocolViolation

Buffer = bytes | bytearray | memoryview

_INT8: Final = struct.Struct(">b")
_INT16: Final = struct.Struct(">h")
_INT32: Final = struct.Struct(">i")
_INT64: Final = struct.Struct(">q")
_UINT32: Final = struct.Struct(">I")
_FLOAT64: Final = struct.Struct(">d")

UVARINT_MAX: Final = 2**32 - 1
_UVARINT_BYTES_MAX: Final = 5

NULL: Final = -1
"""The length of a null string, array or block of bytes."""


class Reader:
    """A cursor over one message. Every method reads one value and moves on."""

    __slots__ = ("_view", "end", "flexible", "position")

    def __init__(self, buffer: Buffer, position: int = 0, *, flexible: bool = True, end: int | None = None) -> None:
        self._view = buffer if isinstance(buffer, memoryview) else memoryview(buffer)
        self.position = position
        self.end = len(self._view) if end is None else end
        self.flexible = flexible

    @property
    def remaining(self) -> int:
        """How many bytes are left."""
        return self.end - self.position

    def int8(self) -> int:
        value: int = _INT8.unpack_from(self._view, self._advance(1))[0]
        return value

    def int16(self) -> int:
        """Read a signed 16-bit integer."""
        value: int = _INT16.unpack_from(self._view, self._advance(2))[0]
        return value

    def int32(self) -> int:
        """Read a signed 32-bit integer."""
        value: int = _INT32.unpack_from(self._view, self._advance(4))[0]
        return value

    def int64(self) -> int:
        """Read a signed 64-bit integer."""
        value: int = _INT64.unpack_from(self._view, self._advance(8))[0]
        return value

    def uint32(self) -> int:
        """Read an unsigned 32-bit integer."""
        value: int = _UINT32.unpack_from(self._view, self._advance(4))[0]
        return value

    def float64(self) -> float:
        value: float = _FLOAT64.unpack_from(self._view, self._advance(8))[0]
        return value

    def fields(self, layout: struct.Struct) -> tuple[Any, ...]:
        """Read several values of fixed width at once."""
        return layout.unpack_from(self._view, self._advance(layout.size))

    def boolean(self) -> bool:
        """Read one byte; anything but zero is true, as in Kafka."""
        return self._view[self._advance(1)] != 0

    def uuid(self) -> UUID:
        """Read a 128-bit id; Kafka's null id is all zeros."""
        start = self._advance(16)
        return UUID(bytes=bytes(self._view[start : start + 16]))

    def uvarint(self) -> int:
        """Read an unsigned integer of at most 32 bits in base 128."""
        position = self.position
        if position < self.end:
            first = self._view[position]
            if first < 0x80:
                self.position = position + 1
                return first
        value = self._base128(_UVARINT_BYTES_MAX)
        if value > UVARINT_MAX:
            raise ProtocolViolation(f"a varint of {value} is beyond 32 bits")
        return value

    def string(self) -> str:
        """Read a string that cannot be null."""
        text = self.nullable_string()
        if text is None:
            raise ProtocolViolation("a string is null where the protocol does not allow it")
        return text

    def nullable_string(self) -> str | None:
        length = self.uvarint() - 1 if self.flexible else self.int16()
        return self._text(length)

    def legacy_nullable_string(self) -> str | None:
        """Read a string with a 16-bit length in every version, as the client id in headers has."""
        return self._text(self.int16())

    def blob(self) -> memoryview | None:
        """Read a block of bytes or null, without copying it."""
        length = self.uvarint() - 1 if self.flexible else self.int32()
        if length == NULL:
            return None
        start = self._advance(length)
        return self._view[start : start + length]

    def array_length(self, *, item_bytes_min: int = 1) -> int:
        """Read how many items follow, -1 for null; more than the bytes left can hold is a violation."""
        length = self.uvarint() - 1 if self.flexible else self.int32()
        if length < NULL or length * item_bytes_min > self.remaining:
            raise ProtocolViolation(f"an array declares {length} items, but only {self.remaining} bytes are left")
        return length

    def int32_array(self) -> list[int]:
        """Read an array of 32-bit integers; null reads as empty."""
        length = max(self.array_length(item_bytes_min=4), 0)
        return list(struct.unpack_from(f">{length}i", self._view, self._advance(4 * length)))

    def tags(self) -> Iterator[tuple[int, Reader]]:
        """Yield every tagged field as its number and a reader of its content; nothing if not flexible."""
        if not self.flexible:
            return
        for _ in range(self._tag_count()):
            tag, size = self.uvarint(), self.uvarint()
            start = self._advance(size)
            yield tag, Reader(self._view, start, flexible=True, end=start + size)

    def skip_tags(self) -> None:
        """Step over all tagged fields; nothing if not flexible."""
        if not self.flexible:
            return
        if self.position < self.end and not self._view[self.position]:
            self.position += 1
        else:
            for _ in range(self._tag_count()):
                self.uvarint()
                self._advance(self.uvarint())

    def skip_no_tags(self) -> bool:
        """Step over the empty list of tagged fields, if the version has one."""
        if self.flexible and self.position < self.end and not self._view[self.position]:
            self.position += 1
            return True
        return False

    def rest(self) -> memoryview:
        """Return the remaining bytes without copying them."""
        start = self._advance(self.remaining)
        return self._view[start : self.end]

    def _tag_count(self) -> int:
        count = self.uvarint()
        if count * 2 > self.remaining:
            raise ProtocolViolation(f"{count} tagged fields are declared, but only {self.remaining} bytes are left")
        return count

    def _advance(self, size: int) -> int:
        start = self.position
        after = start + size
        if size < 0 or after > self.end:
            raise ProtocolViolation(f"{size} bytes are needed, but only {self.end - start} are left")
        self.position = after
        return start

    def _text(self, length: int) -> str | None:
        if length == NULL:
            return None
        start = self._advance(length)
        try:
            return str(self._view[start : start + length], "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolViolation(f"a string is not UTF-8: {error}") from None

    def _base128(self, bytes_max: int) -> int:
        value = 0
        for index in range(bytes_max):
            byte = self._view[self._advance(1)]
            value |= (byte & 0x7F) << (7 * index)
            if byte < 0x80:
                return value
        raise ProtocolViolation(f"a varint is longer than {bytes_max} bytes")


class Writer:
    """A growing buffer. Every method appends one value and returns nothing."""

    __slots__ = ("buffer", "flexible")

    def __init__(self, *, flexible: bool = True, buffer: bytearray | None = None) -> None:
        self.buffer = bytearray() if buffer is None else buffer
        self.flexible = flexible

    def int8(self, value: int) -> None:
        """Append one signed byte."""
        self.buffer += _INT8.pack(value)

    def int16(self, value: int) -> None:
        """Append a signed 16-bit integer."""
        self.buffer += _INT16.pack(value)

    def int32(self, value: int) -> None:
        """Append a signed 32-bit integer."""
        self.buffer += _INT32.pack(value)

    def int64(self, value: int) -> None:
        """Append a signed 64-bit integer."""
        self.buffer += _INT64.pack(value)

    def uint32(self, value: int) -> None:
        """Append an unsigned 32-bit integer."""
        self.buffer += _UINT32.pack(value)

    def float64(self, value: float) -> None:
        self.buffer += _FLOAT64.pack(value)

    def boolean(self, value: bool) -> None:
        """Append one byte, 1 or 0."""
        self.buffer.append(1 if value else 0)

    def uuid(self, value: UUID) -> None:
        """Append a 128-bit id."""
        self.buffer += value.bytes

    def uvarint(self, value: int) -> None:
        """Append an unsigned integer in base 128."""
        while value > 0x7F:
            self.buffer.append((value & 0x7F) | 0x80)
            value >>= 7
        self.buffer.append(value)

    def string(self, value: str | None) -> None:
        if value is None:
            self._length(NULL, _INT16)
            return
        content = value.encode()
        self._length(len(content), _INT16)
        self.buffer += content

    def legacy_string(self, value: str | None) -> None:
        """Append a string with a 16-bit length in every version, as the client id in headers has."""
        content = b"" if value is None else value.encode()
        self._fixed_length(NULL if value is None else len(content), _INT16)
        self.buffer += content

    def blob(self, value: Buffer | None) -> None:
        """Append a block of bytes or null."""
        self.blob_length(NULL if value is None else len(value))
        if value is not None:
            self.buffer += value

    def blob_length(self, length: int) -> None:
        """Append only the length of a block whose bytes are sent separately."""
        self._length(length, _INT32)

    def array_length(self, length: int) -> None:
        """Append how many items follow, -1 for null."""
        self._length(length, _INT32)

    def int32_array(self, values: list[int] | tuple[int, ...]) -> None:
        """Append an array of 32-bit integers."""
        self.array_length(len(values))
        self.buffer += struct.pack(f">{len(values)}i", *values)

    def no_tags(self) -> None:
        """Append an empty list of tagged fields; nothing if not flexible."""
        if self.flexible:
            self.buffer.append(0)

    def tags(self, tags: Mapping[int, bytes | bytearray]) -> None:
        """Append tagged fields."""
        self.uvarint(len(tags))
        for tag, content in tags.items():
            self.uvarint(tag)
            self.uvarint(len(content))
            self.buffer += content

    def _length(self, length: int, width: struct.Struct) -> None:
        if self.flexible:
            self.uvarint(length + 1)
        else:
            self._fixed_length(length, width)

    def _fixed_length(self, length: int, width: struct.Struct) -> None:
        try:
            self.buffer += width.pack(length)
        except struct.error:
            raise InvalidRequest(
                f"{length} bytes or items are more than this version of the request can encode"
            ) from None
