"""Single records, in plain Python: for the small batches the broker writes itself and for looking one record up.

A record inside a batch, all numbers zigzag varints unless said otherwise:

    length | attributes i8 | timestamp delta | offset delta | key length, key | value length, value
    | header count | for each header: key length, key (UTF-8) | value length, value

A length of -1 means null; a header's key cannot be null. Bulk work on many records is `records.columns`' job.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from millstream.core.errors import BatchRejected, CorruptBatch, InvalidBatch
from millstream.core.ids import NO_TIMESTAMP_MS, Offset
from millstream.protocol.records.aborted_batches import Aborted, AbortedBatches
from millstream.protocol.records.batch import (
    COMPRESSION_NONE,
    CONTROL_FLAG,
    HEADER_BYTES,
    TIMESTAMP_TYPE_FLAG,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    Buffer,
    check_crc,
    check_offsets,
    iterate_whole_headers,
    seal_batch,
)
from millstream.protocol.records.compression import compress, decompress

CREATE_TIME, LOG_APPEND_TIME = range(2)
"""The types of timestamp: given by the producer, or by the broker when it appended the batch."""

RECORD_BYTES_MIN = 7
"""No record is shorter: seven varints and bytes of one byte each."""

HEADERS_MAX = 65_536
"""A record with more headers is refused, so that a small batch cannot ask for a lot of memory."""

Headers = tuple[tuple[str, bytes | None], ...]

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT32_MAX = 2**31 - 1


class OversizedRecord(Exception):
    """A record is larger than its reader takes; nothing of it was copied."""

    def __init__(self, offset: int, size: int) -> None:
        super().__init__(f"the record at offset {offset} takes {size} bytes")
        self.offset = offset
        self.size = size


class NewRecord(NamedTuple):
    """A record to be written; the batch gives it its offset."""

    key: bytes | None
    value: bytes | None
    headers: Headers = ()
    timestamp_ms: int = NO_TIMESTAMP_MS


class Record(NamedTuple):
    """A record as it was read."""

    offset: Offset
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: Headers


def encode_batch(
    records: Sequence[NewRecord],
    *,
    base_offset: int = 0,
    compression: int = COMPRESSION_NONE,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    timestamp_type: int = CREATE_TIME,
    transactional: bool = False,
    control: bool = False,
) -> bytearray:
    """Write one batch; with `LOG_APPEND_TIME` every reader sees the largest of the timestamps."""
    if not records:
        raise InvalidBatch("a record batch needs at least one record")
    base_timestamp_ms = records[0].timestamp_ms
    section = bytearray()
    for delta, record in enumerate(records):
        _write_record(section, record, delta, record.timestamp_ms - base_timestamp_ms)
    attributes = (
        compression
        | (TIMESTAMP_TYPE_FLAG if timestamp_type == LOG_APPEND_TIME else 0)
        | (TRANSACTIONAL_FLAG if transactional else 0)
        | (CONTROL_FLAG if control else 0)
    )
    batch = bytearray(HEADER_BYTES)
    batch += section if compression == COMPRESSION_NONE else compress(compression, section)
    seal_batch(
        batch,
        base_offset=base_offset,
        attributes=attributes,
        last_offset_delta=len(records) - 1,
        base_timestamp_ms=base_timestamp_ms,
        max_timestamp_ms=max(record.timestamp_ms for record in records),
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(records),
    )
    return batch


def decode_records(
    buffer: Buffer,
    *,
    aborted: Aborted = (),
    control: bool = False,
    verify_crc: bool = True,
    decompressed_bytes_max: int | None = None,
    skip: Callable[[BatchHeader, BatchRejected], None] | None = None,
) -> Iterator[Record]:
    """Yield the records of a fetch answer, without those of the aborted transactions that came with it.

    A last batch that is cut off is ignored. Control batches are skipped unless asked for. The first batch may hold
    records below the offset that was fetched: dropping them is the caller's job. A batch that cannot be read raises, or
    is handed to `skip`, and what is behind it follows.
    """
    left_out = AbortedBatches(aborted)
    for header in iterate_whole_headers(buffer):
        if left_out.holds(header.last_offset, header.attributes, header.producer_id):
            continue
        if header.is_control and not control:
            continue
        try:
            if verify_crc:
                check_crc(buffer, header)
            yield from decode_batch(buffer, header, decompressed_bytes_max=decompressed_bytes_max)
        except BatchRejected as error:
            if skip is None:
                raise
            skip(header, error)


def decode_batch(
    buffer: Buffer,
    header: BatchHeader,
    *,
    decompressed_bytes_max: int | None = None,
    first: int = _INT64_MIN,
    last: int = _INT64_MAX,
    record_bytes_max: int = _INT32_MAX,
) -> Iterator[Record]:
    """Yield the records of one batch, decompressing it; the CRC is the caller's job.

    With `first` and `last`, others are stepped over, which costs little, or not looked at. Raise `OversizedRecord` for
    one of these that is larger than `record_bytes_max`.
    """
    check_offsets(header)
    section = memoryview(buffer)[header.position + HEADER_BYTES : header.end_position]
    if header.compression != COMPRESSION_NONE and len(section):
        section = memoryview(decompress(header.compression, section, bytes_max=decompressed_bytes_max))
    if header.record_count * RECORD_BYTES_MIN > len(section):
        raise CorruptBatch(f"{header.record_count} records cannot fit into {len(section)} bytes")
    append_time_ms = header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else None
    reader = _Reader(section)
    delta_before = -1
    if header.record_count == header.last_offset_delta + 1:
        # Nothing of the batch is missing, so a record's place in it gives its offset.
        delta_before += min(max(first - header.base_offset, 0), header.record_count)
        for _ in range(delta_before + 1):
            reader.position = reader.begin_record()
    for _ in range(header.record_count - delta_before - 1):
        end = reader.begin_record()
        timestamp_delta = reader.varlong()
        offset_delta = reader.varint()
        if not delta_before < offset_delta <= header.last_offset_delta:
            raise CorruptBatch(
                f"offset delta {offset_delta} behind {delta_before} in a batch that ends at {header.last_offset_delta}"
            )
        delta_before = offset_delta
        if header.base_offset + offset_delta > last:
            return
        if end - reader.position > record_bytes_max and header.base_offset + offset_delta >= first:
            raise OversizedRecord(header.base_offset + offset_delta, end - reader.position)
        record = Record(
            Offset(header.base_offset + offset_delta),
            _timestamp(header.base_timestamp_ms + timestamp_delta) if append_time_ms is None else append_time_ms,
            reader.binary(end),
            reader.binary(end),
            reader.headers(end),
        )
        if reader.position != end:
            raise CorruptBatch(f"a record ends {end - reader.position} bytes away from where its length says")
        if record.offset >= first:
            yield record
    if reader.position != len(section):
        raise CorruptBatch(f"{len(section) - reader.position} bytes lie behind the last record of a batch")


def decode_headers(section: Buffer) -> Headers:
    """Read the headers of a record, from their count on, which nothing follows."""
    reader = _Reader(memoryview(section))
    headers = reader.headers(len(section))
    if reader.position != len(section):
        raise CorruptBatch(f"{len(section) - reader.position} bytes lie behind the headers of a record")
    return headers


def _timestamp(value: int) -> int:
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise CorruptBatch("the timestamp of a record overflows 64 bits")
    return value


class _Reader:
    """Reads varints and bytes from the records of a batch, never beyond their end."""

    __slots__ = ("_view", "position")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.position = 0

    def begin_record(self) -> int:
        """Read length and attributes; return where the record must end."""
        length = self.varint()
        end = self.position + length
        if length < RECORD_BYTES_MIN - 1 or end > len(self._view):
            raise CorruptBatch(f"a record declares {length} bytes, {len(self._view) - self.position} are there")
        self.position += 1
        return end

    def varint(self) -> int:
        """A zigzag number of at most 32 bits."""
        return self._zigzag(32)

    def varlong(self) -> int:
        """A zigzag number of at most 64 bits."""
        return self._zigzag(64)

    def binary(self, end: int) -> bytes | None:
        """A nullable run of bytes that must lie before `end`."""
        length = self.varint()
        if length == -1:
            return None
        return self._take(length, end)

    def headers(self, end: int) -> Headers:
        """All headers of a record."""
        count = self.varint()
        if count == 0:
            return ()
        if count < 0 or count > HEADERS_MAX:
            raise CorruptBatch(f"a record declares {count} headers, at most {HEADERS_MAX} are read")
        return tuple((self._header_key(end), self.binary(end)) for _ in range(count))

    def _header_key(self, end: int) -> str:
        # Some producers send keys that are not UTF-8; like the Java consumer, show a mark instead of refusing them.
        return self._take(self.varint(), end).decode("utf-8", "replace")

    def _take(self, length: int, end: int) -> bytes:
        start = self.position
        if length < 0 or length > end - start:
            raise CorruptBatch(
                f"a field of {length} bytes does not fit into the {end - start} that its record has left"
            )
        self.position = start + length
        return bytes(self._view[start : start + length])

    def _zigzag(self, bits: int) -> int:
        view, position, shift, value = self._view, self.position, 0, 0
        end = len(view)
        while shift < bits:
            if position >= end:
                raise CorruptBatch("a record batch ends within a number")
            byte = view[position]
            position += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                break
            shift += 7
        else:
            raise CorruptBatch(f"a number takes more than {bits} bits")
        if value >> bits:
            raise CorruptBatch(f"a number takes more than {bits} bits")
        self.position = position
        return (value >> 1) ^ -(value & 1)


def _write_record(section: bytearray, record: NewRecord, offset_delta: int, timestamp_delta: int) -> None:
    if not _INT64_MIN <= timestamp_delta <= _INT64_MAX:
        raise InvalidBatch(f"the timestamps of a batch lie {timestamp_delta} ms apart")
    body = bytearray(1)
    _write_varint(body, timestamp_delta)
    _write_varint(body, offset_delta)
    _write_binary(body, record.key)
    _write_binary(body, record.value)
    _write_varint(body, len(record.headers))
    for key, value in record.headers:
        try:
            _write_binary(body, key.encode("utf-8"))
        except UnicodeEncodeError as error:
            raise InvalidBatch(f"header key {key!r} cannot be written as UTF-8") from error
        _write_binary(body, value)
    if len(body) > _INT32_MAX:
        raise InvalidBatch(f"a record of {len(body)} bytes is too large")
    _write_varint(section, len(body))
    section += body


def _write_binary(target: bytearray, value: bytes | None) -> None:
    if value is None:
        target.append(0x01)
        return
    _write_varint(target, len(value))
    target += value


def _write_varint(target: bytearray, value: int) -> None:
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    while rest > 0x7F:
        target.append(0x80 | rest & 0x7F)
        rest >>= 7
    target.append(rest)
