"""Replaying the journal after a crash: every entry is written where it belongs, and the segments are synced."""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.folder import DataFolder
from millstream.broker.log.journal import Entry, read_journal, remove_journal
from millstream.broker.log.ledger import LogKey
from millstream.broker.log.segment import segment_path
from millstream.broker.log.state import LogState
from millstream.core.ids import PartitionIndex


class Replay:
    """Brings the segments up to what the journal holds. `bytes_by_folder` tells what was written."""

    def __init__(self, files: Files, folder: DataFolder, state_of: Callable[[LogKey], LogState | None]) -> None:
        self.bytes_by_folder: dict[str, int] = {}
        self._files = files
        self._folder = folder
        self._state_of = state_of
        self._states: dict[LogKey, LogState | None] = {}
        self._written: set[str] = set()

    def run(self, sync_everything: Callable[[], bool]) -> None:
        """Replay everything, sync it, and remove the journal.

        `sync_everything` is called once all is written; where it says that it did nothing, file after file is synced.
        """
        for entry, data in read_journal(self._files, self._folder.journal):
            self._apply(entry, data)
        if not sync_everything():
            self._sync_written()
        remove_journal(self._files, self._folder.journal)

    def _sync_written(self) -> None:
        for path in self._written:
            descriptor = self._files.open(path)
            try:
                self._files.sync(descriptor)
            finally:
                self._files.close(descriptor)
        for folder in self.bytes_by_folder:
            self._files.sync_directory(folder)

    def _apply(self, entry: Entry, data: bytes) -> None:
        folder = self._folder.of_log(entry.topic_id, entry.partition)
        if not self._files.exists(folder):
            # A log is in the journal only once its folder is there for good, so this one was deleted.
            return
        path = segment_path(folder, entry.base_offset)
        state = self._state(entry)
        if state is not None:
            void = entry.journal_id == state.journal_id and entry.sequence < state.journal_sequence
            deleted = entry.base_offset < state.start_offset and not self._files.exists(path)
            if void or deleted:
                return
        descriptor = self._files.open(path, create=True)
        try:
            write_fully(self._files, descriptor, data, entry.position)
        finally:
            self._files.close(descriptor)
        self._written.add(path)
        self.bytes_by_folder[folder] = self.bytes_by_folder.get(folder, 0) + len(data)

    def _state(self, entry: Entry) -> LogState | None:
        key = (entry.topic_id, PartitionIndex(entry.partition))
        if key not in self._states:
            self._states[key] = self._state_of(key)
        return self._states[key]
