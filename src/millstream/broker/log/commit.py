"""The group commit: everything that many producers wait for becomes durable in one go.

A commit of a few logs syncs their segments; one of more goes through the journal with a single sync. It is prepared
on the loop (`Commit(...)`), done in a thread (`execute`) and accounted for on the loop (`finish`).
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from millstream.broker.log.files import Files
from millstream.broker.log.journal import Journal, Reservation
from millstream.broker.log.log import Log
from millstream.broker.log.repair import Repair
from millstream.broker.log.sync import Capture, sync_folders, sync_segments, unjournaled_bytes

_logger = logging.getLogger(__name__)

DIRECT_LOGS_MAX = 4
"""So many logs are synced one by one; the journal costs a copy of the bytes and pays from here on."""

JOURNAL_BYTES_MAX = 128 * 1024
"""With more than this to write for each log, writing it twice costs more than syncing each file."""


class Commit:
    """One group of logs on their way to the disk."""

    def __init__(self, logs: Iterable[Log], files: Files, journal: Journal, *, direct: bool = False) -> None:
        self.again: list[Log] = []
        """Logs that have to be part of the next commit."""
        self.later: list[Log] = []
        """Logs that the disk failed and that should be tried again after a while."""
        self._files = files
        self._journal = journal
        self._captures: list[Capture] = []
        self._repairs: list[Repair] = []
        self._errors: dict[Log, OSError] = {}
        self._reservation: Reservation | None = None
        for log in logs:
            # A log under repair comes back by itself when that is done.
            if not log.closed and not log.repairing:
                self._prepare(log)
        if not direct and self._pays_to_journal():
            self._reservation = journal.reserve(self._captures)

    def _pays_to_journal(self) -> bool:
        count = len(self._captures)
        return count > DIRECT_LOGS_MAX and sum(map(unjournaled_bytes, self._captures)) <= count * JOURNAL_BYTES_MAX

    def _prepare(self, log: Log) -> None:
        try:
            segments = log.unsynced_segments()
            broken = next((segment for segment in segments if segment.broken), None)
            if broken is None:
                self._captures.append(Capture(log, segments))
            else:
                log.distrust(broken)
                self._repairs.append(Repair(log, broken, self._journal))
        except OSError as error:
            log.fail_sync(error, "opening a file to sync it")
            self.later.append(log)

    # -- in a thread ----------------------------------------------------------------------------------------

    def execute(self) -> None:
        """Do what takes time."""
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
        """Tell the logs, which tell those who wait."""
        for repair in self._repairs:
            repair.finish()
            if repair.error is None:
                self.again.append(repair.log)
            else:
                repair.log.fail_sync(repair.error, "copying records out of a file that could not be synced")
                self.later.append(repair.log)
        for capture in self._captures:
            capture.release()
        if self._reservation is not None:
            self._journal.note(self._reservation, self._captures)
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
                # Segments were cut or deleted meanwhile; whoever waits must not wait for somebody else's append.
                self.again.append(log)
            return
        capture.mark_synced_files()
        broken = next((target.segment for target in capture.targets if target.segment.broken), None)
        if broken is None:
            log.fail_sync(error, "syncing")
            self.later.append(log)
        else:
            log.distrust(broken)
            self.again.append(log)
