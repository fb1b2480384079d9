"""Records of a batch as the bytes they are: found, looked at by key, and kept or left out without being decoded.

What compaction needs. A record that stays is copied, so that nothing of it changes: headers that are not UTF-8 and
numbers that somebody wrote longer than need be included. In plain Python, importing neither numpy nor numba.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millstream.core.errors import CorruptBatch
from millstream.core.ids import NO_TIMESTAMP_MS
from millstream.protocol.records.batch import (
    COMPRESSION_NONE,
    DELETE_HORIZON_FLAG,
    HEADER_BYTES,
    TIMESTAMP_TYPE_FLAG,
    BatchHeader,
    Buffer,
    place_batch,
    seal_batch,
)
from millstream.protocol.records.compression import compress, decompress
from millstream.protocol.records.record import RECORD_BYTES_MIN

_VARINT_BYTES_MAX = 10
_NULL_LENGTH = 0x01
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RawRecord(NamedTuple):
    """One record: its bytes in the section, where its offset delta begins, and what is known of it."""

    start: int
    end: int
    offset_at: int
    timestamp_delta_ms: int
    offset_delta: int
    key: bytes | None
    has_value: bool


def records_section(batch: Buffer, header: BatchHeader, *, decompressed_bytes_max: int | None = None) -> bytes:
    """The records of a batch, decompressed."""
    section = memoryview(batch)[header.position + HEADER_BYTES : header.end_position]
    if header.compression == COMPRESSION_NONE or not len(section):
        return bytes(section)
    return bytes(decompress(header.compression, section, bytes_max=decompressed_bytes_max))


def raw_records(section: bytes, header: BatchHeader) -> Iterator[RawRecord]:
    """Yield every record; raise `CorruptBatch` where the section is no sequence of records."""
    if header.record_count * RECORD_BYTES_MIN > len(section):
        raise CorruptBatch(f"{header.record_count} records cannot fit into {len(section)} bytes")
    position, delta_before = 0, -1
    try:
        for _ in range(header.record_count):
            record = _record_at(section, position)
            if not delta_before < record.offset_delta <= header.last_offset_delta:
                raise CorruptBatch(f"offset delta {record.offset_delta} behind {delta_before}")
            yield record
            position, delta_before = record.end, record.offset_delta
    except IndexError:
        raise CorruptBatch("a record batch ends within a record") from None
    if position != len(section):
        raise CorruptBatch(f"{len(section) - position} bytes lie behind the last record of a batch")


def _record_at(section: bytes, start: int) -> RawRecord:
    length, position = _varint(section, start)
    end = position + length
    if length < RECORD_BYTES_MIN - 1 or end > len(section):
        raise CorruptBatch(f"a record declares {length} bytes, {len(section) - position} are there")
    timestamp_delta_ms, offset_at = _varint(section, position + 1)
    offset_delta, position = _varint(section, offset_at)
    key_length, position = _varint(section, position)
    key = None
    if key_length >= 0:
        key = section[position : position + key_length]
        position += key_length
    if position >= end:
        raise CorruptBatch("the key of a record does not fit into it")
    value_length, _ = _varint(section, position)
    return RawRecord(start, end, offset_at, timestamp_delta_ms, offset_delta, key, value_length >= 0)


def find_without_key(section: bytes, record_count: int) -> list[int]:
    """Find the records that have no key, by their number; no more is looked at than that takes."""
    position = 0
    without: list[int] = []
    try:
        for at in range(record_count):
            length, position = _varint(section, position)
            field = position + 1
            while section[field] > 0x7F:
                field += 1
            field += 1
            while section[field] > 0x7F:
                field += 1
            if section[field + 1] == _NULL_LENGTH:
                without.append(at)
            if length < RECORD_BYTES_MIN - 1:
                raise CorruptBatch(f"a record declares {length} bytes")
            position += length
    except IndexError:
        raise CorruptBatch("a record batch ends within a record") from None
    if position != len(section):
        raise CorruptBatch(f"the records of a batch end {position - len(section)} bytes away from its end")
    return without


def read_timestamp_deltas(section: bytes, record_count: int) -> list[int]:
    """Read by how much each record's timestamp differs from the batch's."""
    position = 0
    deltas: list[int] = []
    try:
        for _ in range(record_count):
            length, position = _varint(section, position)
            deltas.append(_varint(section, position + 1)[0])
            if length < RECORD_BYTES_MIN - 1:
                raise CorruptBatch(f"a record declares {length} bytes")
            position += length
    except IndexError:
        raise CorruptBatch("a record batch ends within a record") from None
    return deltas


def rebuild_batch(
    header: BatchHeader, section: bytes, kept: Sequence[RawRecord], *, delete_horizon_ms: int | None = None
) -> bytearray:
    """A batch like the one given, with some of its records: same offsets, producer, epoch, codec and timestamps.

    With a delete horizon, the batch says from when on its deletions may go. It takes the place of the base
    timestamp, as in Kafka, and the records' deltas count from it.
    """
    base_timestamp_ms, attributes = header.base_timestamp_ms, header.attributes
    if delete_horizon_ms is not None:
        shift = base_timestamp_ms - delete_horizon_ms
        body = b"".join(_shifted(section, record, shift) for record in kept)
        base_timestamp_ms, attributes = delete_horizon_ms, attributes | DELETE_HORIZON_FLAG
    else:
        body = b"".join(section[record.start : record.end] for record in kept)
    max_timestamp_ms = header.max_timestamp_ms
    if not attributes & TIMESTAMP_TYPE_FLAG:
        max_timestamp_ms = header.base_timestamp_ms + max(record.timestamp_delta_ms for record in kept)
    batch = bytearray(HEADER_BYTES)
    batch += body if header.compression == COMPRESSION_NONE else compress(header.compression, body)
    seal_batch(
        batch,
        base_offset=header.base_offset,
        attributes=attributes,
        last_offset_delta=header.last_offset_delta,
        base_timestamp_ms=base_timestamp_ms,
        max_timestamp_ms=max_timestamp_ms,
        producer_id=header.producer_id,
        producer_epoch=header.producer_epoch,
        base_sequence=header.base_sequence,
        record_count=len(kept),
    )
    return _placed(batch, header.base_offset, header.leader_epoch)


def can_shift(header: BatchHeader, kept: Sequence[RawRecord], delete_horizon_ms: int) -> bool:
    """Whether the timestamps of the records can be told from a delete horizon on."""
    shift = header.base_timestamp_ms - delete_horizon_ms
    return all(_INT64_MIN <= record.timestamp_delta_ms + shift <= _INT64_MAX for record in kept)


def empty_batch(
    base_offset: int,
    next_offset: int,
    leader_epoch: int,
    *,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    append_time_ms: int | None = None,
) -> bytearray:
    """A batch without records: it stands for offsets that are gone, and for what its producer wrote last."""
    batch = bytearray(HEADER_BYTES)
    seal_batch(
        batch,
        base_offset=base_offset,
        attributes=0 if append_time_ms is None else TIMESTAMP_TYPE_FLAG,
        last_offset_delta=next_offset - base_offset - 1,
        base_timestamp_ms=NO_TIMESTAMP_MS,
        max_timestamp_ms=NO_TIMESTAMP_MS if append_time_ms is None else append_time_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=0,
    )
    return _placed(batch, base_offset, leader_epoch)


def _placed(batch: bytearray, base_offset: int, leader_epoch: int) -> bytearray:
    length = len(batch) - 12
    place_batch(batch, BatchHeader(0, base_offset, length, *([0] * 11)), base_offset, leader_epoch)  # type: ignore[arg-type]
    return batch


def _shifted(section: bytes, record: RawRecord, shift: int) -> bytes:
    """The bytes of a record whose timestamp counts from another moment."""
    _, body_at = _varint(section, record.start)
    body = section[body_at : body_at + 1] + _zigzag(record.timestamp_delta_ms + shift)
    body += section[record.offset_at : record.end]
    return _zigzag(len(body)) + body


def _varint(section: bytes, position: int) -> tuple[int, int]:
    """A zigzag number and the position after it."""
    byte = section[position]
    if byte < 0x80:
        return (byte >> 1) ^ -(byte & 1), position + 1
    value, shift = byte & 0x7F, 7
    for at in range(position + 1, position + _VARINT_BYTES_MAX):
        byte = section[at]
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return (value >> 1) ^ -(value & 1), at + 1
        shift += 7
    raise CorruptBatch("a number takes more than 64 bits")


def _zigzag(value: int) -> bytes:
    rest = value << 1 if value >= 0 else (-value << 1) - 1
    written = bytearray()
    while rest > 0x7F:
        written.append(0x80 | rest & 0x7F)
        rest >>= 7
    written.append(rest)
    return bytes(written)
