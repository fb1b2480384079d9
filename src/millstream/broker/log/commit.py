"""The group commit: the records of many producers become durable with one sync.

A commit of a few logs syncs their segments; one of more logs goes through the journal with a single sync. It is
prepared on the loop (`Commit(...)`), carried out in the background (`begin`) or in a thread (`execute`), and accounted
for on the loop (`finish`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from millstream.broker.log.files import BackgroundSync, Files, write_fully
from millstream.broker.log.journal import Capture, Journal, Reservation, sync_folders, sync_segments, unjournaled_bytes
from millstream.broker.log.log import Log
from millstream.broker.log.scan import BadRange, Scan, Window
from millstream.broker.log.segment import REPAIR_SUFFIX, Segment, segment_path
from millstream.core.errors import MillstreamError
from millstream.protocol.records.batch import BatchHeader

_logger = logging.getLogger(__name__)


class TailRewrite:
    """Replaces the tail of one segment whose sync failed; the log refuses appends meanwhile."""

    def __init__(self, log: Log, segment: Segment, journal: Journal) -> None:
        self.log = log
        self._journal = journal
        self.error: OSError | None = None
        self._generation = log.generation
        self._old_segment = segment
        self._descriptor = log.open_files.pin(segment)
        # A sync that began earlier in another thread may still succeed; its bytes are copied nevertheless.
        self._start = segment.synced_bytes
        self._start_offset = segment.synced_offset
        self._new = Segment(log.directory, segment.synced_offset)
        self._new.first_append_ms = segment.first_append_ms
        self._new.last_append_ms = segment.last_append_ms
        self._interval_bytes = log.settings.index_interval_bytes
        self._lost_ranges: list[BadRange] = []
        log.health.begin_repair()

    def execute(self, files: Files) -> None:
        """Copy the tail into a new file and sync it; called in a thread."""
        new = self._new
        temporary = segment_path(new.directory, new.base_offset, REPAIR_SUFFIX)
        try:
            descriptor = files.open(temporary, create=True)
            try:
                files.truncate(descriptor, 0)
                self._restore_from_journal(files)
                self._copy(files, descriptor)
                files.sync(descriptor)
            finally:
                files.close(descriptor)
            files.rename(temporary, new.path)
            files.sync_directory(new.directory)
        except OSError as error:
            self.error = error

    def _restore_from_journal(self, files: Files) -> None:
        """Write the journaled bytes of the old file into it again, because they were acknowledged."""
        old = self._old_segment
        if old.journaled_bytes > self._start:
            for entry, data in self._journal.entries_of(self.log, old.base_offset):
                write_fully(files, self._descriptor, data, entry.position)

    def _copy(self, files: Files, descriptor: int) -> None:
        old, new, self._lost_ranges = self._old_segment, self._new, []
        end = min(old.size, files.size(self._descriptor))
        window = Window(files, self._descriptor, end)
        scan = Scan(window, self._start, self._start_offset, limit=old.next_offset)
        for found in scan:
            if isinstance(found, BadRange):
                after = found.next_offset if found.next_offset >= 0 else old.next_offset
                self._lost_ranges.append(BadRange(new.size, new.size, found.first, after))
            else:
                self._copy_batch(files, descriptor, window, found)
        if scan.expected < old.next_offset and not (
            self._lost_ranges and self._lost_ranges[-1].next_offset == old.next_offset
        ):
            self._lost_ranges.append(BadRange(new.size, new.size, scan.expected, old.next_offset))
        new.next_offset = old.next_offset

    def _copy_batch(self, files: Files, descriptor: int, window: Window, header: BatchHeader) -> None:
        new = self._new
        position, index = new.size, new.index
        write_fully(files, descriptor, window.at(header.position, header.size_bytes), position)
        if index is not None:
            new.add_batch(header, header.base_offset, position, index, self._interval_bytes)

    def finish(self) -> None:
        """Continue with the new segment; called on the loop."""
        log, old, new = self.log, self._old_segment, self._new
        log.open_files.unpin(old)
        is_repaired = self.error is None and self._generation == log.generation
        log.health.end_repair(is_repaired=is_repaired)
        if not is_repaired:
            return
        new.mark_synced(new.size, new.next_offset)
        new.sealed = old.sealed
        at = log.segments.index(old)
        if self._start:
            self._truncate_old(old)
            log.replace_segments([*log.segments[: at + 1], new, *log.segments[at + 1 :]])
        else:
            # A segment that begins at the same offset has the name of its file now.
            removed = [old] if new.base_offset != old.base_offset else []
            log.open_files.release(old)
            log.replace_segments([*log.segments[:at], new, *log.segments[at + 1 :]], removed)
        log.void_journal()
        log.maintenance.checkpoint_soon(log)
        if self._lost_ranges:
            self._report_lost()
        _logger.warning(
            "after a failed sync the log continues in a new segment",
            extra={"partition": str(log.partition), "file": new.path, "bytes": new.size, "from_file": old.path},
        )

    def _report_lost(self) -> None:
        """Fail requests that wait for records of the tail that could not be read back, and record the loss."""
        log = self.log
        for lost in self._lost_ranges:
            log.record_damage(self._new, lost, unread=True)
            log.producers.drop_range(lost.first, lost.next_offset)
        try:
            log.maintenance.checkpoint_now(log)
        except OSError as error:
            log.fail_sync(error, "recording lost records")
        else:
            log.fail_sync(OSError(5, "the records of the failed sync were lost"), f"syncing {self._old_segment.path}")
            log.health.succeed()

    def _truncate_old(self, old: Segment) -> None:
        """Truncate the old segment to its last good sync; the rest is in the new one."""
        old.sealed = True
        old.size = old.journaled_bytes = old.synced_bytes = self._start
        old.next_offset = old.synced_offset = self._start_offset
        try:
            index = self.log.reader.index_of(old)
            index.cut(old.size)
            old.index_stored = min(old.index_stored, len(index))
            old.max_timestamp_ms = self.log.reader.find_max_timestamp(old, old.next_offset)
        except (OSError, MillstreamError) as error:
            _logger.warning(
                "the index of a segment could not be truncated", extra={"file": old.path, "error": str(error)}
            )


DIRECT_LOGS_MAX = 4
"""Up to this many logs are synced one by one; beyond, the copy into the journal is cheaper."""

JOURNAL_BYTES_MAX = 128 * 1024
"""With more than this per log, writing it twice costs more than syncing each file."""


class Commit:
    """A group of logs on their way to the disk."""

    def __init__(self, logs: Iterable[Log], files: Files, journal: Journal, *, direct: bool = False) -> None:
        self.logs = tuple(logs)
        self.is_direct = direct
        """Whether it brings segments up to what the journal holds, concurrently with other commits."""
        self.retry_now: list[Log] = []
        """Logs that must be part of the next commit."""
        self.retry_later: list[Log] = []
        """Logs that the disk failed, to be tried again after a while."""
        self._files = files
        self._journal = journal
        self._captures: list[Capture] = []
        self._repairs: list[TailRewrite] = []
        self._errors: dict[Log, OSError] = {}
        self._reservation: Reservation | None = None
        for log in self.logs:
            # A log under repair is committed again when that is done.
            if not log.closed and not log.health.repairing:
                self._prepare(log)
        if not direct and self._pays_to_journal():
            self._reservation = journal.reserve(self._captures)

    def _pays_to_journal(self) -> bool:
        count = len(self._captures)
        return count > DIRECT_LOGS_MAX and sum(map(unjournaled_bytes, self._captures)) <= count * JOURNAL_BYTES_MAX

    def _prepare(self, log: Log) -> None:
        try:
            segments = log.segments.unsynced()
            broken = next((segment for segment in segments if segment.broken), None)
            if broken is None:
                self._captures.append(Capture(log, segments))
            else:
                log.mark_unsynced_segment(broken)
                self._repairs.append(TailRewrite(log, broken, self._journal))
        except OSError as error:
            log.fail_sync(error, "opening a file to sync it")
            self.retry_later.append(log)

    # -- in the background of the loop ----------------------------------------------------------------------

    def begin(self, sync: BackgroundSync, executed: Callable[[Commit], None]) -> bool:
        """Sync one file without a thread, then call `executed`; return False if the commit needs a thread.

        That is the ordinary commit of one log. New names, several files, a repair and the journal are for a thread.
        """
        capture = self._captures[0] if len(self._captures) == 1 else None
        if capture is None or len(capture.targets) != 1 or self._repairs or self._reservation is not None:
            return False
        if not (capture.names_synced and capture.folder_synced and capture.targets[0].segment.claim_sync()):
            return False
        if not sync.begin(capture.targets[0].descriptor, _FileSync(self, capture, executed)):
            capture.targets[0].segment.sync_ended(None)
            return False
        return True

    def file_synced(self, capture: Capture, error: OSError | None) -> None:
        """Account for the one file; called on the loop, possibly in the middle of other work."""
        capture.targets[0].segment.sync_ended(error)
        if error is None:
            capture.synced_files = 1
        else:
            self._errors[capture.log] = error

    # -- in a thread ----------------------------------------------------------------------------------------

    def execute(self) -> None:
        for repair in self._repairs:
            repair.execute(self._files)
        if self._reservation is not None:
            try:
                sync_folders(self._files, self._captures)
                self._journal.write(self._reservation, self._captures)
                return
            except OSError as error:
                _logger.error("the journal failed; segments are synced directly", extra={"error": str(error)})
                self._journal.broken = True
                self._reservation = None
        self._sync_directly()

    def _sync_directly(self) -> None:
        try:
            sync_folders(self._files, self._captures)
        except OSError as error:
            self._errors = {capture.log: error for capture in self._captures}
            return
        for capture in self._captures:
            try:
                sync_segments(self._files, capture)
            except OSError as error:
                self._errors[capture.log] = error

    # -- on the loop again ----------------------------------------------------------------------------------

    def finish(self) -> None:
        """Account for the commit and release waiting requests; called on the loop."""
        for repair in self._repairs:
            repair.finish()
            if repair.error is None:
                self.retry_now.append(repair.log)
            else:
                repair.log.fail_sync(repair.error, "copying records out of a file that could not be synced")
                self.retry_later.append(repair.log)
        for capture in self._captures:
            capture.release()
        if self._reservation is not None:
            self._journal.record_commit(self._reservation, self._captures)
        for capture in self._captures:
            self._finish_capture(capture)

    def _finish_capture(self, capture: Capture) -> None:
        log = capture.log
        error = self._errors.get(log)
        if error is None:
            if self._reservation is not None:
                capture.mark_journaled()
            else:
                capture.mark_stored()
            if not capture.current:
                # Segments were truncated or deleted meanwhile; the commit is repeated without waiting for an append.
                self.retry_now.append(log)
            return
        capture.mark_synced_files()
        broken = next((target.segment for target in capture.targets if target.segment.broken), None)
        if broken is None:
            log.fail_sync(error, "syncing")
            self.retry_later.append(log)
        else:
            log.mark_unsynced_segment(broken)
            self.retry_now.append(log)


class _FileSync:
    """Waits for the one file of a commit."""

    __slots__ = ("_capture", "_commit", "_executed")

    def __init__(self, commit: Commit, capture: Capture, executed: Callable[[Commit], None]) -> None:
        self._commit = commit
        self._capture = capture
        self._executed = executed

    def sync_ended(self, error: OSError | None) -> None:
        self._commit.file_synced(self._capture, error)

    def proceed(self) -> None:
        self._executed(self._commit)
