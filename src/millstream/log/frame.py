"""The few header fields of a batch that are needed to walk over a segment file."""

from __future__ import annotations

import struct
from typing import NamedTuple

from crc32c import crc32c

from millstream.model.errors import CorruptBatch
from millstream.records.batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, MAGIC

FRAME_BYTES = 43
LENGTH_MIN = HEADER_BYTES - LOG_OVERHEAD_BYTES
_CRC_FROM = 21
_FRAME = struct.Struct(">qiibIhi8xq")


class Frame(NamedTuple):
    """One batch of a segment file; `position` counts from the start of the file."""

    position: int
    base_offset: int
    length: int
    leader_epoch: int
    magic: int
    crc: int
    attributes: int
    last_offset_delta: int
    max_timestamp_ms: int

    @property
    def end_position(self) -> int:
        """Where the next batch begins."""
        return self.position + LOG_OVERHEAD_BYTES + self.length

    @property
    def next_offset(self) -> int:
        """The offset after the batch."""
        return self.base_offset + self.last_offset_delta + 1


def read_frame(buffer: bytes | memoryview, at: int, position: int) -> Frame:
    """Read the fields of a batch that begins at `at` in the buffer and at `position` in its file."""
    frame = Frame(position, *_FRAME.unpack_from(buffer, at))
    if frame.magic != MAGIC or frame.length < LENGTH_MIN or frame.last_offset_delta < 0:
        raise CorruptBatch(f"there is no record batch at byte {position}")
    return frame


def intact(buffer: memoryview, at: int, frame: Frame) -> bool:
    """Whether the checksum of a batch that lies wholly in the buffer is right."""
    return bool(crc32c(buffer[at + _CRC_FROM : at + LOG_OVERHEAD_BYTES + frame.length]) == frame.crc)
