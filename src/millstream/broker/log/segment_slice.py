"""Whole batches of one segment, whether read already or not.

A response announces its length before its first record is sent, and is read from files while it is sent. A slice
therefore never changes: while it is held, retention and compaction cannot remove its file, and bytes that were
truncated, damaged or cannot be read raise an error instead of becoming other bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.log.files import OpenFiles
from millstream.broker.log.scan import UNREADABLE_ERRORS
from millstream.broker.log.segment import Segment
from millstream.core.errors import CorruptBatch, StorageFailure

Verify = Callable[[Segment, int, int], None]
"""Checks the batches of a segment that begin between two positions; raises `BrokenSegment`."""


class BrokenSegment(CorruptBatch):
    """A segment is not a chain of valid batches where it should be; the log turns this into recorded damage."""

    def __init__(self, segment: Segment, position: int, error: OSError | None = None) -> None:
        reason = "" if error is None else f": {error.strerror or error}"
        super().__init__(f"{segment.path} holds no valid record batch at byte {position}{reason}")
        self.segment = segment
        self.position = position


def unreadable(segment: Segment, position: int, error: OSError) -> OSError | BrokenSegment:
    """Return the error for a failed read: bytes that the disk cannot read are damage, like changed bytes."""
    return BrokenSegment(segment, position, error) if error.errno in UNREADABLE_ERRORS else error


class SegmentSlice:
    """Whole batches of one segment, and the offset that follows them."""

    __slots__ = (
        "_cuts",
        "_is_held",
        "_open_files",
        "_position",
        "_segment",
        "_stamp",
        "_verify",
        "data",
        "next_offset",
        "size",
    )

    def __init__(
        self,
        open_files: OpenFiles,
        segment: Segment,
        position: int,
        size: int,
        next_offset: int,
        verify: Verify | None = None,
    ) -> None:
        self._open_files = open_files
        self._segment = segment
        self._cuts = segment.cuts
        self._position = position
        self._verify = verify
        self._stamp = segment.verification.stamp
        self._is_held = False
        self.size = size
        self.next_offset = next_offset
        self.data: bytes | memoryview = b""
        """All bytes, if they were read already."""

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        """Read everything."""
        return bytes(self.data) or self.read(0, self.size)

    def __del__(self) -> None:
        """Release the file: a response can be dropped in many places, and none of them must remember this."""
        if self._is_held:
            self._open_files.unpin(self._segment)

    @property
    def end_position(self) -> int:
        """The position of the next batch in the file."""
        return self._position + self.size

    def hold(self) -> None:
        """Keep the file open until this is dropped, unless that would leave too few descriptors for others."""
        if not self._is_held and self._open_files.has_room_to_pin:
            self._open_files.pin(self._segment)
            self._is_held = True

    def read(self, at: int, size: int) -> bytes:
        """Read some of the bytes; `StorageFailure`, `BrokenSegment` or `OSError` if they are gone.

        The next read of the same range reads the segment at once, so its caller gets the log's own error.
        """
        segment = self._segment
        if segment.cuts != self._cuts or (segment.released and segment.descriptor < 0):
            raise StorageFailure(f"{segment.path} was deleted or truncated while its records were being sent")
        segment.suspect = True
        descriptor = segment.descriptor
        if descriptor < 0:
            descriptor = self._open_files.descriptor(segment)
        segment.used = True
        if self._verify is not None and 0 <= self._stamp != self._open_files.files.stamp(descriptor):
            self._verify(segment, self._position + at, self._position + at + size)
        try:
            data = self._open_files.files.read_at(descriptor, size, self._position + at)
        except OSError as error:
            raise unreadable(segment, self._position + at, error) from error
        if len(data) != size:
            raise BrokenSegment(segment, self._position + at + len(data))
        segment.suspect = False
        return data
