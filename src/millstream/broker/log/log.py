"""One partition's log: an append-only sequence of batches with offsets, in segments.

Every method is synchronous and runs on the event loop, which owns the state; only syncing happens in threads, by
the jobs of `sync`, `checkpoint` and `repair`, which read and change the log on the loop before and after.
"""

from __future__ import annotations

import logging
import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import suppress
from errno import ENOENT
from typing import Protocol
from uuid import UUID

from millstream.broker.log.appended import AppendedRange as AppendedRange
from millstream.broker.log.checked_append import append_checked
from millstream.broker.log.damage import LostRange
from millstream.broker.log.fast_append import append_fast
from millstream.broker.log.files import Files, write_fully
from millstream.broker.log.follower_append import append_replica, begin_restart
from millstream.broker.log.index import RELATIVE_OFFSET_MAX, Index
from millstream.broker.log.indexes import LoadedIndexes
from millstream.broker.log.log_contents import LogContents
from millstream.broker.log.lookup import Found, Lookup
from millstream.broker.log.open_files import OpenFiles
from millstream.broker.log.producer_replay import producers_up_to
from millstream.broker.log.producers import Producers
from millstream.broker.log.reader import Reader
from millstream.broker.log.retention import RetentionFloors, delete_before, delete_expired
from millstream.broker.log.scan import Bad
from millstream.broker.log.segment import Segment
from millstream.broker.log.segment_slice import BrokenSegment, SegmentSlice
from millstream.broker.log.swap import Swap, settle_swaps
from millstream.broker.log.transactions import Guard
from millstream.broker.log.truncation import Checkpointing, Truncation, begin_truncation, retry_truncation
from millstream.core.clock import Clock
from millstream.core.errors import (
    DamagedRange,
    OffsetOutOfRange,
    PartitionClosed,
    RepairPending,
    StorageFailure,
)
from millstream.core.ids import Epoch, Offset
from millstream.core.topic import FLUSH_ALWAYS, FLUSH_OS, TopicPartition, TopicSettings
from millstream.protocol.records.batch import Buffer

_logger = logging.getLogger(__name__)

HINTS_MAX = 64
"""Known positions of offsets that are asked for next: where reads ended and where commits ended."""

READ_ALL = sys.maxsize
"""However much it is, it is read."""

CHECKPOINT_BYTES = 64 * 1024 * 1024
"""After this much a checkpoint is asked for, so that there is never more than this to scan after a crash."""


class Maintenance(Protocol):
    """Whoever makes the log durable."""

    floors: RetentionFloors

    def note_dirty(self, log: Log) -> None:
        """The log has begun to hold what is not synced."""

    def checkpoint_soon(self, log: Log) -> None:
        """Something happened that a checkpoint should record."""

    def checkpoint_now(self, log: Log) -> None:
        """Checkpoint the log before this returns, or raise `OSError`."""

    def checkpoint_job(self, log: Log) -> Checkpointing:
        """Capture a checkpoint for whoever does it."""

    def truncate_now(self, cut: Truncation) -> None:
        """Carry out a cut before this returns."""

    def journal_mark(self) -> tuple[int, int]:
        """The journal's id and next sequence: what was journaled before is void for a log that notes this."""


class Log:
    """One partition's log. What is not a method of the contract is for the other parts of this package."""

    def __init__(
        self,
        topic_id: UUID,
        partition: TopicPartition,
        contents: LogContents,
        settings: TopicSettings,
        *,
        files: Files,
        open_files: OpenFiles,
        indexes: LoadedIndexes,
        clock: Clock,
        maintenance: Maintenance,
    ) -> None:
        self.key = (topic_id, partition.partition)
        self.topic_id = topic_id
        self.partition = partition
        self.settings = settings
        self.allows_fast_append = _takes_plain(settings)
        """Whether batches are stored as they come, without a look at their records and without another time."""
        self.directory = contents.directory
        self.segments = contents.segments
        self.start_offset = Offset(contents.start_offset)
        self.end_offset = Offset(contents.end_offset)
        self.synced_offset = Offset(contents.end_offset)
        self.stored_offset = Offset(contents.end_offset)
        """Everything below is durable in the segments themselves, not only in the journal."""
        self.producers: Producers = contents.producers
        self.epochs = contents.epochs
        self.damage = contents.damage
        self.journal_mark = contents.journal_mark
        self.on_synced: Callable[[], None] | None = None
        self.on_sync_failed: Callable[[StorageFailure], None] | None = None
        self.acknowledged_offset: Callable[[], int] | None = None
        """Up to where nothing can be cut off again, so that it may be deleted and compacted; None for all of it."""
        self.failure: str | None = None
        """What the disk last failed at, until it does something right."""
        self.failed_at = 0.0
        self.broken = False
        """A sync of a segment failed; writes are refused until its tail is in another file."""
        self.repairing = False
        self.is_truncating = self.truncation_failed = False
        """Whether its files still hold what was cut off, and if the disk refused the cut; no writes are taken then."""
        self.closed = False
        self.generation = 0
        """Changes when segments are cut or replaced, so that a job that is under way knows."""
        self.names_version = 0
        self.names_synced = 0
        self.folder_synced = True
        self.removed_segments: list[Segment] = []
        """Segments that are no part of the log any more; their files go after the next checkpoint."""
        self.names_lock = threading.Lock()  # Held to remove the files of doomed segments, and to take over their names.
        self.swaps: list[Swap] = []
        """Compacted segments whose files take their place with the next checkpoint."""
        self.cleaned_offset = contents.cleaned_offset
        """Up to where compaction has been: below, each key stands once."""
        self.dirty = False
        self.changed = contents.changed
        """Whether the last checkpoint is behind."""
        self.reader = Reader(
            files, open_files, indexes, self.epochs, clock, index_interval_bytes=settings.index_interval_bytes
        )
        self._lookup = Lookup(self.reader)
        self._bases = [segment.base_offset for segment in self.segments]
        self._hints: dict[int, tuple[Segment, int]] = {}
        self.unchecked_bytes = 0
        self._files = files
        self.open_files = open_files
        self.clock = clock
        self.maintenance = maintenance

    def __repr__(self) -> str:
        return f"Log({self.partition}, offsets {self.start_offset}..{self.end_offset})"

    # -- what is known --------------------------------------------------------------------------------------

    @property
    def latest_epoch(self) -> Epoch:
        """The epoch of the last leader that wrote, or -1."""
        return self.epochs.latest

    @property
    def size_bytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    @property
    def damaged_ranges(self) -> tuple[tuple[int, int], ...]:
        """The ranges of offsets that the disk lost, each as (first, next)."""
        return self.damage.ranges()

    def settle_transactions(self) -> None:
        """Forget how to take back the markers that cannot be cut off any more."""
        settled = self.synced_offset if self.acknowledged_offset is None else self.acknowledged_offset()
        self.producers.transactions.settle(settled)

    def end_of_epoch(self, epoch: int) -> tuple[Epoch, Offset]:
        """Where an epoch ended, as `OffsetForLeaderEpoch` asks; (-1, -1) if it is unknown."""
        return self.epochs.end_of(epoch, self.end_offset)

    def change_settings(self, settings: TopicSettings) -> None:
        """Follow the topic's settings from now on."""
        self.settings = settings
        self.allows_fast_append = _takes_plain(settings)
        if self.dirty:
            self.maintenance.note_dirty(self)

    # -- append ---------------------------------------------------------------------------------------------

    def append(
        self,
        batches: bytearray | memoryview,
        *,
        leader_epoch: Epoch,
        internal: bool = False,
        guard: Guard | None = None,
        is_checked: bool = False,
    ) -> AppendedRange:
        """Check the batches, give them offsets in place, and write them; nothing is synced yet.

        The guard is what a transaction needs to begin here. Keys are looked for unless `is_checked`.
        """
        if (self.closed or self.broken or self.is_truncating) and not retry_truncation(self, self._files):
            raise self._refusal()
        if not internal:
            appended = append_fast(self, batches, leader_epoch)
            if appended is not None:
                return appended
        return append_checked(self, batches, leader_epoch, internal=internal, guard=guard, is_checked=is_checked)

    def _refusal(self) -> PartitionClosed | StorageFailure:
        if self.closed:
            return PartitionClosed(f"{self.partition} is closed")
        if self.is_truncating and not self.truncation_failed:
            return StorageFailure(f"{self.partition}: writes are refused until its end is cut off")
        return StorageFailure(f"{self.partition}: writes are refused until the disk works again: {self.failure}")

    def segment_for(self, size: int, next_offset: int, now_ms: int) -> Segment:
        """The segment that takes the next write, a new one when the last is full or an hour old."""
        if not self.segments:
            return self.roll()
        active = self.segments[-1]
        settings = self.settings
        if active.size and (
            active.size + size > settings.segment_bytes
            or now_ms - active.first_append_ms >= settings.segment_ms
            or next_offset - active.base_offset > RELATIVE_OFFSET_MAX
        ):
            return self.roll()
        return active

    def roll(self) -> Segment:
        """Begin a new segment."""
        segment = Segment(self.directory, self.end_offset)
        self._claim_name(segment.base_offset)
        try:
            # A file of this name can only be the remains of something that was cut off.
            self._files.truncate(self.open_files.descriptor(segment, create=True), 0)
        except OSError as error:
            self.open_files.release(segment)
            raise self.fail_write("beginning a new segment", error) from error
        self.names_version += 1
        # Where the log ended is now at the start of another file.
        self._hints.pop(self.end_offset, None)
        if self.segments:
            self.segments[-1].sealed = True
            self.maintenance.checkpoint_soon(self)
        self.segments.append(segment)
        self._bases.append(segment.base_offset)
        return segment

    def _claim_name(self, base_offset: int) -> None:
        """See to it that files of this name are not removed any more, also by a checkpoint that is under way."""
        for doomed in [doomed for doomed in self.removed_segments if doomed.base_offset == base_offset]:
            with self.names_lock:
                doomed.is_removed = True
            self.removed_segments.remove(doomed)

    def write(self, segment: Segment, batches: bytearray | memoryview) -> Index:
        """Write behind the last batch, or leave the segment as it was; the index is returned for what comes next."""
        segment.used = True
        try:
            index = segment.index
            if index is None:
                index = self.reader.index_of(segment)
            descriptor = segment.descriptor
            if descriptor < 0:
                descriptor = self.open_files.descriptor(segment)
            write_fully(self._files, descriptor, batches, segment.size)
        except OSError as error:
            self._cut_back(segment)
            raise self.fail_write(f"writing {len(batches)} bytes", error) from error
        return index

    def _cut_back(self, segment: Segment) -> None:
        """Remove what a failed write left behind. The next write begins at the same place, so this may fail too."""
        try:
            self._files.truncate(self.open_files.descriptor(segment), segment.size)
        except OSError as error:
            _logger.warning(
                "the remains of a failed write could not be cut off",
                extra={"partition": str(self.partition), "error": str(error)},
            )

    def fail_write(self, doing: str, error: OSError) -> StorageFailure:
        """The error for a write that the disk did not take; also told by the log itself until a write succeeds."""
        self._note_failure(f"{doing} failed: {error.strerror or error}")
        _logger.error("the disk refused a write", extra={"partition": str(self.partition), "error": self.failure})
        return StorageFailure(
            f"{self.partition}: {self.failure}. Nothing was stored and reads go on; free space on the disk of "
            f"{self.directory} or repair it, and writes resume by themselves"
        )

    def after_append(self, size: int) -> None:
        """See to what follows from more bytes in the log."""
        self.unchecked_bytes += size
        if self.unchecked_bytes > CHECKPOINT_BYTES and self.settings.flush != FLUSH_OS:
            self.unchecked_bytes = 0
            self.maintenance.checkpoint_soon(self)
        if not self.dirty:
            self.dirty = self.changed = True
            self.maintenance.note_dirty(self)
        if self.failure is not None:
            self.failure = None

    # -- read -----------------------------------------------------------------------------------------------

    def read(self, offset: int, *, max_bytes: int, up_to: int, at_least_one: bool = True) -> bytes | memoryview:
        """Whole batches from the one that holds `offset`: no more than `max_bytes`, but `at_least_one` if so asked."""
        found = self.read_slice(offset, max_bytes=max_bytes, up_to=up_to, at_least_one=at_least_one)
        return b"" if found is None else found.data

    def read_slice(
        self, offset: int, *, max_bytes: int, up_to: int, eager_bytes: int = READ_ALL, at_least_one: bool = True
    ) -> SegmentSlice | None:
        """The same, as a place in a file; more than `eager_bytes` bytes are left there. None when there is nothing."""
        if not self.start_offset <= offset <= self.end_offset or self.closed:
            raise self._out_of_range(offset)
        if offset >= up_to or offset >= self.end_offset:
            return None
        if self.damage:
            up_to = self._undamaged(offset, up_to)
        try:
            hint = self._hints.get(offset)
            if hint is None:
                segment = self._segment_of(offset)
                position = self.reader.locate(segment, offset)
            else:
                segment, position = hint
            limit, limit_offset = self._limit(segment, up_to)
            found = self.reader.find(
                segment, position, max_bytes, limit, limit_offset, eager_bytes, at_least_one=at_least_one
            )
        except BrokenSegment as broken:
            self._locate_damage(broken)
            return self.read_slice(
                offset, max_bytes=max_bytes, up_to=up_to, eager_bytes=eager_bytes, at_least_one=at_least_one
            )
        except OSError as error:
            self._record_missing(error)
            return self.read_slice(
                offset, max_bytes=max_bytes, up_to=up_to, eager_bytes=eager_bytes, at_least_one=at_least_one
            )
        if not found.size:
            return None
        self.hint(found.next_offset, segment, found.end_position)
        return found

    def _out_of_range(self, offset: int) -> OffsetOutOfRange | PartitionClosed:
        if self.closed:
            return PartitionClosed(f"{self.partition} is closed")
        return OffsetOutOfRange(
            f"{self.partition} holds offsets {self.start_offset} to {self.end_offset}, not {offset}",
            start=self.start_offset,
            end=self.end_offset,
        )

    def _unreadable(self, error: OSError) -> StorageFailure:
        return StorageFailure(f"{self.partition}: reading from {self.directory} failed: {error.strerror or error}")

    def _undamaged(self, offset: int, up_to: int) -> int:
        """Up to where reading may go before it meets a lost range; raise when the offset lies in one."""
        lost = self.damage.at(offset)
        if lost is not None and lost in self.damage.repairable:
            raise RepairPending(
                f"{self.partition}: the disk lost the offsets {lost.first} to {lost.next_offset - 1}; "
                "they are being fetched from another replica"
            )
        if lost is not None:
            raise DamagedRange(
                f"{self.partition}: the disk lost the offsets {lost.first} to {lost.next_offset - 1}; "
                f"reading can go on at {lost.next_offset}",
                first=lost.first,
                next_offset=lost.next_offset,
            )
        first = self.damage.next_after(offset)
        return up_to if first is None else min(up_to, first)

    def _segment_of(self, offset: int) -> Segment:
        """The segment that holds an offset below the end, or the first one with something behind it."""
        at = max(0, bisect_right(self._bases, offset) - 1)
        while self.segments[at].next_offset <= offset:
            at += 1
        return self.segments[at]

    def _limit(self, segment: Segment, up_to: int) -> tuple[int, int]:
        """Where in a segment reading has to stop."""
        if up_to >= segment.next_offset:
            return segment.size, segment.next_offset
        hint = self._hints.get(up_to)
        if hint is not None and hint[0] is segment:
            return hint[1], up_to
        lost = self.damage.at(up_to) if self.damage else None
        if lost is not None and lost.segment == segment.base_offset:
            return lost.start, up_to
        position = self.reader.locate(segment, up_to)
        self.hint(up_to, segment, position)
        return position, up_to

    def hint(self, offset: int, segment: Segment, position: int) -> None:
        """Remember where an offset lies that is likely to be asked for next."""
        if offset >= segment.next_offset and segment.sealed:
            return
        hints = self._hints
        hints[offset] = (segment, position)
        if len(hints) > HINTS_MAX:
            del hints[next(iter(hints))]

    def offset_for_time(self, timestamp_ms: int, *, up_to: int) -> Found | None:
        """The first record with at least this timestamp: its offset, its timestamp and its leader epoch."""
        return self._looked_up(
            lambda: self._lookup.first_at_or_after(self.segments, timestamp_ms, self.start_offset, up_to)
        )

    def max_timestamp(self, *, up_to: int) -> Found | None:
        """The first of the records with the largest timestamp."""
        return self._looked_up(lambda: self._lookup.latest(self.segments, self.start_offset, up_to))

    def _looked_up(self, look_up: Callable[[], Found | None]) -> Found | None:
        if self.closed:
            raise PartitionClosed(f"{self.partition} is closed")
        while True:
            try:
                return look_up()
            except BrokenSegment as broken:
                self._locate_damage(broken)
            except OSError as error:
                self._record_missing(error)

    def boundary(self, offset: int) -> tuple[Segment, int, int]:
        """Where to cut so that nothing at or beyond an offset is left: segment, position, and the new end."""
        segment = self._segment_of(offset)
        while True:
            try:
                start = self.reader.index_of(segment).position_of(max(0, offset - segment.base_offset))
                for frame in self.reader.frames(segment, start):
                    if frame.next_offset > offset:
                        return segment, frame.position, min(offset, frame.base_offset)
                return segment, segment.size, offset
            except BrokenSegment as broken:
                self._locate_damage(broken)
            except OSError as error:
                self._record_missing(error)

    # -- damage ---------------------------------------------------------------------------------------------

    def _locate_damage(self, broken: BrokenSegment) -> None:
        """Find out which offsets are lost where a segment was found to be broken."""
        segment = broken.segment
        for bad in self._find_bad_ranges(segment, broken.position):
            known = self.damage.at(bad.first)
            if known is None or known.next_offset < bad.next_offset:
                self.record_damage(segment, bad)
                return
        raise StorageFailure(f"{self.partition}: {broken}, and looking again found nothing wrong")

    def _record_missing(self, error: OSError) -> None:
        """Note that all of a segment is lost if its file was removed; any other error is raised to the reader."""
        missing = [segment for segment in self.segments if segment.path == error.filename]
        if not isinstance(error, FileNotFoundError) or not missing or not self._files.exists(self.directory):
            raise self._unreadable(error) from error
        self.record_missing_file(missing[0])

    def record_missing_file(self, segment: Segment) -> None:
        """Note that all of a segment is lost, as its file was removed."""
        known = self.damage.at(max(segment.base_offset, self.start_offset))
        if known is not None and known.next_offset >= segment.next_offset:
            return
        self.open_files.close(segment)
        # There is nothing to sync any more; the checkpoint that follows says that it is lost.
        segment.mark_synced(segment.size, segment.next_offset)
        unsynced = max(self.synced_offset, segment.base_offset)
        is_awaited = self.settings.flush == FLUSH_ALWAYS and unsynced < segment.next_offset
        self.record_damage(segment, Bad(0, segment.size, segment.base_offset, segment.next_offset), unread=is_awaited)
        if is_awaited:
            # A commit under way may still advance past it, and a retry must not count as a duplicate of what is gone.
            self.producers.drop_range(unsynced, segment.next_offset)
            self.fail_sync(FileNotFoundError(ENOENT, "the file was removed"), f"syncing {segment.path}")
            self.failure = None
        if segment is self.segments[-1]:
            # A disk that takes no new file is told to whoever writes.
            with suppress(StorageFailure):
                self.roll()

    def locate_damage(self, segment: Segment, position: int) -> None:
        """Somebody found a segment to be broken; note what is lost."""
        self._locate_damage(BrokenSegment(segment, position))

    def _find_bad_ranges(self, segment: Segment, position: int) -> Iterator[Bad]:
        """What is bad in a segment from the last known batch before a position on."""
        relative, start = self.reader.index_of(segment).start_before(position)
        try:
            scan = self.reader.scan(segment, start, segment.base_offset + relative)
            for found in scan:
                if not isinstance(found, Bad):
                    continue
                if found.next_offset < 0:
                    yield Bad(found.start, segment.size, found.first, segment.next_offset)
                    return
                yield found
        except OSError as error:
            raise self._unreadable(error) from error
        if scan.expected < segment.next_offset:
            yield Bad(scan.position, segment.size, scan.expected, segment.next_offset)

    def record_damage(self, segment: Segment, bad: Bad, *, unread: bool = False) -> None:
        """Note that a range of offsets is lost. What lies behind it stays."""
        segment.holes[bad.start] = (bad.end, bad.next_offset)
        self.damage.add(LostRange(bad.first, bad.next_offset, segment.base_offset, bad.start, bad.end, unread))
        self._hints.clear()
        self.changed = True
        self.maintenance.checkpoint_soon(self)
        _logger.error(
            "records are damaged on disk",
            extra={
                "topic": self.partition.topic,
                "partition": self.partition.partition,
                "first_offset": bad.first,
                "next_offset": bad.next_offset,
                "file": segment.path,
                "bytes": f"{bad.start}-{bad.end}",
            },
        )
        self.damage.on_change()

    def mark_intact(self, lost: LostRange) -> None:
        """Serve a range that was lost and is whole again, as somebody restored its file."""
        others = [one for one in self.damage if one.segment == lost.segment and one != lost]
        self.mark_repaired(lost, lost.next_offset, others)

    def mark_repaired(self, lost: LostRange, next_offset: int, left: list[LostRange]) -> None:
        """Serve a lost range up to an offset again; `left` is what is still lost of its segment."""
        self.damage.replace(lost, left)
        for segment in self.segments:
            segment.holes = self.damage.holes_of(segment.base_offset) if self.damage else {}
            if segment.base_offset <= lost.first < segment.next_offset:
                segment.forget_verified()
        self._hints.clear()
        self.changed = True
        self.maintenance.checkpoint_soon(self)
        _logger.warning(
            "records that were damaged are whole again",
            extra={
                "topic": self.partition.topic,
                "partition": self.partition.partition,
                "first_offset": lost.first,
                "next_offset": next_offset,
            },
        )
        if lost.unread and not any(one.unread for one in self.damage):
            # Among what is back may be the end of a transaction, or the last batch of a producer.
            self.producers = producers_up_to(self, self.end_offset)
        self.damage.on_change()

    # -- deletion -------------------------------------------------------------------------------------------

    def delete_expired(self, now_ms: int) -> int:
        """Delete the segments that are too old or too many by the topic's settings; returns the bytes freed."""
        return delete_expired(self, now_ms)

    def delete_before(self, offset: int) -> None:
        """Let the log begin at an offset, as `DeleteRecords` asks."""
        delete_before(self, offset)

    def truncate_to(self, offset: int) -> None:
        """Cut off everything from an offset on (and the batch that holds it), for good when this returns."""
        cut = self.begin_truncation(offset)
        if cut is not None:
            self.maintenance.truncate_now(cut)

    def begin_truncation(self, offset: int) -> Truncation | None:
        """The same, for good when the cut is done, and nothing is taken until then; None when nothing is to be cut."""
        return begin_truncation(self, offset, self._files)

    # -- replication ----------------------------------------------------------------------------------------

    def append_replica(self, batches: Buffer, *, leader_epoch: Epoch) -> None:
        """Take over batches as the leader of an epoch wrote them; nothing is synced yet."""
        if (self.closed or self.broken or self.is_truncating) and not retry_truncation(self, self._files):
            raise self._refusal()
        append_replica(self, batches, leader_epoch, self._files)

    def restart_at(self, offset: int) -> None:
        """Drop everything and begin anew at an offset, for good when this returns."""
        self.maintenance.truncate_now(self.begin_restart(offset))

    def begin_restart(self, offset: int) -> Truncation:
        """The same, for good when the cut is done. The log takes nothing until then."""
        return begin_restart(self, offset, self._files)

    # -- for the jobs ---------------------------------------------------------------------------------------

    def unsynced_segments(self) -> list[Segment]:
        """The segments with bytes that are not durable in their own file, in order."""
        found: list[Segment] = []
        for segment in reversed(self.segments):
            if segment.size and segment.synced_bytes == segment.size:
                break
            if segment.size:
                found.append(segment)
        return found[::-1]

    def advance_synced(self, end_offset: int) -> None:
        """Everything below an offset is durable, in the segments or in the journal."""
        if not self.broken:
            self.failure = None
        if end_offset > self.synced_offset:
            self.synced_offset = Offset(end_offset)
            if self.on_synced is not None:
                self.on_synced()

    def _note_failure(self, what: str) -> None:
        self.failure = what
        self.failed_at = self.clock.monotonic()

    def mark_unsynced_segment(self, segment: Segment) -> None:
        """A sync of a segment failed: refuse writes until what it held is safe in another file."""
        if not self.broken:
            self.broken = True
            self._note_failure(f"{segment.path} could not be synced")
            _logger.error(
                "a file could not be synced and is not trusted again",
                extra={"partition": str(self.partition), "file": segment.path},
            )

    def fail_sync(self, error: OSError, doing: str) -> None:
        """Tell whoever waits for a sync that it did not come about."""
        self._note_failure(f"{doing} failed: {error.strerror or error}")
        if not self.closed:
            _logger.error("a log could not be synced", extra={"partition": str(self.partition), "error": self.failure})
        if self.on_sync_failed is not None:
            self.on_sync_failed(
                StorageFailure(
                    f"{self.partition}: {self.failure}. What was sent last may be stored or not; free space on the "
                    f"disk of {self.directory} or repair it, and writes resume by themselves"
                )
            )

    def replace_segments(self, segments: list[Segment]) -> None:
        """Go on with other segments; positions that were known are not any more."""
        self.segments = segments
        self._bases = [segment.base_offset for segment in segments]
        self._hints.clear()
        self.generation += 1
        self.changed = True

    def swap_segments(self, segments: list[Segment]) -> None:
        """Go on with compacted segments: the end of the log stays as it is, so what is under way there goes on."""
        generation = self.generation
        self.replace_segments(segments)
        self.generation = generation
        self.names_version += 1
        self.journal_mark = self.maintenance.journal_mark()

    def close(self) -> None:
        """Close the files; the log takes and gives nothing from here on."""
        self.closed = True
        self.generation += 1
        settle_swaps(self, list(self.swaps))
        for segment in self.segments:
            self.open_files.release(segment)


def _takes_plain(settings: TopicSettings) -> bool:
    return settings.message_timestamp_type == "CreateTime" and not settings.reads_records
