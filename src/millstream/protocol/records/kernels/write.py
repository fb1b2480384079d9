"""Writing records: first their lengths, which precede them, then their bytes."""

from __future__ import annotations

from numba import int64, uint8, uint64

from millstream.protocol.records.kernels.compiled import compiled
from millstream.protocol.records.layout import Bytes, Int32s, Int64s, Row, Table

INT32_MAX = 2**31 - 1
INT64_MAX = 2**63 - 1


@compiled
def _varint_bytes(value: int) -> int:
    """Return the size of the number in bytes."""
    rest = (value << 1) ^ (value >> 63)
    size = 1
    while rest < 0 or rest > 0x7F:
        rest = (rest >> 7) & (INT64_MAX >> 6)
        size += 1
    return size


@compiled
def _write_varint(target: Bytes, position: int, value: int) -> int:
    """Write a zigzag number and return the position after it."""
    rest = (value << 1) ^ (value >> 63)
    while rest < 0 or rest > 0x7F:
        target[position] = uint8(0x80 | (rest & 0x7F))
        # The highest bit is data here, not a sign, so the shift must not extend it.
        rest = (rest >> 7) & (INT64_MAX >> 6)
        position += 1
    target[position] = uint8(rest)
    return position + 1


@compiled
def _field_bytes(length: int) -> int:
    """Return the encoded size of a field, including its length."""
    return _varint_bytes(length) + max(length, 0)


@compiled
def _write_field(target: Bytes, position: int, data: Bytes, start: int, length: int) -> int:
    """Write a field and its length, -1 for null; return the position after it."""
    position = _write_varint(target, position, length)
    if length <= 0:
        return position
    # Unsigned numbers, since Python's meaning of negative indices would keep the loop from being vectorised.
    source = uint64(start)
    place = uint64(position)
    for index in range(uint64(length)):
        target[place + index] = data[source + index]
    return position + length


@compiled
def _body_bytes(record: Row, headers: Table, timestamp_delta: int, offset_delta: int) -> int:
    """Return the size of a record without its length prefix."""
    size = 1 + _varint_bytes(timestamp_delta) + _varint_bytes(offset_delta)
    size += _field_bytes(int64(record["key_length"])) + _field_bytes(int64(record["value_length"]))
    size += _varint_bytes(int64(record["header_count"]))
    first = int64(record["headers_at"])
    for row in range(first, first + record["header_count"]):
        size += _field_bytes(int64(headers[row]["key_length"])) + _field_bytes(int64(headers[row]["value_length"]))
    return size


@compiled
def measure_batch(
    records: Table, headers: Table, timestamps: Int64s, first: int, bytes_max: int, lengths: Int32s
) -> tuple[int, int, int]:
    """Find how many records from `first` on make a batch of at most `bytes_max`, but at least one, and their lengths.

    Returns the row after them, the bytes they take and their largest timestamp. A batch also ends before a
    timestamp that cannot be encoded as a delta from its first one.
    """
    size = 0
    max_timestamp = timestamps[first]
    for row in range(first, records.size):
        timestamp_delta = timestamps[row] - timestamps[first]
        overflows = (timestamps[row] ^ timestamps[first]) & (timestamps[row] ^ timestamp_delta) < 0
        if overflows:
            return row, size, max_timestamp
        length = _body_bytes(records[row], headers, timestamp_delta, row - first)
        total = size + _varint_bytes(length) + length
        if total > bytes_max and row > first:
            return row, size, max_timestamp
        lengths[row] = min(length, INT32_MAX)
        size = total
        max_timestamp = max(max_timestamp, timestamps[row])
    return records.size, size, max_timestamp


@compiled
def write_batch(
    records: Table,
    headers: Table,
    data: tuple[Bytes, Bytes, Bytes, Bytes],
    timestamps: Int64s,
    lengths: Int32s,
    first: int,
    end: int,
    target: Bytes,
) -> int:
    """Write the measured records; `data` is that of keys, values, header keys and header values.

    Returns the bytes written.
    """
    keys, values, header_keys, header_values = data
    position = 0
    for row in range(first, end):
        record = records[row]
        position = _write_varint(target, position, int64(lengths[row]))
        target[position] = 0
        position = _write_varint(target, position + 1, timestamps[row] - timestamps[first])
        position = _write_varint(target, position, row - first)
        position = _write_field(target, position, keys, int64(record["key_at"]), int64(record["key_length"]))
        position = _write_field(target, position, values, int64(record["value_at"]), int64(record["value_length"]))
        position = _write_varint(target, position, int64(record["header_count"]))
        header_first = int64(record["headers_at"])
        for index in range(header_first, header_first + record["header_count"]):
            header = headers[index]
            position = _write_field(target, position, header_keys, int64(header["key_at"]), int64(header["key_length"]))
            position = _write_field(
                target, position, header_values, int64(header["value_at"]), int64(header["value_length"])
            )
    return position
