"""One partition's log: an append-only sequence of batches with offsets, in segments.

Every method is synchronous and runs on the event loop, which owns the state. Only slow work happens in threads, by jobs
(commits, checkpoints, scans, truncations, repairs) that read and change the log on the loop before and after.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from errno import ENOENT
from typing import TYPE_CHECKING
from uuid import UUID

from millstream.broker.log.append import AppendedRange as AppendedRange
from millstream.broker.log.append import AppendedRun as AppendedRun
from millstream.broker.log.append import ByteRanges as ByteRanges
from millstream.broker.log.append import append_checked, append_fast, append_replica
from millstream.broker.log.damage import LostRange
from millstream.broker.log.files import Files, OpenFiles, is_out_of_space, write_fully
from millstream.broker.log.log_contents import LogContents, ProducerReplay, read_producers
from millstream.broker.log.producers import Producers
from millstream.broker.log.reader import Found, HeavyBatch, Lookup, Reader
from millstream.broker.log.retention import delete_before, delete_expired
from millstream.broker.log.scan import BadRange, LoadedIndexes
from millstream.broker.log.segment import RELATIVE_OFFSET_MAX, Index, Segment, SegmentList
from millstream.broker.log.segment_slice import BrokenSegment, SegmentSlice
from millstream.broker.log.transactions import Guard
from millstream.broker.log.truncation import Truncation, begin_restart, begin_truncation, retry_truncation
from millstream.core.clock import Clock
from millstream.core.errors import (
    DamagedRange,
    InspectionPending,
    OffsetOutOfRange,
    PartitionClosed,
    RepairPending,
    StorageFailure,
)
from millstream.core.ids import Epoch, Offset, OffsetRange
from millstream.core.topic import FLUSH_ALWAYS, FLUSH_OS, TopicPartition, TopicSettings
from millstream.protocol.records.batch import Buffer

if TYPE_CHECKING:
    from millstream.broker.log.store import LogStore

_logger = logging.getLogger(__name__)

READ_ALL = sys.maxsize
"""Read everything at once, without a limit."""

CHECKPOINT_BYTES = 64 * 1024 * 1024
"""The bytes after which a checkpoint is requested, which bounds the scan after a crash."""


@dataclass(slots=True, eq=False)
class LogHealth:
    """Whether a log accepts writes, and the last failure of its disk."""

    blocks_writes: bool = False
    """Whether an append needs further checks: the log is closed, broken, or being truncated."""
    closed: bool = False
    broken: bool = False
    """Whether a sync of a segment failed; writes are refused until its tail is in another file."""
    repairing: bool = False
    """Whether the tail of that segment is being copied."""
    is_truncating: bool = False
    """Whether the files may still hold truncated records; if so, writes are refused."""
    truncation_failed: bool = False
    failure: str | None = None
    """The last operation at which the disk failed, until one succeeds."""
    failed_at: float = 0.0
    lack: tuple[int, str] | None = None
    """The size of a write that did not fit on the disk, and the failure, which lasts until that size would fit."""

    @property
    def is_idle(self) -> bool:
        """Whether nothing is failing, being repaired or being truncated."""
        return not (self.closed or self.broken or self.repairing or self.is_truncating)

    def fail(self, failure: str, now: float, lacking_bytes: int = 0) -> None:
        self.failure, self.failed_at = failure, now
        if lacking_bytes:
            self.lack = (lacking_bytes, failure)

    def succeed(self) -> None:
        """Clear the last failure, unless a broken segment is still to be repaired."""
        if not self.broken:
            self.failure = None

    def check_space(self, free_bytes: int) -> str | None:
        """Return the error of a write for which the disk had no space; None once that write would fit."""
        if self.lack is not None and self.lack[0] <= free_bytes:
            self.lack = None
        return None if self.lack is None else self.lack[1]

    def mark_broken(self) -> None:
        """Refuse writes until the tail of a segment that failed to sync is in another file."""
        self.broken = self.blocks_writes = True

    def begin_repair(self) -> None:
        """Freeze the log while the tail is copied."""
        self.repairing = True

    def end_repair(self, *, is_repaired: bool) -> None:
        """Account for the copy; if it succeeded, writes are taken again."""
        self.repairing = False
        if is_repaired:
            self.broken, self.failure = False, None
            self.blocks_writes = self.closed or self.is_truncating

    def begin_truncation(self) -> None:
        """Refuse writes; until the truncation is captured, it counts as failed and must be repeated."""
        self.is_truncating = self.truncation_failed = self.blocks_writes = True

    def truncation_captured(self) -> None:
        """Account for a truncation that is on its way to the disk."""
        self.truncation_failed = False

    def end_truncation(self, *, is_done: bool) -> None:
        """Accept writes again, or request that the truncation be repeated first."""
        self.truncation_failed = not is_done
        self.is_truncating = not is_done
        self.blocks_writes = self.closed or self.broken or self.is_truncating

    def close(self) -> None:
        """Refuse everything from here on."""
        self.closed = self.blocks_writes = True


class Log:
    """A partition's log. The jobs of this package change it through the methods of its last section, on the loop."""

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
        maintenance: LogStore,
    ) -> None:
        self.key = (topic_id, partition.partition)
        self.topic_id = topic_id
        self.partition = partition
        self.directory = contents.directory
        self.settings = settings
        self.allows_fast_append = _allows_fast_append(settings)
        """Whether batches are stored as they are, without decoding their records or changing their timestamps."""
        self.segments = SegmentList(contents.directory, contents.segments, open_files, folder_synced=contents.known)
        self.health = LogHealth()
        self.start_offset = Offset(contents.start_offset)
        self.end_offset = Offset(contents.end_offset)
        self.synced_offset = Offset(contents.end_offset)
        self.stored_offset = Offset(contents.end_offset)
        """The offset below which everything is durable in the segments themselves, not only in the journal."""
        self.cleaned_offset = contents.cleaned_offset
        """The offset below which everything is compacted: each key occurs once."""
        self.superseded_by = contents.superseded_by
        """Compaction may have removed records because of later ones below this offset. Truncated below it, the log may
        lack the last value of a key, and has to be fetched again as a whole."""
        self.producers: Producers = contents.producers
        self.epochs = contents.epochs
        self.damage = contents.damage
        self.journal_mark = contents.journal_mark
        """Journal entries from before this mark are void for this log."""
        self.is_replaying = False
        """Whether producers and aborted transactions are unknown after a truncation; then nothing is read, and the
        checkpoint stays as it is."""
        self.reader = Reader(
            files, open_files, indexes, self.epochs, clock, index_interval_bytes=settings.index_interval_bytes
        )
        self.open_files = open_files
        self.clock = clock
        self.maintenance = maintenance
        self._files = files
        self._lookup = Lookup(self.reader)
        self._on_synced: Callable[[], None] | None = None
        self._on_sync_failed: Callable[[StorageFailure], None] | None = None
        self._acknowledged_offset: Callable[[], int] | None = None
        self._is_dirty = False
        self._is_changed = contents.changed
        self._uncheckpointed_bytes = 0

    def __repr__(self) -> str:
        return f"Log({self.partition}, offsets {self.start_offset}..{self.end_offset})"

    # -- properties -----------------------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        return self.health.closed

    @property
    def failure(self) -> str | None:
        """The last failed operation of the disk, until one succeeds."""
        return self.health.failure

    @property
    def generation(self) -> int:
        """A number that changes when segments are truncated or replaced, and when the log is closed."""
        return self.segments.generation

    @property
    def is_dirty(self) -> bool:
        """Whether appends are waiting for a sync to be captured."""
        return self._is_dirty

    @property
    def needs_checkpoint(self) -> bool:
        """Whether the last checkpoint is out of date."""
        return self._is_changed

    def listen(
        self,
        *,
        on_synced: Callable[[], None] | None = None,
        on_sync_failed: Callable[[StorageFailure], None] | None = None,
        acknowledged_offset: Callable[[], int] | None = None,
    ) -> None:
        """Set the callbacks after syncs, and the source of the offset below which nothing can be truncated.

        Only what is below that offset is deleted and compacted; without a source, everything may be.
        """
        self._on_synced = on_synced
        self._on_sync_failed = on_sync_failed
        self._acknowledged_offset = acknowledged_offset

    def acknowledged_offset(self, *, default: int) -> int:
        """Return the offset below which nothing can be truncated; the default if replicas have no say in it."""
        return default if self._acknowledged_offset is None else self._acknowledged_offset()

    @property
    def latest_epoch(self) -> Epoch:
        """The epoch of the last leader that wrote, or -1."""
        return self.epochs.latest

    @property
    def size_bytes(self) -> int:
        return sum(segment.size for segment in self.segments)

    @property
    def damaged_ranges(self) -> tuple[OffsetRange, ...]:
        """The ranges of offsets that the disk lost, each as (first, next)."""
        return self.damage.ranges()

    def settle_transactions(self) -> None:
        """Forget how to revert the markers that can no longer be truncated."""
        self.producers.transactions.settle(self.acknowledged_offset(default=self.synced_offset))

    def end_of_epoch(self, epoch: int) -> tuple[Epoch, Offset]:
        """Return an epoch and its end offset for `OffsetForLeaderEpoch`, or (-1, -1) if it is unknown."""
        return self.epochs.end_of(epoch, self.end_offset)

    def change_settings(self, settings: TopicSettings) -> None:
        self.settings = settings
        self.allows_fast_append = _allows_fast_append(settings)
        if self._is_dirty or settings.compacts:
            self.maintenance.mark_dirty(self)

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
        """Validate batches, assign their offsets in place, and write them; nothing is synced yet.

        A transaction begins only under its guard. Records are checked unless `is_checked`.
        """
        if self.health.blocks_writes and not retry_truncation(self, self._files):
            raise self._write_refusal()
        if not internal:
            base_offsets, _ = append_fast(self, memoryview(batches), ((0, len(batches)),), leader_epoch)
            if base_offsets:
                return AppendedRange(Offset(base_offsets[0]), self.end_offset, -1, self.start_offset, False)
        return append_checked(self, batches, leader_epoch, internal=internal, guard=guard, is_checked=is_checked)

    def append_first(self, data: memoryview, ranges: ByteRanges, *, leader_epoch: Epoch) -> AppendedRun | None:
        """Append as many of the first batches in these byte ranges as need no decision, in one write."""
        if not self.may_append_first:
            return None
        start = self.end_offset
        base_offsets, size = append_fast(self, data, ranges, leader_epoch)
        if not base_offsets:
            return None
        return AppendedRun(AppendedRange(start, self.end_offset, -1, self.start_offset, False), base_offsets, size)

    @property
    def may_append_first(self) -> bool:
        """Whether some batches may need no decision: the disk works, and the topic's settings ask for none."""
        return self.allows_fast_append and not self.health.blocks_writes and self.health.failure is None

    def _write_refusal(self) -> PartitionClosed | StorageFailure:
        health = self.health
        if health.closed:
            return PartitionClosed(f"{self.partition} is closed")
        if health.is_truncating and not health.truncation_failed:
            return StorageFailure(f"{self.partition}: writes are refused until its truncation is on disk")
        return StorageFailure(f"{self.partition}: writes are refused until the disk works again: {health.failure}")

    def segment_for(self, size: int, next_offset: int, now_ms: int) -> Segment:
        """Return the segment that takes the next write; a new one if the last is full or too old."""
        active = self.segments.active
        if active is None:
            return self.roll()
        settings = self.settings
        if active.size and (
            active.size + size > settings.segment_bytes
            or now_ms - active.first_append_ms >= settings.segment_ms
            or next_offset - active.base_offset > RELATIVE_OFFSET_MAX
        ):
            return self.roll()
        return active

    def roll(self) -> Segment:
        segment = Segment(self.directory, self.end_offset)
        self.segments.claim_name(segment.base_offset)
        try:
            # A file of this name can only be left over from a truncation.
            self._files.truncate(self.open_files.descriptor(segment, create=True), 0)
        except OSError as error:
            self.open_files.release(segment)
            raise self.fail_write("beginning a new segment", error) from error
        if self.segments.active is not None:
            self.maintenance.checkpoint_soon(self)
        self.segments.add(segment)
        return segment

    def write(self, segment: Segment, batches: Buffer) -> Index:
        """Append to the segment, or leave it unchanged on failure; return its index."""
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
            self._discard_failed_write(segment)
            raise self.fail_write(f"writing {len(batches)} bytes", error, len(batches)) from error
        return index

    def _discard_failed_write(self, segment: Segment) -> None:
        """Remove the bytes of a failed write. The next write begins at the same position, so this may fail too."""
        try:
            self._files.truncate(self.open_files.descriptor(segment), segment.size)
        except OSError as error:
            _logger.warning(
                "the remains of a failed write could not be removed",
                extra={"partition": str(self.partition), "error": str(error)},
            )

    def fail_write(self, doing: str, error: OSError, size: int = 1) -> StorageFailure:
        """Return the error for a write that the disk refused, and remember the failure until a write succeeds."""
        self.record_failure(f"{doing} failed: {error.strerror or error}", size if is_out_of_space(error) else 0)
        _logger.error("the disk refused a write", extra={"partition": str(self.partition), "error": self.failure})
        return StorageFailure(
            f"{self.partition}: {self.failure}. Nothing was stored, reads continue; free space on the disk of "
            f"{self.directory} or repair it, and writes resume automatically"
        )

    def advance_end(self, end_offset: int, size: int) -> None:
        """Account for batches that were appended: their bytes, and the new end."""
        self.end_offset = Offset(end_offset)
        self._uncheckpointed_bytes += size
        if self._uncheckpointed_bytes > CHECKPOINT_BYTES and self.settings.flush != FLUSH_OS:
            self._uncheckpointed_bytes = 0
            self.maintenance.checkpoint_soon(self)
        if not self._is_dirty:
            self._is_dirty = self._is_changed = True
            self.maintenance.mark_dirty(self)
        if self.health.failure is not None:
            self.health.succeed()

    # -- read -----------------------------------------------------------------------------------------------

    def read(self, offset: int, *, max_bytes: int, up_to: int, at_least_one: bool = True) -> bytes | memoryview:
        """Read whole batches from the one that holds `offset`: at most `max_bytes`, but one batch if `at_least_one`."""
        records_slice = self.read_slice(offset, max_bytes=max_bytes, up_to=up_to, at_least_one=at_least_one)
        return b"" if records_slice is None else records_slice.data

    def read_slice(
        self, offset: int, *, max_bytes: int, up_to: int, eager_bytes: int = READ_ALL, at_least_one: bool = True
    ) -> SegmentSlice | None:
        """Find such batches in their segment, and read them if they have at most `eager_bytes`; return None if there
        are none.
        """
        if not self.start_offset <= offset <= self.end_offset or self.health.closed:
            raise self._out_of_range(offset)
        if offset >= up_to or offset >= self.end_offset:
            return None
        if self.is_replaying:
            raise InspectionPending(
                f"{self.partition}: after a truncation, its transactions are being read from the log"
            )
        if self.damage:
            up_to = self._readable_until(offset, up_to)
        try:
            hint = self.segments.hints.get(offset)
            if hint is None:
                segment = self.segments.containing(offset)
                position = self.reader.locate(segment, offset)
            else:
                segment, position = hint
            limit, limit_offset = self._read_limit(segment, up_to)
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
        self.segments.hint(found.next_offset, segment, found.end_position)
        return found

    def _out_of_range(self, offset: int) -> OffsetOutOfRange | PartitionClosed:
        if self.closed:
            return PartitionClosed(f"{self.partition} is closed")
        return OffsetOutOfRange(
            f"{self.partition} holds offsets {self.start_offset} to {self.end_offset}, not {offset}",
            start=self.start_offset,
            end=self.end_offset,
        )

    def _read_error(self, error: OSError) -> StorageFailure:
        return StorageFailure(f"{self.partition}: reading from {self.directory} failed: {error.strerror or error}")

    def _readable_until(self, offset: int, up_to: int) -> int:
        """Return up to where reading is possible before a lost range; raise if the offset is in one."""
        lost = self.damage.at(offset)
        if lost is not None and lost in self.damage.repairable:
            raise RepairPending(
                f"{self.partition}: the disk lost the offsets {lost.start} to {lost.end - 1}; "
                "they are being fetched from another replica"
            )
        if lost is not None:
            raise DamagedRange(
                f"{self.partition}: the disk lost the offsets {lost.start} to {lost.end - 1}; "
                f"reading can continue at {lost.end}",
                start=lost.start,
                end=lost.end,
            )
        first = self.damage.next_after(offset)
        return up_to if first is None else min(up_to, first)

    def _read_limit(self, segment: Segment, up_to: int) -> tuple[int, int]:
        """Return the position and the offset in a segment at which reading stops."""
        if up_to >= segment.next_offset:
            return segment.size, segment.next_offset
        hint = self.segments.hints.get(up_to)
        if hint is not None and hint[0] is segment:
            return hint[1], up_to
        lost = self.damage.at(up_to) if self.damage else None
        if lost is not None and lost.segment == segment.base_offset:
            return lost.start_position, up_to
        position = self.reader.locate(segment, up_to)
        self.segments.hint(up_to, segment, position)
        return position, up_to

    def offset_for_time(self, timestamp_ms: int, *, up_to: int) -> Found | None:
        """The first record with at least this timestamp, or the first of its batch if that is too heavy for the loop.

        Return its offset, its timestamp and its leader epoch.
        """
        found = self._first_at_or_after(timestamp_ms, self.start_offset, up_to)
        return found.roughly if isinstance(found, HeavyBatch) else found

    async def find_time(self, timestamp_ms: int, *, up_to: int) -> Found | None:
        """Find the first record with at least this timestamp; large batches are decompressed off the loop."""
        found = self._first_at_or_after(timestamp_ms, self.start_offset, up_to)
        while isinstance(found, HeavyBatch):
            within = await found.find_record()
            if within is not None:
                return within
            found = self._first_at_or_after(timestamp_ms, max(self.start_offset, found.offsets.stop), up_to)
        return found

    async def find_max_timestamp(self, *, up_to: int) -> Found | None:
        """Find the first of the records with the largest timestamp."""
        found = self._look_up(lambda: self._lookup.latest(self.segments, self.start_offset, up_to))
        return await self.find_time(found.timestamp_ms, up_to=up_to) if isinstance(found, HeavyBatch) else found

    def _first_at_or_after(self, timestamp_ms: int, start_offset: int, up_to: int) -> Found | HeavyBatch | None:
        return self._look_up(lambda: self._lookup.first_at_or_after(self.segments, timestamp_ms, start_offset, up_to))

    def _look_up(self, look_up: Callable[[], Found | HeavyBatch | None]) -> Found | HeavyBatch | None:
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
        """Return the segment, the position and the new end that remove everything from an offset on."""
        segment = self.segments.containing(offset)
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
        """Record which offsets are lost where a segment turned out to be broken, or raise until that is known."""
        if not self.maintenance.inspect(self, broken.segment, broken.position):
            raise InspectionPending(f"{self.partition}: {broken}; determining which offsets are lost")

    def _record_missing(self, error: OSError) -> None:
        """Record that a segment is lost if its file was removed; raise any other error to the reader."""
        missing = [segment for segment in self.segments if segment.path == error.filename]
        if not isinstance(error, FileNotFoundError) or not missing or not self._files.exists(self.directory):
            raise self._read_error(error) from error
        self.record_missing_file(missing[0])

    def record_missing_file(self, segment: Segment) -> None:
        """Record that all of a segment is lost, because its file was removed."""
        known = self.damage.at(max(segment.base_offset, self.start_offset))
        if known is not None and known.end >= segment.next_offset:
            return
        self.open_files.close(segment)
        # Nothing is left to sync; the checkpoint that follows records the loss.
        segment.mark_synced(segment.size, segment.next_offset)
        unsynced = max(self.synced_offset, segment.base_offset)
        is_awaited = self.settings.flush == FLUSH_ALWAYS and unsynced < segment.next_offset
        self.record_damage(
            segment, BadRange(0, segment.size, segment.base_offset, segment.next_offset), unread=is_awaited
        )
        if is_awaited:
            # A pending commit may still advance past it, and a retry must not count as a duplicate of lost records.
            self.producers.drop_range(unsynced, segment.next_offset)
            self.fail_sync(FileNotFoundError(ENOENT, "the file was removed"), f"syncing {segment.path}")
            self.health.succeed()
        if segment is self.segments.active:
            # If the disk accepts no new file, the next write reports it.
            with suppress(StorageFailure):
                self.roll()

    def locate_damage(self, segment: Segment, position: int) -> None:
        """Find the lost offsets at a position where a segment turned out to be broken, now or in a thread."""
        self.maintenance.inspect(self, segment, position)

    def record_damage(self, segment: Segment, bad: BadRange, *, unread: bool = False) -> None:
        """Record that a range of offsets is lost; the records behind it stay readable."""
        segment.holes[bad.start] = (bad.end, bad.next_offset)
        self.damage.add(LostRange(bad.first, bad.next_offset, segment.base_offset, bad.start, bad.end, unread))
        self.segments.hints.clear()
        self.mark_changed()
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

    def mark_intact(self, lost: LostRange, replay: ProducerReplay | None = None) -> None:
        """Serve a lost range again whose file was restored from outside."""
        self.mark_repaired(lost, lost.end, self.other_losses(lost), replay)

    def other_losses(self, lost: LostRange) -> list[LostRange]:
        """Return the other lost ranges of the same segment."""
        return [lost_range for lost_range in self.damage if lost_range.segment == lost.segment and lost_range != lost]

    def needs_replay(self, lost: LostRange, left: Iterable[LostRange] = ()) -> bool:
        """Return whether the producers must be read again once a range is repaired except for what remains lost of its
        segment.

        The repaired batches may include the end of a transaction, or the last batch of a producer.
        """
        others = (lost_range for lost_range in self.damage if lost_range.segment != lost.segment)
        return lost.unread and not any(lost_range.unread for lost_range in (*others, *left))

    def mark_repaired(
        self, lost: LostRange, next_offset: int, left: list[LostRange], replay: ProducerReplay | None = None
    ) -> None:
        """Serve a lost range up to an offset again; `left` is the part of its segment that is still lost.

        `replay` has read the producers of the repaired log, if they are read again; otherwise they are read here.
        """
        if self.needs_replay(lost, left):
            self.producers = read_producers(self) if replay is None else replay.take()
        self.damage.replace(lost, left)
        for segment in self.segments:
            segment.holes = self.damage.holes_of(segment.base_offset) if self.damage else {}
            if segment.base_offset <= lost.start < segment.next_offset:
                segment.forget_verified()
        self.segments.hints.clear()
        self.mark_changed()
        self.maintenance.checkpoint_soon(self)
        _logger.warning(
            "damaged records were repaired",
            extra={
                "topic": self.partition.topic,
                "partition": self.partition.partition,
                "first_offset": lost.start,
                "next_offset": next_offset,
            },
        )
        self.damage.on_change()

    # -- deletion -------------------------------------------------------------------------------------------

    def delete_expired(self, now_ms: int) -> int:
        return delete_expired(self, now_ms)

    def delete_before(self, offset: int) -> None:
        delete_before(self, offset)

    def truncate_to(self, offset: int) -> None:
        """Truncate everything from an offset on, and the batch that holds it; durable when this returns."""
        cut = self.begin_truncation(offset)
        if cut is not None:
            self.maintenance.truncate_now(cut)

    def begin_truncation(self, offset: int) -> Truncation | None:
        """Truncate in memory; durable once the result is carried out. None if there is nothing to truncate."""
        return begin_truncation(self, offset, self._files)

    # -- replication ----------------------------------------------------------------------------------------

    def append_replica(self, batches: Buffer, *, leader_epoch: Epoch, compacted_until: int = 0) -> None:
        """Append batches as the leader of an epoch wrote them; nothing is synced yet.

        Records may be missing among them because of later ones below `compacted_until`.
        """
        if self.health.blocks_writes and not retry_truncation(self, self._files):
            raise self._write_refusal()
        append_replica(self, batches, leader_epoch, compacted_until, self._files)

    def restart_at(self, offset: int) -> None:
        """Drop everything and restart at an offset; durable when this returns."""
        self.maintenance.truncate_now(self.begin_restart(offset))

    def begin_restart(self, offset: int) -> Truncation:
        """Drop everything in memory; durable once the result is carried out, and no writes are taken until then."""
        return begin_restart(self, offset, self._files)

    # -- for the jobs of this package -----------------------------------------------------------------------

    def sync_captured(self) -> None:
        """Account for a capture of everything unsynced; the next append is announced again."""
        self._is_dirty = False

    def advance_synced(self, end_offset: int) -> None:
        """Account for a sync: everything below an offset is durable, in the segments or in the journal."""
        self.health.succeed()
        if end_offset > self.synced_offset:
            self.synced_offset = Offset(end_offset)
            if self._on_synced is not None:
                self._on_synced()

    def advance_stored(self, end_offset: int) -> None:
        """Account for a sync of the segments themselves."""
        self.stored_offset = max(self.stored_offset, Offset(end_offset))
        self.advance_synced(end_offset)

    def record_failure(self, what: str, lacking_bytes: int = 0) -> None:
        """Record a failure of the disk; the next attempt waits a little."""
        self.health.fail(what, self.clock.monotonic(), lacking_bytes)

    def mark_unsynced_segment(self, segment: Segment) -> None:
        """Refuse writes until the tail of a segment whose sync failed is safe in another file."""
        if not self.health.broken:
            self.health.mark_broken()
            self.record_failure(f"{segment.path} could not be synced")
            _logger.error(
                "a file could not be synced and is not trusted again",
                extra={"partition": str(self.partition), "file": segment.path},
            )

    def fail_sync(self, error: OSError, doing: str) -> None:
        self.record_failure(f"{doing} failed: {error.strerror or error}")
        if not self.closed:
            _logger.error("a log could not be synced", extra={"partition": str(self.partition), "error": self.failure})
        if self._on_sync_failed is not None:
            self._on_sync_failed(
                StorageFailure(
                    f"{self.partition}: {self.failure}. The last records sent may or may not be stored; free space on "
                    f"the disk of {self.directory} or repair it, and writes resume automatically"
                )
            )

    def mark_changed(self) -> None:
        """Request a checkpoint even if nothing is appended."""
        self._is_changed = True

    def checkpoint_captured(self) -> None:
        """Account for a checkpoint that captured the current log."""
        self._is_changed = False
        self._uncheckpointed_bytes = 0

    def void_journal(self) -> None:
        """Invalidate all journal entries of this log so far."""
        self.journal_mark = self.maintenance.journal_mark()

    def replace_segments(self, segments: list[Segment], removed: Iterable[Segment] = ()) -> None:
        """Continue with other segments; the files of those that are removed go after the next checkpoint."""
        self.segments.replace(segments, removed)
        self.mark_changed()

    def swap_in(self, old: list[Segment], new: Segment, token: str) -> bool:
        """Replace old segments by a new one; return False if the log has changed since."""
        health = self.health
        if not health.is_idle or self.is_replaying or not self.segments.swap_in(old, new, token):
            return False
        self.mark_changed()
        self.void_journal()
        return True

    def advance_start(self, start_offset: int) -> None:
        """Begin at a later offset; segments are not touched."""
        self.start_offset = max(self.start_offset, Offset(start_offset))
        self.damage.cut_before(self.start_offset)
        self.producers.transactions.cut_before(self.start_offset)
        self.mark_changed()

    def record_superseding(self, end_offset: int) -> None:
        """Account for a segment whose records are removed because of later ones below an offset."""
        self.superseded_by = max(self.superseded_by, end_offset)

    def advance_cleaned(self, cleaned_offset: int) -> None:
        """Account for a compaction pass."""
        self.cleaned_offset = cleaned_offset
        self.mark_changed()
        self.maintenance.checkpoint_soon(self)

    def adopt_producers(self, replay: ProducerReplay) -> None:
        """Use the producers' state that was read from the batches after a truncation."""
        self.producers, self.is_replaying = replay.take(), False

    def lower_end(self, end_offset: int) -> None:
        """End at an earlier offset; segments and damage are not touched."""
        self.end_offset = Offset(end_offset)
        self.start_offset = min(self.start_offset, self.end_offset)
        self.synced_offset = min(self.synced_offset, self.end_offset)
        self.stored_offset = min(self.stored_offset, self.end_offset)
        self.cleaned_offset = min(self.cleaned_offset, end_offset)
        self.superseded_by = min(self.superseded_by, end_offset)
        self.epochs.cut_after(end_offset)
        if not self.producers.truncate(end_offset):
            # Only the log itself shows the earlier state of the transactions.
            self.producers.clear()
            self.is_replaying = True

    def reset_to(self, offset: int) -> None:
        """Drop everything, and begin and end at an offset."""
        self.replace_segments([], removed=list(self.segments))
        self.start_offset = self.end_offset = self.synced_offset = self.stored_offset = Offset(offset)
        self.cleaned_offset = self.superseded_by = offset
        self.epochs.cut_after(0)
        self.producers.clear()
        self.is_replaying = False
        self.damage.clear()

    def close(self) -> None:
        self.health.close()
        self.segments.close()


def _allows_fast_append(settings: TopicSettings) -> bool:
    return settings.message_timestamp_type == "CreateTime" and not settings.reads_records
