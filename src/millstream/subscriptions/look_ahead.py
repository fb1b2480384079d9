"""What a queue has to know of a stretch of the log before it can hand it out: which offsets hold messages, which of
them are delayed, and their keys. Batches that raise none of these questions are not opened.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from typing import Final, NamedTuple
from zlib import crc32

import numpy as np
import numpy.typing as npt

from millstream.model.errors import BatchRejected, DamagedRange, OffsetOutOfRange, RepairPending
from millstream.model.ids import Offset
from millstream.model.subscription import READ_COMMITTED
from millstream.records.aborted_batches import AbortedBatches
from millstream.records.batch import (
    COMPRESSION_NONE,
    HEADER_BYTES,
    BatchHeader,
    Buffer,
    iterate_whole_headers,
)
from millstream.records.compression import decompress
from millstream.records.raw_record import raw_records, records_section
from millstream.records.record import Record, decode_batch
from millstream.replication.partition import Partition

DELIVER_AT: Final = "deliver-at"
"""The header that delays a message: milliseconds since 1970, as text."""

_DELIVER_AT_BYTES: Final = DELIVER_AT.encode()
_TIME_DIGITS_MAX: Final = 15

Ranges = list[tuple[int, int]]
"""Offsets, each range with its first and its last."""


class Stretch(NamedTuple):
    """A part of the log as a queue looks at it."""

    records: Buffer
    first: Offset
    next_offset: Offset
    absent: Ranges
    due: Ranges
    """Delayed messages: offset and time."""
    keys: npt.NDArray[np.int64] | None
    damage: DamagedRange | None = None
    """Why all of it is absent, if the disk lost it."""


def readable_end(partition: Partition, isolation: str) -> Offset:
    """Up to where a queue may look."""
    return partition.last_stable_offset if isolation == READ_COMMITTED else partition.high_watermark


def read(
    partition: Partition, offset: Offset, isolation: str, *, max_bytes: int, at_least_one: bool = True
) -> tuple[Buffer, Ranges]:
    """Whole batches from an offset on, and the aborted transactions among them."""
    if isolation == READ_COMMITTED:
        committed = partition.read_committed(offset, max_bytes=max_bytes, at_least_one=at_least_one)
        return committed.records, committed.aborted
    return partition.read(offset, max_bytes=max_bytes, at_least_one=at_least_one), []


def look(
    partition: Partition,
    offset: Offset,
    isolation: str,
    *,
    max_bytes: int,
    offsets_max: int,
    with_keys: bool = False,
) -> Stretch | None:
    """Look at the log from an offset on; None when there is nothing to see yet."""
    try:
        records, aborted = read(partition, offset, isolation, max_bytes=max_bytes)
    except DamagedRange as damage:
        next_offset = Offset(min(damage.next_offset, readable_end(partition, isolation)))
        return _lost(offset, next_offset, damage, with_keys=with_keys)
    except RepairPending:
        # Whoever waits is woken when it is back, or when nobody has it.
        return None
    absent: Ranges = []
    due: Ranges = []
    left_out = AbortedBatches(aborted)
    position = offset
    for header in iterate_whole_headers(records):
        if header.next_offset <= position:
            continue
        if position > offset and header.next_offset - offset > offsets_max:
            break
        if header.base_offset > position:
            absent.append((position, header.base_offset - 1))
        first = max(position, header.base_offset)
        is_aborted = left_out.holds(header.last_offset, header.attributes, header.producer_id)
        if header.is_control or is_aborted:
            absent.append((first, header.last_offset))
        else:
            _open_if_needed(records, header, first, absent, due)
        position = header.next_offset
    if position == offset:
        return None
    return Stretch(
        records,
        offset,
        position,
        absent,
        due,
        _keys(records, offset, position) if with_keys else None,
    )


def _lost(offset: Offset, next_offset: Offset, damage: DamagedRange, *, with_keys: bool) -> Stretch | None:
    """A stretch that the disk has lost: nothing is there, and what follows goes on."""
    if next_offset <= offset:
        return None
    keys = np.zeros(next_offset - offset, np.int64) if with_keys else None
    return Stretch(b"", offset, next_offset, [(offset, next_offset - 1)], [], keys, damage)


def _open_if_needed(records: Buffer, header: BatchHeader, first: int, absent: Ranges, due: Ranges) -> None:
    is_dense = header.record_count == header.last_offset_delta + 1
    try:
        if is_dense and not _may_be_delayed(records, header):
            return
        position = first
        for record in decode_batch(records, header):
            if record.offset < first:
                continue
            if record.offset > position:
                absent.append((position, record.offset - 1))
            position = record.offset + 1
            time_ms = deliver_at_ms(record)
            if time_ms is not None:
                due.append((record.offset, time_ms))
    except BatchRejected:
        # It cannot be opened here, so nothing is known to be missing or delayed; workers get it as it is.
        return
    if position <= header.last_offset:
        absent.append((position, header.last_offset))


def _may_be_delayed(records: Buffer, header: BatchHeader) -> bool:
    section = memoryview(records)[header.position + HEADER_BYTES : header.end_position]
    content: bytes | bytearray | memoryview = section
    if header.compression != COMPRESSION_NONE and len(section):
        content = decompress(header.compression, section)
    return bytes(content).find(_DELIVER_AT_BYTES) >= 0


def deliver_at_ms(record: Record) -> int | None:
    """When a message wants to be delivered, if it says so in a way that can be read."""
    for name, value in record.headers:
        if name == DELIVER_AT and value is not None and value.isdigit() and len(value) <= _TIME_DIGITS_MAX:
            return int(value)
    return None


def _keys(records: Buffer, first: Offset, next_offset: Offset) -> npt.NDArray[np.int64]:
    """A number for the key of every offset, the same on every node; 0 where there is none.

    In plain Python: this runs on the loop, where compiled code would first be compiled, for seconds. Two keys with the
    same number wait for each other, which keeps the order of both.
    """
    keys = np.zeros(next_offset - first, np.int64)
    for header in iterate_whole_headers(records):
        if header.is_control or header.base_offset >= next_offset or header.last_offset < first:
            continue
        # A batch that cannot be opened has no keys; the others have.
        with suppress(BatchRejected):
            for record in raw_records(records_section(records, header), header):
                place = header.base_offset + record.offset_delta - first
                if 0 <= place < len(keys):
                    keys[place] = _key_number(record.key)
    return keys


def keys_in_batch(partition: Partition, offset: Offset) -> tuple[dict[int, int], Offset]:
    """Every message of the batch that holds an offset, with the number of its key; and the offset behind the batch.

    What cannot be read any more, or cannot be opened, has none.
    """
    found: dict[int, int] = {}
    try:
        records = partition.read(offset, max_bytes=1)
    except (OffsetOutOfRange, DamagedRange, RepairPending):
        return found, Offset(offset + 1)
    header = next(iterate_whole_headers(records), None)
    if header is None:
        return found, Offset(offset + 1)
    if not header.is_control:
        with suppress(BatchRejected):
            for record in raw_records(records_section(records, header), header):
                found[header.base_offset + record.offset_delta] = _key_number(record.key)
    return found, Offset(max(header.next_offset, offset + 1))


def _key_number(key: bytes | None) -> int:
    return 0 if key is None else crc32(key) + 1


def batches_with(records: Buffer, leased: list[tuple[int, int]]) -> Iterator[memoryview]:
    """The batches of a stretch that hold something of the given ranges, which are in order; neighbours together."""
    view = memoryview(records)
    begin = end = 0
    ranges = iter(leased)
    current = next(ranges, None)
    for header in iterate_whole_headers(records):
        while current is not None and current[1] < header.base_offset:
            current = next(ranges, None)
        if current is None:
            break
        if current[0] > header.last_offset:
            continue
        if header.position != end:
            if end > begin:
                yield view[begin:end]
            begin = header.position
        end = header.end_position
    if end > begin:
        yield view[begin:end]


def batch_ends(records: Buffer) -> tuple[list[int], Offset]:
    """The last offset of every batch, and the offset after all of them."""
    ends = [int(header.last_offset) for header in iterate_whole_headers(records)]
    return ends, Offset(ends[-1] + 1 if ends else -1)
