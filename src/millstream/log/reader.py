"""Reading whole batches out of a segment: one read of the file, no work per batch in what is returned.

Bytes that this process did not write are checked once before they are used, CRC and offsets: a bit that flipped on
disk since is found here, whatever the checkpoint says.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from millstream.log.epochs import EpochHistory
from millstream.log.files import Files
from millstream.log.frame import FRAME_BYTES, Frame, Run, read_frame, valid_run
from millstream.log.handles import OpenFiles
from millstream.log.index import Index
from millstream.log.indexes import LoadedIndexes, build_index, load_index
from millstream.log.scan import Scan, Window
from millstream.log.segment import Segment
from millstream.model.errors import CorruptBatch

WALK_BYTES = 16 * 1024
VERIFY_BYTES = 256 * 1024


class BrokenSegment(CorruptBatch):
    """A segment is not a chain of valid batches where it should be; the log turns this into known damage."""

    def __init__(self, segment: Segment, position: int) -> None:
        super().__init__(f"{segment.path} holds no valid record batch at byte {position}")
        self.segment = segment
        self.position = position


class Stretch(NamedTuple):
    """Whole batches as they lie in the file, and where the next one begins."""

    data: bytes | memoryview
    end_position: int
    next_offset: int


class Reader:
    """Reads the segments of one log."""

    def __init__(
        self,
        files: Files,
        open_files: OpenFiles,
        indexes: LoadedIndexes,
        epochs: EpochHistory,
        *,
        index_interval_bytes: int,
    ) -> None:
        self._files = files
        self._open_files = open_files
        self._indexes = indexes
        self._epochs = epochs
        self._index_interval_bytes = index_interval_bytes

    # -- index ----------------------------------------------------------------------------------------------

    def index_of(self, segment: Segment) -> Index:
        """The index of a segment, read from disk or made anew when it is not in memory."""
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
        """Look at everything from a batch on whose offset is known, believing nothing."""
        descriptor = self._open_files.descriptor(segment)
        window = Window(self._files, descriptor, min(segment.size, self._files.size(descriptor)))
        return Scan(window, position, expected, limit=segment.next_offset, epochs=self._epochs)

    # -- walking --------------------------------------------------------------------------------------------

    def frames(self, segment: Segment, position: int) -> Iterator[Frame]:
        """The batches from one whose position is known to the end of the segment, damaged stretches left out."""
        descriptor = self._open_files.descriptor(segment)
        end = segment.size
        while (position := segment.beyond_hole(position)) < end:
            stop = end
            if position < segment.unverified_to:
                self.verify(segment, position, position + WALK_BYTES)
                stop = segment.verified_to if segment.verified_to < segment.unverified_to else end
            chunk = self._files.read_at(descriptor, min(WALK_BYTES, end - position), position)
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
        """The position of the first batch that ends beyond an offset; the end of the segment when there is none."""
        if offset >= segment.next_offset:
            return segment.size
        start = self.index_of(segment).position_of(max(0, offset - segment.base_offset))
        for frame in self.frames(segment, start):
            if frame.next_offset > offset:
                return frame.position
        return segment.size

    def max_timestamp_below(self, segment: Segment, up_to: int) -> int:
        """The largest timestamp of the batches that begin below an offset."""
        return segment.max_timestamp_ms if up_to >= segment.next_offset else self.find_max_timestamp(segment, up_to)

    def find_max_timestamp(self, segment: Segment, up_to: int) -> int:
        """The same, by looking, for a segment that was or is about to be cut."""
        index = self.index_of(segment)
        start, largest = index.max_timestamp_before(index.position_of(max(0, up_to - segment.base_offset)))
        for frame in self.frames(segment, start):
            if frame.base_offset >= up_to:
                break
            largest = max(largest, frame.max_timestamp_ms)
        return largest

    # -- reading --------------------------------------------------------------------------------------------

    def read(self, segment: Segment, position: int, max_bytes: int, limit: int, limit_offset: int) -> Stretch:
        """Read whole batches from a position up to a limit: at least one, then no more than `max_bytes`."""
        available = limit - position
        if available <= 0:
            return Stretch(b"", position, limit_offset)
        if position < segment.unverified_to:
            self.verify(segment, position, position + min(max_bytes, available))
        descriptor = segment.descriptor
        if descriptor < 0:
            descriptor = self._open_files.descriptor(segment)
        segment.used = True
        if available <= max_bytes:
            return Stretch(self._read_at(segment, descriptor, available, position), limit, limit_offset)
        data = self._read_at(segment, descriptor, min(available, max(max_bytes, FRAME_BYTES)), position)
        end, next_offset = self._last_whole(segment, data, position)
        if end > position:
            return Stretch(memoryview(data)[: end - position], end, next_offset)
        first = self._frame(segment, data, 0, position)
        data = self._read_at(segment, descriptor, first.end_position - position, position)
        return Stretch(data, first.end_position, first.next_offset)

    def _read_at(self, segment: Segment, descriptor: int, size: int, position: int) -> bytes:
        data = self._files.read_at(descriptor, size, position)
        if len(data) != size:
            raise BrokenSegment(segment, position + len(data))
        return data

    def _last_whole(self, segment: Segment, data: bytes, position: int) -> tuple[int, int]:
        """Where the last whole batch in the data ends, and the offset after it."""
        stop = position + len(data)
        relative, start = self.index_of(segment).start_before(stop)
        if start <= position:
            end, next_offset = position, -1
        else:
            end, next_offset = start, segment.base_offset + relative
        while stop - end >= FRAME_BYTES:
            frame = self._frame(segment, data, end - position, end)
            if frame.end_position > stop:
                break
            end, next_offset = frame.end_position, frame.next_offset
        return end, next_offset

    # -- verifying ------------------------------------------------------------------------------------------

    def verify(self, segment: Segment, start: int, stop: int) -> None:
        """Check the batches that begin between two positions, unless that was done; `BrokenSegment` tells where."""
        stop = min(stop, segment.unverified_to)
        if segment.verified_from <= start and stop <= segment.verified_to:
            return
        if not segment.verified_from <= start <= segment.verified_to:
            relative, position = self.index_of(segment).start_before(start)
            segment.verified_from = segment.verified_to = position
            segment.verified_offset = segment.base_offset + relative
        descriptor = self._open_files.descriptor(segment)
        while segment.verified_to < stop:
            self._skip_hole(segment)
            if segment.verified_to < stop:
                self._verify_chunk(segment, descriptor, stop)

    def _skip_hole(self, segment: Segment) -> None:
        """Go on behind a damaged stretch that is known."""
        for start, (end, next_offset) in segment.holes.items():
            if start <= segment.verified_to < end or start == segment.verified_to == end:
                segment.verified_to, segment.verified_offset = end, next_offset

    def _verify_chunk(self, segment: Segment, descriptor: int, stop: int) -> None:
        """Check the batches of one stretch of the file, which ends at the next damaged one at the latest."""
        position = segment.verified_to
        stop = min([stop, *(start for start in segment.holes if start > position)])
        data = self._files.read_at(
            descriptor, min(max(VERIFY_BYTES, stop - position), segment.size - position), position
        )
        run = self._valid_run(segment, data, stop)
        if run.end == 0 and not run.broken and len(data) >= FRAME_BYTES:
            # The first batch is larger than what was read.
            end = self._frame(segment, data, 0, position).end_position
            run = self._valid_run(segment, self._read_at(segment, descriptor, end - position, position), stop)
        if run.broken or run.end == 0:
            raise BrokenSegment(segment, position + run.end)
        segment.verified_to, segment.verified_offset = position + run.end, run.next_offset

    def _valid_run(self, segment: Segment, data: bytes, stop: int) -> Run:
        return valid_run(data, stop - segment.verified_to, segment.verified_offset, self._epochs.epoch_at)
