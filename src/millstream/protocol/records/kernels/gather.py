"""Copying the fields of records into columns. Where a field lies was checked when the records were parsed."""

from __future__ import annotations

from numba import int64, uint8, uint64

from millstream.protocol.records.kernels.compiled import compiled
from millstream.protocol.records.layout import Bytes, Int32s

INT32_MAX = 2**31 - 1


@compiled
def lay_out(lengths: Int32s, offsets: Int32s, validity: Bytes) -> tuple[int, int]:
    """Fill the offsets of a column and its validity, a bit a row; return its bytes (-1: too many) and its nulls."""
    total = 0
    nulls = 0
    validity[:] = 0
    offsets[0] = 0
    for row in range(lengths.size):
        length = lengths[row]
        if length >= 0:
            total += int64(length)
            validity[row >> 3] |= uint8(1 << (row & 7))
        else:
            nulls += 1
        if total > INT32_MAX:
            return -1, nulls
        offsets[row + 1] = total
    return total, nulls


@compiled
def copy_fields(data: Bytes, positions: Int32s, offsets: Int32s, column: Bytes) -> None:
    """Copy the bytes of every field to its place in the column."""
    for row in range(positions.size):
        # Unsigned numbers, since Python's meaning of negative indices would keep the loop from being vectorised.
        source = uint64(positions[row])
        target = uint64(offsets[row])
        for index in range(uint64(offsets[row + 1]) - target):
            column[target + index] = data[source + index]


@compiled
def _utf8_follows(data: Bytes, position: int, end: int) -> int:
    """The bytes of the well-formed character that begins with the non-ASCII byte at `position`; 0 if there is none."""
    first = data[position]
    if first < 0xC2 or first > 0xF4:
        return 0
    size = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if size > end - position:
        return 0
    # The second byte is narrower after these, which rules out overlong forms, surrogates and what lies beyond Unicode.
    low = 0xA0 if first == 0xE0 else 0x90 if first == 0xF0 else 0x80
    high = 0x9F if first == 0xED else 0x8F if first == 0xF4 else 0xBF
    if data[position + 1] < low or data[position + 1] > high:
        return 0
    for index in range(position + 2, position + size):
        if data[index] & 0xC0 != 0x80:
            return 0
    return size


@compiled
def all_utf8(data: Bytes, offsets: Int32s) -> bool:
    """Whether every single value of the column is well-formed UTF-8."""
    for row in range(offsets.size - 1):
        position = int64(offsets[row])
        end = int64(offsets[row + 1])
        while position < end:
            size = 1 if data[position] < 0x80 else _utf8_follows(data, position, end)
            if size == 0:
                return False
            position += size
    return True
