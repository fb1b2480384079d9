"""Walking over the batches of a segment file by the few header fields that this needs."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from millstream.log.files import Files
from millstream.model.errors import CorruptBatch
from millstream.records.batch import HEADER_BYTES, LOG_OVERHEAD_BYTES, MAGIC

FRAME_BYTES = 43
WALK_BYTES = 16 * 1024
_LENGTH_MIN = HEADER_BYTES - LOG_OVERHEAD_BYTES
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
    if frame.magic != MAGIC or frame.length < _LENGTH_MIN or frame.last_offset_delta < 0:
        raise CorruptBatch(f"there is no record batch at byte {position}")
    return frame


def walk(
    files: Files, descriptor: int, position: int, end: int, holes: dict[int, int], *, base_offset: int
) -> Iterator[Frame]:
    """Yield the batches from a position up to the end of what is valid, reading headers only.

    `holes` maps the start of a damaged stretch of the file to its end. Raises `CorruptBatch` when the file is not
    a chain of batches with rising offsets, which the caller takes as damage that was not known before.
    """
    expected = base_offset
    while position < end:
        if position in holes:
            position = holes[position]
            continue
        chunk = files.read_at(descriptor, min(WALK_BYTES, end - position), position)
        at = 0
        while len(chunk) - at >= FRAME_BYTES:
            frame = read_frame(chunk, at, position + at)
            if frame.base_offset < expected or frame.end_position > end:
                raise CorruptBatch(f"the record batch at byte {frame.position} does not continue the one before it")
            yield frame
            expected = frame.next_offset
            at = frame.end_position - position
            if position + at in holes:
                break
        if at == 0:
            raise CorruptBatch(f"the file ends within the record batch at byte {position}")
        position += at
