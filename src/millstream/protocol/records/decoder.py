"""Fetch responses to columns, in compiled code.

No Python runs per record: batches are found, records parsed and fields copied by kernels, a few thousand records at a
time. Python runs per batch only to check its CRC and to decompress it. Every table is sized by the bytes received,
never by what a header declares.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from crc32c import crc32c

from millstream.core.errors import BatchRejected, CorruptBatch, UnsupportedCompression
from millstream.core.ids import Offset
from millstream.protocol.records.batch import (
    COMPRESSION_MASK,
    COMPRESSION_NONE,
    COMPRESSION_ZSTD,
    CONTROL_FLAG,
    CRC_FROM,
    PRODUCER_ID_AT,
    Buffer,
)
from millstream.protocol.records.columns import BinaryColumn, Columns, HeaderColumn
from millstream.protocol.records.compression import decompress
from millstream.protocol.records.kernels import parse
from millstream.protocol.records.layout import BATCHES, HEADERS, PARSING, RECORDS, Bytes, Int32s, Table, read_only
from millstream.protocol.records.record import AbortedBatches

KEY, VALUE, HEADER = "key", "value", "headers"
FIELDS = frozenset({KEY, VALUE, HEADER})
"""The fields of a record that are built only on request."""

ROWS_MAX = 8192
"""Rows decoded at a time: few enough for the caches, and a size that suits Spark."""

OFFSET_MAX = 2**63 - 1
_SOURCE_BYTES_MAX = 2**31 - 1
_JOINED_BYTES = 1024 * 1024


@dataclass(frozen=True, slots=True)
class Batches:
    """The whole batches of a fetch response."""

    data: Bytes
    table: Table

    @property
    def next_offset(self) -> Offset | None:
        """Return the offset after the last batch, where to fetch next; None if there is no batch."""
        if not self.table.size:
            return None
        last = self.table[-1]
        return Offset(int(last["base_offset"] + last["last_delta"]) + 1)


@dataclass(frozen=True, slots=True)
class UnreadableBatch:
    """Offsets from `start` up to, not including, `end` whose batch cannot be read, or decompresses to too much."""

    start: int
    end: int
    timestamp_ms: int
    reason: str


Skip = Callable[[UnreadableBatch], None]


def find_batches(buffer: Buffer) -> Batches:
    """Find the batches of a fetch response and check their framing; an incomplete last batch is ignored."""
    if len(buffer) > _SOURCE_BYTES_MAX:
        raise CorruptBatch(f"{len(buffer)} bytes are more than a fetch response holds")
    data = read_only(np.frombuffer(buffer, np.uint8))
    count, fault = parse.count_batches(data)
    if fault:
        raise CorruptBatch(f"record batch {count} of a fetch response is corrupt: {parse.SCAN_FAULTS[fault]}")
    table = np.empty(count, BATCHES)
    row, fault = parse.scan_batches(data, table)
    if fault:
        raise CorruptBatch(f"record batch {row} of a fetch response is corrupt: {parse.SCAN_FAULTS[fault]}")
    if np.any(table["attributes"] & COMPRESSION_MASK > COMPRESSION_ZSTD):
        raise UnsupportedCompression("a record batch names a compression codec that is unknown")
    return Batches(data, table)


def decode_columns(
    buffer: Buffer | Batches,
    *,
    fields: Collection[str] = FIELDS,
    start_offset: int = 0,
    end_offset: int = OFFSET_MAX,
    aborted: Collection[tuple[int, int]] = (),
    control: bool = False,
    verify_crc: bool = True,
    decompressed_bytes_max: int | None = None,
    rows_max: int = ROWS_MAX,
    skip: Skip | None = None,
) -> Iterator[Columns]:
    """Yield the records from `start_offset` up to `end_offset`, exclusive, at most `rows_max` at a time.

    Control batches are skipped unless requested, and so are batches of the aborted transactions in the response, each
    given as producer id and first offset. A batch that cannot be read is reported to `skip` when it is reached, and
    skipped; without `skip`, it raises `BatchRejected`.
    """
    batches = buffer if isinstance(buffer, Batches) else find_batches(buffer)
    table = batches.table
    selected = (table["base_offset"] < end_offset) & (table["base_offset"] + table["last_delta"] >= start_offset)
    if not control:
        selected &= table["attributes"] & CONTROL_FLAG == 0
    if aborted:
        selected &= ~_aborted(batches, aborted)
    table = table[selected]

    def decode(some: Table, start: int) -> Iterator[Columns]:
        if verify_crc:
            _check_crcs(batches.data, some)
        for data, part in _sources(batches.data, some, decompressed_bytes_max):
            yield from _decode_source(data, part, frozenset(fields), start, end_offset, rows_max)

    if skip is None:
        yield from decode(table, start_offset)
        return
    position = start_offset
    try:
        # A copy, since decompressed records are in another buffer.
        for columns in decode(table.copy(), position):
            yield columns
            position = int(columns.offsets[-1]) + 1
    except BatchRejected:
        yield from _decode_each_batch(table, position, min(end_offset, OFFSET_MAX), decode, skip)


def _decode_each_batch(
    table: Table, position: int, end_offset: int, decode: Callable[[Table, int], Iterator[Columns]], skip: Skip
) -> Iterator[Columns]:
    """Decode batch by batch, so that all readable ones are returned."""
    for row in range(table.size):
        batch = table[row]
        base_offset, end = int(batch["base_offset"]), int(batch["base_offset"] + batch["last_delta"]) + 1
        if end <= position:
            continue
        try:
            for columns in decode(table[row : row + 1].copy(), position):
                yield columns
                position = int(columns.offsets[-1]) + 1
        except BatchRejected as error:
            start = max(base_offset, position)
            skip(UnreadableBatch(start, min(end, end_offset), int(batch["max_timestamp"]), str(error)))
        position = end


def _aborted(batches: Batches, aborted: Collection[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return for every batch whether it belongs to an aborted transaction."""
    table = batches.table
    at = table["start"][:, np.newaxis] + np.arange(PRODUCER_ID_AT, PRODUCER_ID_AT + 8)
    producers = batches.data[at].view(">i8")[:, 0]
    left_out = AbortedBatches(aborted)
    last_offsets = table["base_offset"] + table["last_delta"]
    rows = zip(last_offsets.tolist(), table["attributes"].tolist(), producers.tolist(), strict=True)
    return np.fromiter((left_out.holds(*row) for row in rows), np.bool_, table.size)


def _check_crcs(data: Bytes, table: Table) -> None:
    view = data.data
    rows = zip(table["start"].tolist(), table["end"].tolist(), table["crc"].tolist(), strict=True)
    for row, (start, end, expected) in enumerate(rows):
        checksum = crc32c(view[start + CRC_FROM : end])
        if checksum != expected:
            raise CorruptBatch(
                f"record batch at offset {table['base_offset'][row]}: CRC-32C is {checksum:#010x}, "
                f"its header says {expected:#010x}"
            )


def _sources(data: Bytes, table: Table, decompressed_bytes_max: int | None) -> Iterator[tuple[Bytes, Table]]:
    """Yield arrays of uncompressed records, and the batches in each."""
    codecs = table["attributes"] & COMPRESSION_MASK
    if not codecs.any():
        yield data, table
        return
    view = data.data
    pieces: list[Buffer] = []
    size = first = 0
    bounds = zip(codecs.tolist(), table["records_at"].tolist(), table["records_end"].tolist(), strict=True)
    for row, (codec, start, end) in enumerate(bounds):
        piece: Buffer = view[start:end]
        if codec != COMPRESSION_NONE and start < end:
            piece = decompress(codec, piece, bytes_max=decompressed_bytes_max)
        pieces.append(piece)
        size += len(piece)
        if size >= _JOINED_BYTES or row == table.size - 1:
            yield _join(pieces, table[first : row + 1])
            pieces, size, first = [], 0, row + 1


def _join(pieces: list[Buffer], table: Table) -> tuple[Bytes, Table]:
    joined = b"".join(pieces) if len(pieces) > 1 else pieces[0]
    if len(joined) > _SOURCE_BYTES_MAX:
        raise CorruptBatch(f"records decompress to {len(joined)} bytes")
    table["records_end"] = np.cumsum([len(piece) for piece in pieces])
    table["records_at"][1:] = table["records_end"][:-1]
    table["records_at"][0] = 0
    return read_only(np.frombuffer(joined, np.uint8)), table


def _decode_source(
    data: Bytes, table: Table, fields: frozenset[str], start_offset: int, end_offset: int, rows_max: int
) -> Iterator[Columns]:
    state = np.zeros(1, PARSING)
    counts = np.cumsum(table["record_count"])
    done = 0
    while state["batch"][0] < table.size:
        rows = int(min(rows_max, counts[-1] - done))
        offsets, timestamps = np.empty(rows, np.int64), np.empty(rows, np.int64)
        attributes, records = np.empty(rows, np.int16), np.empty(rows, RECORDS)
        rows, fault = parse.parse_records(
            data, table, state, start_offset, end_offset, offsets, timestamps, attributes, records
        )
        batch = int(state["batch"][0])
        if fault:
            raise CorruptBatch(f"record batch at offset {table['base_offset'][batch]}: {parse.FAULTS[fault]}")
        done = int((counts[batch - 1] if batch else 0) + state["record"][0])
        if rows:
            records = records[:rows]
            yield Columns(
                offsets=offsets[:rows],
                timestamps_ms=timestamps[:rows],
                attributes=attributes[:rows],
                keys=_gather(data, records["key_at"], records["key_length"]) if KEY in fields else None,
                values=_gather(data, records["value_at"], records["value_length"]) if VALUE in fields else None,
                headers=_gather_headers(data, records) if HEADER in fields else None,
            )


def _gather(data: Bytes, positions: Int32s, lengths: Int32s) -> BinaryColumn:
    offsets = np.empty(lengths.size + 1, np.int32)
    validity = np.empty((lengths.size + 7) // 8, np.uint8)
    size, null_count = parse.lay_out(lengths, offsets, validity)
    column = np.empty(size, np.uint8)
    parse.copy_fields(data, positions, offsets, column)
    return BinaryColumn(offsets=offsets, data=column, validity=validity if null_count else None, null_count=null_count)


def _gather_headers(data: Bytes, records: Table) -> HeaderColumn:
    offsets = np.zeros(records.size + 1, np.int32)
    np.cumsum(records["header_count"], out=offsets[1:])
    headers = np.empty(offsets[-1], HEADERS)
    header_count = parse.find_headers(data, records, headers)
    if header_count != headers.size:
        raise CorruptBatch(f"records declare {headers.size} headers, but hold {header_count}")
    return HeaderColumn(
        offsets=offsets,
        keys=_as_text(_gather(data, headers["key_at"], headers["key_length"])),
        values=_gather(data, headers["value_at"], headers["value_length"]),
    )


def _as_text(column: BinaryColumn) -> BinaryColumn:
    """Replace header keys that are not UTF-8, as the Java consumer does; hardly ever needed."""
    if parse.all_utf8(column.data, column.offsets):
        return column
    data = column.data.tobytes()
    texts = [data[start:end].decode("utf-8", "replace").encode() for start, end in pairwise(column.offsets.tolist())]
    offsets = np.zeros(len(texts) + 1, np.int32)
    np.cumsum([len(text) for text in texts], out=offsets[1:])
    return BinaryColumn(offsets=offsets, data=np.frombuffer(b"".join(texts), np.uint8))
