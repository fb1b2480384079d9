"""Syncing one log: captured on the loop, carried out in a thread, accounted for on the loop again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from millstream.broker.log.files import Files
from millstream.broker.log.folder import folders_above
from millstream.broker.log.log import Log
from millstream.broker.log.segment import Segment


class Target(NamedTuple):
    """A segment file as it was when the sync was captured."""

    segment: Segment
    descriptor: int
    journaled: int
    size: int
    next_offset: int


class Capture:
    """The unsynced bytes of one log at one moment; its files stay open until `release`."""

    def __init__(self, log: Log, segments: list[Segment] | None = None) -> None:
        """Capture a log, or those of its segments that are known to be unsynced."""
        self.log = log
        self.end_offset = log.end_offset
        self.generation = log.generation
        self.names_version = log.segments.names_version
        self.names_synced = log.segments.names_synced == self.names_version
        self.folder_synced = log.segments.folder_synced
        self.folders_above = () if self.folder_synced else folders_above(log.directory)
        self.targets: list[Target] = []
        self.synced_files = 0
        """How many of the targets a thread has synced."""
        try:
            for segment in log.segments.unsynced() if segments is None else segments:
                descriptor = log.open_files.pin(segment)
                self.targets.append(
                    Target(segment, descriptor, segment.journaled_bytes, segment.size, segment.next_offset)
                )
        except OSError:
            self.release()
            raise
        log.sync_captured()
        if self.targets:
            last = self.targets[-1]
            # The high watermark is about to advance to here, and readers will look up its position.
            log.segments.hint(last.next_offset, last.segment, last.size)

    def release(self) -> None:
        """Let the files be closed; the thread is done with them."""
        for target in self.targets:
            self.log.open_files.unpin(target.segment)

    @property
    def current(self) -> bool:
        """Whether the log still has the segments that were captured."""
        return self.generation == self.log.generation

    def mark_stored(self) -> None:
        """Account for a sync of the segments themselves."""
        log = self.log
        log.segments.mark_names_synced(self.names_version)
        if not self.current:
            return
        for target in self.targets:
            target.segment.mark_synced(target.size, target.next_offset)
        log.advance_stored(self.end_offset)

    def mark_synced_files(self) -> None:
        """Account for the files that were synced before one failed."""
        if self.current:
            for target in self.targets[: self.synced_files]:
                target.segment.mark_synced(target.size, target.next_offset)

    def mark_journaled(self) -> None:
        """Account for a sync of the journal that holds everything captured."""
        self.log.segments.mark_folder_synced()
        if not self.current:
            return
        for target in self.targets:
            target.segment.journaled_bytes = max(target.segment.journaled_bytes, target.size)
        self.log.advance_synced(self.end_offset)


def unjournaled_bytes(capture: Capture) -> int:
    """Return how many bytes the journal would write."""
    return sum(target.size - target.journaled for target in capture.targets)


def sync_folders(files: Files, captures: Iterable[Capture]) -> None:
    """Make the folders of new logs durable in the folders above them; called in a thread.

    A folder that disappears with a deleted log meanwhile does not fail the other logs.
    """
    logs_below: dict[str, list[Log]] = {}
    for capture in captures:
        for folder in () if capture.folder_synced else capture.folders_above:
            logs_below.setdefault(folder, []).append(capture.log)
    for folder, logs in sorted(logs_below.items()):
        try:
            files.sync_directory(folder)
        except FileNotFoundError:
            if not all(log.closed for log in logs):
                raise


def sync_segments(files: Files, capture: Capture) -> None:
    """Sync every file of a capture, and the names of new ones; called in a thread."""
    for target in capture.targets:
        target.segment.sync(files, target.descriptor)
        capture.synced_files += 1
    if not capture.names_synced:
        files.sync_directory(capture.log.directory)
