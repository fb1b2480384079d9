"""What only a follower does to its log: take over batches as its leader wrote them, or start anew elsewhere.

The bytes stay as they are, offsets, epochs and times included, so replicas of a topic that is not compacted are the
same byte for byte. Two things are laid anew, both on compacted topics only, so that the batches of a log still follow
each other without a gap: offsets that the leader has nothing of any more, and the part that is still missing of an
empty batch in which the leader has joined several.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.log.files import Files
from millstream.broker.log.truncation import Truncation, block_writes, check_can_truncate
from millstream.core.errors import CorruptBatch
from millstream.core.ids import Offset
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

_EVERYTHING = 2**63 - 1
_EMPTY_OFFSETS_MAX = 2**31 - 1


def append_replica(log: Log, batches: Buffer, leader_epoch: int, files: Files) -> None:
    """Check batches that a leader gave and write them behind the last; nothing is synced yet."""
    headers, in_row = _checked(log, batches, leader_epoch)
    start_offset = log.start_offset
    if not in_row:
        if headers[0].base_offset < start_offset == log.end_offset:
            # The leader's log begins within a batch, and so will this one.
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
    log.end_offset = headers[-1].next_offset
    log.settle_transactions()
    log.after_append(segment.size - start)
    if log.start_offset < start_offset:
        log.delete_before(start_offset)


def _checked(log: Log, batches: Buffer, leader_epoch: int) -> tuple[list[BatchHeader], bool]:
    """The headers of whole and valid batches, of epochs that may follow those of the log.

    Also whether they go on where the log ends, each where the one before it ends.
    """
    headers: list[BatchHeader] = []
    latest, expected, in_row = int(log.latest_epoch), int(log.end_offset), True
    for header in iterate_headers(batches):
        check_offsets(header)
        check_crc(batches, header)
        if not latest <= header.leader_epoch <= leader_epoch:
            raise CorruptBatch(
                f"{log.partition}: the leader of epoch {leader_epoch} gave a batch of epoch {header.leader_epoch} "
                f"to follow one of epoch {latest}"
            )
        if header.base_offset != expected:
            in_row = False
        latest, expected = header.leader_epoch, int(header.next_offset)
        headers.append(header)
    return headers, in_row


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


def begin_restart(log: Log, offset: int, files: Files) -> Truncation:
    """Drop everything and let the log begin and end at an offset; it is for good when the cut is done."""
    check_can_truncate(log)
    block_writes(log)
    for segment in log.segments:
        segment.cuts += 1
        log.open_files.release(segment)
    log.removed_segments += log.segments
    log.replace_segments([])
    log.start_offset = log.end_offset = log.synced_offset = log.stored_offset = Offset(offset)
    log.cleaned_offset = offset
    log.epochs.cut_after(0)
    log.producers.clear()
    log.damage.cut_before(_EVERYTHING)
    # The state goes first here, too: after a crash in between, the old files are not taken for a part of the log.
    return Truncation(log, files, "starting the log anew")
