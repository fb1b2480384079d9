"""The shared journal: a commit that touches many partitions costs one sync instead of one for each.

Two preallocated files take turns. An entry says which bytes belong where in which segment, so replaying it is a write
that can be repeated. A file is reused once every log with entries in it has synced its own segments; when neither has
room, commits sync the segments directly, which makes room.

An entry: magic, journal id u64, sequence u64, topic id, partition i32, base offset i64, position i64, length u32,
CRC-32C u32 of all of it but itself, the bytes.
"""

from __future__ import annotations

import logging
import secrets
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple
from uuid import UUID

from crc32c import crc32c

from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.folder import folders_above
from millstream.broker.log.log import Log
from millstream.broker.log.segment import Segment

_logger = logging.getLogger(__name__)


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
        """Unpin the files: the thread no longer uses them."""
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
    """Return the number of bytes that the journal would write."""
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


FILE_NAMES = ("0.journal", "1.journal")
CHUNK_BYTES = 1024 * 1024
_MAGIC = b"MSjl"
_HEAD = struct.Struct(">4sQQ16siqqI")
_CRC = struct.Struct(">I")
ENTRY_HEAD_BYTES = _HEAD.size + _CRC.size


class Entry(NamedTuple):
    """The segment and position of the bytes of one entry."""

    journal_id: int
    sequence: int
    topic_id: UUID
    partition: int
    base_offset: int
    position: int


@dataclass(eq=False)
class JournalFile:
    """One of the two files. `pending` maps the logs that need it after a crash to the offset up to which they do."""

    path: str
    descriptor: int = -1
    position: int = 0
    pending: dict[Log, int] = field(default_factory=dict)

    def settle(self) -> None:
        """Forget the logs whose segments are durable up to their entries in this file."""
        self.pending = {
            log: offset
            for log, offset in self.pending.items()
            if not log.closed and log.stored_offset < min(offset, log.end_offset)
        }


class Reservation(NamedTuple):
    """Room for one commit."""

    file: JournalFile
    position: int
    sequence: int


class Journal:
    """The journal of a data folder. Room is reserved on the loop, writing happens in the commit's thread."""

    def __init__(self, files: Files, directory: str, file_bytes: int) -> None:
        self.journal_id = secrets.randbits(63)
        self.next_sequence = 1
        self.broken = False
        self._files = files
        self._directory = directory
        self._file_bytes = file_bytes
        self._current = JournalFile(f"{directory}/{FILE_NAMES[0]}")
        self._other = JournalFile(f"{directory}/{FILE_NAMES[1]}")
        self._lagging: list[Log] = []

    def reserve(self, captures: list[Capture]) -> Reservation | None:
        """Reserve room for everything captured; return None if the segments must be synced directly."""
        targets = [target for capture in captures for target in capture.targets if target.size > target.journaled]
        size = sum(ENTRY_HEAD_BYTES + target.size - target.journaled for target in targets)
        if size > self._file_bytes or (self.broken and not self._renew()):
            return None
        if self._current.position + size > self._file_bytes:
            self._other.settle()
            if self._other.pending:
                return None
            self._lagging += self._current.pending
            self._current, self._other = self._other, self._current
            self._current.position = 0
        reservation = Reservation(self._current, self._current.position, self.next_sequence)
        self._current.position += size
        self.next_sequence += len(targets)
        return reservation

    def _renew(self) -> bool:
        """Begin with new files after one has failed, once nothing depends on the old ones."""
        for file in (self._current, self._other):
            file.settle()
        if self._current.pending or self._other.pending:
            return False
        try:
            self.remove()
        except OSError:
            return False
        self.broken = False
        return True

    def take_lagging(self) -> list[Log]:
        """Return the logs whose segments must catch up before a full file can be reused."""
        left, self._lagging = self._lagging, []
        return left

    def record_commit(self, reservation: Reservation, captures: list[Capture]) -> None:
        """Record a commit; its file is needed until the segments have caught up."""
        for capture in captures:
            reservation.file.pending[capture.log] = capture.end_offset

    # -- in the commit's thread -----------------------------------------------------------------------------

    def write(self, reservation: Reservation, captures: list[Capture]) -> None:
        """Copy the captured bytes from the segments and sync them once."""
        file, position, sequence = reservation
        descriptor = self._open(file)
        pieces: list[bytes] = []
        gathered = 0
        for capture in captures:
            for target in capture.targets:
                if target.size <= target.journaled:
                    continue
                pieces += self._entry(capture.log, target, sequence)
                gathered += len(pieces[-1]) + ENTRY_HEAD_BYTES
                sequence += 1
                if gathered >= CHUNK_BYTES:
                    write_fully(self._files, descriptor, b"".join(pieces), position)
                    position += gathered
                    pieces, gathered = [], 0
        write_fully(self._files, descriptor, b"".join(pieces), position)
        self._files.sync(descriptor)

    def _open(self, file: JournalFile) -> int:
        if file.descriptor < 0:
            self._files.make_directory(self._directory)
            file.descriptor = self._files.open(file.path, create=True)
            self._files.allocate(file.descriptor, self._file_bytes)
            self._files.sync(file.descriptor)
            self._files.sync_directory(self._directory)
            self._files.sync_directory(self._directory.rpartition("/")[0])
        return file.descriptor

    def _entry(self, log: Log, target: Target, sequence: int) -> tuple[bytes, bytes]:
        size = target.size - target.journaled
        data = self._files.read_at(target.descriptor, size, target.journaled)
        if len(data) != size:
            raise OSError(5, f"{target.segment.path} could not be read back")
        head = _HEAD.pack(
            _MAGIC,
            self.journal_id,
            sequence,
            log.topic_id.bytes,
            log.partition.partition,
            target.segment.base_offset,
            target.journaled,
            size,
        )
        return head + _CRC.pack(crc32c(data, crc32c(head))), data

    def entries_of(self, log: Log, base_offset: int) -> Iterator[tuple[Entry, bytes]]:
        """Yield the entries that the journal still holds of one segment."""
        identity = (self.journal_id, log.topic_id, log.partition.partition, base_offset)
        for entry, data in read_journal(self._files, self._directory):
            if (entry.journal_id, entry.topic_id, entry.partition, entry.base_offset) == identity:
                yield entry, data

    # -- end of life ----------------------------------------------------------------------------------------

    def close(self) -> None:
        for file in (self._current, self._other):
            if file.descriptor >= 0:
                self._files.close(file.descriptor)
                file.descriptor = -1

    def remove(self) -> None:
        """Remove the files, when no log needs them any more."""
        self.close()
        remove_journal(self._files, self._directory)
        self.journal_id = secrets.randbits(63)
        for file in (self._current, self._other):
            file.position = 0
            file.pending.clear()


def remove_journal(files: Files, directory: str) -> None:
    present = set(files.names(directory))
    for name in FILE_NAMES:
        if name in present:
            files.remove(f"{directory}/{name}")
    if present:
        files.sync_directory(directory)


def read_journal(files: Files, directory: str) -> Iterator[tuple[Entry, bytes]]:
    """Yield every entry that is whole, in the order in which they were written."""
    present = set(files.names(directory))
    readers = [_read_file(files, f"{directory}/{name}") for name in FILE_NAMES if name in present]
    firsts = [(first, reader) for reader in readers if (first := next(reader, None)) is not None]
    for first, reader in sorted(firsts, key=lambda pair: pair[0][0].sequence):
        yield first
        yield from reader


def _read_file(files: Files, path: str) -> Iterator[tuple[Entry, bytes]]:
    descriptor = files.open(path)
    try:
        position, expected = 0, None
        while True:
            head = files.read_at(descriptor, ENTRY_HEAD_BYTES, position)
            if len(head) < ENTRY_HEAD_BYTES or head[:4] != _MAGIC:
                return
            _, journal_id, sequence, topic_id, partition, base_offset, at, length = _HEAD.unpack_from(head)
            data = files.read_at(descriptor, length, position + ENTRY_HEAD_BYTES)
            checksum = crc32c(data, crc32c(head[: _HEAD.size]))
            if len(data) != length or head[_HEAD.size :] != _CRC.pack(checksum):
                return
            if expected is not None and (journal_id, sequence) != expected:
                # The rest is left over from the previous use of the file.
                return
            expected = (journal_id, sequence + 1)
            yield Entry(journal_id, sequence, UUID(bytes=topic_id), partition, base_offset, at), data
            position += ENTRY_HEAD_BYTES + length
    finally:
        files.close(descriptor)
