"""Finding records by timestamp: the time index narrows the search to a batch, which is then decoded."""

from __future__ import annotations

from collections.abc import Iterable

from millstream.broker.log.frame import Frame
from millstream.broker.log.reader import Reader
from millstream.broker.log.segment import Segment
from millstream.core.errors import BatchRejected
from millstream.core.ids import Epoch, Offset
from millstream.protocol.records.batch import TIMESTAMP_TYPE_FLAG, read_header
from millstream.protocol.records.record import decode_batch

Found = tuple[Offset, int, Epoch]

LOOKED_INTO_BYTES_MAX = 32 * 1024 * 1024
"""A batch that decompresses to more is not decoded on the loop; the batch's own timestamp is returned."""


class Lookup:
    """Finds records of one log by their timestamps."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader

    def first_at_or_after(
        self, segments: Iterable[Segment], timestamp_ms: int, start_offset: int, up_to: int
    ) -> Found | None:
        """Return the first record with at least this timestamp, in the order of the log."""
        for segment in segments:
            if segment.max_timestamp_ms < timestamp_ms:
                continue
            if segment.base_offset >= up_to:
                return None
            found = self._first_in(segment, timestamp_ms, start_offset, up_to)
            if found is not None:
                return found
        return None

    def _first_in(self, segment: Segment, timestamp_ms: int, start_offset: int, up_to: int) -> Found | None:
        position = self._reader.index_of(segment).position_for_time(timestamp_ms)
        for frame in self._reader.frames(segment, position):
            if frame.base_offset >= up_to:
                return None
            if frame.max_timestamp_ms < timestamp_ms or frame.next_offset <= start_offset:
                continue
            found = self._first_of_batch(segment, frame, timestamp_ms, start_offset, up_to)
            if found is not None:
                return found
        return None

    def _first_of_batch(
        self, segment: Segment, frame: Frame, timestamp_ms: int, start_offset: int, up_to: int
    ) -> Found | None:
        epoch = Epoch(frame.leader_epoch)
        first = Offset(max(frame.base_offset, start_offset))
        if frame.attributes & TIMESTAMP_TYPE_FLAG:
            return (first, frame.max_timestamp_ms, epoch) if first < up_to else None
        data = bytes(self._reader.find(segment, frame.position, 0, segment.size, segment.next_offset, 0))
        try:
            for record in decode_batch(data, read_header(data), decompressed_bytes_max=LOOKED_INTO_BYTES_MAX):
                if record.timestamp_ms >= timestamp_ms and start_offset <= record.offset < up_to:
                    return record.offset, record.timestamp_ms, epoch
        except BatchRejected:
            # The checksum is right, so the producer sent it like this; only the batch as a whole can be located.
            return (first, frame.max_timestamp_ms, epoch) if first < up_to else None
        return None

    def latest(self, segments: Iterable[Segment], start_offset: int, up_to: int) -> Found | None:
        """Return the first of the records that have the largest timestamp."""
        largest = -1
        for segment in segments:
            if segment.base_offset >= up_to:
                break
            if segment.next_offset > start_offset:
                largest = max(largest, self._largest_in(segment, start_offset, up_to))
        return self.first_at_or_after(segments, largest, start_offset, up_to) if largest >= 0 else None

    def _largest_in(self, segment: Segment, start_offset: int, up_to: int) -> int:
        if start_offset <= segment.base_offset:
            return self._reader.max_timestamp_below(segment, up_to)
        largest = -1
        for frame in self._reader.frames(segment, self._reader.locate(segment, start_offset)):
            if frame.base_offset >= up_to:
                break
            largest = max(largest, frame.max_timestamp_ms)
        return largest
