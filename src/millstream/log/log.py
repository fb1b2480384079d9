"""One partition's log: an append-only sequence of batches with offsets, in segments.

Every method is synchronous and runs on the event loop, which owns the state; only syncing happens in a thread.
"""

from __future__ import annotations

import logging
from bisect import bisect_right
from collections.abc import Callable
from typing import NamedTuple, Protocol

from millstream.log.admission import read_headers
from millstream.log.contents import Contents
from millstream.log.files import Files, write_fully
from millstream.log.handles import OpenFiles
from millstream.log.index import Index
from millstream.log.lookup import Lookup
from millstream.log.producers import Producers
from millstream.log.reader import Reader
from millstream.log.segment import Segment
from millstream.model.clock import Clock
from millstream.model.errors import FencedLeaderEpoch, OffsetOutOfRange, PartitionClosed, StorageFailure
from millstream.model.ids import Epoch, Offset
from millstream.model.topic import TopicPartition, TopicSettings
from millstream.records.batch import BatchHeader, check_crc, place_batch, stamp_append_time

_logger = logging.getLogger(__name__)

HINTS_MAX = 64
"""Known positions of offsets that are asked for next: where reads ended and where commits ended."""


class AppendedRange(NamedTuple):
    """Where an append went, or where it had gone the first time when it is a duplicate."""

    base_offset: Offset
    next_offset: Offset
    append_time_ms: int
    log_start: Offset
    duplicate: bool


class Keeper(Protocol):
    """Whoever syncs the log."""

    def touched(self, log: Log) -> None:
        """The log has begun to hold what is not synced."""


class Log:
    """One partition's log."""

    def __init__(
        self,
        partition: TopicPartition,
        contents: Contents,
        settings: TopicSettings,
        *,
        files: Files,
        open_files: OpenFiles,
        clock: Clock,
        keeper: Keeper,
    ) -> None:
        self.partition = partition
        self.settings = settings
        self.directory = contents.directory
        self.segments = contents.segments
        self.start_offset = Offset(contents.start_offset)
        self.end_offset = Offset(contents.end_offset)
        self.synced_offset = Offset(contents.end_offset)
        self.producers: Producers = contents.producers
        self.on_synced: Callable[[], None] | None = None
        self.on_sync_failed: Callable[[StorageFailure], None] | None = None
        self._epochs = contents.epochs
        self._bases = [segment.base_offset for segment in self.segments]
        self._hints: dict[int, tuple[Segment, int]] = {}
        self._files = files
        self._open_files = open_files
        self._reader = Reader(files, open_files)
        self._lookup = Lookup(self._reader)
        self._clock = clock
        self._keeper = keeper
        self._dirty = False
        self._closed = False

    # ------------------------------------------------------------------ what is known

    @property
    def latest_epoch(self) -> Epoch:
        """The epoch of the last leader that wrote, or -1."""
        return self._epochs.latest

    @property
    def size_bytes(self) -> int:
        """The bytes of all segments."""
        return sum(segment.size for segment in self.segments)

    @property
    def damage(self) -> tuple[tuple[int, int], ...]:
        """The ranges of offsets that the disk lost, each as (first, next)."""
        return ()

    def end_of_epoch(self, epoch: int) -> tuple[Epoch, Offset]:
        """Where an epoch ended, as `OffsetForLeaderEpoch` asks; (-1, -1) if it is unknown."""
        return self._epochs.end_of(epoch, self.end_offset)

    def change_settings(self, settings: TopicSettings) -> None:
        """Follow the topic's settings from now on."""
        self.settings = settings

    # ------------------------------------------------------------------ append

    def append(self, batches: bytearray | memoryview, *, leader_epoch: Epoch, internal: bool = False) -> AppendedRange:
        """Check the batches, give them offsets in place, and write them; nothing is synced yet."""
        if self._closed:
            raise PartitionClosed(f"{self.partition} is closed")
        settings = self.settings
        headers = read_headers(batches, internal=internal, max_message_bytes=settings.max_message_bytes)
        for header in headers:
            check_crc(batches, header)
        if leader_epoch < self._epochs.latest:
            raise FencedLeaderEpoch(f"{self.partition} has epoch {self._epochs.latest}, not {leader_epoch}")
        now_ms = self._clock.now_ms()
        if not internal and headers[0].producer_id >= 0:
            duplicate = self.producers.check(headers[0], now_ms)
            if duplicate is not None:
                return AppendedRange(
                    Offset(duplicate.base_offset),
                    Offset(duplicate.next_offset),
                    duplicate.append_time_ms,
                    self.start_offset,
                    True,
                )
        append_time_ms = -1
        if settings.message_timestamp_type == "LogAppendTime":
            append_time_ms = now_ms
            headers = _stamped(batches, headers, now_ms)
        base_offset = offset = self.end_offset
        for header in headers:
            place_batch(batches, header, offset, leader_epoch)
            offset += header.last_offset_delta + 1  # type: ignore[assignment]
        segment = self._segment_for(len(batches), offset, now_ms)
        self._write(segment, batches)
        self._advance(segment, headers, leader_epoch, now_ms, append_time_ms)
        return AppendedRange(base_offset, self.end_offset, append_time_ms, self.start_offset, False)

    def _segment_for(self, size: int, next_offset: int, now_ms: int) -> Segment:
        """The segment that takes the next write, a new one when the last is full or an hour old."""
        if self.segments:
            active = self.segments[-1]
            if not active.size:
                return active
            if (
                active.size + size <= self.settings.segment_bytes
                and now_ms - active.first_append_ms < self.settings.segment_ms
                and next_offset - active.base_offset < 2**32
            ):
                return active
        return self._roll()

    def _roll(self) -> Segment:
        """Begin a new segment."""
        segment = Segment(self.directory, self.end_offset)
        try:
            self._open_files.descriptor(segment, create=True)
        except OSError as error:
            raise self._failure("beginning a new segment", error) from error
        if self.segments:
            self.segments[-1].sealed = True
        self.segments.append(segment)
        self._bases.append(segment.base_offset)
        return segment

    def _write(self, segment: Segment, batches: bytearray | memoryview) -> None:
        """Write behind the last batch, or leave the segment as it was."""
        segment.used = True
        descriptor = segment.descriptor
        try:
            if descriptor < 0:
                descriptor = self._open_files.descriptor(segment)
            write_fully(self._files, descriptor, batches, segment.size)
        except OSError as error:
            self._cut_back(segment)
            raise self._failure(f"writing {len(batches)} bytes", error) from error

    def _cut_back(self, segment: Segment) -> None:
        """Remove what a failed write left behind. The next write begins at the same place, so this may fail too."""
        try:
            self._files.truncate(self._open_files.descriptor(segment), segment.size)
        except OSError as error:
            _logger.warning(
                "the remains of a failed write could not be cut off",
                extra={"partition": str(self.partition), "error": str(error)},
            )

    def _failure(self, doing: str, error: OSError) -> StorageFailure:
        return StorageFailure(
            f"{self.partition}: {doing} failed: {error.strerror or error}. Nothing was stored and reads go on; "
            f"free space on the disk of {self.directory} or repair it, and writes resume by themselves"
        )

    def _advance(
        self, segment: Segment, headers: list[BatchHeader], leader_epoch: int, now_ms: int, append_time_ms: int
    ) -> None:
        """Account for batches that were written."""
        start, offset = segment.size, int(self.end_offset)
        if not start:
            segment.first_append_ms = now_ms
        index = segment.index or Index()
        for header in headers:
            position = start + header.position
            if position - index.last_position >= self.settings.index_interval_bytes:
                index.add(offset - segment.base_offset, position, segment.max_timestamp_ms)
            if header.max_timestamp_ms > segment.max_timestamp_ms:
                segment.max_timestamp_ms = header.max_timestamp_ms
            if header.producer_id >= 0:
                self.producers.record(header, offset, now_ms, append_time_ms)
            offset += header.last_offset_delta + 1
        if leader_epoch > self._epochs.latest:
            self._epochs.begin(leader_epoch, self.end_offset)
        segment.size = start + headers[-1].end_position
        segment.next_offset = offset
        self.end_offset = Offset(offset)
        if not self._dirty:
            self._dirty = True
            self._keeper.touched(self)

    # ------------------------------------------------------------------ read

    def read(self, offset: int, *, max_bytes: int, up_to: int) -> bytes | memoryview:
        """Whole batches from the one that holds `offset`: at least one, then no more than `max_bytes`."""
        if not self.start_offset <= offset <= self.end_offset:
            raise OffsetOutOfRange(
                f"{self.partition} holds offsets {self.start_offset} to {self.end_offset}, not {offset}",
                start=self.start_offset,
                end=self.end_offset,
            )
        if offset >= up_to or offset >= self.end_offset:
            return b""
        hint = self._hints.get(offset)
        if hint is None:
            segment = self._segment_of(offset)
            position = self._reader.locate(segment, offset)
        else:
            segment, position = hint
        limit, limit_offset = self._limit(segment, up_to)
        stretch = self._reader.read(segment, position, max_bytes, limit, limit_offset)
        self._hint(stretch.next_offset, segment, stretch.end_position)
        return stretch.data

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
        position = self._reader.locate(segment, up_to)
        self._hint(up_to, segment, position)
        return position, up_to

    def _hint(self, offset: int, segment: Segment, position: int) -> None:
        """Remember where an offset lies that is likely to be asked for next."""
        if offset >= segment.next_offset:
            return
        hints = self._hints
        hints[offset] = (segment, position)
        if len(hints) > HINTS_MAX:
            del hints[next(iter(hints))]

    def offset_for_time(self, timestamp_ms: int, *, up_to: int) -> tuple[Offset, int, Epoch] | None:
        """The first record with at least this timestamp: its offset, its timestamp and its leader epoch."""
        return self._lookup.first_at_or_after(self.segments, timestamp_ms, self.start_offset, up_to)

    def max_timestamp(self, *, up_to: int) -> tuple[Offset, int, Epoch] | None:
        """The first of the records with the largest timestamp."""
        return self._lookup.latest(self.segments, self.start_offset, up_to)

    # ------------------------------------------------------------------ sync

    def capture(self) -> tuple[Offset, list[Segment]]:
        """What a sync that begins now will cover."""
        self._dirty = False
        segments = [segment for segment in self.segments if segment.synced_bytes < segment.size]
        return self.end_offset, segments

    def synced(self, end_offset: Offset) -> None:
        """A sync has finished that covers everything below an offset."""
        if end_offset > self.synced_offset:
            self.synced_offset = end_offset
            if self.on_synced is not None:
                self.on_synced()

    def close(self) -> None:
        """Close the files; the log takes and gives nothing from here on."""
        self._closed = True
        for segment in self.segments:
            self._open_files.release(segment)


def _stamped(batches: bytearray | memoryview, headers: list[BatchHeader], now_ms: int) -> list[BatchHeader]:
    """Put the broker's time into the batches and their headers."""
    for header in headers:
        stamp_append_time(batches, header, now_ms)
    return [header._replace(max_timestamp_ms=now_ms) for header in headers]
