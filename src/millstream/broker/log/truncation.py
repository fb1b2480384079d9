"""Truncating a log at its end, as a follower does when a new leader has another history."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING

from millstream.broker.log.files import Files
from millstream.broker.log.log_contents import ProducerReplay
from millstream.broker.log.segment import Segment
from millstream.core.errors import OffsetOutOfRange, StorageFailure

if TYPE_CHECKING:
    from millstream.broker.log.checkpoint import Checkpoints
    from millstream.broker.log.log import Log

_logger = logging.getLogger(__name__)

RETRY_S = 1.0
"""How long after a failure the next write retries the truncation; sooner if the disk recovers meanwhile."""

_DOING = "truncating the end of the log"


class Truncation:
    """A truncation that is done in memory and on its way to the disk; nothing is appended until it is durable.

    Captured on the loop, carried out in a thread, accounted for on the loop again.
    """

    def __init__(self, log: Log, files: Files, doing: str) -> None:
        self.log = log
        self._files = files
        self._doing = doing
        self._error: OSError | None = None
        self._failure: StorageFailure | None = None
        self.checkpoint: Checkpoints | None = None
        self._last: Segment | None = None
        self.replay = ProducerReplay(log) if log.is_replaying else None
        """The replay that must be read before `take_producers`."""
        if self.replay is None:
            self._capture()
        else:
            # In progress: neither a write nor another truncation may repeat it while the producers are read.
            log.health.truncation_captured()

    def take_producers(self) -> None:
        """Continue with the producers that were read; called on the loop."""
        log, replay = self.log, self.replay
        if replay is None or log.closed:
            return
        try:
            # Nothing was appended meanwhile.
            log.adopt_producers(replay)
            self._capture()
        except StorageFailure as error:
            self._failure = error

    def _capture(self) -> None:
        log, doing = self.log, self._doing
        self._last = log.segments.active
        self._size = 0 if self._last is None else self._last.size
        log.void_journal()
        try:
            self._descriptor = -1 if self._last is None else log.open_files.pin(self._last)
        except OSError as error:
            raise log.fail_write(doing, error) from error
        log.health.truncation_captured()
        self.checkpoint = log.maintenance.checkpoint_job(log)

    def execute(self) -> None:
        """Make the truncation durable.

        The state is written first: a file that is longer than its state says is scanned, and the rest is not part of
        the log; a shorter one would be damage.
        """
        if self.checkpoint is None:
            return
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
        """Allow writes again; if the disk refused the truncation, raise, and repeat it before the next write."""
        log = self.log
        if self._last is not None:
            log.open_files.unpin(self._last)
        is_done = log.closed or (self._error is None and self._failure is None)
        log.health.end_truncation(is_done=is_done)
        if self._failure is not None and not is_done:
            log.record_failure(f"{self._doing} failed: {self._failure}")
            raise self._failure
        if self._error is not None and not is_done:
            raise log.fail_write(self._doing, self._error) from self._error
        _logger.info("a log was truncated", extra={"partition": str(log.partition), "end": log.end_offset})


def finish_when_executed(executed: asyncio.Future[None], end: Callable[[], None]) -> asyncio.Future[None]:
    """Finish a truncation after its thread, whether or not the returned future still has a waiter."""
    finished: asyncio.Future[None] = executed.get_loop().create_future()

    def finish(_: asyncio.Future[None]) -> None:
        try:
            end()
        except StorageFailure as error:
            if not finished.done():
                finished.set_exception(error)
                # Without a waiter nothing retrieves the exception.
                finished.exception()
        else:
            if not finished.done():
                finished.set_result(None)

    executed.add_done_callback(finish)
    return finished


def begin_truncation(log: Log, offset: int, files: Files) -> Truncation | None:
    """Truncate everything from an offset on, and the batch that holds it; durable when the result is done."""
    if offset >= log.end_offset:
        return _repeat_truncation(log, files) if log.health.truncation_failed else None
    _check_can_truncate(log)
    if offset < log.start_offset:
        raise OffsetOutOfRange(
            f"{log.partition} begins at {log.start_offset} and cannot be truncated at {offset}",
            start=log.start_offset,
            end=log.end_offset,
        )
    # If the log is damaged there, the damage may have to be located first; nothing has changed then.
    boundary = log.boundary(offset)
    log.health.begin_truncation()
    _truncate_segments(log, *boundary)
    return Truncation(log, files, _DOING)


def begin_restart(log: Log, offset: int, files: Files) -> Truncation:
    """Drop everything and let the log begin and end at an offset; durable when the truncation is done."""
    _check_can_truncate(log)
    log.health.begin_truncation()
    for segment in log.segments:
        segment.cuts += 1
    log.reset_to(offset)
    # The state is stored first here, too: after a crash in between, the old files are not part of the log.
    return Truncation(log, files, "restarting the log at another offset")


def _check_can_truncate(log: Log) -> None:
    health = log.health
    if health.broken or health.repairing:
        raise StorageFailure(f"{log.partition} cannot be truncated while its disk fails: {health.failure}")
    if health.is_truncating and not health.truncation_failed:
        raise StorageFailure(f"{log.partition} is already being truncated")


def retry_truncation(log: Log, files: Files) -> bool:
    """Repeat a truncation that the disk refused, from time to time; return whether the log accepts writes again.

    The truncated bytes are still in the files: if only overwritten, their rest would be found after the new records
    after a crash.
    """
    health = log.health
    if not health.truncation_failed or health.closed or health.broken or health.repairing:
        return False
    if health.failure is not None and log.clock.monotonic() - health.failed_at < RETRY_S:
        return False
    log.maintenance.truncate_now(_repeat_truncation(log, files))
    return True


def _repeat_truncation(log: Log, files: Files) -> Truncation:
    _check_can_truncate(log)
    if log.segments.active is not None and log.segments.active.broken:
        log.roll()
    return Truncation(log, files, _DOING)


def _truncate_segments(log: Log, last: Segment, position: int, end: int) -> None:
    lost = log.damage.at(end)
    if lost is not None and lost.start == end and lost.segment == last.base_offset:
        # The damage is forgotten with its offsets. Its bytes go too, or they would be read as the next records.
        position = lost.start_position
    at = log.segments.index(last)
    # A segment that begins with a lost range may begin beyond the new end, and is then removed as a whole.
    kept = log.segments[: at + 1] if last.base_offset <= end else log.segments[:at]
    removed = log.segments[len(kept) :]
    for segment in removed:
        segment.cuts += 1
    if last in kept:
        index, newest_ms = log.reader.index_of(last), log.reader.find_max_timestamp(last, end)
        last.truncate(position, end, index=index, max_timestamp_ms=newest_ms)
    log.replace_segments(kept, removed)
    log.lower_end(end)
    log.damage.cut_after(end, last.base_offset, position)
    last.holes = log.damage.holes_of(last.base_offset)
    if last.broken and not last.size and last in kept:
        log.open_files.release(last)
        log.replace_segments(kept[:-1])
    if last.broken or last not in kept:
        # Nothing may be written to the last remaining file, so the log continues in another one.
        log.roll()
