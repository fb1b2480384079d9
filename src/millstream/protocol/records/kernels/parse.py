"""Finding batches and the fields of their records, and copying them into columns.

Fields are checked when they are found, so that copying needs no checks.
"""

from __future__ import annotations

from numba import int8, int64, uint8, uint64

from millstream.protocol.records.kernels.compiled import compiled
from millstream.protocol.records.layout import Bytes, Int16s, Int32s, Int64s, Row, Table

HEADER_BYTES = 61
OVERHEAD_BYTES = 12
MAGIC = 2

WRONG_MAGIC, BATCH_LENGTH, NEGATIVE_COUNT, OFFSET_OVERFLOW = range(1, 5)

SCAN_FAULTS = {
    WRONG_MAGIC: f"its magic is not {MAGIC}",
    BATCH_LENGTH: "its length is below the size of a header",
    NEGATIVE_COUNT: "its record count or its last offset delta is negative",
    OFFSET_OVERFLOW: "its offsets are negative or overflow 64 bits",
}
"""The meaning of each fault, as the end of a sentence. Kernels return faults, callers raise."""


@compiled
def _read_big_endian(data: Bytes, position: int, size: int) -> int:
    """Return a signed number of `size` bytes; the caller has checked that they are there."""
    value: int = int64(int8(data[position]))
    for index in range(position + 1, position + size):
        value = (value << 8) | int64(data[index])
    return value


@compiled
def count_batches(data: Bytes) -> tuple[int, int]:
    """Return the number of whole batches, and 0 or the fault after them; an incomplete last batch is ignored."""
    count = 0
    position = 0
    while data.size - position >= HEADER_BYTES:
        if data[position + 16] != MAGIC:
            return count, WRONG_MAGIC
        length = _read_big_endian(data, position + 8, 4)
        if length < HEADER_BYTES - OVERHEAD_BYTES:
            return count, BATCH_LENGTH
        if length + OVERHEAD_BYTES > data.size - position:
            break
        count += 1
        position += length + OVERHEAD_BYTES
    return count, 0


@compiled
def _read_header(data: Bytes, position: int, batch: Row) -> int:
    """Read the header of a whole batch; return 0 or a fault."""
    batch["start"] = position
    batch["end"] = position + _read_big_endian(data, position + 8, 4) + OVERHEAD_BYTES
    batch["records_at"] = position + HEADER_BYTES
    batch["records_end"] = batch["end"]
    batch["base_offset"] = _read_big_endian(data, position, 8)
    batch["crc"] = _read_big_endian(data, position + 17, 4) & 0xFFFFFFFF
    batch["attributes"] = _read_big_endian(data, position + 21, 2)
    batch["last_delta"] = _read_big_endian(data, position + 23, 4)
    batch["base_timestamp"] = _read_big_endian(data, position + 27, 8)
    batch["max_timestamp"] = _read_big_endian(data, position + 35, 8)
    batch["record_count"] = _read_big_endian(data, position + 57, 4)
    if batch["last_delta"] < 0 or batch["record_count"] < 0:
        return NEGATIVE_COUNT
    if batch["base_offset"] < 0 or batch["base_offset"] >= INT64_MAX - batch["last_delta"]:
        return OFFSET_OVERFLOW
    return 0


@compiled
def scan_batches(data: Bytes, batches: Table) -> tuple[int, int]:
    """Fill a table of as many batches as `count_batches` found; return the row it ended at, and 0 or a fault."""
    position = 0
    for row in range(batches.size):
        fault = _read_header(data, position, batches[row])
        if fault:
            return row, fault
        position = batches[row]["end"]
    return batches.size, 0


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
    for row in range(positions.size):
        # Unsigned numbers, since Python's meaning of negative indices would keep the loop from being vectorised.
        source = uint64(positions[row])
        target = uint64(offsets[row])
        for index in range(uint64(offsets[row + 1]) - target):
            column[target + index] = data[source + index]


@compiled
def _utf8_follows(data: Bytes, position: int, end: int) -> int:
    """Return the size of the character that begins with the non-ASCII byte at `position`; 0 if it is malformed."""
    first = data[position]
    if first < 0xC2 or first > 0xF4:
        return 0
    size = 2 if first < 0xE0 else 3 if first < 0xF0 else 4
    if size > end - position:
        return 0
    # The second byte is narrower after these, which rules out overlong forms, surrogates and values beyond Unicode.
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


RECORD_BYTES_MIN = 7
HEADERS_MAX = 65_536
"""A record with more headers is refused, so that a small batch cannot cause a large allocation."""
APPEND_TIME_FLAG = 0x08
INT64_MAX = 2**63 - 1

ENDS_WITHIN_NUMBER, NUMBER_TOO_LARGE, RECORD_LENGTH, FIELD_LENGTH, OFFSET_DELTA = -1, -2, -3, -4, -5
TIMESTAMP_OVERFLOW, TOO_MANY_HEADERS, RECORD_END, BYTES_LEFT_OVER, TOO_MANY_RECORDS = -6, -7, -8, -9, -10

FAULTS = {
    ENDS_WITHIN_NUMBER: "a record ends within a number",
    NUMBER_TOO_LARGE: "a number takes more bits than it may",
    RECORD_LENGTH: "a record declares a length that it cannot have",
    FIELD_LENGTH: "a field declares a length that its record cannot hold",
    OFFSET_DELTA: "offset deltas do not increase, or leave the batch",
    TIMESTAMP_OVERFLOW: "a timestamp overflows 64 bits",
    TOO_MANY_HEADERS: f"a record declares a negative number of headers or more than {HEADERS_MAX}",
    RECORD_END: "a record does not end where its length says",
    BYTES_LEFT_OVER: "bytes follow its last record",
    TOO_MANY_RECORDS: "it declares more records than its bytes can hold",
}
"""The meaning of each fault, as the end of a sentence. Faults are negative, unlike the positions that are returned."""


@compiled
def _read_varint(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Return a zigzag number of at most 32 bits, and the position after it or a fault."""
    value = 0
    for shift in range(0, 35, 7):
        if position >= end:
            return 0, ENDS_WITHIN_NUMBER
        byte = int64(data[position])
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            if value >> 32:
                return 0, NUMBER_TOO_LARGE
            return (value >> 1) ^ -(value & 1), position
    return 0, NUMBER_TOO_LARGE


@compiled
def _read_varlong(data: Bytes, position: int, end: int) -> tuple[int, int]:
    """Return a zigzag number of at most 64 bits, and the position after it or a fault."""
    value = 0
    for shift in range(0, 70, 7):
        if position >= end:
            return 0, ENDS_WITHIN_NUMBER
        byte = int64(data[position])
        position += 1
        if shift == 63 and byte > 1:
            return 0, NUMBER_TOO_LARGE
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            # The highest bit is data here, not a sign, so the shift must not extend it.
            return ((value >> 1) & INT64_MAX) ^ -(value & 1), position
    return 0, NUMBER_TOO_LARGE


@compiled
def _read_length(data: Bytes, position: int, end: int, least: int) -> tuple[int, int]:
    """Return the length of a field whose bytes lie before `end`, and the position of these bytes or a fault."""
    length, position = _read_varint(data, position, end)
    if position >= 0 and (length < least or length > end - position):
        return 0, FIELD_LENGTH
    return length, position


@compiled
def _skip_headers(data: Bytes, position: int, end: int, count: int) -> int:
    """Check all headers of a record; return the position after them or a fault."""
    for _ in range(count):
        length, position = _read_length(data, position, end, 0)
        if position < 0:
            return position
        length, position = _read_length(data, position + length, end, -1)
        if position < 0:
            return position
        position += max(length, 0)
    return position


@compiled
def _find_fields(data: Bytes, position: int, end: int, record: Row) -> int:
    """Note where key, value and headers of a record lie; return 0 or a fault."""
    length, position = _read_length(data, position, end, -1)
    if position < 0:
        return position
    record["key_at"] = position
    record["key_length"] = length
    length, position = _read_length(data, position + max(length, 0), end, -1)
    if position < 0:
        return position
    record["value_at"] = position
    record["value_length"] = length
    count, position = _read_varint(data, position + max(length, 0), end)
    if position < 0:
        return position
    if count < 0 or count > HEADERS_MAX:
        return TOO_MANY_HEADERS
    record["headers_at"] = position
    record["header_count"] = count
    position = _skip_headers(data, position, end, count)
    if position < 0:
        return position
    return 0 if position == end else RECORD_END


@compiled
def _parse_record(data: Bytes, parsing: Row, batch: Row, record: Row) -> tuple[int, int]:
    """Check the record at the parser's position and step over it; return its timestamp, and 0 or a fault."""
    length, position = _read_varint(data, parsing["position"], batch["records_end"])
    if position < 0:
        return 0, position
    if length < RECORD_BYTES_MIN - 1 or length > batch["records_end"] - position:
        return 0, RECORD_LENGTH
    end = position + length
    timestamp_delta, position = _read_varlong(data, position + 1, end)
    if position < 0:
        return 0, position
    offset_delta, position = _read_varint(data, position, end)
    if position < 0:
        return 0, position
    if offset_delta <= parsing["delta"] or offset_delta > batch["last_delta"]:
        return 0, OFFSET_DELTA
    fault = _find_fields(data, position, end, record)
    if fault:
        return 0, fault
    parsing["position"] = end
    parsing["delta"] = offset_delta
    if batch["attributes"] & APPEND_TIME_FLAG:
        return batch["max_timestamp"], 0
    base = batch["base_timestamp"]
    timestamp = base + timestamp_delta
    if (base ^ timestamp) & (timestamp_delta ^ timestamp) < 0:
        return 0, TIMESTAMP_OVERFLOW
    return timestamp, 0


@compiled
def _begin_batch(parsing: Row, batch: Row) -> int:
    """Move to the first record of a batch; return 0 or a fault."""
    parsing["position"] = batch["records_at"]
    parsing["delta"] = -1
    if batch["record_count"] * RECORD_BYTES_MIN > batch["records_end"] - batch["records_at"]:
        return TOO_MANY_RECORDS
    return 0


@compiled
def parse_records(
    data: Bytes,
    batches: Table,
    state: Table,
    start_offset: int,
    end_offset: int,
    offsets: Int64s,
    timestamps: Int64s,
    attributes: Int16s,
    records: Table,
) -> tuple[int, int]:
    """Fill the columns with the next records from `start_offset` up to, not including, `end_offset`.

    Begins at the state's position and stops when the columns are full, the rows have many headers or the batches are
    done. Returns the number of rows, and 0 or a fault in the batch at the new position.
    """
    parsing = state[0]
    row = 0
    header_count = 0
    while parsing["batch"] < batches.size:
        batch = batches[parsing["batch"]]
        if parsing["record"] == 0:
            fault = _begin_batch(parsing, batch)
            if fault:
                return row, fault
        while parsing["record"] < batch["record_count"]:
            if row == records.size or header_count > HEADERS_MAX:
                return row, 0
            timestamp, fault = _parse_record(data, parsing, batch, records[row])
            if fault:
                return row, fault
            parsing["record"] += 1
            offset = batch["base_offset"] + parsing["delta"]
            if start_offset <= offset < end_offset:
                offsets[row] = offset
                timestamps[row] = timestamp
                attributes[row] = batch["attributes"]
                header_count += records[row]["header_count"]
                row += 1
        if parsing["position"] != batch["records_end"]:
            return row, BYTES_LEFT_OVER
        parsing["batch"] += 1
        parsing["record"] = 0
    return row, 0


@compiled
def find_headers(data: Bytes, records: Table, headers: Table) -> int:
    """Note where the fields of all headers lie, as many as the parsed records have; return how many were found."""
    row = 0
    for index in range(records.size):
        position = int64(records[index]["headers_at"])
        for _ in range(records[index]["header_count"]):
            length, position = _read_length(data, position, data.size, 0)
            if position < 0 or row == headers.size:
                return row
            headers[row]["key_at"] = position
            headers[row]["key_length"] = length
            length, position = _read_length(data, position + length, data.size, -1)
            if position < 0:
                return row
            headers[row]["value_at"] = position
            headers[row]["value_length"] = length
            position += max(length, 0)
            row += 1
    return row
