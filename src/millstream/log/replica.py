"""What only a follower does to its log: take over batches as its leader wrote them, or start anew elsewhere.

The bytes stay as they are, offsets, epochs and times included, so replicas of a topic that is not compacted are the
same byte for byte. Two things are laid anew, both on compacted topics only, so that the batches of a log still follow
each other without a gap: offsets that the leader has nothing of any more, and the part that is still missing of an
empty batch in which the leader has joined several.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from millstream.log.files import Files
from millstream.model.errors import CorruptBatch, StorageFailure
from millstream.model.ids import Offset
from millstream.records.batch import (
    TIMESTAMP_TYPE_FLAG,
    BatchHeader,
    Buffer,
    check_crc,
    check_offsets,
    iterate_headers,
)
from millstream.records.raw_record import empty_batch

if TYPE_CHECKING:
    from millstream.log.log import Log

_logger = logging.getLogger(__name__)
_EVERYTHING = 2**63 - 1
_EMPTY_OFFSETS_MAX = 2**31 - 1


def append_replica(log: Log, batches: Buffer, leader_epoch: int, files: Files) -> None:
    """Check batches that a leader gave and write them behind the last; nothing is synced yet."""
    headers = _checked(log, batches, leader_epoch)
    start_offset = log.start_offset
    if headers and headers[0].base_offset < start_offset == log.end_offset:
        # The leader's log begins within a batch, and so will this one.
        restart_at(log, headers[0].base_offset, files)
    if any(header.base_offset != expected for header, expected in _with_expected(log, headers)):
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
    log.end_offset = headers[-1].next_offset
    log.settle_transactions()
    log.grown(segment.size - start)
    if log.start_offset < start_offset:
        log.delete_before(start_offset)


def _checked(log: Log, batches: Buffer, leader_epoch: int) -> list[BatchHeader]:
    """The headers of whole and valid batches, of epochs that may follow those of the log."""
    headers = list(iterate_headers(batches))
    latest = int(log.latest_epoch)
    for header in headers:
        check_offsets(header)
        check_crc(batches, header)
        if not latest <= header.leader_epoch <= leader_epoch:
            raise CorruptBatch(
                f"{log.partition}: the leader of epoch {leader_epoch} gave a batch of epoch {header.leader_epoch} "
                f"to follow one of epoch {latest}"
            )
        latest = header.leader_epoch
    return headers


def _with_expected(log: Log, headers: list[BatchHeader]) -> list[tuple[BatchHeader, int]]:
    ends = [int(log.end_offset), *(int(header.next_offset) for header in headers)]
    return list(zip(headers, ends[:-1], strict=True))


def _continued(log: Log, batches: Buffer, headers: list[BatchHeader]) -> bytearray:
    """The same batches so that they go on where the log ends, each where the one before it ends."""
    laid = bytearray()
    expected = int(log.end_offset)
    for header in headers:
        if header.next_offset <= expected:
            # The log has it already.
            continue
        if header.base_offset < expected and header.record_count:
            raise CorruptBatch(
                f"{log.partition} ends at {expected}, within the batch of offsets {header.base_offset} to "
                f"{header.last_offset} that the leader gave"
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


def restart_at(log: Log, offset: int, files: Files) -> None:
    """Drop everything and let the log begin and end at an offset, for good when this returns."""
    if log.broken:
        raise StorageFailure(f"{log.partition} cannot start anew while its disk fails: {log.failure}")
    for segment in log.segments:
        segment.cuts += 1
        log.open_files.release(segment)
    log.doomed += log.segments
    log.replace_segments([])
    log.start_offset = log.end_offset = log.synced_offset = log.stored_offset = Offset(offset)
    log.cleaned_offset = offset
    log.epochs.cut_after(0)
    log.producers.clear()
    log.lost.cut_before(_EVERYTHING)
    log.journal_mark = log.keeper.journal_mark()
    # The state goes first: after a crash in between, the old files are not taken for a part of the log.
    try:
        log.keeper.checkpoint_now(log)
        files.sync_directory(log.directory)
    except OSError as error:
        raise log.refuse("starting the log anew", error) from error
    _logger.info("a log starts anew", extra={"partition": str(log.partition), "start": offset})
