"""Segments: files of whole batches, each named after its first offset, and the list of them that makes up a log."""

from __future__ import annotations

import logging
import sys
import threading
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Iterator, Mapping
from math import inf
from typing import NamedTuple, overload

from crc32c import crc32c

from millstream.broker.log.files import Files, OpenFiles
from millstream.broker.log.state import SegmentState, SwapName
from millstream.protocol.records.batch import BatchHeader

_logger = logging.getLogger(__name__)

ENTRY_BYTES = 8
RELATIVE_OFFSET_MAX = 2**32 - 1
_POSITION_MASK = 0xFFFFFFFF


class Index:
    """Positions and timestamps of some batches of a segment.

    An entry is added at the start of a batch once `index.interval.bytes` were written since the last one. It holds the
    offset and position of the batch, and the largest timestamp before it in the segment. Both columns share their
    ordinal: `.index` holds (offset - base) << 32 position, `.timeindex` the timestamps, eight bytes each. The entry for
    the start of the segment is implicit.
    """

    __slots__ = ("_place_sum", "_summed", "_time_sum", "last_position", "places", "times")

    def __init__(self) -> None:
        self.places = array("Q")
        self.times = array("q")
        self.last_position = 0
        self._summed = 0
        self._place_sum = 0
        self._time_sum = 0

    def __len__(self) -> int:
        return len(self.places)

    @classmethod
    def from_bytes(cls, places: bytes, times: bytes) -> Index:
        """Restore the entries that `to_bytes` returned."""
        index = cls()
        index.places.frombytes(places)
        index.times.frombytes(times)
        if sys.byteorder == "big":
            index.places.byteswap()
            index.times.byteswap()
        if index.places:
            index.last_position = index.places[-1] & _POSITION_MASK
        return index

    def to_bytes(self, first: int = 0) -> tuple[bytes, bytes]:
        """Return the two columns from an entry on, little-endian."""
        places, times = self.places[first:], self.times[first:]
        if sys.byteorder == "big":
            places.byteswap()
            times.byteswap()
        return places.tobytes(), times.tobytes()

    def add(self, relative_offset: int, position: int, max_timestamp_before_ms: int) -> None:
        self.places.append(relative_offset << 32 | position)
        self.times.append(max_timestamp_before_ms)
        self.last_position = position

    def position_of(self, relative_offset: int) -> int:
        """Return the start of the last known batch that begins at or before an offset."""
        at = bisect_right(self.places, relative_offset << 32 | _POSITION_MASK)
        return self.places[at - 1] & _POSITION_MASK if at else 0

    def start_before(self, position: int) -> tuple[int, int]:
        """Return the last known batch that begins at or before a position: its relative offset and its position."""
        at = bisect_right(self.places, position, key=_position)
        return (self.places[at - 1] >> 32, self.places[at - 1] & _POSITION_MASK) if at else (0, 0)

    def position_for_time(self, timestamp_ms: int) -> int:
        """Return the last known position before which all timestamps are earlier than this one."""
        at = bisect_left(self.times, timestamp_ms)
        return self.places[at - 1] & _POSITION_MASK if at else 0

    def max_timestamp_before(self, position: int) -> tuple[int, int]:
        """Return the last known start at or before a position, and the largest timestamp before it."""
        at = bisect_right(self.places, position, key=_position)
        return (self.places[at - 1] & _POSITION_MASK, self.times[at - 1]) if at else (0, -1)

    def cut(self, position: int) -> None:
        """Remove every start at or beyond a position."""
        at = bisect_left(self.places, position, key=_position)
        del self.places[at:]
        del self.times[at:]
        self.last_position = self.places[-1] & _POSITION_MASK if at else 0
        self._summed = self._place_sum = self._time_sum = 0

    def checksum(self) -> int:
        """Return the CRC-32C of both columns in one number; only entries added since the last call are read."""
        places, times = self.to_bytes(self._summed)
        self._place_sum = crc32c(places, self._place_sum)
        self._time_sum = crc32c(times, self._time_sum)
        self._summed = len(self.places)
        return self._place_sum << 32 | self._time_sum


def _position(place: int) -> int:
    return place & _POSITION_MASK


LOG_SUFFIX = ".log"
INDEX_SUFFIX = ".index"
TIME_INDEX_SUFFIX = ".timeindex"
SEGMENT_SUFFIXES = (LOG_SUFFIX, INDEX_SUFFIX, TIME_INDEX_SUFFIX)
REPAIR_SUFFIX = ".log.repair"
DELETED_SUFFIX = ".deleted"
CLEANED_SUFFIX = ".cleaned"
_NAME_DIGITS = 20
HINTS_MAX = 64
FRESH_S = 1.0
"""For this long, at most twice as long, the end of a segment is served as written, without verifying it."""


def segment_path(directory: str, base_offset: int, suffix: str = LOG_SUFFIX) -> str:
    return f"{directory}/{segment_name(base_offset, suffix)}"


def segment_name(base_offset: int, suffix: str = LOG_SUFFIX) -> str:
    """Return the name of a file of a segment in the folder of its log."""
    return f"{base_offset:0{_NAME_DIGITS}d}{suffix}"


def cleaned_path(directory: str, base_offset: int, token: str) -> str:
    """Return the path of a new file before it replaces a segment; the token distinguishes passes."""
    return segment_path(directory, base_offset, f"{LOG_SUFFIX}.{token}{CLEANED_SUFFIX}")


def base_offset_of(name: str) -> int | None:
    """Return the base offset in the name of a segment's log file; None for any other name."""
    stem = name.removesuffix(LOG_SUFFIX)
    if stem == name or len(stem) != _NAME_DIGITS or not stem.isdigit():
        return None
    return int(stem)


class Verification:
    """The bytes of a segment that may be served without verifying them again.

    The end of an active segment is fresh: this process wrote it at most twice `FRESH_S` ago. Below that, the bytes
    between `start` and `end` have been verified, at `verified_at` and while the file had `stamp`, which any write
    changes. `next_offset` is the offset that continues at `end`.
    """

    __slots__ = ("_fresh_from", "_mark_at", "_mark_size", "end", "next_offset", "stamp", "start", "verified_at")

    def __init__(self, base_offset: int) -> None:
        self.verified_at = -inf
        self.stamp = -1
        self.start = 0
        self.end = 0
        self.next_offset = base_offset
        self._fresh_from = 0
        self._mark_at = -inf
        self._mark_size = 0

    def cold_to(self, size: int, now: float) -> int:
        """Return up to where an active segment of this size is verified before it is served."""
        age = now - self._mark_at
        if age > FRESH_S:
            self._fresh_from = self._mark_size if age <= 2 * FRESH_S else size
            self._mark_at, self._mark_size = now, size
        return self._fresh_from

    def begin(self, position: int, offset: int) -> None:
        """Begin again at a batch whose offset is known."""
        self.start = self.end = position
        self.next_offset = offset

    def renew(self, base_offset: int, stamp: int, now: float) -> None:
        """Forget the verified range, and start again with the current file."""
        self.begin(0, base_offset)
        self.stamp, self.verified_at = stamp, now

    def extend(self, end: int, next_offset: int) -> None:
        """Account for batches up to a position."""
        if end > self.end:
            self.end, self.next_offset = end, next_offset

    def skip(self, holes: Mapping[int, tuple[int, int]]) -> None:
        """Continue behind a known damaged range."""
        for start, (end, next_offset) in holes.items():
            if start <= self.end < end or start == self.end == end:
                self.end, self.next_offset = end, next_offset

    def truncate(self, base_offset: int, position: int) -> None:
        """Account for bytes that may differ from a position on."""
        self._fresh_from, self._mark_size = min(self._fresh_from, position), min(self._mark_size, position)
        self.begin(0, base_offset)


class Segment:
    """A file of batches. `size` counts the bytes of whole, valid batches; what follows them is ignored.

    `synced_bytes` are durable in the file itself, `journaled_bytes` in the file or in the journal. `holes` maps the
    start of each damaged range to its end and to the offset that continues there. `cuts` counts truncations, after
    which other bytes may be at the same position. A `suspect` segment could not be read in the middle of a response,
    so nothing of it is promised before it is read. The files of a segment that `is_removed` are gone, or belong to
    another segment.
    """

    __slots__ = (
        "_sync_lock",
        "base_offset",
        "broken",
        "cuts",
        "descriptor",
        "directory",
        "first_append_ms",
        "holes",
        "index",
        "index_checksum",
        "index_entries",
        "index_stored",
        "is_removed",
        "journaled_bytes",
        "last_append_ms",
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
        "verification",
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
        self.verification = Verification(base_offset)
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
        """Return a segment as the checkpoint saw it; its index is loaded when it is needed."""
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
        """Return the current state of the segment; the stored index must have as many entries as this says."""
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
        """Return up to where bytes are verified before they are served: all of a sealed segment."""
        return self.size if self.sealed else self.verification.cold_to(self.size, now)

    def forget_verified(self) -> None:
        """Mark everything as not verified."""
        self.verification.begin(0, self.base_offset)

    def truncate(self, position: int, end: int, *, index: Index, max_timestamp_ms: int) -> None:
        """Forget the batches from a position on; the segment then ends at an offset, and is written to again."""
        index.cut(position)
        self.index_stored = min(self.index_stored, len(index))
        self.max_timestamp_ms = max_timestamp_ms
        self.cuts += 1
        self.size = position
        self.next_offset = end
        self.sealed = False
        if self.synced_bytes > position:
            self.synced_bytes, self.synced_offset = position, end
        self.journaled_bytes = min(self.journaled_bytes, position)
        self.verification.truncate(self.base_offset, position)

    def beyond_hole(self, position: int) -> int:
        """Return the position itself, or the end of the damaged range that contains it."""
        for start, (end, _) in self.holes.items():
            if start <= position < end:
                return end
        return position

    def readable_from(self, position: int) -> int:
        """Return the number of readable bytes between a position and the next damaged range or the end."""
        return min([self.size, *(start for start in self.holes if start > position)]) - position

    def add_batch(
        self, header: BatchHeader, base_offset: int, position: int, index: Index, interval_bytes: int
    ) -> None:
        """Account for one more batch behind the last, which may lie behind a damaged range."""
        if position - index.last_position >= interval_bytes:
            index.add(base_offset - self.base_offset, position, self.max_timestamp_ms)
        self.max_timestamp_ms = max(self.max_timestamp_ms, header.max_timestamp_ms)
        self.size = position + header.length + 12
        self.next_offset = base_offset + header.last_offset_delta + 1

    def extend_to(
        self,
        position: int,
        next_offset: int,
        max_timestamp_ms: int,
        entries: Iterable[tuple[int, int, int]],
        index: Index,
        now_ms: int,
    ) -> int:
        """Account for batches appended up to a position, with their index entries; return their size."""
        for offset, start, max_timestamp_before_ms in entries:
            index.add(offset - self.base_offset, start, max_timestamp_before_ms)
        size, self.size = position - self.size, position
        self.next_offset = next_offset
        self.max_timestamp_ms = max_timestamp_ms
        self.last_append_ms = now_ms
        return size

    def mark_synced(self, size: int, next_offset: int) -> None:
        """Account for a sync: everything up to a position is durable in the file."""
        if size >= self.synced_bytes:
            self.synced_bytes = size
            self.synced_offset = max(self.synced_offset, next_offset)
        if size > self.journaled_bytes:
            self.journaled_bytes = size

    def closed(self) -> None:
        """Drop the index: the file was closed, so nothing of it is needed soon."""
        self.drop_index()

    def drop_index(self) -> None:
        """Drop the index if it can be loaded again, that is, of a sealed segment."""
        if self.sealed and self.index is not None and self.index_stored == len(self.index):
            self.to_state()
            self.index = None

    def sync(self, files: Files, descriptor: int) -> None:
        """Sync the file; called in a thread. After a failure the file is never trusted again.

        The kernel reports an error once; a second sync would succeed over pages that it has dropped. The lock prevents
        a concurrent sync in another thread from being trusted.
        """
        with self._sync_lock:
            if self.broken:
                raise OSError(5, "an earlier sync of the file has failed")
            try:
                files.sync(descriptor)
            except OSError:
                self.broken = True
                raise

    def claim_sync(self) -> bool:
        """Claim the file for a sync in the background, which `sync_ended` ends; return False if a thread syncs it.

        Until then a thread that syncs the file waits; code that would wait on the loop itself ends it first.
        """
        if not self._sync_lock.acquire(blocking=False):
            return False
        if self.broken:
            self._sync_lock.release()
            return False
        return True

    def sync_ended(self, error: OSError | None) -> None:
        """Account for a sync in the background; after a failure the file is never trusted again."""
        if error is not None:
            self.broken = True
        self._sync_lock.release()


class Swap(NamedTuple):
    """A new segment whose file has not been renamed yet; the token is part of its temporary name."""

    segment: Segment
    token: str

    @property
    def name(self) -> SwapName:
        """The swap as a checkpoint records it."""
        return self.segment.base_offset, self.token


class SegmentList:
    """The segments of one log in order, the positions known in them, and what their files are called on disk.

    Segments leave the list at once; their files are removed after the next checkpoint, so that a crash in between
    cannot mistake a deleted segment for a lost one. A new segment replaces old ones so that a crash leaves either:

    1. Its file is complete and synced under a temporary name.
    2. On the loop, `swap_in` puts it into the list, read under that name.
    3. A checkpoint records the swap. From here on the new segment counts; journal entries of the old files are void.
    4. `complete_swaps` renames the file and syncs the directory; the other old files are removed.

    Recovery completes the swaps that the checkpoint records, and removes every other file of this kind.
    """

    __slots__ = (
        "_bases",
        "_names_lock",
        "_open_files",
        "_segments",
        "active",
        "directory",
        "folder_synced",
        "generation",
        "hints",
        "names_synced",
        "names_version",
        "removed",
        "swaps",
    )

    def __init__(self, directory: str, segments: list[Segment], open_files: OpenFiles, *, folder_synced: bool) -> None:
        self.directory = directory
        self.active = segments[-1] if segments else None
        self.generation = 0
        """Changes when segments are truncated or replaced, so that a job under way notices."""
        self.hints: dict[int, tuple[Segment, int]] = {}
        """Positions of offsets that are likely to be read next: where reads and commits ended."""
        self.names_version = 0
        self.names_synced = 0
        self.folder_synced = folder_synced
        """Whether the log's own folder is durable in the folders above it."""
        self.removed: list[Segment] = []
        """Segments that left the list; their files are removed after the next checkpoint."""
        self.swaps: list[Swap] = []
        """Segments whose files take their place with the next checkpoint."""
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self._open_files = open_files
        self._names_lock = threading.Lock()  # Held to remove the files of segments, and to claim their names.

    def __len__(self) -> int:
        return len(self._segments)

    def __iter__(self) -> Iterator[Segment]:
        return iter(self._segments)

    def __reversed__(self) -> Iterator[Segment]:
        return reversed(self._segments)

    @overload
    def __getitem__(self, at: int) -> Segment: ...

    @overload
    def __getitem__(self, at: slice) -> list[Segment]: ...

    def __getitem__(self, at: int | slice) -> Segment | list[Segment]:
        return self._segments[at]

    def index(self, segment: Segment) -> int:
        return self._segments.index(segment)

    def find(self, base_offset: int) -> Segment | None:
        return next((segment for segment in self._segments if segment.base_offset == base_offset), None)

    def containing(self, offset: int) -> Segment:
        """Return the segment that holds an offset below the end, or the first one with records after it."""
        at = max(0, bisect_right(self._bases, offset) - 1)
        while self._segments[at].next_offset <= offset:
            at += 1
        return self._segments[at]

    def unsynced(self) -> list[Segment]:
        """Return the segments with bytes that are not durable in their own file, in order."""
        segments: list[Segment] = []
        for segment in reversed(self._segments):
            if segment.size and segment.synced_bytes == segment.size:
                break
            if segment.size:
                segments.append(segment)
        return segments[::-1]

    def hint(self, offset: int, segment: Segment, position: int) -> None:
        """Remember the position of an offset that is likely to be read next."""
        if offset >= segment.next_offset and segment.sealed:
            return
        hints = self.hints
        hints[offset] = (segment, position)
        if len(hints) > HINTS_MAX:
            del hints[next(iter(hints))]

    # -- changes --------------------------------------------------------------------------------------------

    def add(self, segment: Segment) -> None:
        self.names_version += 1
        # The end of the log is now at the start of another file.
        self.hints.pop(segment.base_offset, None)
        if self.active is not None:
            self.active.sealed = True
        self._segments.append(segment)
        self._bases.append(segment.base_offset)
        self.active = segment

    def replace(self, segments: list[Segment], removed: Iterable[Segment] = ()) -> None:
        """Continue with other segments; close those that are removed, whose files go after the next checkpoint."""
        for segment in removed:
            self._open_files.release(segment)
            self.removed.append(segment)
        self._set(segments)
        self.generation += 1

    def _set(self, segments: list[Segment]) -> None:
        self._segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self.active = segments[-1] if segments else None
        self.hints.clear()

    def swap_in(self, old: list[Segment], new: Segment, token: str) -> bool:
        """Replace old segments by a new one; return False if those have changed since.

        Without old ones it is inserted where its offsets belong, which no segment holds.
        """
        at = bisect_left(self._bases, new.base_offset)
        if old and ([*map(id, self[at : at + len(old)])] != [*map(id, old)] or not old[-1].sealed):
            return False
        new.path = cleaned_path(self.directory, new.base_offset, token)
        # Pinned until it is renamed: meanwhile it cannot be opened by name.
        self._open_files.pin(new)
        for segment in old:
            self._open_files.release(segment)
        self.removed += old[1:]
        self.swaps.append(Swap(new, token))
        # The generation stays the same: the end of the log is unchanged, so pending jobs continue.
        self._set([*self[:at], new, *self[at + len(old) :]])
        self.names_version += 1
        return True

    def settle_swaps(self, swaps: Iterable[Swap]) -> None:
        """Account for files that have taken their place."""
        for swap in swaps:
            if swap in self.swaps:
                self.swaps.remove(swap)
                swap.segment.path = segment_path(self.directory, swap.segment.base_offset)
                self._open_files.unpin(swap.segment)

    # -- names on disk --------------------------------------------------------------------------------------

    def mark_names_synced(self, version: int) -> None:
        """Account for a sync of the directory, and of the folders above it."""
        self.names_synced = max(self.names_synced, version)
        self.folder_synced = True

    def mark_folder_synced(self) -> None:
        """Account for a sync of the folders above the log's own."""
        self.folder_synced = True

    def claim_name(self, base_offset: int) -> None:
        """Keep files of this name from being removed, even by a checkpoint that is under way."""
        for removed in [removed for removed in self.removed if removed.base_offset == base_offset]:
            with self._names_lock:
                removed.is_removed = True
            self.removed.remove(removed)

    def remove_files(self, files: Files, segments: Iterable[Segment]) -> None:
        """Remove the files of removed segments, unless their names were claimed; called in a thread."""
        for segment in segments:
            with self._names_lock:
                if not segment.is_removed:
                    _remove_segment(files, segment)
                    segment.is_removed = True

    def forget_removed(self, segments: Iterable[Segment]) -> None:
        """Account for removed segments whose files are gone."""
        done = {id(segment) for segment in segments}
        self.removed = [segment for segment in self.removed if id(segment) not in done]

    def close(self) -> None:
        self.generation += 1
        self.settle_swaps(list(self.swaps))
        for segment in self._segments:
            self._open_files.release(segment)


def complete_swaps(files: Files, directory: str, swaps: Iterable[SwapName]) -> bool:
    """Rename the files of swaps into place, durably; return whether one was still to do. Called in a thread."""
    names = list(swaps)
    has_renamed = False
    for base_offset, token in names:
        try:
            files.rename(cleaned_path(directory, base_offset, token), segment_path(directory, base_offset))
            has_renamed = True
        except FileNotFoundError:
            # An earlier attempt renamed it, and perhaps did not sync.
            continue
    if names:
        files.sync_directory(directory)
    return has_renamed


def _remove_segment(files: Files, segment: Segment) -> None:
    try:
        for suffix in SEGMENT_SUFFIXES:
            path = segment_path(segment.directory, segment.base_offset, suffix)
            if files.exists(path):
                files.rename(path, path + DELETED_SUFFIX)
                files.remove(path + DELETED_SUFFIX)
    except FileNotFoundError:
        # The whole log was deleted meanwhile.
        return
    except OSError as error:
        _logger.warning(
            "a deleted segment could not be removed; the next start tries again",
            extra={"file": segment.path, "error": str(error)},
        )
