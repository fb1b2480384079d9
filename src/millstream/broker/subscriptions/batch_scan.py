"""Find the messages of a batch that a queue sees for the first time, and the deltas that record them.

A batch is scanned on the loop only if that takes well under a millisecond. `scan_batch` raises `BatchTooHeavy` for any
other, which the filter process then scans.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from millstream.broker.subscriptions.lease import Delta, DeltaKind
from millstream.core.errors import CorruptBatch
from millstream.core.headers import DELIVER_AT
from millstream.core.ids import OffsetRange
from millstream.protocol.records.batch import COMPRESSION_NONE, BatchHeader, Buffer
from millstream.protocol.records.record import Record, decode_batch, records_section
from millstream.protocol.records.rewrite import raw_records

if TYPE_CHECKING:
    from millstream.protocol.records.columns import HeaderColumn

LIGHT_BYTES_MAX: Final = 1024 * 1024
LIGHT_RECORDS_MAX: Final = 2_000
"""A batch that decompresses to more, or holds more records to examine, is not scanned on the loop."""
COMPILED_RECORDS_MIN: Final = 20_000
"""From this many records on, compiled code is worth the seconds that it takes to load."""

DELIVER_AT_BYTES: Final = DELIVER_AT.encode()
_TIME_DIGITS_MAX: Final = 15

Ranges = list[tuple[int, int]]
"""Ranges of offsets, each as its first and its last."""


class BatchTooHeavy(Exception):
    """Scanning the batch would stall the loop."""


class BatchScan(NamedTuple):
    """The result of scanning one batch from an offset on."""

    absent: Ranges
    delayed: Ranges
    """Delayed messages, as pairs of offset and time."""
    keys: npt.NDArray[np.int64] | None
    """A hash of the key for every offset, the same on every node; 0 where there is no key.

    Keys with the same hash wait for each other, which preserves the order of both.
    """
    scanned_bytes: int
    """How many bytes were examined."""


def scan_batch(records: Buffer, header: BatchHeader, first: int, *, with_keys: bool, light: bool = True) -> BatchScan:
    """Find the offsets of a batch that hold messages, the delayed ones among them, and their keys.

    Raises `BatchRejected` if the batch cannot be read, and `BatchTooHeavy` if `light` is set and it is too large for
    the loop.
    """
    is_dense = header.record_count == header.last_offset_delta + 1
    is_compressed = header.compression != COMPRESSION_NONE
    try:
        section = records_section(records, header, decompressed_bytes_max=LIGHT_BYTES_MAX if light else None)
    except CorruptBatch:
        if not (light and is_compressed):
            raise
        raise BatchTooHeavy from None
    has_delays = section.find(DELIVER_AT_BYTES) >= 0
    if is_dense and not has_delays and not with_keys:
        return BatchScan([], [], None, len(section))
    if light and header.record_count > LIGHT_RECORDS_MAX:
        raise BatchTooHeavy
    if header.record_count >= COMPILED_RECORDS_MIN:
        return _scan_compiled(records, header, first, with_keys=with_keys, has_delays=has_delays)
    offsets: list[int] = []
    delayed: Ranges = []
    keys = np.zeros(header.next_offset - first, np.int64) if with_keys else None
    if has_delays:
        for record in decode_batch(records, header, ranges=(OffsetRange(first, header.next_offset),)):
            offsets.append(record.offset)
            if (time_ms := deliver_at_ms(record)) is not None:
                delayed.append((record.offset, time_ms))
            if keys is not None and record.key is not None:
                keys[record.offset - first] = crc32(record.key) + 1
    else:
        for raw in raw_records(section, header):
            offset = header.base_offset + raw.offset_delta
            if offset >= first:
                offsets.append(offset)
                if keys is not None and raw.key is not None:
                    keys[offset - first] = crc32(raw.key) + 1
    absent = _find_gaps(np.array(offsets, np.int64), first, header.last_offset)
    return BatchScan(absent, delayed, keys, len(section))


def _scan_compiled(records: Buffer, header: BatchHeader, first: int, *, with_keys: bool, has_delays: bool) -> BatchScan:
    from millstream.protocol.records.decoder import HEADER, KEY, decode_columns

    batch = memoryview(records)[header.position : header.end_position]
    fields = [name for name, is_needed in ((KEY, with_keys), (HEADER, has_delays)) if is_needed]
    offsets: list[npt.NDArray[np.int64]] = [np.empty(0, np.int64)]
    delayed: Ranges = []
    keys = np.zeros(header.next_offset - first, np.int64) if with_keys else None
    for columns in decode_columns(batch, fields=fields, start_offset=first, verify_crc=False):
        offsets.append(columns.offsets)
        if keys is not None and columns.keys is not None:
            data, ends = columns.keys.data.tobytes(), columns.keys.offsets.tolist()
            numbers = np.fromiter((crc32(data[a:b]) + 1 for a, b in pairwise(ends)), np.int64, len(ends) - 1)
            if columns.keys.validity is not None:
                numbers[np.unpackbits(columns.keys.validity, count=numbers.size, bitorder="little") == 0] = 0
            keys[columns.offsets - first] = numbers
        if columns.headers is not None:
            delayed += _find_delayed(columns.offsets, columns.headers)
    return BatchScan(_find_gaps(np.concatenate(offsets), first, header.last_offset), delayed, keys, len(batch))


def _find_delayed(offsets: npt.NDArray[np.int64], headers: HeaderColumn) -> Ranges:
    names, values = headers.keys.data.tobytes(), headers.values.data.tobytes()
    name_ends, value_ends = headers.keys.offsets.tolist(), headers.values.offsets.tolist()
    delayed: Ranges = []
    for offset, (begin, end) in zip(offsets.tolist(), pairwise(headers.offsets.tolist()), strict=True):
        for position in range(begin, end):
            if names[name_ends[position] : name_ends[position + 1]] == DELIVER_AT_BYTES:
                time_ms = _time_ms(values[value_ends[position] : value_ends[position + 1]])
                if time_ms is not None:
                    delayed.append((offset, time_ms))
                    break
    return delayed


def _find_gaps(offsets: npt.NDArray[np.int64], first: int, last: int) -> Ranges:
    """Find the ranges from `first` to `last` that no offset falls into."""
    bounds = np.concatenate(([first - 1], offsets, [last + 1]))
    before = np.flatnonzero(np.diff(bounds) > 1)
    return [(int(bounds[position]) + 1, int(bounds[position + 1]) - 1) for position in before]


def deliver_at_ms(record: Record) -> int | None:
    """Read the time until which a message is delayed; None without a valid header."""
    for name, value in record.headers:
        if name == DELIVER_AT and value is not None and (time_ms := _time_ms(value)) is not None:
            return time_ms
    return None


def _time_ms(value: bytes) -> int | None:
    return int(value) if value.isdigit() and len(value) <= _TIME_DIGITS_MAX else None


@dataclass(frozen=True, slots=True, kw_only=True)
class ScanResult:
    """The messages found in the offsets [first, next_offset)."""

    first: int
    next_offset: int
    absent: Sequence[tuple[int, int]] = ()
    """Offsets without a message, as ranges with both ends."""
    matches: npt.NDArray[np.bool_] | None = None
    """Whether each offset matches the filter; None if there is no filter."""
    keys: npt.NDArray[np.int64] | None = None
    """The hash of the key of each offset; 0 without a key."""
    delayed: Sequence[tuple[int, int]] = ()
    """Delayed messages, as pairs of offset and time."""

    def starting_at(self, offset: int) -> ScanResult:
        """Return the part from an offset on; a gap before the first scanned offset is absent."""
        skipped = offset - self.first
        if skipped == 0:
            return self
        if skipped < 0:
            gap = -skipped
            return ScanResult(
                first=offset,
                next_offset=self.next_offset,
                absent=[(offset, self.first - 1), *self.absent],
                matches=None if self.matches is None else np.concatenate((np.ones(gap, np.bool_), self.matches)),
                keys=None if self.keys is None else np.concatenate((np.zeros(gap, np.int64), self.keys)),
                delayed=self.delayed,
            )
        return ScanResult(
            first=offset,
            next_offset=max(self.next_offset, offset),
            absent=[(max(first, offset), last) for first, last in self.absent if last >= offset],
            matches=None if self.matches is None else self.matches[skipped:],
            keys=None if self.keys is None else self.keys[skipped:],
            delayed=[(message, due_ms) for message, due_ms in self.delayed if message >= offset],
        )

    def key_bytes(self) -> bytes:
        if self.keys is None:
            return bytes(8 * (self.next_offset - self.first))
        return np.ascontiguousarray(self.keys, np.int64).tobytes()

    def deltas(self, now_ms: int) -> list[Delta]:
        if self.next_offset <= self.first:
            return []
        first, last = self.first, self.next_offset - 1
        deltas = [Delta(DeltaKind.SCANNED, first, last, 0, 0, "", now_ms)]
        for begin, end in self.absent:
            deltas.append(Delta(DeltaKind.ABSENT, begin, end, 0, 0, "", now_ms))
        if self.matches is None and not self.delayed:
            return deltas
        selected = np.ones(self.next_offset - self.first, np.bool_)
        for begin, end in self.absent:
            selected[begin - self.first : end - self.first + 1] = False
        if self.matches is not None:
            deltas += self._filtered_deltas(selected & ~self.matches, now_ms)
            selected &= self.matches
        deltas += self._parked_deltas(selected, now_ms)
        return deltas

    def _filtered_deltas(self, out: npt.NDArray[np.bool_], now_ms: int) -> list[Delta]:
        places = np.flatnonzero(out)
        if not len(places):
            return []
        begin, end = int(places[0]), int(places[-1])
        # A range is enough if it has no gaps; otherwise each offset gets a bit.
        bits = b"" if end - begin + 1 == len(places) else np.packbits(out[begin : end + 1], bitorder="little").tobytes()
        first, last = self.first + begin, self.first + end
        return [Delta(DeltaKind.FILTERED, first, last, 0, 0, "", now_ms, "", bits)]

    def _parked_deltas(self, selected: npt.NDArray[np.bool_], now_ms: int) -> list[Delta]:
        deltas: list[Delta] = []
        for offset, due_ms in self.delayed:
            if due_ms <= now_ms or not selected[offset - self.first]:
                continue
            before = deltas[-1] if deltas else None
            if before is not None and before.last + 1 == offset and before.due_ms == due_ms:
                deltas[-1] = before._replace(last=offset)
            else:
                deltas.append(Delta(DeltaKind.PARKED, offset, offset, 0, due_ms, "", now_ms))
        return deltas
