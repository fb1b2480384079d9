"""Cutting a log from the end: what a follower does when a new leader has another history."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from millstream.log.files import Files
from millstream.log.producer_replay import producers_up_to
from millstream.log.segment import Segment
from millstream.model.errors import OffsetOutOfRange, StorageFailure
from millstream.model.ids import Offset

if TYPE_CHECKING:
    from millstream.log.log import Log

_logger = logging.getLogger(__name__)


def truncate_to(log: Log, offset: int, files: Files) -> None:
    """Cut off everything from an offset on (and the batch that holds it), for good when this returns."""
    if offset >= log.end_offset:
        return
    if log.broken:
        raise StorageFailure(f"{log.partition} cannot be cut while its disk fails: {log.failure}")
    if offset < log.start_offset:
        raise OffsetOutOfRange(
            f"{log.partition} begins at {log.start_offset} and cannot be cut at {offset}",
            start=log.start_offset,
            end=log.end_offset,
        )
    _cut_end(log, offset)
    log.journal_mark = log.keeper.journal_mark()
    # The state goes first: a file that is longer than it says is scanned, one that is shorter would be damage.
    try:
        log.keeper.checkpoint_now(log)
        last = log.segments[-1]
        descriptor = log.open_files.descriptor(last)
        files.truncate(descriptor, last.size)
        last.sync(files, descriptor)
        files.sync_directory(log.directory)
    except OSError as error:
        raise log.refuse("cutting off the end of the log", error) from error
    _logger.info("the end of a log was cut off", extra={"partition": str(log.partition), "end": log.end_offset})


def _cut_end(log: Log, offset: int) -> None:
    last, position, end = log.boundary(offset)
    if end < log.producers.transactions.decided_from:
        log.producers = producers_up_to(log, end)
    lost = log.lost.at(end)
    if lost is not None and lost.first == end and lost.segment == last.base_offset:
        # The damaged stretch is forgotten with its offsets; its bytes go too, or they would be read as what comes next.
        position = lost.start
    at = log.segments.index(last)
    # A segment that begins with a lost range may begin beyond the new end, and then goes as a whole.
    kept = log.segments[: at + 1] if last.base_offset <= end else log.segments[:at]
    for segment in log.segments[len(kept) :]:
        segment.cuts += 1
        log.open_files.release(segment)
        log.doomed.append(segment)
    if last in kept:
        _cut_segment(log, last, position, end)
    log.replace_segments(kept)
    log.end_offset = Offset(end)
    log.start_offset = min(log.start_offset, log.end_offset)
    log.synced_offset = min(log.synced_offset, log.end_offset)
    log.stored_offset = min(log.stored_offset, log.end_offset)
    log.cleaned_offset = min(log.cleaned_offset, end)
    log.epochs.cut_after(end)
    log.producers.truncate(end)
    log.lost.cut_after(end, last.base_offset, position)
    last.holes = log.lost.holes_of(last.base_offset)
    if last.broken and not last.size and last in kept:
        log.open_files.release(last)
        log.replace_segments(kept[:-1])
    if last.broken or last not in kept:
        # Nothing may be written to the last file that is left, so the log goes on in another one.
        log.roll()


def _cut_segment(log: Log, segment: Segment, position: int, end: int) -> None:
    index = log.reader.index_of(segment)
    segment.max_timestamp_ms = log.reader.find_max_timestamp(segment, end)
    index.cut(position)
    segment.index_stored = min(segment.index_stored, len(index))
    segment.cuts += 1
    segment.size = position
    segment.next_offset = end
    segment.sealed = False
    if segment.synced_bytes > position:
        segment.synced_bytes, segment.synced_offset = position, end
    segment.journaled_bytes = min(segment.journaled_bytes, position)
    segment.unverified_to = min(segment.unverified_to, position)
    segment.verified_from = segment.verified_to = 0
    segment.verified_offset = segment.base_offset
