"""Appends of a follower: batches are stored as the leader wrote them, offsets, epochs and timestamps included.

Replicas of a topic that is not compacted are therefore identical byte for byte. On compacted topics two things are
filled with empty batches, so that batches stay contiguous: offsets that the leader no longer has, and the missing rest
of an empty batch in which the leader joined several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.log.files import Files
from millstream.broker.log.truncation import begin_restart
from millstream.core.errors import CorruptBatch
from millstream.protocol.records.batch import (
    TIMESTAMP_TYPE_FLAG,
    BatchHeader,
    Buffer,
    check_crc,
    check_offsets,
    iterate_headers,
)
from millstream.protocol.records.rewrite import empty_batch

if TYPE_CHECKING:
    from millstream.broker.log.log import Log

_EMPTY_OFFSETS_MAX = 2**31 - 1


def append_replica(log: Log, batches: Buffer, leader_epoch: int, files: Files) -> None:
    """Validate batches from a leader and write them behind the last; nothing is synced yet."""
    headers, in_row = _checked(log, batches, leader_epoch)
    start_offset = log.start_offset
    if not in_row:
        if headers[0].base_offset < start_offset == log.end_offset:
            # The leader's log begins within a batch; this one has to begin there too.
            log.maintenance.truncate_now(begin_restart(log, headers[0].base_offset, files))
        batches = _continued(log, batches, headers)
        headers = list(iterate_headers(batches))
    if not headers:
        return
    now_ms = log.clock.now_ms()
    segment = log.segment_for(len(batches), headers[-1].next_offset, now_ms)
    index = log.write(segment, memoryview(batches))
    start = segment.size
    if not start:
        segment.first_append_ms = now_ms
    segment.last_append_ms = now_ms
    interval_bytes = log.settings.index_interval_bytes
    for header in headers:
        log.epochs.begin(header.leader_epoch, header.base_offset)
        segment.note(header, header.base_offset, start + header.position, index, interval_bytes)
        if header.producer_id >= 0:
            append_time_ms = header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else -1
            log.producers.take(header, batches, header.base_offset, now_ms, append_time_ms)
    log.advance_end(headers[-1].next_offset, segment.size - start)
    log.settle_transactions()
    if log.start_offset < start_offset:
        log.delete_before(start_offset)


def _checked(log: Log, batches: Buffer, leader_epoch: int) -> tuple[list[BatchHeader], bool]:
    """Return the headers of valid batches whose epochs may follow those of the log, and whether they are contiguous."""
    headers: list[BatchHeader] = []
    latest, expected, in_row = int(log.latest_epoch), int(log.end_offset), True
    for header in iterate_headers(batches):
        check_offsets(header)
        check_crc(batches, header)
        if not latest <= header.leader_epoch <= leader_epoch:
            raise CorruptBatch(
                f"{log.partition}: the leader of epoch {leader_epoch} sent a batch of epoch {header.leader_epoch} "
                f"to follow one of epoch {latest}"
            )
        if header.base_offset != expected:
            in_row = False
        latest, expected = header.leader_epoch, int(header.next_offset)
        headers.append(header)
    return headers, in_row


def _continued(log: Log, batches: Buffer, headers: list[BatchHeader]) -> bytearray:
    """Return the batches so that they are contiguous and begin where the log ends."""
    laid = bytearray()
    expected = int(log.end_offset)
    for header in headers:
        if header.next_offset <= expected:
            # The log has it already.
            continue
        if header.base_offset < expected and header.record_count:
            raise CorruptBatch(
                f"{log.partition} ends at {expected}, within the batch of offsets {header.base_offset} to "
                f"{header.last_offset} that the leader sent"
            )
        if header.base_offset < expected:
            laid += empty_batch(expected, header.next_offset, header.leader_epoch)
        else:
            while expected < header.base_offset:
                after = min(int(header.base_offset), expected + _EMPTY_OFFSETS_MAX)
                laid += empty_batch(expected, after, header.leader_epoch)
                expected = after
            laid += memoryview(batches)[header.position : header.end_position]
        expected = int(header.next_offset)
    return laid
