"""The fast path into the log, for the batch that a producer sends all day long."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crc32c import crc32c

from millstream.broker.log.appended import AppendedRange
from millstream.broker.log.index import RELATIVE_OFFSET_MAX
from millstream.protocol.records.batch import (
    BATCH_HEADER,
    COMPRESSION_MASK,
    COMPRESSION_ZSTD,
    CONTROL_FLAG,
    CRC_FROM,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    OFFSET_LENGTH_EPOCH,
    TRANSACTIONAL_FLAG,
    BatchHeader,
)

if TYPE_CHECKING:
    from millstream.broker.log.log import Log
    from millstream.broker.log.producer import Producer

_CODEC_AND_CONTROL = COMPRESSION_MASK | CONTROL_FLAG


def append_fast(log: Log, batches: bytearray | memoryview, leader_epoch: int) -> AppendedRange | None:
    """Append one client batch if nothing about it needs a decision; otherwise return None and change nothing.

    That is: it is whole, valid and within all limits, new to the log, keeps the producer's timestamps, begins no
    transaction, fits the open segment, and comes from the leader that wrote last. `append_checked` handles every other
    batch, and its checks are authoritative: each condition here is the negation of one of them.
    """
    size = len(batches)
    segment = log.segments.active
    if size < HEADER_BYTES or segment is None:
        return None
    fields = BATCH_HEADER.unpack_from(batches)
    base, length, _, magic, crc, attributes, delta, _, newest_ms, producer_id, _, _, count = fields
    settings = log.settings
    position = segment.size
    offset = log.end_offset
    next_offset = offset + delta + 1
    now_ms = log.clock.now_ms()
    if (
        magic != MAGIC
        or base
        or length != size - LOG_OVERHEAD_BYTES
        or delta < 0
        or count != delta + 1
        or attributes & _CODEC_AND_CONTROL > COMPRESSION_ZSTD
        or size > settings.max_message_bytes
        or not log.allows_fast_append
        or leader_epoch != log.epochs.latest
        or newest_ms > now_ms + settings.message_timestamp_after_max_ms
        or not position
        or position + size > settings.segment_bytes
        or now_ms - segment.first_append_ms >= settings.segment_ms
        or next_offset - segment.base_offset > RELATIVE_OFFSET_MAX
        or crc32c(batches[CRC_FROM:] if isinstance(batches, memoryview) else memoryview(batches)[CRC_FROM:]) != crc
    ):
        return None
    header = None
    if producer_id >= 0:
        header = BatchHeader(0, *fields)
        opened = log.producers.transactions.open
        if (opened or attributes & TRANSACTIONAL_FLAG) and not _continues_transaction(header, opened.get(producer_id)):
            return None
        if header.base_sequence < 0 or header.producer_epoch < 0 or log.producers.check(header, now_ms) is not None:
            return None
    elif attributes & TRANSACTIONAL_FLAG:
        return None
    OFFSET_LENGTH_EPOCH.pack_into(batches, 0, offset, length, leader_epoch)
    index = log.write(segment, batches)
    segment.grow(size, offset, next_offset, newest_ms, index, settings.index_interval_bytes)
    segment.last_append_ms = now_ms
    if header is not None:
        log.producers.record(header, offset, now_ms)
    log.advance_end(next_offset, size)
    return AppendedRange(offset, log.end_offset, -1, log.start_offset, False)


def _continues_transaction(header: BatchHeader, known: Producer | None) -> bool:
    """Whether a batch neither begins a transaction nor bypasses the one that its producer has open."""
    if known is None:
        return not header.is_transactional
    return header.is_transactional and known.epoch == header.producer_epoch
