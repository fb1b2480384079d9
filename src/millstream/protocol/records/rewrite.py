"""Rewrites batches without decoding their records, for compaction.

A record that is kept is copied unchanged, including headers that are not UTF-8 and numbers written longer than
necessary. In plain Python, importing neither numpy nor numba.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from millstream.core.ids import NO_TIMESTAMP_MS
from millstream.protocol.records.batch import (
    COMPRESSION_NONE,
    DELETE_HORIZON_FLAG,
    HEADER_BYTES,
    TIMESTAMP_TYPE_FLAG,
    BatchHeader,
    place_batch,
    seal_batch,
)
from millstream.protocol.records.compression import compress
from millstream.protocol.records.record import encode_varint, read_varint, walk_records

_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1


class RawRecord(NamedTuple):
    """A record: its bytes in the section, and its parsed fields."""

    start: int
    end: int
    timestamp_delta_ms: int
    offset_delta: int
    key: bytes | None
    has_value: bool


def raw_records(section: bytes, header: BatchHeader) -> Iterator[RawRecord]:
    """Yield every record; raise `CorruptBatch` if the section is not a sequence of records."""
    start, base = 0, header.base_offset
    for offset, delta_ms, key_at, key_end, value_at, _, end in walk_records(section, header):
        yield RawRecord(
            start, end, delta_ms, offset - base, section[key_at:key_end] if key_at >= 0 else None, value_at >= 0
        )
        start = end


def rebuild_batch(
    header: BatchHeader, section: bytes, kept: Sequence[RawRecord], *, delete_horizon_ms: int | None = None
) -> bytearray:
    """Return the batch with some of its records: same offsets, producer, epoch, codec and timestamps.

    With a delete horizon, the batch stores when its tombstones may be removed. It replaces the base timestamp, as
    in Kafka, and the records' deltas count from it.
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
    """Return whether the records' timestamps can be expressed relative to a delete horizon."""
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
    """Return a batch without records, which represents removed offsets and its producer's last state."""
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
    """Return the bytes of a record with its timestamp delta shifted."""
    _, body_at = read_varint(section, record.start)
    _, offset_at = read_varint(section, body_at + 1, bits=64)
    body = section[body_at : body_at + 1] + encode_varint(record.timestamp_delta_ms + shift)
    body += section[offset_at : record.end]
    return encode_varint(len(body)) + body
