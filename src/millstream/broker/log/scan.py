"""Scans a segment file batch by batch: finds valid batches, and where they resume after bad bytes; rebuilds indexes.

Used wherever bytes are not trusted: after a crash, when a read found damage, and when a file whose sync failed is
copied. The CRC of a batch does not cover its base offset and leader epoch, so these are checked against the batches
around it.
"""

from __future__ import annotations

import errno
import struct
from collections import OrderedDict
from collections.abc import Iterator
from typing import NamedTuple

from crc32c import crc32c

from millstream.broker.log.epochs import EpochHistory
from millstream.broker.log.files import Files
from millstream.broker.log.segment import ENTRY_BYTES, INDEX_SUFFIX, TIME_INDEX_SUFFIX, Index, Segment, segment_path
from millstream.broker.log.state import read_whole
from millstream.core.errors import BatchRejected, CorruptBatch
from millstream.protocol.records.batch import (
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    BatchHeader,
    check_crc,
    read_header,
)

FRAME_BYTES = 43
LENGTH_MIN = HEADER_BYTES - LOG_OVERHEAD_BYTES
_CRC_FROM = 21
_FRAME = struct.Struct(">qiibIhi8xq")


class Frame(NamedTuple):
    """A batch of a segment file; `position` counts from the start of the file."""

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
    """A chain of valid batches at the start of a buffer: its end, and the offset that continues there."""

    end: int
    next_offset: int
    broken: bool


def valid_run(data: bytes, stop: int, expected: int, epochs: EpochHistory) -> Run:
    """Verify the batches from the start of a buffer up to one that begins at `stop` or does not fit in it.

    This is the only loop over batches on the read path, so it is optimized for speed. Each batch has to continue at
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


WINDOW_BYTES = 4 * 1024 * 1024
_MAGIC_AT = 16
_MAGIC_BYTE = b"\x02"
_VOTES_MAX = 16
_SIZE_AND_COUNTS = struct.Struct(">8xi11xi30xi")
"""The length of a batch, its last offset delta and its number of records."""


class BadRange(NamedTuple):
    """Bytes that are not a batch, and the offsets that they should hold; `next_offset` is -1 if nothing follows."""

    start: int
    end: int
    first: int
    next_offset: int


UNREADABLE_ERRORS = frozenset({errno.EIO, errno.ENODATA, errno.EBADMSG, errno.EUCLEAN, errno.EREMOTEIO, errno.EILSEQ})
"""The errors of reads where a disk or file system has lost some bytes, while others are readable."""
_SECTOR_BYTES = 4096
_SECTORS_BYTES = 1024 * 1024


class Window:
    """A file, read through a buffer that moves along."""

    def __init__(self, files: Files, descriptor: int, end: int) -> None:
        self._files = files
        self._descriptor = descriptor
        self._data = b""
        self._start = 0
        self.end = end

    def hold(self, position: int, size: int) -> tuple[bytes, int]:
        """Return a buffer with some bytes of the file, fewer at its end, and their position in it."""
        at = position - self._start
        if at < 0 or at + size > len(self._data):
            self._fill(position, size)
            at = 0
        return self._data, at

    def at(self, position: int, size: int) -> memoryview:
        """Return the bytes from a position on, fewer at the end of the file."""
        data, at = self.hold(position, min(size, self.end - position))
        return memoryview(data)[at : at + size]

    def _fill(self, position: int, size: int) -> None:
        window_bytes = min(max(size, WINDOW_BYTES), self.end - position)
        self._data = _read_all(self._files, self._descriptor, window_bytes, position)
        self._start = position

    def find_magic(self, position: int) -> int:
        """Return the first position from here on that has the magic byte of a batch, or -1."""
        while position + HEADER_BYTES <= self.end:
            data, at = self.hold(position, HEADER_BYTES)
            found = data.find(_MAGIC_BYTE, at + _MAGIC_AT)
            if found >= 0:
                return position + found - _MAGIC_AT - at
            position += max(1, len(data) - _MAGIC_AT - at)
        return -1


class SectorWindow(Window):
    """A file in which the sectors that the disk cannot read are zeros."""

    error: OSError | None = None
    """The error of the disk, if some bytes could not be read."""
    was_readable = False
    """Whether any could: a disk of which nothing can be read has failed as a whole, and may recover."""

    def _fill(self, position: int, size: int) -> None:
        try:
            super()._fill(position, size)
            self.was_readable |= bool(self._data)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRORS:
                raise
            end = min(position + max(size, _SECTORS_BYTES), self.end)
            self._data = b"".join(self._read_sector(at, end) for at in range(position, end, _SECTOR_BYTES))
            self._start = position

    def _read_sector(self, position: int, end: int) -> bytes:
        size = min(_SECTOR_BYTES, end - position)
        try:
            data = self._files.read_at(self._descriptor, size, position)
        except OSError as error:
            if error.errno not in UNREADABLE_ERRORS:
                raise
            self.error = error
            return bytes(size)
        self.was_readable |= bool(data)
        return data.ljust(size, b"\0")


def _read_all(files: Files, descriptor: int, size: int, position: int) -> bytes:
    data = files.read_at(descriptor, size, position)
    while len(data) < size:
        more = files.read_at(descriptor, size - len(data), position + len(data))
        if not more:
            break
        data += more
    return data


def batch_at(window: Window, position: int) -> BatchHeader | None:
    """Return the batch that begins at a position, or None if there is no valid one."""
    if window.end - position < HEADER_BYTES:
        return None
    data, at = window.hold(position, HEADER_BYTES)
    size = LOG_OVERHEAD_BYTES + int.from_bytes(data[at + 8 : at + LOG_OVERHEAD_BYTES], "big", signed=True)
    if size < HEADER_BYTES or position + size > window.end:
        return None
    if at + size > len(data):
        data, at = window.hold(position, size)
    try:
        header = read_header(data, at)
        check_crc(data, header)
    except BatchRejected:
        return None
    return BatchHeader(position, *header[1:])


class Scan:
    """Walks over the batches of a segment from a position whose offset is known.

    `limit` is the offset at which the next segment begins. `epochs`, if given, is the history that each batch has to
    agree with; otherwise epochs may only increase.
    """

    def __init__(
        self,
        window: Window,
        position: int,
        expected: int,
        *,
        limit: int,
        last_epoch: int = -1,
        epochs: EpochHistory | None = None,
    ) -> None:
        self.position = position
        self.expected = expected
        self.window = window
        self._limit = limit
        self._epochs = epochs
        self._last_epoch = last_epoch

    def __iter__(self) -> Iterator[BatchHeader | BadRange]:
        while self.position < self.window.end and self.expected < self._limit:
            header = batch_at(self.window, self.position)
            if header is None or not self._continues(header):
                bad, header = self._resume(header)
                yield bad
                self.position = bad.end
                if header is None:
                    return
            self._last_epoch = header.leader_epoch
            self.position = header.end_position
            self.expected = header.next_offset
            yield header

    def _continues(self, header: BatchHeader) -> bool:
        """Whether a batch continues the one before it."""
        if header.base_offset != self.expected or header.next_offset > self._limit:
            return False
        return self._epoch_fits(header)

    def _epoch_fits(self, header: BatchHeader) -> bool:
        if self._epochs is not None:
            return self._epochs.epoch_at(header.base_offset) == header.leader_epoch
        if header.leader_epoch <= self._last_epoch:
            return header.leader_epoch == self._last_epoch
        following = batch_at(self.window, header.end_position)
        return (
            following is None
            or following.base_offset != header.next_offset
            or not self._last_epoch <= following.leader_epoch < header.leader_epoch
        )

    def _resume(self, header: BatchHeader | None) -> tuple[BadRange, BatchHeader | None]:
        """Return the bad range from here on, and the valid batch that follows it, if any."""
        start, first = self.position, self.expected
        if header is not None and first < header.base_offset and header.next_offset <= self._limit:
            shift = header.base_offset - first
            right, wrong = self._votes(header, header.next_offset), self._votes(header, header.next_offset - shift)
            if right > wrong and self._epoch_fits(header):
                # Nothing is wrong with this batch: what should come before it is missing from the file.
                return BadRange(start, start, first, header.base_offset), header
        for position in self._candidates(start):
            found = batch_at(self.window, position)
            if found is not None and self._is_plausible(found):
                return BadRange(start, position, first, found.base_offset), found
        return BadRange(start, self.window.end, first, -1), None

    def _votes(self, header: BatchHeader, next_offset: int) -> int:
        """Count the following batches that agree that a batch ends at an offset, minus those that disagree."""
        agreed = 0
        for _ in range(_VOTES_MAX):
            following = batch_at(self.window, header.end_position)
            if following is None:
                break
            agreed += 1 if following.base_offset == next_offset else -1
            header, next_offset = following, next_offset + following.last_offset_delta + 1
        return agreed

    def _candidates(self, start: int) -> Iterator[int]:
        """Yield where the next batch may begin: where the bad one claims to end, then anywhere.

        The order matters, because the payload of a batch may hold bytes that look like a batch.
        """
        head = self.window.at(start, HEADER_BYTES)
        if len(head) == HEADER_BYTES:
            length = int.from_bytes(head[8:12], "big")
            if LENGTH_MIN <= length <= self.window.end - start - LOG_OVERHEAD_BYTES:
                yield start + LOG_OVERHEAD_BYTES + length
        position = self.window.find_magic(start + 1)
        while position >= 0:
            yield position
            position = self.window.find_magic(position + 1)

    def _is_plausible(self, header: BatchHeader) -> bool:
        """Whether a batch behind bad bytes has an offset and an epoch that can be trusted."""
        if not self.expected <= header.base_offset or header.next_offset > self._limit:
            return False
        if header.base_offset == 0:
            # Bytes precede it, so it cannot be the first batch: a page that was never written reads as zeros.
            return False
        if self._epochs is not None:
            if self._epochs.epoch_at(header.base_offset) != header.leader_epoch:
                return False
        elif header.leader_epoch < self._last_epoch:
            return False
        votes = self._votes(header, header.next_offset)
        # Against a single other batch, the batches before decide which of the two is wrong.
        return votes > 0 or (votes >= -1 and self._is_expected_offset(header))

    def _is_expected_offset(self, header: BatchHeader) -> bool:
        """Whether an offset that no later batch confirms fits what the bad bytes before it can have held.

        If they are one batch, two fields of its header say how many offsets it has, and one bit can have changed only
        one of them. If they are several, a record takes more than a byte.
        """
        if header.next_offset == self._limit:
            # It ends where the segment is known to end.
            return True
        if header.base_offset == self.expected:
            # It continues where the last good batch ended. Nothing of the log can lie in between: too few bytes for
            # a batch, or a whole one that belongs elsewhere. A damaged batch would have had its own offsets.
            return header.position - self.position < HEADER_BYTES or batch_at(self.window, self.position) is not None
        head = self.window.at(self.position, HEADER_BYTES)
        if len(head) < HEADER_BYTES:
            return False
        size, last_offset_delta, record_count = _SIZE_AND_COUNTS.unpack_from(head)
        if header.base_offset - self.expected in (last_offset_delta + 1, record_count):
            return True
        one_batch = self.position + LOG_OVERHEAD_BYTES + size == header.position
        return not one_batch and header.base_offset - self.expected <= header.position - self.position


INDEX_BUDGET_BYTES = 64 * 1024 * 1024


def load_index(files: Files, segment: Segment) -> Index | None:
    """Return the stored index; None if it is not the one that the checkpoint recorded."""
    index_bytes = segment.index_entries * ENTRY_BYTES
    if not index_bytes:
        return Index()
    try:
        places = read_whole(files, segment_path(segment.directory, segment.base_offset, INDEX_SUFFIX))
        times = read_whole(files, segment_path(segment.directory, segment.base_offset, TIME_INDEX_SUFFIX))
    except OSError:
        return None
    if len(places) < index_bytes or len(times) < index_bytes:
        return None
    index = Index.from_bytes(places[:index_bytes], times[:index_bytes])
    return index if index.checksum() == segment.index_checksum else None


def build_index(scan: Scan, segment: Segment, interval_bytes: int) -> Index:
    """Rebuild the index from the batches; damaged ones are left out and found again when they are read."""
    index, largest = Index(), -1
    for found in scan:
        if isinstance(found, BadRange):
            continue
        if found.position - index.last_position >= interval_bytes:
            index.add(found.base_offset - segment.base_offset, found.position, largest)
        largest = max(largest, found.max_timestamp_ms)
    segment.index_stored = 0
    return index


class LoadedIndexes:
    """The indexes of sealed segments in memory, within one budget for all logs.

    When the budget is used up, the one that was loaded first is dropped. Active segments do not count.
    """

    def __init__(self, budget_bytes: int = INDEX_BUDGET_BYTES) -> None:
        self._budget_bytes = budget_bytes
        self._bytes = 0
        self._loaded: OrderedDict[int, tuple[Segment, int]] = OrderedDict()

    def loaded(self, segment: Segment) -> None:
        if not segment.sealed or segment.index is None:
            return
        self._forget(id(segment))
        size = 2 * ENTRY_BYTES * len(segment.index)
        self._loaded[id(segment)] = (segment, size)
        self._bytes += size
        while self._bytes > self._budget_bytes and len(self._loaded) > 1:
            oldest = next(iter(self._loaded.values()))[0]
            self._forget(id(oldest))
            oldest.drop_index()

    def _forget(self, key: int) -> None:
        known = self._loaded.pop(key, None)
        if known is not None:
            self._bytes -= known[1]
