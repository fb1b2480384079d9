"""Finding the batches of a fetch answer."""

from __future__ import annotations

from numba import int8, int64

from millstream.protocol.records.kernels.compiled import compiled
from millstream.protocol.records.layout import Bytes, Row, Table

HEADER_BYTES = 61
OVERHEAD_BYTES = 12
MAGIC = 2
INT64_MAX = 2**63 - 1

WRONG_MAGIC, BATCH_LENGTH, NEGATIVE_COUNT, OFFSET_OVERFLOW = range(1, 5)

FAULTS = {
    WRONG_MAGIC: f"its magic is not {MAGIC}",
    BATCH_LENGTH: "its length is below the size of a header",
    NEGATIVE_COUNT: "its record count or its last offset delta is negative",
    OFFSET_OVERFLOW: "its offsets are negative or overflow 64 bits",
}
"""What each fault means, as the end of a sentence. Kernels return faults, callers raise."""


@compiled
def _read_big_endian(data: Bytes, position: int, size: int) -> int:
    """A signed number of `size` bytes; the caller has checked that they are there."""
    value: int = int64(int8(data[position]))
    for index in range(position + 1, position + size):
        value = (value << 8) | int64(data[index])
    return value


@compiled
def count_batches(data: Bytes) -> tuple[int, int]:
    """How many whole batches there are, and 0 or a fault behind them; a last batch that is cut off is ignored."""
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
