"""Checkpoints: sync the segments, store their indexes and the log's state, then remove deleted files.

Captured on the loop, carried out in a thread, accounted for on the loop again. After a checkpoint, a crash costs at
most a scan of what was appended since.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import NamedTuple

from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.journal import Capture, sync_folders, sync_segments
from millstream.broker.log.ledger import Ledger
from millstream.broker.log.log import Log
from millstream.broker.log.segment import (
    ENTRY_BYTES,
    INDEX_SUFFIX,
    TIME_INDEX_SUFFIX,
    Segment,
    complete_swaps,
    segment_path,
)
from millstream.broker.log.state import FORMAT, LogState, encode_state

_logger = logging.getLogger(__name__)


class IndexWrite(NamedTuple):
    """New entries of an index, to be appended to the stored ones."""

    segment: Segment
    stored: int
    entries: int
    places: bytes
    times: bytes


class Checkpoint:
    """A checkpoint of one log; `Checkpoints` writes it to the ledger."""

    def __init__(self, log: Log, version: int) -> None:
        self.log = log
        self.error: OSError | None = None
        self.capture = Capture(log)
        self.removed = list(log.segments.removed)
        self.swaps = list(log.segments.swaps)
        self.state = encode_state(_state_of(log))
        self.index_writes = [_index_write(segment) for segment in log.segments if _has_unstored_index(segment)]
        self.version = version
        log.checkpoint_captured()

    def execute(self, files: Files) -> None:
        """Sync the segments and store the indexes; called in a thread."""
        try:
            sync_segments(files, self.capture)
        except OSError as error:
            self.error = error
            return
        self.index_writes = [write for write in self.index_writes if self._store_index(files, write)]

    def remove_obsolete(self, files: Files) -> None:
        """Complete swaps and remove deleted files, once the ledger says so; called in a thread."""
        try:
            complete_swaps(files, self.log.directory, [swap.name for swap in self.swaps])
        except OSError as error:
            self.error = error
            return
        self.log.segments.remove_files(files, self.removed)

    def finish(self) -> None:
        """Account for the checkpoint; called on the loop."""
        log = self.log
        self.capture.release()
        if self.error is not None and log.closed:
            # Its folder was deleted with it.
            return
        if self.error is not None:
            self.capture.mark_synced_files()
            log.mark_changed()
            _logger.warning(
                "a checkpoint failed and will be retried",
                extra={"partition": str(log.partition), "error": str(self.error)},
            )
            return
        self.capture.mark_stored()
        log.segments.settle_swaps(self.swaps)
        log.segments.forget_removed(self.removed)
        if not self.capture.current:
            log.mark_changed()
            return
        for write in self.index_writes:
            write.segment.index_stored = write.entries

    def _store_index(self, files: Files, write: IndexWrite) -> bool:
        """Write the new entries; if that fails, a later start rebuilds the index from the batches.

        They are synced once the segment is sealed. Until then a lost entry costs a scan.
        """
        try:
            for suffix, data in ((INDEX_SUFFIX, write.places), (TIME_INDEX_SUFFIX, write.times)):
                path = segment_path(write.segment.directory, write.segment.base_offset, suffix)
                descriptor = files.open(path, create=True)
                try:
                    write_fully(files, descriptor, data, write.stored * ENTRY_BYTES)
                    if write.segment.sealed:
                        files.sync(descriptor)
                finally:
                    files.close(descriptor)
        except OSError as error:
            if not self.log.closed:
                _logger.warning("an index could not be stored", extra={"file": write.segment.path, "error": str(error)})
            return False
        return True


class Checkpoints:
    """The checkpoints of several logs, which share one write to the ledger."""

    def __init__(self, logs: Iterable[Log], files: Files, ledger: Ledger) -> None:
        self.checkpoints: list[Checkpoint] = []
        self.unopened: list[tuple[Log, OSError]] = []
        """Logs of which a file could not be opened."""
        self._files = files
        self._ledger = ledger
        for log in logs:
            try:
                self.checkpoints.append(Checkpoint(log, ledger.next_version()))
            except OSError as error:
                log.mark_changed()
                self.unopened.append((log, error))

    @property
    def failed(self) -> list[Log]:
        """The logs that need another checkpoint."""
        logs = [log for log, _ in self.unopened] + [
            checkpoint.log for checkpoint in self.checkpoints if checkpoint.error is not None
        ]
        return [log for log in logs if not log.closed]

    @property
    def error(self) -> OSError | None:
        """Return why one of them failed, if one did."""
        errors = [error for _, error in self.unopened] + [checkpoint.error for checkpoint in self.checkpoints]
        return next((error for error in errors if error is not None), None)

    def execute(self) -> None:
        for checkpoint in self.checkpoints:
            checkpoint.execute(self._files)
        good = [checkpoint for checkpoint in self.checkpoints if checkpoint.error is None]
        try:
            sync_folders(self._files, [checkpoint.capture for checkpoint in good])
            self._ledger.write([(snapshot.log.key, snapshot.version, snapshot.state) for snapshot in good])
        except OSError as error:
            for checkpoint in good:
                checkpoint.error = error
            return
        for checkpoint in good:
            checkpoint.remove_obsolete(self._files)

    def finish(self) -> None:
        """Account for the checkpoints; called on the loop."""
        for checkpoint in self.checkpoints:
            checkpoint.finish()


def _state_of(log: Log) -> LogState:
    log.settle_transactions()
    return LogState(
        format=FORMAT,
        topic=log.partition.topic,
        start_offset=log.start_offset,
        recovery_offset=log.end_offset,
        segments=[segment.to_state() for segment in log.segments],
        epochs=log.epochs.entries(),
        producers=log.producers.pack(),
        lost=list(log.damage),
        journal_id=log.journal_mark[0],
        journal_sequence=log.journal_mark[1],
        cleaned_offset=log.cleaned_offset,
        superseded_by=log.superseded_by,
        swaps=[swap.name for swap in log.segments.swaps],
        transactions=log.producers.pack_transactions(),
    )


def _has_unstored_index(segment: Segment) -> bool:
    return segment.index is not None and len(segment.index) > segment.index_stored


def _index_write(segment: Segment) -> IndexWrite:
    index = segment.index
    if index is None:
        return IndexWrite(segment, 0, 0, b"", b"")
    places, times = index.to_bytes(segment.index_stored)
    return IndexWrite(segment, segment.index_stored, len(index), places, times)
