"""Reading whole batches out of a segment: one read of the file, no work per batch in what is returned."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from millstream.log.files import Files
from millstream.log.frame import FRAME_BYTES, Frame, read_frame, walk
from millstream.log.handles import OpenFiles
from millstream.log.index import Index
from millstream.log.segment import Segment
from millstream.model.errors import CorruptBatch


class Stretch(NamedTuple):
    """Whole batches as they lie in the file, and where the next one begins."""

    data: bytes | memoryview
    end_position: int
    next_offset: int


class Reader:
    """Reads the segments of one log."""

    def __init__(self, files: Files, open_files: OpenFiles) -> None:
        self._files = files
        self._open_files = open_files

    def index_of(self, segment: Segment) -> Index:
        """The index of a segment."""
        if segment.index is None:
            raise CorruptBatch(f"{segment.path} has no index")
        return segment.index

    def frames(self, segment: Segment, position: int) -> Iterator[Frame]:
        """The batches from one whose position is known to the end of the segment."""
        descriptor = self._open_files.descriptor(segment)
        return walk(self._files, descriptor, position, segment.size, segment.holes, base_offset=segment.base_offset)

    def locate(self, segment: Segment, offset: int) -> int:
        """The position of the first batch that ends beyond an offset; the end of the segment when there is none."""
        if offset >= segment.next_offset:
            return segment.size
        if offset <= segment.base_offset:
            return 0
        start = self.index_of(segment).position_of(offset - segment.base_offset)
        for frame in self.frames(segment, start):
            if frame.next_offset > offset:
                return frame.position
        return segment.size

    def read(self, segment: Segment, position: int, max_bytes: int, limit: int, limit_offset: int) -> Stretch:
        """Read whole batches from a position up to a limit: at least one, then no more than `max_bytes`."""
        available = limit - position
        if available <= 0:
            return Stretch(b"", position, limit_offset)
        descriptor = self._open_files.descriptor(segment)
        if available <= max_bytes:
            return Stretch(self._read_at(segment, descriptor, available, position), limit, limit_offset)
        data = self._read_at(segment, descriptor, min(available, max(max_bytes, FRAME_BYTES)), position)
        end, next_offset = self._last_whole(segment, data, position)
        if end > position:
            return Stretch(memoryview(data)[: end - position], end, next_offset)
        first = read_frame(data, 0, position)
        if first.end_position > limit:
            raise CorruptBatch(f"the record batch at byte {position} of {segment.path} is longer than the log")
        data = self._read_at(segment, descriptor, first.end_position - position, position)
        return Stretch(data, first.end_position, first.next_offset)

    def _read_at(self, segment: Segment, descriptor: int, size: int, position: int) -> bytes:
        data = self._files.read_at(descriptor, size, position)
        if len(data) != size:
            raise CorruptBatch(f"{segment.path} ends at byte {position + len(data)}, not at {segment.size}")
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
            frame = read_frame(data, end - position, end)
            if frame.end_position > stop:
                break
            end, next_offset = frame.end_position, frame.next_offset
        return end, next_offset
