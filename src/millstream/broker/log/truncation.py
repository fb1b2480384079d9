"""Cutting a log from the end: what a follower does when a new leader has another history."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from millstream.broker.log.files import Files
from millstream.broker.log.producer_replay import producers_up_to
from millstream.broker.log.segment import Segment
from millstream.core.errors import OffsetOutOfRange, StorageFailure
from millstream.core.ids import Offset

if TYPE_CHECKING:
    from millstream.broker.log.log import Log

_logger = logging.getLogger(__name__)

AGAIN_S = 1.0
"""How long after the disk refused a cut it is tried again, by the next write; sooner if it did something right."""

_DOING = "cutting off the end of the log"


class Checkpointing(Protocol):
    """A checkpoint that is captured and not done yet."""

    @property
    def error(self) -> OSError | None:
        """Why it failed, if it did."""

    def execute(self) -> None:
        """Do what takes time; called in a thread."""

    def finish(self) -> None:
        """Account for what was done; called on the loop."""


class Cut:
    """A log that was cut in memory and is on its way to be cut on disk; nothing is appended to it until it is.

    Captured on the loop, done in a thread, accounted for on the loop again, as everything that syncs.
    """

    def __init__(self, log: Log, files: Files, doing: str) -> None:
        self.log = log
        self._files = files
        self._doing = doing
        self._error: OSError | None = None
        self._last = log.segments[-1] if log.segments else None
        self._size = 0 if self._last is None else self._last.size
        log.journal_mark = log.keeper.journal_mark()
        try:
            self._descriptor = -1 if self._last is None else log.open_files.pin(self._last)
        except OSError as error:
            raise log.refuse(doing, error) from error
        log.cut_failed = False
        self.checkpoint = log.keeper.checkpoint_job(log)

    def execute(self) -> None:
        """Make it durable. The state goes first: a file that is longer than it says is scanned, and what is found in it
        is no part of the log; one that is shorter would be damage.
        """
        self.checkpoint.execute()
        self._error = self.checkpoint.error
        try:
            if self._error is None:
                if self._last is not None:
                    self._files.truncate(self._descriptor, self._size)
                    self._last.sync(self._files, self._descriptor)
                self._files.sync_directory(self.log.directory)
        except OSError as error:
            self._error = error

    def finish(self) -> None:
        """Let the log go on; raise if the disk did not take it, and have it tried again before anything is written."""
        log = self.log
        if self._last is not None:
            log.open_files.unpin(self._last)
        if self._error is not None and not log.closed:
            log.cut_failed = True
            raise log.refuse(self._doing, self._error) from self._error
        log.is_cutting = False
        _logger.info("a log was cut", extra={"partition": str(log.partition), "end": log.end_offset})


def told_when_done(executed: asyncio.Future[None], end: Callable[[], None]) -> asyncio.Future[None]:
    """End a cut when the thread is done with it, whether or not somebody still waits for the future that tells how."""
    told: asyncio.Future[None] = executed.get_loop().create_future()

    def tell(_: asyncio.Future[None]) -> None:
        try:
            end()
        except StorageFailure as error:
            if not told.done():
                told.set_exception(error)
                # If nobody waits any more, nothing is to be said.
                told.exception()
        else:
            if not told.done():
                told.set_result(None)

    executed.add_done_callback(tell)
    return told


def begin_truncation(log: Log, offset: int, files: Files) -> Cut | None:
    """Cut off everything from an offset on (and the batch that holds it); it is for good when the cut is done."""
    if offset >= log.end_offset:
        return _cut_again(log, files) if log.cut_failed else None
    check_may_be_cut(log)
    if offset < log.start_offset:
        raise OffsetOutOfRange(
            f"{log.partition} begins at {log.start_offset} and cannot be cut at {offset}",
            start=log.start_offset,
            end=log.end_offset,
        )
    begin_cutting(log)
    _cut_end(log, offset)
    return Cut(log, files, _DOING)


def check_may_be_cut(log: Log) -> None:
    """Raise when a log cannot be cut now."""
    if log.broken or log.repairing:
        raise StorageFailure(f"{log.partition} cannot be cut while its disk fails: {log.failure}")
    if log.is_cutting and not log.cut_failed:
        raise StorageFailure(f"{log.partition} is being cut already")


def begin_cutting(log: Log) -> None:
    """Have nothing written until a cut is done; whatever goes wrong before it begins, it has to be done again."""
    log.is_cutting = log.cut_failed = True


def tried_again(log: Log, files: Files) -> bool:
    """Carry out a cut that the disk refused, once in a while; whether it is done, so that the log takes writes again.

    What was cut off still lies in the files. Written over, it would be found behind the new records after a crash.
    """
    if not log.cut_failed or log.closed or log.broken or log.repairing:
        return False
    if log.failure is not None and log.clock.monotonic() - log.failed_at < AGAIN_S:
        return False
    log.keeper.cut_now(_cut_again(log, files))
    return True


def _cut_again(log: Log, files: Files) -> Cut:
    check_may_be_cut(log)
    if log.segments and log.segments[-1].broken:
        log.roll()
    return Cut(log, files, _DOING)


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
    segment.cut_verified(position)
