"""The header fields of a batch that are needed to walk over a segment file."""

from __future__ import annotations

import struct
from typing import NamedTuple

from crc32c import crc32c

from millstream.broker.log.epochs import EpochHistory
from millstream.core.errors import CorruptBatch
from millstream.protocol.records.batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, MAGIC

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
        """The position of the next batch."""
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


class Run(NamedTuple):
    """How far a buffer is a chain of valid batches, and the offset that continues there."""

    end: int
    next_offset: int
    broken: bool


def valid_run(data: bytes, stop: int, expected: int, epochs: EpochHistory) -> Run:
    """Verify the batches from the start of a buffer up to one that begins at `stop` or does not fit in it.

    This is the one loop over batches on the way to a reader, so it is laid out for speed. Each batch has to continue at
    the expected offset, in the epoch that wrote there, and its CRC has to be right.
    """
    view = memoryview(data)
    at, size = 0, len(data)
    unpack = _FRAME.unpack_from
    wanted_epoch, epoch_until = epochs.range_at(expected)
    while at < stop and size - at >= FRAME_BYTES:
        base_offset, length, epoch, magic, crc, _, delta, _ = unpack(data, at)
        if magic != MAGIC or length < LENGTH_MIN or delta < 0 or base_offset != expected:
            return Run(at, expected, True)
        end = at + LOG_OVERHEAD_BYTES + length
        if end > size:
            break
        if base_offset >= epoch_until:
            wanted_epoch, epoch_until = epochs.range_at(base_offset)
        if crc32c(view[at + _CRC_FROM : end]) != crc or epoch != wanted_epoch:
            return Run(at, expected, True)
        at = end
        expected = base_offset + delta + 1
    return Run(at, expected, False)
