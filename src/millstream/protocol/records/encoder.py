"""Columns to record batches, in compiled code. Python runs per batch, never per record."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from millstream.core.errors import InvalidBatch
from millstream.protocol.records.batch import COMPRESSION_NONE, HEADER_BYTES, TRANSACTIONAL_FLAG, seal_batch
from millstream.protocol.records.columns import BinaryColumn, Columns, HeaderColumn
from millstream.protocol.records.compression import compress
from millstream.protocol.records.kernels import write
from millstream.protocol.records.layout import HEADERS, RECORDS, Bytes, Int32s, Int64s, Table, read_only
from millstream.protocol.records.record import HEADERS_MAX

BATCH_BYTES_MAX = 512 * 1024
"""The size of a batch's records before compression: well below the default `max.message.bytes`."""

_RECORD_BYTES_MAX = 2**31 - 1 - HEADER_BYTES


@dataclass(frozen=True, slots=True)
class Source:
    """Records as the kernels read them: tables of field positions, and the bytes of the fields.

    Prepared once for all batches made of slices of the same records.
    """

    records: Table
    headers: Table
    data: tuple[Bytes, Bytes, Bytes, Bytes]
    timestamps_ms: Int64s

    def rows(self, first: int, end: int) -> Source:
        """Return a slice of the records; nothing is copied."""
        return Source(self.records[first:end], self.headers, self.data, self.timestamps_ms[first:end])


def encode_source(
    source: Source,
    *,
    compression: int = COMPRESSION_NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
    batch_bytes_max: int = BATCH_BYTES_MAX,
) -> Iterator[bytearray]:
    """Yield batches with all records of a source, in order; offsets count from 0 in each, as a producer sends them.

    With a `base_sequence` the sequences of the batches are consecutive, as an idempotent producer's are. A record
    larger than `batch_bytes_max` gets its own batch.
    """
    lengths = np.empty(source.records.size, np.int32)
    attributes = compression | (TRANSACTIONAL_FLAG if transactional else 0)
    first, sequence = 0, base_sequence
    while first < source.records.size:
        end, size, max_timestamp_ms = write.measure_batch(
            source.records, source.headers, source.timestamps_ms, first, batch_bytes_max, lengths
        )
        batch = _write_records(source, lengths, first, end, size)
        if compression != COMPRESSION_NONE:
            batch[HEADER_BYTES:] = compress(compression, memoryview(batch)[HEADER_BYTES:])
        seal_batch(
            batch,
            base_offset=0,
            attributes=attributes,
            last_offset_delta=end - first - 1,
            base_timestamp_ms=int(source.timestamps_ms[first]),
            max_timestamp_ms=max_timestamp_ms,
            producer_id=producer_id,
            producer_epoch=producer_epoch,
            base_sequence=sequence,
            record_count=end - first,
        )
        yield batch
        if sequence >= 0:
            sequence = (sequence + end - first) & 0x7FFFFFFF
        first = end


def _write_records(source: Source, lengths: Int32s, first: int, end: int, size: int) -> bytearray:
    if size > _RECORD_BYTES_MAX:
        raise InvalidBatch(f"a record of {size} bytes is too large")
    batch = bytearray(HEADER_BYTES + size)
    written = write.write_batch(
        source.records,
        source.headers,
        source.data,
        source.timestamps_ms,
        lengths,
        first,
        end,
        np.frombuffer(batch, np.uint8, offset=HEADER_BYTES),
    )
    if written != size:
        raise InvalidBatch(f"records of {size} bytes were written as {written}")
    return batch


def source_of(columns: Columns, rows: Int64s | None = None) -> Source:
    """Prepare rows, all or those with the given numbers, in that order."""
    records, timestamps_ms = _records_table(columns), columns.timestamps_ms
    if rows is not None:
        if rows.size and (rows.min() < 0 or rows.max() >= len(columns)):
            raise InvalidBatch(f"there are only {len(columns)} rows")
        records, timestamps_ms = records[rows], timestamps_ms[rows]
    headers = columns.headers
    return Source(
        records,
        _headers_table(headers),
        (
            _data(columns.keys),
            _data(columns.values),
            _data(headers.keys if headers is not None else None),
            _data(headers.values if headers is not None else None),
        ),
        read_only(timestamps_ms),
    )


def _data(column: BinaryColumn | None) -> Bytes:
    return read_only(column.data if column is not None else np.empty(0, np.uint8))


def _records_table(columns: Columns) -> Table:
    table = np.empty(len(columns), RECORDS)
    _fill(table, "key", columns.keys)
    _fill(table, "value", columns.values)
    headers = columns.headers
    if headers is None:
        table["headers_at"] = table["header_count"] = 0
        return table
    table["headers_at"] = headers.offsets[:-1]
    table["header_count"] = np.diff(headers.offsets)
    inside = headers.offsets[0] >= 0 and headers.offsets[-1] <= len(headers.keys)
    if not inside or np.any(table["header_count"] < 0) or np.any(table["header_count"] > HEADERS_MAX):
        raise InvalidBatch(f"a record has at most {HEADERS_MAX} headers, none of which may be missing")
    return table


def _headers_table(headers: HeaderColumn | None) -> Table:
    if headers is None:
        return np.empty(0, HEADERS)
    if headers.keys.null_count:
        raise InvalidBatch("the key of a header is null")
    table = np.empty(len(headers.keys), HEADERS)
    _fill(table, "key", headers.keys)
    _fill(table, "value", headers.values)
    return table


def _fill(table: Table, field: str, column: BinaryColumn | None) -> None:
    """Record the position of each value of the column; a missing column is null in every row."""
    if column is None:
        table[f"{field}_at"], table[f"{field}_length"] = 0, -1
        return
    if len(column) != table.size:
        raise InvalidBatch(f"a column of {len(column)} rows does not match {table.size} records")
    column.check()
    table[f"{field}_at"] = column.offsets[:-1]
    table[f"{field}_length"] = column.lengths()
