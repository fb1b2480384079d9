"""Scan a range of the log for a queue: which offsets hold messages, which are delayed, and their keys.

Batches for which none of this matters are not decoded.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from contextlib import suppress
from operator import attrgetter
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from millstream.broker.log.log import Log
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.batch_scan import DELIVER_AT_BYTES, BatchScan, BatchTooHeavy, Ranges, scan_batch
from millstream.broker.subscriptions.frame import PUBLISHED
from millstream.core.errors import BatchRejected, DamagedRange, MillstreamError, OffsetOutOfRange, RepairPending
from millstream.core.ids import Offset
from millstream.core.mirror import EPOCH_STEP
from millstream.core.subscription import READ_COMMITTED
from millstream.protocol.records.batch import BatchHeader, Buffer, iterate_whole_headers, read_header
from millstream.protocol.records.record import AbortedBatches

SCANNED_BYTES_MAX: Final = 2 * 1024 * 1024
"""How much is scanned on the loop at once: a few milliseconds' worth."""


class ScannedRange(NamedTuple):
    """A range of the log as a queue sees it."""

    records: Buffer
    first: Offset
    next_offset: Offset
    absent: Ranges
    delayed: Ranges
    """Delayed messages, as pairs of offset and time."""
    keys: npt.NDArray[np.int64] | None
    scanned_bytes: int = 0
    """How many bytes were examined."""
    is_heavy: bool = False
    """Whether the range ends with a batch that must be scanned elsewhere."""
    unreadable: tuple[tuple[int, int, str], ...] = ()
    """Unreadable batches, each as its first and last offset and the reason; their offsets are absent."""
    damage: DamagedRange | None = None
    """The damage because of which the whole range is absent."""
    published: bytes = b""
    """The times of the batches for the ledger: pairs of the offset after a batch and its time."""
    headers: Sequence[BatchHeader] = ()
    ends: Sequence[int] = ()
    """The offset after each of the batches of these headers."""

    @property
    def batch_first(self) -> int:
        """The first offset to scan in the heavy batch."""
        return max(int(self.first), read_header(self.records).base_offset)

    def headers_from(self, offset: int, bytes_max: int, *, at_least_one: bool) -> Sequence[BatchHeader]:
        """Return the headers of the batches from an offset on that fit into some bytes, or of one batch."""
        start = bisect_right(self.ends, offset)
        if start == len(self.headers):
            return ()
        position_max = self.headers[start].position + bytes_max
        end = bisect_right(self.headers, position_max, lo=start, key=attrgetter("end_position"))
        return self.headers[start : max(end, start + at_least_one)]

    def without(self, unreadable: Sequence[tuple[int, int, str]]) -> ScannedRange:
        """Return the range without batches that turned out to be unreadable, unless their offsets are absent anyway."""
        if not unreadable:
            return self
        lost = np.zeros(self.next_offset - self.first + 2, np.int8)
        for first, last, _reason in unreadable:
            lost[first - self.first + 1 : last - self.first + 2] = 1
        for first, last in self.absent:
            lost[max(first - self.first, 0) + 1 : last - self.first + 2] = 0
        edges = (np.flatnonzero(np.diff(lost)) + int(self.first)).tolist()
        unreadable_ranges = [(start, end - 1) for start, end in zip(edges[::2], edges[1::2], strict=True)]
        known = {first for first, _last, _reason in self.unreadable}
        new = tuple(
            bad_range
            for bad_range in unreadable
            if bad_range[0] not in known and any(a <= bad_range[1] and bad_range[0] <= b for a, b in unreadable_ranges)
        )
        return self._replace(absent=sorted([*self.absent, *unreadable_ranges]), unreadable=(*self.unreadable, *new))

    def with_batch_scan(self, scan: BatchScan | str) -> ScannedRange:
        """Return the range with its heavy batch scanned, or with the reason why it is unreadable."""
        first = self.batch_first
        if isinstance(scan, str):
            lost = (first, self.next_offset - 1)
            return self._replace(absent=[*self.absent, lost], is_heavy=False, unreadable=((*lost, scan),))
        keys = self.keys
        if keys is not None and scan.keys is not None:
            keys[first - self.first :] = scan.keys
        return self._replace(absent=[*self.absent, *scan.absent], delayed=scan.delayed, is_heavy=False)


def readable_end(partition: Partition, isolation: str) -> Offset:
    """Return the offset up to which a queue may read."""
    return partition.last_stable_offset if isolation == READ_COMMITTED else partition.high_watermark


def failover_marks(partition: Partition, first: int, end: int) -> int:
    """Return how many offsets of a range hold the mark of a mirror's failover instead of a message."""
    log = partition.log
    return sum(_is_mark(log, start) for start in log.epochs.jumps(EPOCH_STEP) if first <= start < end)


def _is_mark(log: Log, offset: int) -> bool:
    try:
        records = log.read(Offset(offset), max_bytes=1, up_to=log.end_offset)
    except MillstreamError:
        return False
    header = next(iterate_whole_headers(records), None)
    return header is not None and (header.base_offset > offset or not header.record_count)


def read_batches(
    partition: Partition, offset: Offset, isolation: str, *, max_bytes: int, at_least_one: bool = True
) -> tuple[Buffer, Ranges]:
    """Read whole batches from an offset on, with the aborted transactions among them."""
    if isolation == READ_COMMITTED:
        committed = partition.read_committed(offset, max_bytes=max_bytes, at_least_one=at_least_one)
        return committed.records, committed.aborted
    return partition.read(offset, max_bytes=max_bytes, at_least_one=at_least_one), []


def scan_log(
    partition: Partition,
    offset: Offset,
    isolation: str,
    *,
    max_bytes: int,
    offsets_max: int,
    with_keys: bool = False,
    with_times: bool = False,
) -> ScannedRange | None:
    """Scan the log from an offset on; None if there is nothing to read yet."""
    try:
        records, aborted = read_batches(partition, offset, isolation, max_bytes=max_bytes)
    except DamagedRange as damage:
        next_offset = Offset(min(damage.end, readable_end(partition, isolation)))
        return _damaged_range(offset, next_offset, damage, with_keys=with_keys)
    except RepairPending:
        # Waiting workers are woken when the range is repaired, or when no replica has it.
        return None
    return _scan_batches(
        records,
        AbortedBatches(aborted),
        offset,
        offsets_max=offsets_max,
        with_keys=with_keys,
        with_times=with_times,
    )


def _scan_batches(
    records: Buffer,
    aborted_batches: AbortedBatches,
    offset: Offset,
    *,
    offsets_max: int,
    with_keys: bool,
    with_times: bool,
) -> ScannedRange | None:
    absent: Ranges = []
    delayed: Ranges = []
    keys: list[tuple[int, npt.NDArray[np.int64]]] = []
    unreadable: list[tuple[int, int, str]] = []
    # One search costs less than one for each of many small batches.
    is_plain = not with_keys and DELIVER_AT_BYTES not in bytes(records)
    position = offset
    scanned_bytes = 0
    times: list[bytes] = []
    headers: list[BatchHeader] = []
    ends: list[int] = []
    for header in iterate_whole_headers(records):
        next_offset = header.next_offset
        if next_offset <= position:
            continue
        if position > offset and (next_offset - offset > offsets_max or scanned_bytes > SCANNED_BYTES_MAX):
            break
        first = max(position, header.base_offset)
        gap = [(int(position), header.base_offset - 1)] if header.base_offset > position else []
        # Markers are passed too, since they end aborted transactions.
        is_aborted = aborted_batches.holds(header.last_offset, header.attributes, header.producer_id)
        if header.is_control or is_aborted:
            absent += [*gap, (first, header.last_offset)]
        else:
            try:
                scan = (
                    BatchScan([], [], None, header.length)
                    if is_plain and not header.compression and header.record_count == header.last_offset_delta + 1
                    else scan_batch(records, header, first, with_keys=with_keys)
                )
            except BatchTooHeavy:
                if position > offset:
                    break
                batch = memoryview(records)[header.position : header.end_position]
                no_keys = np.zeros(header.next_offset - offset, np.int64) if with_keys else None
                time = PUBLISHED.pack(header.next_offset, header.max_timestamp_ms) if with_times else b""
                heavy = ScannedRange(batch, offset, header.next_offset, gap, [], no_keys, is_heavy=True)
                return heavy._replace(published=time)
            except BatchRejected as error:
                absent += [*gap, (first, header.last_offset)]
                unreadable.append((first, header.last_offset, str(error)))
            else:
                absent += [*gap, *scan.absent]
                delayed += scan.delayed
                scanned_bytes += scan.scanned_bytes
                if scan.keys is not None:
                    keys.append((first, scan.keys))
                if with_times:
                    times.append(PUBLISHED.pack(header.next_offset, header.max_timestamp_ms))
        headers.append(header)
        ends.append(next_offset)
        position = next_offset
    if position == offset:
        return None
    all_keys = np.zeros(position - offset, np.int64) if with_keys else None
    if all_keys is not None:
        for begin, batch_keys in keys:
            all_keys[begin - offset : begin - offset + batch_keys.size] = batch_keys
    result = ScannedRange(records, offset, position, absent, delayed, all_keys, scanned_bytes, False, tuple(unreadable))
    return result._replace(published=b"".join(times), headers=headers, ends=ends)


def scan_heavy_batch(scanned: ScannedRange) -> ScannedRange:
    """Scan the heavy batch of a range in this process."""
    header, with_keys = read_header(scanned.records), scanned.keys is not None
    try:
        return scanned.with_batch_scan(
            scan_batch(scanned.records, header, scanned.batch_first, with_keys=with_keys, light=False)
        )
    except BatchRejected as error:
        return scanned.with_batch_scan(str(error))


def _damaged_range(
    offset: Offset, next_offset: Offset, damage: DamagedRange, *, with_keys: bool
) -> ScannedRange | None:
    """Return a range without messages, which the disk has lost; the scan continues after it."""
    if next_offset <= offset:
        return None
    keys = np.zeros(next_offset - offset, np.int64) if with_keys else None
    return ScannedRange(b"", offset, next_offset, [(offset, next_offset - 1)], [], keys, damage=damage)


async def keys_in_batch(partition: Partition, offset: Offset) -> tuple[dict[int, int], Offset]:
    """Return the keys of the messages in the batch that contains an offset, and the offset after the batch.

    A batch that is unreadable or no longer stored has no keys. Raises `RepairPending` while it is being repaired.
    """
    keys: dict[int, int] = {}
    try:
        records = partition.read(offset, max_bytes=1)
    except (OffsetOutOfRange, DamagedRange):
        return keys, Offset(offset + 1)
    header = next(iterate_whole_headers(records), None)
    if header is None:
        return keys, Offset(offset + 1)
    if not header.is_control:
        with suppress(BatchRejected):
            scan = await asyncio.to_thread(scan_batch, records, header, header.base_offset, with_keys=True, light=False)
            if scan.keys is not None:
                keys = dict(enumerate(scan.keys.tolist(), header.base_offset))
            for first, last in scan.absent:
                for missing in range(first, last + 1):
                    del keys[missing]
    return keys, Offset(max(header.next_offset, offset + 1))


def batches_covering(headers: Iterable[BatchHeader], leased: Iterable[tuple[int, int]]) -> list[BatchHeader]:
    """Return the batches that overlap the given ascending ranges."""
    headers_in_ranges: list[BatchHeader] = []
    ranges = iter(leased)
    current = next(ranges, None)
    for header in headers:
        while current is not None and current[1] < header.base_offset:
            current = next(ranges, None)
        if current is None:
            break
        if current[0] <= header.last_offset:
            headers_in_ranges.append(header)
    return headers_in_ranges


def join_adjacent(records: Buffer, batches: Iterable[BatchHeader]) -> list[memoryview]:
    """Return the content of the given batches, adjacent ones together."""
    view = memoryview(records)
    pieces: list[memoryview] = []
    begin = end = 0
    for header in batches:
        if header.position != end:
            if end > begin:
                pieces.append(view[begin:end])
            begin = header.position
        end = header.end_position
    if end > begin:
        pieces.append(view[begin:end])
    return pieces
