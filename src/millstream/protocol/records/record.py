"""The record codec in plain Python, for processes and batches too small to pay for loading compiled code.

A record inside a batch, all numbers zigzag varints unless stated otherwise:

    length | attributes i8 | timestamp delta | offset delta | key length, key | value length, value
    | header count | for each header: key length, key (UTF-8) | value length, value

A length of -1 means null; a header's key cannot be null. Lengths, counts and offset deltas have at most 32 bits,
timestamp deltas 64. Deltas count from the batch's base offset and base timestamp; offset deltas increase.

This layout is implemented twice: here (`walk_records` reads, `record_pieces` writes) and in `kernels/` for bulk work
(`parse.py`, `write.py`, used through `decoder.py` and `encoder.py`). Property tests prove both equal, on valid and on
broken bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple

from millstream.core.errors import BatchRejected, CorruptBatch, InvalidBatch
from millstream.core.ids import NO_TIMESTAMP_MS, Offset, OffsetRange
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

Aborted = Iterable[tuple[int, int]]
"""Aborted transactions, each as producer id and first offset."""


class AbortedBatches:
    """Given every batch of a response in order, knows which to skip.

    A producer's batches are skipped from the first offset of its aborted transaction up to its next marker, which ended
    it: a producer has one transaction at a time. The list applies to one response only.
    """

    __slots__ = ("_ahead", "_now")

    def __init__(self, aborted: Aborted) -> None:
        self._ahead = sorted(((first, producer_id) for producer_id, first in aborted), reverse=True)
        self._now: set[int] = set()

    def holds(self, last_offset: int, attributes: int, producer_id: int) -> bool:
        """Return whether a batch belongs to an aborted transaction; its marker does not."""
        while self._ahead and self._ahead[-1][0] <= last_offset:
            self._now.add(self._ahead.pop()[1])
        if attributes & CONTROL_FLAG:
            self._now.discard(producer_id)
            return False
        return bool(attributes & TRANSACTIONAL_FLAG) and producer_id in self._now


CREATE_TIME, LOG_APPEND_TIME = range(2)
"""The types of timestamp: given by the producer, or by the broker when it appended the batch."""

RECORD_BYTES_MIN = 7
"""No record is shorter: seven varints and bytes of one byte each."""

HEADERS_MAX = 65_536
"""A record with more headers is refused, so that a small batch cannot cause a large allocation."""

Headers = tuple[tuple[str, bytes | None], ...]

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1
_INT32_MAX = 2**31 - 1

EVERY_OFFSET: Final = (OffsetRange(_INT64_MIN, _INT64_MAX),)

_NULL_FIELD: Final = b"\x01"
_NO_HEADERS: Final = b"\x00"
_SMALL_MAX: Final = 8192
_SMALL: Final = (
    *(bytes((number << 1,)) for number in range(64)),
    *(bytes((number << 1 & 0x7F | 0x80, number >> 6)) for number in range(64, _SMALL_MAX)),
)
"""The varints of one and two bytes, of the numbers from 0 on."""

Fields = tuple[int, int, int, int, int, int, int]
"""A record in its section: offset, timestamp delta, key start (-1 for null), key end, value start (-1 for null),
headers start (which is the value's end), end."""


class OversizedRecord(Exception):
    """A record exceeds the reader's limit; nothing was copied."""

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
    pieces: list[Buffer] = []
    for delta, record in enumerate(records):
        timestamp_delta = record.timestamp_ms - base_timestamp_ms
        if not _INT64_MIN <= timestamp_delta <= _INT64_MAX:
            raise InvalidBatch(f"the timestamps of a batch lie {timestamp_delta} ms apart")
        pieces += record_pieces(record.key, record.value, record.headers, timestamp_delta, delta)[1]
    section = b"".join(pieces)
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
    """Yield the records of a fetch response, without those of the aborted transactions that came with it.

    A last batch that is cut off is ignored. Control batches are skipped unless requested. The first batch may hold
    records below the offset that was fetched: dropping them is the caller's job. A batch that cannot be read raises, or
    is passed to `skip`, and decoding continues after it.
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
    ranges: Iterable[OffsetRange] = EVERY_OFFSET,
    decompressed_bytes_max: int | None = None,
    record_bytes_max: int = _INT32_MAX,
) -> Iterator[Record]:
    """Yield the records of one batch whose offsets lie in ascending ranges; checking the CRC is the caller's job.

    Raises `OversizedRecord` for one of these that is larger than `record_bytes_max`, before it is copied.
    """
    check_offsets(header)
    section = records_section(buffer, header, decompressed_bytes_max=decompressed_bytes_max)
    base_ms, append_ms = header.base_timestamp_ms, append_time_ms(header)
    for offset, delta_ms, key_at, key_end, value_at, headers_at, end in walk_records(section, header, ranges):
        size = end - (key_at if key_at >= 0 else key_end)
        if size > record_bytes_max:
            raise OversizedRecord(offset, size)
        yield Record(
            Offset(offset),
            _check_timestamp(base_ms + delta_ms) if append_ms is None else append_ms,
            None if key_at < 0 else section[key_at:key_end],
            None if value_at < 0 else section[value_at:headers_at],
            decode_headers(section, headers_at, end),
        )


def records_section(batch: Buffer, header: BatchHeader, *, decompressed_bytes_max: int | None = None) -> bytes:
    """Return the records of a batch, decompressed."""
    section = memoryview(batch)[header.position + HEADER_BYTES : header.end_position]
    if header.compression == COMPRESSION_NONE or not len(section):
        return bytes(section)
    return bytes(decompress(header.compression, section, bytes_max=decompressed_bytes_max))


def append_time_ms(header: BatchHeader) -> int | None:
    """Return the timestamp that all records of a batch have, if the broker gave it."""
    return header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else None


def walk_records(
    section: bytes, header: BatchHeader, ranges: Iterable[tuple[int, int]] = EVERY_OFFSET
) -> Iterator[Fields]:
    """Find the fields of the records whose offsets lie in ascending ranges; headers are not parsed.

    Most numbers take one or two bytes. These are read in place, since a call would cost more than all the rest.
    """
    count, size, base, last_delta = header.record_count, len(section), header.base_offset, header.last_offset_delta
    waiting = iter(ranges)
    first, stop = next(waiting, (0, 0))
    try:
        passed, at = _pass_records(section, header, first - base)
        before = passed - 1
        for _ in range(passed, count):
            byte = section[at]
            if byte < 0x80:
                length, at = (byte >> 1) ^ -(byte & 1), at + 1
            elif (second := section[at + 1]) < 0x80 and not byte & 1:
                length, at = (byte & 0x7F | second << 7) >> 1, at + 2
            else:
                length, at = read_varint(section, at)
            end = at + length
            if length < RECORD_BYTES_MIN - 1 or end > size:
                raise _length_error(section, at, length)
            byte = section[at + 1]
            if byte < 0x80:
                delta_ms, at = (byte >> 1) ^ -(byte & 1), at + 2
            elif (second := section[at + 2]) < 0x80 and not byte & 1:
                delta_ms, at = (byte & 0x7F | second << 7) >> 1, at + 3
            else:
                delta_ms, at = read_varint(section, at + 1, bits=64)
            byte = section[at]
            if byte < 0x80:
                delta, at = (byte >> 1) ^ -(byte & 1), at + 1
            elif (second := section[at + 1]) < 0x80 and not byte & 1:
                delta, at = (byte & 0x7F | second << 7) >> 1, at + 2
            else:
                delta, at = read_varint(section, at)
            if not before < delta <= last_delta:
                raise CorruptBatch(f"offset delta {delta} follows {before} in a batch that ends at {last_delta}")
            before, offset = delta, base + delta
            while offset >= stop:
                if (following := next(waiting, None)) is None:
                    return
                first, stop = following
            if offset < first:
                at = end
                continue
            byte = section[at]
            if byte < 0x80 and not byte & 1:
                key_at, key_end = at + 1, at + 1 + (byte >> 1)
            else:
                key_at, key_end = _field_at(section, at)
            byte = section[key_end]
            if byte & 1:
                value_at, at = _field_at(section, key_end)
            elif byte < 0x80:
                value_at, at = key_end + 1, key_end + 1 + (byte >> 1)
            elif (second := section[key_end + 1]) < 0x80:
                value_at, at = key_end + 2, key_end + 2 + ((byte & 0x7F | second << 7) >> 1)
            else:
                value_at, at = _field_at(section, key_end)
            if at >= end:
                raise CorruptBatch(f"the record at offset {offset} is longer than its length says")
            yield offset, delta_ms, key_at, key_end, value_at, at, end
            at = end
    except IndexError:
        raise CorruptBatch("a record batch ends within a record") from None
    if at != size:
        raise CorruptBatch(f"{size - at} bytes follow the last record of a batch")


def _pass_records(section: bytes, header: BatchHeader, maximum: int) -> tuple[int, int]:
    """Step over the records before an offset delta, if offsets follow from their positions.

    Returns how many there are and where the next one starts.
    """
    if header.record_count * RECORD_BYTES_MIN > len(section):
        raise CorruptBatch(f"{header.record_count} records cannot fit into {len(section)} bytes")
    if maximum <= 0 or header.record_count != header.last_offset_delta + 1:
        return 0, 0
    at, count = 0, min(maximum, header.record_count)
    for _ in range(count):
        length, at = read_varint(section, at)
        if length < RECORD_BYTES_MIN - 1 or at + length > len(section):
            raise _length_error(section, at, length)
        at += length
    return count, at


def _length_error(section: bytes, at: int, length: int) -> CorruptBatch:
    return CorruptBatch(f"a record declares {length} bytes; {len(section) - at} are left")


def _field_at(section: bytes, at: int) -> tuple[int, int]:
    """Return the start of a field, or -1 if it is null, and its end."""
    length, at = read_varint(section, at)
    if length < 0:
        if length != -1:
            raise CorruptBatch(f"a field declares {length} bytes")
        return -1, at
    return at, at + length


def read_varint(section: bytes, at: int, *, bits: int = 32) -> tuple[int, int]:
    """Read a zigzag number of at most 32 or 64 bits; also return the position after it."""
    byte = section[at]
    value, at, shift = byte & 0x7F, at + 1, 7
    while byte > 0x7F:
        if shift >= bits:
            raise CorruptBatch(f"a number takes more than {bits} bits")
        byte = section[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
    if value >> bits:
        raise CorruptBatch(f"a number takes more than {bits} bits")
    return (value >> 1) ^ -(value & 1), at


def decode_headers(section: bytes, at: int, end: int) -> Headers:
    """Read the headers of a record, from their count up to the record's end."""
    if section[at] == 0 and at + 1 == end:
        return ()
    try:
        count, at = read_varint(section, at)
        if not 0 <= count <= HEADERS_MAX:
            raise CorruptBatch(f"a record declares {count} headers; at most {HEADERS_MAX} are read")
        headers = []
        for _ in range(count):
            key_at, key_end = _field_at(section, at)
            value_at, at = _field_at(section, key_end)
            if key_at < 0 or at > end:
                raise CorruptBatch("a record has a header without a key, or one that does not fit into it")
            # Some producers send keys that are not UTF-8: like the Java consumer, show a mark instead of refusing them.
            key = section[key_at:key_end].decode("utf-8", "replace")
            headers.append((key, None if value_at < 0 else section[value_at:at]))
    except IndexError:
        raise CorruptBatch("a record batch ends within the headers of a record") from None
    if at != end:
        raise CorruptBatch(f"a record ends {end - at} bytes away from where its length says")
    return tuple(headers)


def _check_timestamp(value: int) -> int:
    if not _INT64_MIN <= value <= _INT64_MAX:
        raise CorruptBatch("the timestamp of a record overflows 64 bits")
    return value


def record_pieces(
    key: Buffer | None, value: Buffer | None, headers: Headers, timestamp_delta: int, offset_delta: int
) -> tuple[int, tuple[Buffer, ...]]:
    """Return the size of a record, and its pieces in order."""
    time = _SMALL[timestamp_delta] if 0 <= timestamp_delta < _SMALL_MAX else encode_varint(timestamp_delta)
    number = _SMALL[offset_delta] if offset_delta < _SMALL_MAX else encode_varint(offset_delta)
    key_length, key = _field_pieces(key)
    value_length, value = _field_pieces(value)
    written = _encode_headers(headers) if headers else _NO_HEADERS
    length = 1 + len(time) + len(number) + len(key_length) + len(key) + len(value_length) + len(value) + len(written)
    if length > _INT32_MAX:
        raise InvalidBatch(f"a record of {length} bytes is too large")
    prefix = _SMALL[length] if length < _SMALL_MAX else encode_varint(length)
    return length + len(prefix), (prefix, b"\x00", time, number, key_length, key, value_length, value, written)


def _field_pieces(value: Buffer | None) -> tuple[bytes, Buffer]:
    if value is None:
        return _NULL_FIELD, b""
    length = len(value)
    return (_SMALL[length] if length < _SMALL_MAX else encode_varint(length)), value


def _encode_headers(headers: Headers) -> bytes:
    pieces: list[Buffer] = [encode_varint(len(headers))]
    for name, value in headers:
        try:
            text = name.encode()
        except UnicodeEncodeError as error:
            raise InvalidBatch(f"header key {name!r} cannot be written as UTF-8") from error
        pieces += (*_field_pieces(text), *_field_pieces(value))
    return b"".join(pieces)


def encode_varint(value: int) -> bytes:
    """Write a zigzag number of up to 64 bits."""
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    written = bytearray()
    while rest > 0x7F:
        written.append(0x80 | rest & 0x7F)
        rest >>= 7
    written.append(rest)
    return bytes(written)
