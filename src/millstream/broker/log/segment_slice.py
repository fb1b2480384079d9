"""Whole batches as they lie in a segment: where they are is certain, whether they were read yet is not.

An answer to a consumer tells its length before its first record is sent, and is read from files while it is sent. So a
stretch stays what it is, whatever happens to the log meanwhile: while it is held, retention and compaction cannot take
the file from under it, and what was cut off, was damaged or cannot be read raises an error instead of being other
bytes.
"""

from __future__ import annotations

from collections.abc import Callable

from millstream.broker.log.open_files import OpenFiles
from millstream.broker.log.segment import Segment
from millstream.core.errors import CorruptBatch, StorageFailure

Verify = Callable[[Segment, int, int], None]
"""Check the batches of a segment that begin between two positions; `BrokenSegment` tells where one is broken."""


class BrokenSegment(CorruptBatch):
    """A segment is not a chain of valid batches where it should be; the log turns this into known damage."""

    def __init__(self, segment: Segment, position: int) -> None:
        super().__init__(f"{segment.path} holds no valid record batch at byte {position}")
        self.segment = segment
        self.position = position


class SegmentSlice:
    """Whole batches of one segment, and where the next one begins."""

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
        """All of it, if that was read already."""

    def __len__(self) -> int:
        return self.size

    def __bytes__(self) -> bytes:
        """All of it."""
        return bytes(self.data) or self.read(0, self.size)

    def __del__(self) -> None:
        """Let go of the file; an answer may be dropped in many places, and none of them has to think of this."""
        if self._is_held:
            self._open_files.unpin(self._segment)

    @property
    def end_position(self) -> int:
        """Where in the file the next batch begins."""
        return self._position + self.size

    def hold(self) -> None:
        """Keep the file until this is dropped, unless so many are kept that there would be none for others."""
        if not self._is_held and self._open_files.has_room_to_pin:
            self._open_files.pin(self._segment)
            self._is_held = True

    def read(self, at: int, size: int) -> bytes:
        """Some of the bytes; `StorageFailure`, `BrokenSegment` or `OSError` if they are not there any more.

        Whoever asks for the same again is then told by the log what is the matter: it reads such a segment at once.
        """
        segment = self._segment
        if segment.cuts != self._cuts or (segment.released and segment.descriptor < 0):
            raise StorageFailure(f"{segment.path} was deleted or cut off while records of it were being sent")
        segment.suspect = True
        descriptor = segment.descriptor
        if descriptor < 0:
            descriptor = self._open_files.descriptor(segment)
        segment.used = True
        if self._verify is not None and 0 <= self._stamp != self._open_files.files.stamp(descriptor):
            self._verify(segment, self._position + at, self._position + at + size)
        data = self._open_files.files.read_at(descriptor, size, self._position + at)
        if len(data) != size:
            raise BrokenSegment(segment, self._position + at + len(data))
        segment.suspect = False
        return data
