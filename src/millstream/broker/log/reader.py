"""Finds whole batches in a segment, to be read in one call without work per batch.

Everything that was not just written is verified before it is served (CRC, offsets, epochs), which finds bits that
flipped on disk and writes by others. Verified bytes are served for `VERIFIED_S` without verifying them again, unless
the file was written to since. `Lookup` finds records by timestamp: the time index narrows the search to a batch, which
is then decoded: a batch of few records on the loop, any other by a thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple

from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.files import Files, OpenFiles
from millstream.broker.log.scan import (
    FRAME_BYTES,
    Frame,
    LoadedIndexes,
    Run,
    Scan,
    SectorWindow,
    build_index,
    load_index,
    read_frame,
    valid_run,
)
from millstream.broker.log.segment import Index, Segment
from millstream.broker.log.segment_slice import BrokenSegment, SegmentSlice, Verify, unreadable
from millstream.core.clock import Clock
from millstream.core.errors import BatchRejected, CorruptBatch
from millstream.core.ids import Epoch, Offset
from millstream.protocol.records.batch import TIMESTAMP_TYPE_FLAG, read_header
from millstream.protocol.records.record import decode_batch

WALK_BYTES = 16 * 1024
VERIFY_BYTES = 256 * 1024
STEP_BYTES = 4 * 1024
COLD_BYTES_MAX = 2 * 1024 * 1024
"""The maximum number of bytes verified for one response, because that happens on the loop."""

VERIFIED_S = 60.0
"""Verification expires: a bit can flip on disk after the verified page was evicted, without any write."""


class Reader:
    """Reads the segments of one log."""

    def __init__(
        self,
        files: Files,
        open_files: OpenFiles,
        indexes: LoadedIndexes,
        epochs: EpochHistory,
        clock: Clock,
        *,
        index_interval_bytes: int,
    ) -> None:
        self._files = files
        self._open_files = open_files
        self._indexes = indexes
        self._epochs = epochs
        self._clock = clock
        self._index_interval_bytes = index_interval_bytes

    # -- index ----------------------------------------------------------------------------------------------

    def index_of(self, segment: Segment) -> Index:
        """Return the index of a segment, loaded from disk or rebuilt if it is not in memory."""
        index = segment.index
        if index is None:
            index = load_index(self._files, segment)
            if index is None:
                scan = self.scan(segment, 0, segment.base_offset)
                index = build_index(scan, segment, self._index_interval_bytes)
            segment.index = index
            self._indexes.loaded(segment)
        return index

    def scan(self, segment: Segment, position: int, expected: int) -> Scan:
        """Scan everything from a batch whose offset is known, trusting nothing."""
        descriptor = self._open_files.descriptor(segment)
        window = SectorWindow(self._files, descriptor, min(segment.size, self._files.size(descriptor)))
        return Scan(window, position, expected, limit=segment.next_offset, epochs=self._epochs)

    # -- walking --------------------------------------------------------------------------------------------

    def frames(self, segment: Segment, position: int) -> Iterator[Frame]:
        """Yield the batches from a known position to the end of the segment, skipping damaged ranges."""
        descriptor = self._open_files.descriptor(segment)
        end, cold_to = segment.size, segment.cold_to(self._clock.monotonic())
        while (position := segment.beyond_hole(position)) < end:
            stop = end
            if position < cold_to:
                self.verify(segment, position, min(position + WALK_BYTES, cold_to))
                stop = segment.verification.end if segment.verification.end < cold_to else end
            size = min(WALK_BYTES, segment.readable_from(position))
            chunk = self._read(segment, descriptor, size, position)
            at = 0
            while len(chunk) - at >= FRAME_BYTES and position + at < stop:
                frame = self._frame(segment, chunk, at, position + at)
                yield frame
                at = frame.end_position - position
                if segment.holes and segment.beyond_hole(position + at) != position + at:
                    break
            if at == 0:
                raise BrokenSegment(segment, position)
            position += at

    def _frame(self, segment: Segment, buffer: bytes, at: int, position: int) -> Frame:
        try:
            frame = read_frame(buffer, at, position)
        except CorruptBatch:
            raise BrokenSegment(segment, position) from None
        if frame.end_position > segment.size or frame.base_offset < segment.base_offset:
            raise BrokenSegment(segment, position)
        return frame

    def locate(self, segment: Segment, offset: int) -> int:
        """Return the position of the first batch that ends beyond an offset, or the end of the segment."""
        if offset >= segment.next_offset:
            return segment.size
        start = self.index_of(segment).position_of(max(0, offset - segment.base_offset))
        for frame in self.frames(segment, start):
            if frame.next_offset > offset:
                return frame.position
        return segment.size

    def max_timestamp_below(self, segment: Segment, up_to: int) -> int:
        """Return the largest timestamp of the batches that begin below an offset."""
        return segment.max_timestamp_ms if up_to >= segment.next_offset else self.find_max_timestamp(segment, up_to)

    def find_max_timestamp(self, segment: Segment, up_to: int) -> int:
        """Find the record by reading, for a segment that was or is about to be truncated."""
        index = self.index_of(segment)
        start, largest = index.max_timestamp_before(index.position_of(max(0, up_to - segment.base_offset)))
        for frame in self.frames(segment, start):
            if frame.base_offset >= up_to:
                break
            largest = max(largest, frame.max_timestamp_ms)
        return largest

    # -- reading --------------------------------------------------------------------------------------------

    def find(
        self,
        segment: Segment,
        position: int,
        max_bytes: int,
        limit: int,
        limit_offset: int,
        eager_bytes: int,
        *,
        at_least_one: bool = True,
    ) -> SegmentSlice:
        """Find whole batches from a position up to a limit: at most `max_bytes`, but one if `at_least_one`.

        They are read as well if they are at most `eager_bytes`, or have to be verified.
        """
        size, next_offset = limit - position, limit_offset
        if size <= 0 or (not at_least_one and max_bytes < FRAME_BYTES):
            return SegmentSlice(self._open_files, segment, position, 0, next_offset)
        verify: Verify | None = None
        if position < segment.cold_to(self._clock.monotonic()):
            verify = self.verify
            max_bytes = min(max_bytes, COLD_BYTES_MAX)
            if not self._is_verified(segment, position, position + min(max_bytes, size)):
                return self._find_cold(segment, position, max_bytes, limit, at_least_one=at_least_one)
        data = b""
        if size > max_bytes:
            if max_bytes <= eager_bytes:
                descriptor = self._open_files.descriptor(segment)
                data = self._read_at(segment, descriptor, min(size, max(max_bytes, FRAME_BYTES)), position)
            end, next_offset = self._last_whole_batch(segment, position, position + max_bytes, data)
            size = end - position if at_least_one or end - position <= max_bytes else 0
        records_slice = SegmentSlice(self._open_files, segment, position, size, next_offset, verify)
        if size <= len(data):
            records_slice.data = memoryview(data)[:size]
        elif size <= eager_bytes or segment.suspect:
            records_slice.data = records_slice.read(0, size)
        return records_slice

    def _find_cold(
        self, segment: Segment, position: int, max_bytes: int, limit: int, *, at_least_one: bool
    ) -> SegmentSlice:
        """Read and verify the batches; return those before a broken batch."""
        expected = self._verify_up_to(segment, position)
        descriptor = self._open_files.descriptor(segment)
        data = self._read_at(segment, descriptor, min(max(max_bytes, FRAME_BYTES), limit - position), position)
        run = valid_run(data, len(data), expected, self._epochs)
        if run.end == 0 and not run.broken:
            if not at_least_one:
                return SegmentSlice(self._open_files, segment, position, 0, expected)
            # The first batch is larger than requested.
            end = self._frame(segment, data, 0, position).end_position
            data = self._read_at(segment, descriptor, end - position, position)
            run = valid_run(data, 1, expected, self._epochs)
        if run.end == 0:
            raise BrokenSegment(segment, position)
        segment.verification.extend(position + run.end, run.next_offset)
        records_slice = SegmentSlice(self._open_files, segment, position, run.end, run.next_offset, self.verify)
        records_slice.data = memoryview(data)[: run.end]
        segment.suspect = False
        return records_slice

    def _verify_up_to(self, segment: Segment, position: int) -> int:
        """Verify up to a batch from the last known one before it; return its offset."""
        verification = segment.verification
        if verification.start <= position < verification.end:
            descriptor = self._open_files.descriptor(segment)
            return self._frame(segment, self._read_at(segment, descriptor, FRAME_BYTES, position), 0, position)[1]
        self.verify(segment, position, position)
        verification.skip(segment.holes)
        if verification.end != position:
            raise BrokenSegment(segment, position)
        return verification.next_offset

    def _last_whole_batch(self, segment: Segment, position: int, stop: int, data: bytes) -> tuple[int, int]:
        """Return the end of the last whole batch between two positions, or of the first beyond, and the offset after
        it.

        `data` holds the known bytes of the file from the first position on.
        """
        relative, start = self.index_of(segment).start_before(stop)
        end, next_offset = (position, -1) if start <= position else (start, segment.base_offset + relative)
        descriptor = self._open_files.descriptor(segment)
        data_at = position
        while stop - end >= FRAME_BYTES or end == position:
            if end + FRAME_BYTES > data_at + len(data):
                size = min(STEP_BYTES, segment.readable_from(end))
                data, data_at = self._read_at(segment, descriptor, size, end), end
            frame = self._frame(segment, data, end - data_at, end)
            if frame.end_position > stop and end > position:
                break
            end, next_offset = frame.end_position, frame.next_offset
        return end, next_offset

    def _read(self, segment: Segment, descriptor: int, size: int, position: int) -> bytes:
        try:
            return self._files.read_at(descriptor, size, position)
        except OSError as error:
            raise unreadable(segment, position, error) from error

    def _read_at(self, segment: Segment, descriptor: int, size: int, position: int) -> bytes:
        data = self._read(segment, descriptor, size, position)
        if len(data) != size:
            raise BrokenSegment(segment, position + len(data))
        return data

    # -- verifying ------------------------------------------------------------------------------------------

    def _is_verified(self, segment: Segment, start: int, stop: int) -> bool:
        """Whether the batches between two positions are verified; drop expired verifications."""
        stamp, now = self._files.stamp(self._open_files.descriptor(segment)), self._clock.monotonic()
        verification = segment.verification
        if stamp < 0 or stamp != verification.stamp or now - verification.verified_at > VERIFIED_S:
            verification.renew(segment.base_offset, stamp, now)
        return verification.start <= start and stop <= verification.end

    def verify(self, segment: Segment, start: int, stop: int) -> None:
        """Verify the batches that begin between two positions, unless they are; raise `BrokenSegment`."""
        if self._is_verified(segment, start, stop):
            return
        verification = segment.verification
        if not verification.start <= start <= verification.end:
            relative, position = self.index_of(segment).start_before(start)
            verification.begin(position, segment.base_offset + relative)
        descriptor = self._open_files.descriptor(segment)
        while verification.end < stop:
            verification.skip(segment.holes)
            if verification.end < stop:
                self._verify_chunk(segment, descriptor, stop)

    def _verify_chunk(self, segment: Segment, descriptor: int, stop: int) -> None:
        """Verify the batches of one chunk of the file, which ends at the next damaged range at the latest."""
        position = segment.verification.end
        stop = min(stop, position + segment.readable_from(position))
        size = min(max(VERIFY_BYTES, stop - position), segment.readable_from(position))
        data = self._read(segment, descriptor, size, position)
        run = self._valid_run(segment, data, stop)
        if run.end == 0 and not run.broken and len(data) >= FRAME_BYTES:
            # The first batch is larger than what was read.
            end = self._frame(segment, data, 0, position).end_position
            run = self._valid_run(segment, self._read_at(segment, descriptor, end - position, position), stop)
        if run.broken or run.end == 0:
            raise BrokenSegment(segment, position + run.end)
        segment.verification.extend(position + run.end, run.next_offset)

    def _valid_run(self, segment: Segment, data: bytes, stop: int) -> Run:
        verification = segment.verification
        return valid_run(data, stop - verification.end, verification.next_offset, self._epochs)


Found = tuple[Offset, int, Epoch]

LIGHT_RECORDS_MAX: Final = 500
LIGHT_BYTES_MAX: Final = 256 * 1024
"""The decompressed size up to which a batch is searched on the loop."""

_thread = ThreadPoolExecutor(1, thread_name_prefix="log-lookup")


class HeavyBatch(NamedTuple):
    """A batch that may hold the wanted record, and is too large for the loop."""

    data: bytes
    offsets: range
    """The offsets of its records that are searched."""
    timestamp_ms: int
    max_timestamp_ms: int
    epoch: Epoch

    @property
    def roughly(self) -> Found:
        """Return the first offset of the batch, as an approximation of the record."""
        return Offset(self.offsets.start), self.max_timestamp_ms, self.epoch

    async def find_record(self) -> Found | None:
        """Find the record, in the thread; an unreadable batch yields its first offset."""
        try:
            found = await asyncio.get_running_loop().run_in_executor(_thread, _first_in_columns, self)
        except BatchRejected:
            # The checksum is right, so this is what the producer sent.
            return self.roughly
        return None if found is None else (Offset(found[0]), found[1], self.epoch)


def _first_in_columns(batch: HeavyBatch) -> tuple[int, int] | None:
    # Compiled code, which takes a while to load and is not needed otherwise.
    from millstream.protocol.records.decoder import decode_columns

    start, end = batch.offsets.start, batch.offsets.stop
    for columns in decode_columns(batch.data, fields=(), start_offset=start, end_offset=end, verify_crc=False):
        late = (columns.timestamps_ms >= batch.timestamp_ms).nonzero()[0]
        if late.size:
            return int(columns.offsets[late[0]]), int(columns.timestamps_ms[late[0]])
    return None


class Lookup:
    """Finds records of one log by their timestamps."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def first_at_or_after(
        self, segments: Iterable[Segment], timestamp_ms: int, start_offset: int, up_to: int
    ) -> Found | HeavyBatch | None:
        """Return the first record in the log with at least this timestamp, or a batch that may hold it."""
        for segment in segments:
            if segment.max_timestamp_ms < timestamp_ms:
                continue
            if segment.base_offset >= up_to:
                return None
            found = self._first_in_segment(segment, timestamp_ms, start_offset, up_to)
            if found is not None:
                return found
        return None

    def _first_in_segment(
        self, segment: Segment, timestamp_ms: int, start_offset: int, up_to: int
    ) -> Found | HeavyBatch | None:
        position = self._reader.index_of(segment).position_for_time(timestamp_ms)
        if segment.base_offset < start_offset < segment.next_offset:
            position = max(position, self._reader.locate(segment, start_offset))
        for frame in self._reader.frames(segment, position):
            if frame.base_offset >= up_to:
                return None
            if frame.max_timestamp_ms < timestamp_ms or frame.next_offset <= start_offset:
                continue
            found = self._first_in_batch(segment, frame, timestamp_ms, start_offset, up_to)
            if found is not None:
                return found
        return None

    def _first_in_batch(
        self, segment: Segment, frame: Frame, timestamp_ms: int, start_offset: int, up_to: int
    ) -> Found | HeavyBatch | None:
        epoch = Epoch(frame.leader_epoch)
        offsets = range(max(frame.base_offset, start_offset), min(frame.next_offset, up_to))
        if not offsets:
            return None
        if frame.attributes & TIMESTAMP_TYPE_FLAG:
            return Offset(offsets.start), frame.max_timestamp_ms, epoch
        data = bytes(self._reader.find(segment, frame.position, 0, segment.size, segment.next_offset, 0))
        header = read_header(data)
        if header.record_count <= LIGHT_RECORDS_MAX:
            try:
                for record in decode_batch(data, header, decompressed_bytes_max=LIGHT_BYTES_MAX):
                    if record.timestamp_ms >= timestamp_ms and record.offset in offsets:
                        return record.offset, record.timestamp_ms, epoch
                return None
            except BatchRejected:
                # The batch may only be too large.
                pass
        return HeavyBatch(data, offsets, timestamp_ms, frame.max_timestamp_ms, epoch)

    def latest(self, segments: Iterable[Segment], start_offset: int, up_to: int) -> Found | HeavyBatch | None:
        """Return the first of the records that have the largest timestamp, or a batch that may hold it."""
        largest = -1
        for segment in segments:
            if segment.base_offset >= up_to:
                break
            if segment.next_offset > start_offset:
                largest = max(largest, self._largest_timestamp(segment, start_offset, up_to))
        return self.first_at_or_after(segments, largest, start_offset, up_to) if largest >= 0 else None

    def _largest_timestamp(self, segment: Segment, start_offset: int, up_to: int) -> int:
        if start_offset <= segment.base_offset:
            return self._reader.max_timestamp_below(segment, up_to)
        largest = -1
        for frame in self._reader.frames(segment, self._reader.locate(segment, start_offset)):
            if frame.base_offset >= up_to:
                break
            largest = max(largest, frame.max_timestamp_ms)
        return largest
