"""One segment: a file of whole batches, named after its first offset, and what is known about it."""

from __future__ import annotations

import threading
from math import inf

from millstream.broker.log.files import Files
from millstream.broker.log.index import Index
from millstream.broker.log.state import SegmentState
from millstream.protocol.records.batch import BatchHeader

LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
SEGMENT_SUFFIXES = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX)
REPAIR_SUFFIX = ".log.repair"
DELETED_SUFFIX = ".deleted"
CLEANED_SUFFIX = ".cleaned"
_NAME_DIGITS = 20
FRESH_S = 1.0
"""For so long, and at most twice as long, the end of a segment is read as it was written, without verifying it."""


def segment_path(directory: str, base_offset: int, suffix: str = LOG_SUFFIX) -> str:
    """A file of a segment."""
    return f"{directory}/{segment_name(base_offset, suffix)}"


def segment_name(base_offset: int, suffix: str = LOG_SUFFIX) -> str:
    """The name of a file of a segment in the folder of its log."""
    return f"{base_offset:0{_NAME_DIGITS}d}{suffix}"


def cleaned_path(directory: str, base_offset: int, token: str) -> str:
    """The file that compaction writes, until it takes the place of a segment; the token tells one pass from another."""
    return segment_path(directory, base_offset, f"{LOG_SUFFIX}.{token}{CLEANED_SUFFIX}")


def base_offset_of(name: str) -> int | None:
    """The base offset in the name of a segment's log file, or None when it is the name of something else."""
    stem = name.removesuffix(LOG_SUFFIX)
    if stem == name or len(stem) != _NAME_DIGITS or not stem.isdigit():
        return None
    return int(stem)


class Segment:
    """A file of batches. `size` counts the bytes of whole, valid batches; what lies behind them is ignored.

    `synced_bytes` are durable in the file itself, `journaled_bytes` in the file or in the journal. Bytes below
    `cold_to` are verified before they are used; those from `verified_from` to `verified_to` have been, at
    `verified_at` and while the file had `verified_stamp`, which tells a later write of anybody. `holes` maps the
    start of each damaged stretch to its end and to the offset that goes on there. `cuts` counts how often the end was
    cut off, since when other bytes may be in its place; a `suspect` segment could not be read in the middle of an
    answer, so that nothing is promised of it unread. The files of one that `is_removed` are gone, or those of another
    segment.
    """

    __slots__ = (
        "_sync_lock",
        "base_offset",
        "broken",
        "cuts",
        "descriptor",
        "directory",
        "first_append_ms",
        "fresh_from",
        "holes",
        "index",
        "index_checksum",
        "index_entries",
        "index_stored",
        "is_removed",
        "journaled_bytes",
        "last_append_ms",
        "mark_at",
        "mark_size",
        "max_timestamp_ms",
        "next_offset",
        "path",
        "pins",
        "released",
        "sealed",
        "size",
        "suspect",
        "synced_bytes",
        "synced_offset",
        "used",
        "verified_at",
        "verified_from",
        "verified_offset",
        "verified_stamp",
        "verified_to",
    )

    def __init__(self, directory: str, base_offset: int) -> None:
        self.directory = directory
        self.base_offset = base_offset
        self.path = segment_path(directory, base_offset)
        self.size = 0
        self.next_offset = base_offset
        self.max_timestamp_ms = -1
        self.first_append_ms = -1
        self.last_append_ms = -1
        self.index: Index | None = Index()
        self.index_entries = 0
        self.index_checksum = 0
        self.index_stored = 0
        self.holes: dict[int, tuple[int, int]] = {}
        self.sealed = False
        self.broken = False
        self.synced_bytes = 0
        self.synced_offset = base_offset
        self.journaled_bytes = 0
        self.fresh_from = 0
        self.mark_at = -inf
        self.mark_size = 0
        self.verified_at = -inf
        self.verified_stamp = -1
        self.verified_from = 0
        self.verified_to = 0
        self.verified_offset = base_offset
        self.descriptor = -1
        self.used = False
        self.pins = 0
        self.released = False
        self.is_removed = False
        self.cuts = 0
        self.suspect = False
        self._sync_lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Segment({self.path}, offsets {self.base_offset}..{self.next_offset}, {self.size} bytes)"

    @classmethod
    def from_state(cls, directory: str, state: SegmentState) -> Segment:
        """A segment that is believed to be as the checkpoint saw it; its index is read when it is needed."""
        segment = cls(directory, state.base_offset)
        segment.size = segment.synced_bytes = segment.journaled_bytes = state.size
        segment.next_offset = segment.synced_offset = state.next_offset
        segment.max_timestamp_ms = state.max_timestamp_ms
        segment.first_append_ms = state.first_append_ms
        segment.last_append_ms = state.last_append_ms
        segment.index = None
        segment.index_entries = segment.index_stored = state.index_entries
        segment.index_checksum = state.index_checksum
        return segment

    def to_state(self) -> SegmentState:
        """The segment as it is now; its index has to be stored for as many entries as this says."""
        if self.index is not None:
            self.index_entries = len(self.index)
            self.index_checksum = self.index.checksum()
        return SegmentState(
            self.base_offset,
            self.size,
            self.next_offset,
            self.max_timestamp_ms,
            self.first_append_ms,
            self.last_append_ms,
            self.index_entries,
            self.index_checksum,
        )

    def cold_to(self, now: float) -> int:
        """Up to where bytes are verified before they are used: all of a sealed segment, else what is not just written.

        What lies behind `fresh_from` was written by this process, at most twice `FRESH_S` ago.
        """
        if self.sealed:
            return self.size
        age = now - self.mark_at
        if age > FRESH_S:
            self.fresh_from = self.mark_size if age <= 2 * FRESH_S else self.size
            self.mark_at, self.mark_size = now, self.size
        return self.fresh_from

    def forget_verified(self) -> None:
        """Have everything verified again."""
        self.verified_from = self.verified_to = 0
        self.verified_offset = self.base_offset

    def cut_verified(self, position: int) -> None:
        """Other bytes may follow from a position on."""
        self.fresh_from, self.mark_size = min(self.fresh_from, position), min(self.mark_size, position)
        self.forget_verified()

    def beyond_hole(self, position: int) -> int:
        """The position itself, or the end of the damaged stretch that it lies in."""
        for start, (end, _) in self.holes.items():
            if start <= position < end:
                return end
        return position

    def note(self, header: BatchHeader, base_offset: int, position: int, index: Index, interval_bytes: int) -> None:
        """Account for one more batch behind the last, which may lie behind a damaged stretch."""
        self.size = position
        next_offset = base_offset + header.last_offset_delta + 1
        self.grow(header.length + 12, base_offset, next_offset, header.max_timestamp_ms, index, interval_bytes)

    def grow(self, size: int, offset: int, next_offset: int, newest_ms: int, index: Index, interval_bytes: int) -> None:
        """Account for a batch of so many bytes right behind the last."""
        position = self.size
        if position - index.last_position >= interval_bytes:
            index.add(offset - self.base_offset, position, self.max_timestamp_ms)
        if newest_ms > self.max_timestamp_ms:
            self.max_timestamp_ms = newest_ms
        self.size = position + size
        self.next_offset = next_offset

    def mark_synced(self, size: int, next_offset: int) -> None:
        """Everything up to a position is durable in the file."""
        if size >= self.synced_bytes:
            self.synced_bytes = size
            self.synced_offset = max(self.synced_offset, next_offset)
        if size > self.journaled_bytes:
            self.journaled_bytes = size

    def closed(self) -> None:
        """The file was closed, so nothing of it is needed soon."""
        self.drop_index()

    def drop_index(self) -> None:
        """Let go of the index where it can be read back, that is, of a sealed segment."""
        if self.sealed and self.index is not None and self.index_stored == len(self.index):
            self.to_state()
            self.index = None

    def sync(self, files: Files, descriptor: int) -> None:
        """Sync the file; called in a thread. After a failure the file is never trusted again.

        The kernel tells an error once, so that a second sync would succeed over pages that it has thrown away;
        the lock keeps a sync in another thread from being believed in that moment.
        """
        with self._sync_lock:
            if self.broken:
                raise OSError(5, "an earlier sync of the file has failed")
            try:
                files.sync(descriptor)
            except OSError:
                self.broken = True
                raise
