"""Reads messages out of record batches within bounds on memory and on the loop's time.

A batch of a few kilobytes may decompress to more than 100 MB. Batches that decompress to little are read at once.
Others are read by one thread, one at a time, so that there is never more than one of them in memory; of each, no more
messages are kept than were asked for. A message too large to be sent over HTTP is reported instead of being read.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Final, NamedTuple
from uuid import UUID

from millstream.core.errors import CorruptBatch
from millstream.core.ids import NodeId, Offset, OffsetRange
from millstream.gateway.api.message import document_bytes, message_bytes
from millstream.protocol.private.leasing import LeaseResponse
from millstream.protocol.private.subscription_messages import LeasedRange
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.records.batch import BatchHeader, Buffer, check_crc, iterate_whole_headers
from millstream.protocol.records.record import OversizedRecord, Record, decode_batch

INLINE_BYTES_MAX: Final = 1024 * 1024
INLINE_RECORDS_MAX: Final = 4000
"""A batch that decompresses to more, or holds more records, is read by the thread."""

MESSAGE_BYTES_MAX: Final = 32 * 1024 * 1024
"""The largest message sent over HTTP, as bytes and as JSON, where a control character takes six bytes."""

Measure = Callable[[Record], int]


class Slice(NamedTuple):
    """Some records of a batch and where to continue; `oversized` says why the record before that offset is left out."""

    records: list[Record]
    next_offset: int
    oversized: str = ""


class ReadRecords(NamedTuple):
    """The messages that a node's response leases, by what has to be done with them."""

    messages: list[LeasedMessage]
    surplus: list[LeasedMessage]
    """Messages beyond the requested bytes, without their contents."""
    unreadable: list[tuple[LeasedMessage, str]]
    """Messages that cannot be sent, without their contents, each with the reason."""


class RecordReader:
    """Reads batches for all requests of a process. `measure` returns the size that a message has when it is sent."""

    def __init__(self, *, measure: Measure = document_bytes) -> None:
        self._measure = measure
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="unpacking")

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)

    async def read(
        self,
        batches: Buffer,
        header: BatchHeader,
        ranges: Sequence[OffsetRange],
        bytes_max: int,
        *,
        large_bytes_max: int = 0,
    ) -> Slice:
        """Read records of a batch until they take `bytes_max`, at least one; raise `CorruptBatch` if that fails.

        A batch that the thread reads may give `large_bytes_max` if that is more: each slice decompresses all of it.
        """
        if header.record_count <= INLINE_RECORDS_MAX:
            try:
                return _read(batches, header, ranges, bytes_max, INLINE_BYTES_MAX, self._measure)
            except CorruptBatch:
                # It may only be too large to be read on the loop.
                pass
        loop = asyncio.get_running_loop()
        slice_bytes = max(bytes_max, large_bytes_max)
        return await loop.run_in_executor(
            self._thread, _read, batches, header, ranges, slice_bytes, None, self._measure
        )

    async def read_one(self, batches: Buffer, header: BatchHeader, offset: int) -> Record | None:
        records = await self.read(batches, header, [OffsetRange(offset, offset + 1)], 0)
        if records.oversized:
            raise CorruptBatch(records.oversized)
        return records.records[0] if records.records else None

    async def read_leased(self, node: NodeId | None, leased: LeaseResponse, bytes_max: int) -> ReadRecords:
        """Read the messages that a response leases until they take `bytes_max`, at least one.

        What is delivered at most once is read whole, since it cannot be returned.
        """
        unpacked = ReadRecords([], [], [])
        remaining_bytes = bytes_max
        for part in leased.response.partitions:
            if part.lease_ms is None:
                remaining_bytes = sys.maxsize
            place = (node, part.topic, UUID(bytes=part.topic_id), part.partition)
            timing = (part.lease_ms, leased.fresh_until(part))
            at = 0
            for header in iterate_whole_headers(part.batches):
                while at < len(part.leases) and part.leases[at].end <= header.base_offset:
                    at += 1
                leases = list(_overlapping(part.leases, at, header))
                if header.is_control or not leases:
                    continue
                batch = _LeasedBatch(place, leases, timing)
                if unpacked.messages and remaining_bytes <= 0:
                    unpacked.surplus.extend(batch.remaining_leases(leases[0].start))
                else:
                    remaining_bytes -= await self._read_leased_batch(
                        part.batches, header, batch, remaining_bytes, unpacked
                    )
        return unpacked

    async def _read_leased_batch(
        self, batches: bytes, header: BatchHeader, batch: _LeasedBatch, bytes_max: int, unpacked: ReadRecords
    ) -> int:
        """Read the leased messages of one batch; return the bytes of those that are kept."""
        start = batch.leases[0].start
        used = 0
        try:
            check_crc(batches, header)
            while True:
                records = await self.read(batches, header, batch.ranges(start), bytes_max - used)
                unpacked.messages.extend(map(batch.message, records.records))
                used += sum(map(message_bytes, records.records))
                start = records.next_offset
                if not records.oversized:
                    break
                unpacked.unreadable.append((batch.stub(start - 1), records.oversized))
            unpacked.surplus.extend(batch.remaining_leases(start))
        except CorruptBatch as error:
            unpacked.unreadable.extend((lease, str(error)) for lease in batch.remaining_leases(start))
        return used


class _LeasedBatch:
    def __init__(
        self,
        place: tuple[NodeId | None, str, UUID, int],
        leases: Sequence[LeasedRange],
        timing: tuple[int | None, float],
    ) -> None:
        self._place = place
        self._timing = timing
        self.leases = leases
        self._by_offset = {offset: lease for lease in leases for offset in range(lease.start, lease.end)}

    def ranges(self, start: int) -> list[OffsetRange]:
        return [OffsetRange(max(lease.start, start), lease.end) for lease in self.leases if lease.end > start]

    def message(self, record: Record) -> LeasedMessage:
        lease = self._by_offset[record.offset]
        return LeasedMessage(*self._place, lease.attempt, lease.deadline_ms, record, *self._timing)

    def stub(self, offset: int) -> LeasedMessage:
        return self.message(Record(Offset(offset), 0, None, None, ()))

    def remaining_leases(self, start: int) -> Iterator[LeasedMessage]:
        return (self.stub(offset) for offset in self._by_offset if offset >= start)


def _overlapping(leases: Sequence[LeasedRange], at: int, header: BatchHeader) -> Iterator[LeasedRange]:
    """Return the parts of the leases, which ascend, that lie in a batch."""
    for number in range(at, len(leases)):
        lease = leases[number]
        if lease.start > header.last_offset:
            return
        start, end = max(lease.start, header.base_offset), min(lease.end, header.next_offset)
        yield LeasedRange(start, end, lease.attempt, lease.deadline_ms)


def _read(
    batches: Buffer,
    header: BatchHeader,
    ranges: Sequence[OffsetRange],
    bytes_max: int,
    decompressed_bytes_max: int | None,
    measure: Measure,
) -> Slice:
    records: list[Record] = []
    size = 0
    try:
        for record in decode_batch(
            batches,
            header,
            ranges=ranges,
            decompressed_bytes_max=decompressed_bytes_max,
            record_bytes_max=MESSAGE_BYTES_MAX,
        ):
            if (sent_bytes := measure(record)) > MESSAGE_BYTES_MAX:
                raise OversizedRecord(record.offset, sent_bytes)
            size += message_bytes(record)
            if records and size > bytes_max:
                return Slice(records, record.offset)
            records.append(record)
    except OversizedRecord as error:
        reason = f"the message has {error.size} bytes; at most {MESSAGE_BYTES_MAX} are sent over HTTP"
        return Slice(records, error.offset + 1, reason)
    return Slice(records, header.next_offset)
