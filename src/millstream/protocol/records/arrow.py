"""Arrow record batches shaped like the rows of Spark's Kafka source, made from fetch responses and turned into batches.

Key, value and header values are `binary` (Spark refuses the large kinds), timestamps are microseconds in UTC, and a
record without headers has a null there, all as Spark's own source does it. Nothing is copied on the way from columns.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from millstream.core.errors import InvalidBatch
from millstream.core.ids import NO_TIMESTAMP_MS
from millstream.protocol.records.columns import BinaryColumn, Columns, HeaderColumn
from millstream.protocol.records.layout import Bytes, Int32s, Int64s

NAMES: Final = ("key", "value", "topic", "partition", "offset", "timestamp", "timestampType", "headers")
"""The column names, in order; separate from the conversion code, since planning a query needs only them."""

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])

_HEADERS = pa.list_(pa.field("element", _HEADER))

_TIMESTAMP = pa.timestamp("us", tz="UTC")

SCHEMA = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", _TIMESTAMP),
        pa.field("timestampType", pa.int32()),
        pa.field("headers", _HEADERS),
    ]
)
"""All columns of Spark's Kafka source."""

_MILLISECONDS_MAX = (2**63 - 1) // 1000


def to_arrow(columns: Columns, *, topic: str, partition: int, names: Sequence[str] = NAMES) -> pa.RecordBatch:
    """Return the named columns as a record batch; key, value and headers must have been decoded if they are named."""
    schema = pa.schema([SCHEMA.field(name) for name in names])
    return pa.RecordBatch.from_arrays([_array(columns, name, topic, partition) for name in names], schema=schema)


def _array(columns: Columns, name: str, topic: str, partition: int) -> pa.Array:
    if name == "key":
        return _binary_array(columns.keys, pa.binary())
    if name == "value":
        return _binary_array(columns.values, pa.binary())
    if name == "topic":
        return pa.repeat(pa.scalar(topic, pa.string()), len(columns))
    if name == "partition":
        return pa.repeat(pa.scalar(partition, pa.int32()), len(columns))
    if name == "offset":
        return pa.array(columns.offsets)
    if name == "timestamp":
        return _timestamp_array(columns.timestamps_ms)
    if name == "timestampType":
        return pa.array(columns.timestamp_types)
    return _headers_array(columns.headers)


def _binary_array(column: BinaryColumn | None, kind: pa.DataType) -> pa.Array:
    if column is None:
        raise ValueError("the column was not decoded")
    buffers = [_buffer(column.validity), _buffer(column.offsets), _buffer(column.data)]
    return pa.Array.from_buffers(kind, len(column), buffers, column.null_count)


def _buffer(array: np.ndarray[Any, Any] | None) -> pa.Buffer | None:
    return None if array is None else pa.py_buffer(array)


def _timestamp_array(timestamps_ms: Int64s) -> pa.Array:
    """Microseconds; null where they do not fit into 64 bits, which producers can send."""
    micros = timestamps_ms * 1000
    outside = (timestamps_ms > _MILLISECONDS_MAX) | (timestamps_ms < -_MILLISECONDS_MAX)
    return pa.array(micros, mask=outside if outside.any() else None).view(_TIMESTAMP)


def _headers_array(headers: HeaderColumn | None) -> pa.Array:
    if headers is None:
        raise ValueError("the headers were not decoded")
    structs = pa.StructArray.from_arrays(
        [_binary_array(headers.keys, pa.string()), _binary_array(headers.values, pa.binary())], fields=list(_HEADER)
    )
    has_none = np.equal(headers.offsets[1:], headers.offsets[:-1])
    validity = np.packbits(~has_none, bitorder="little") if has_none.any() else None
    return pa.Array.from_buffers(
        _HEADERS, len(headers), [_buffer(validity), _buffer(headers.offsets)], children=[structs]
    )


def from_arrow(batch: pa.RecordBatch, *, default_timestamp_ms: int = NO_TIMESTAMP_MS) -> Columns:
    """Columns to be encoded, from a record batch that has `value` and may have `key`, `headers` and `timestamp`.

    Key and value are binary or text. Rows without a timestamp get the default.
    """
    if "value" not in batch.schema.names:
        raise InvalidBatch(f"records to be written need a column `value`; there are: {', '.join(batch.schema.names)}")
    rows = batch.num_rows
    key = _column(batch, "key", pa.binary())
    return Columns(
        offsets=np.arange(rows, dtype=np.int64),
        timestamps_ms=_milliseconds(_column(batch, "timestamp", _TIMESTAMP), rows, default_timestamp_ms),
        attributes=np.zeros(rows, np.int16),
        keys=None if key is None else binary_column(key),
        values=binary_column(_column(batch, "value", pa.binary())),
        headers=_header_column(_column(batch, "headers", _HEADERS)),
    )


def _column(batch: pa.RecordBatch, name: str, kind: pa.DataType) -> pa.Array | None:
    index = batch.schema.get_field_index(name)
    if index < 0:
        return None
    array = batch.column(index)
    try:
        return array if array.type == kind else array.cast(kind)
    except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
        raise InvalidBatch(f"column {name!r} is {array.type}, which cannot be written as {kind}: {error}") from error


def _milliseconds(array: pa.Array | None, rows: int, default_ms: int) -> Int64s:
    if array is None:
        return np.full(rows, default_ms, np.int64)
    micros = array.cast(pa.int64()).fill_null(default_ms * 1000).to_numpy()
    milliseconds: Int64s = micros // 1000
    return milliseconds


def binary_column(array: pa.Array) -> BinaryColumn:
    validity, offsets, data = array.buffers()
    first = array.offset
    return BinaryColumn(
        offsets=_offsets(offsets, first, len(array)),
        data=_bytes(data),
        validity=_bytes(validity) if validity is not None and array.null_count else None,
        validity_at=first,
        null_count=array.null_count,
    )


def _header_column(array: pa.Array | None) -> HeaderColumn | None:
    if array is None or array.null_count == len(array):
        return None
    offsets = np.zeros(len(array) + 1, np.int32)
    np.cumsum(pc.list_value_length(array).fill_null(0).to_numpy(), out=offsets[1:])
    headers = array.flatten()
    if headers.null_count:
        raise InvalidBatch("a header is null")
    keys, values = headers.flatten()
    return HeaderColumn(offsets=offsets, keys=binary_column(keys), values=binary_column(values))


def _offsets(buffer: pa.Buffer | None, first: int, rows: int) -> Int32s:
    # Arrow leaves the buffer out where there are no rows.
    if buffer is None or rows == 0:
        return np.zeros(1, np.int32)
    return np.frombuffer(buffer, np.int32)[first : first + rows + 1]


def _bytes(buffer: pa.Buffer | None) -> Bytes:
    return np.empty(0, np.uint8) if buffer is None else np.frombuffer(buffer, np.uint8)
