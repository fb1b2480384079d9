"""The header of a Kafka record batch (v2): the unit of network, disk and replication.

Layout (big-endian), 61 bytes before the records:

    0 base offset i64 | 8 length i32 (of what follows it) | 12 leader epoch i32 | 16 magic i8 | 17 CRC-32C u32
    21 attributes i16 | 23 last offset delta i32 | 27 base timestamp i64 | 35 max timestamp i64
    43 producer id i64 | 51 producer epoch i16 | 53 base sequence i32 | 57 record count i32

The CRC covers everything from the attributes on, so the broker may write base offset and leader epoch
into a batch without touching the rest. Nothing here looks at single records.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from millstream.core.errors import CorruptBatch, InvalidBatch, UnsupportedCompression
from millstream.core.ids import NO_EPOCH, Epoch, Offset, ProducerEpoch, ProducerId

HEADER_BYTES = 61
LOG_OVERHEAD_BYTES = 12
"""Base offset and length, which the length field does not count."""

MAGIC = 2
COMPRESSION_MASK = 0x07
TIMESTAMP_TYPE_FLAG = 0x08
TRANSACTIONAL_FLAG = 0x10
CONTROL_FLAG = 0x20
DELETE_HORIZON_FLAG = 0x40
SEQUENCE_MASK = 0x7FFFFFFF
"""Sequence numbers continue at 0 after this one."""

COMPRESSION_NONE, COMPRESSION_GZIP, COMPRESSION_SNAPPY, COMPRESSION_LZ4, COMPRESSION_ZSTD = range(5)

BATCH_HEADER = struct.Struct(">qiibIhiqqqhii")
OFFSET_LENGTH_EPOCH = struct.Struct(">qii")
_TIMESTAMP = struct.Struct(">q")
_LENGTH_AT = 8
_MAGIC_AT = 16
_CRC_AT = 17
CRC_FROM = 21
_ATTRIBUTES_AT = 21
_MAX_TIMESTAMP_AT = 35
PRODUCER_ID_AT = 43
_INT64_MAX = 2**63 - 1
_LENGTH = struct.Struct(">i")
_CRC = struct.Struct(">I")
_ATTRIBUTES = struct.Struct(">h")

Buffer = bytes | bytearray | memoryview


class BatchHeader(NamedTuple):
    """The header of one batch and the position of the batch in its buffer.

    A named tuple, since one is made for every batch on the hot path and a frozen dataclass costs five times as much.
    """

    position: int
    base_offset: Offset
    length: int
    leader_epoch: Epoch
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    base_timestamp_ms: int
    max_timestamp_ms: int
    producer_id: ProducerId
    producer_epoch: ProducerEpoch
    base_sequence: int
    record_count: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole batch, including its first twelve bytes."""
        return self.length + LOG_OVERHEAD_BYTES

    @property
    def end_position(self) -> int:
        return self.position + self.length + LOG_OVERHEAD_BYTES

    @property
    def last_offset(self) -> Offset:
        """The offset of the last record; the batch may have fewer records than offsets once compacted."""
        return Offset(self.base_offset + self.last_offset_delta)

    @property
    def next_offset(self) -> Offset:
        return Offset(self.base_offset + self.last_offset_delta + 1)

    @property
    def compression(self) -> int:
        """The number of the compression codec."""
        return self.attributes & COMPRESSION_MASK

    @property
    def is_control(self) -> bool:
        """Whether the batch holds a transaction marker instead of data."""
        return bool(self.attributes & CONTROL_FLAG)

    @property
    def is_transactional(self) -> bool:
        return bool(self.attributes & TRANSACTIONAL_FLAG)

    @property
    def last_sequence(self) -> int:
        """The sequence number of the last record."""
        if self.base_sequence < 0:
            return -1
        return (self.base_sequence + self.last_offset_delta) & SEQUENCE_MASK


def read_header(buffer: Buffer, position: int = 0) -> BatchHeader:
    """Read one header and check the framing against the buffer; the CRC is `check_crc`'s job."""
    available = len(buffer) - position
    if available < HEADER_BYTES:
        raise CorruptBatch(f"a record batch needs at least {HEADER_BYTES} bytes, but only {available} are left")
    header = BatchHeader(position, *BATCH_HEADER.unpack_from(buffer, position))
    if header.magic != MAGIC:
        raise CorruptBatch(f"record batch magic is {header.magic}, only {MAGIC} is supported")
    if header.length < HEADER_BYTES - LOG_OVERHEAD_BYTES:
        raise CorruptBatch(f"record batch length {header.length} is below the size of its header")
    if header.length + LOG_OVERHEAD_BYTES > available:
        raise CorruptBatch(f"record batch of {header.size_bytes} bytes is cut off after {available}")
    if header.last_offset_delta < 0 or header.record_count < 0:
        raise CorruptBatch(
            f"record batch with {header.record_count} records and last offset delta {header.last_offset_delta}"
        )
    if header.compression > COMPRESSION_ZSTD:
        raise UnsupportedCompression(f"compression codec {header.compression} is unknown")
    return header


def check_crc(buffer: Buffer, header: BatchHeader) -> None:
    """Raise `CorruptBatch` when the checksum of the batch is wrong."""
    checksum = crc32c(memoryview(buffer)[header.position + CRC_FROM : header.end_position])
    if checksum != header.crc:
        raise CorruptBatch(f"record batch CRC-32C is {checksum:#010x}, its header says {header.crc:#010x}")


def iterate_headers(buffer: Buffer) -> Iterator[BatchHeader]:
    """Yield the header of every batch in a buffer that must hold whole batches and nothing else."""
    position = 0
    end = len(buffer)
    while position < end:
        header = read_header(buffer, position)
        yield header
        position = header.end_position


def iterate_whole_headers(buffer: Buffer) -> Iterator[BatchHeader]:
    """Yield the header of every whole batch of a fetch response, whose last batch may be cut off anywhere."""
    position = 0
    while len(buffer) - position >= HEADER_BYTES:
        (length,) = _LENGTH.unpack_from(buffer, position + _LENGTH_AT)
        if length + LOG_OVERHEAD_BYTES > len(buffer) - position and buffer[position + _MAGIC_AT] == MAGIC:
            return
        header = read_header(buffer, position)
        check_offsets(header)
        yield header
        position = header.end_position


def check_offsets(header: BatchHeader) -> None:
    """Raise `CorruptBatch` for offsets that a log never gives: below 0 or beyond 64 bits."""
    if not 0 <= header.base_offset < _INT64_MAX - header.last_offset_delta:
        raise CorruptBatch(f"the offsets of a record batch begin at {header.base_offset}")


def seal_batch(
    batch: bytearray,
    *,
    base_offset: int,
    attributes: int,
    last_offset_delta: int,
    base_timestamp_ms: int,
    max_timestamp_ms: int,
    producer_id: int,
    producer_epoch: int,
    base_sequence: int,
    record_count: int,
) -> None:
    """Write the header of a batch whose records follow it in the buffer; the CRC is computed last."""
    try:
        BATCH_HEADER.pack_into(
            batch,
            0,
            base_offset,
            len(batch) - LOG_OVERHEAD_BYTES,
            NO_EPOCH,
            MAGIC,
            0,
            attributes,
            last_offset_delta,
            base_timestamp_ms,
            max_timestamp_ms,
            producer_id,
            producer_epoch,
            base_sequence,
            record_count,
        )
    except struct.error as error:
        raise InvalidBatch(f"a number does not fit into the header of a record batch: {error}") from error
    _CRC.pack_into(batch, _CRC_AT, crc32c(memoryview(batch)[CRC_FROM:]))


def place_batch(buffer: bytearray | memoryview, header: BatchHeader, base_offset: int, leader_epoch: int) -> None:
    """Write the offset and the epoch that the leader gives to the batch into its header, in place."""
    OFFSET_LENGTH_EPOCH.pack_into(buffer, header.position, base_offset, header.length, leader_epoch)


def stamp_append_time(buffer: bytearray | memoryview, header: BatchHeader, now_ms: int) -> None:
    """Mark the batch as stamped by the broker (`LogAppendTime`) and renew its CRC, in place."""
    at = header.position
    _ATTRIBUTES.pack_into(buffer, at + _ATTRIBUTES_AT, header.attributes | TIMESTAMP_TYPE_FLAG)
    _TIMESTAMP.pack_into(buffer, at + _MAX_TIMESTAMP_AT, now_ms)
    crc = crc32c(memoryview(buffer)[at + CRC_FROM : header.end_position])
    _CRC.pack_into(buffer, at + _CRC_AT, crc)
