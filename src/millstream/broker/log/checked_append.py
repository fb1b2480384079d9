"""The full path into the log: every check that can refuse a batch, for batches that the fast path leaves alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from millstream.broker.log.appended import AppendedRange
from millstream.broker.log.batch_checks import check_records, read_headers
from millstream.broker.log.index import Index
from millstream.broker.log.producer import ProducedBatch
from millstream.broker.log.segment import Segment
from millstream.broker.log.transactions import Guard
from millstream.core.errors import FencedLeaderEpoch, InvalidTransactionState
from millstream.core.ids import Offset
from millstream.protocol.records.batch import BatchHeader, check_crc, place_batch, stamp_append_time

if TYPE_CHECKING:
    from millstream.broker.log.log import Log


def append_checked(
    log: Log,
    batches: bytearray | memoryview,
    leader_epoch: int,
    *,
    internal: bool,
    guard: Guard | None,
    is_checked: bool = False,
) -> AppendedRange:
    """Validate batches, assign their offsets in place, and write them; internal ones may be several, or a marker."""
    settings = log.settings
    headers = read_headers(batches, internal=internal, max_message_bytes=settings.max_message_bytes)
    for header in headers:
        check_crc(batches, header)
    if leader_epoch < log.epochs.latest:
        raise FencedLeaderEpoch(f"{log.partition} has leader epoch {log.epochs.latest}, not {leader_epoch}")
    now_ms = log.clock.now_ms()
    if headers[0].producer_id >= 0:
        first = _check_producer(log, headers[0], now_ms, internal=internal, guard=guard)
        if first is not None:
            return AppendedRange(
                Offset(first.base_offset), Offset(first.next_offset), first.append_time_ms, log.start_offset, True
            )
    append_time_ms = -1
    if settings.message_timestamp_type == "LogAppendTime":
        append_time_ms = now_ms
        headers = _stamped(batches, headers, now_ms)
    if not (internal or is_checked):
        check_records(batches, headers[0], settings, now_ms)
    base_offset = log.end_offset
    next_offset = int(base_offset)
    for header in headers:
        place_batch(batches, header, next_offset, leader_epoch)
        next_offset += header.last_offset_delta + 1
    segment = log.segment_for(len(batches), next_offset, now_ms)
    index = log.write(segment, batches)
    _advance(log, batches, segment, index, headers, leader_epoch, now_ms, append_time_ms)
    return AppendedRange(base_offset, log.end_offset, append_time_ms, log.start_offset, False)


def _check_producer(
    log: Log, header: BatchHeader, now_ms: int, *, internal: bool, guard: Guard | None
) -> ProducedBatch | None:
    """Return the first copy of a duplicate. Internal batches have no sequence and are checked by their epoch."""
    producers = log.producers
    if not internal:
        return producers.check_client_batch_order(header, now_ms, guard)
    if not header.is_control:
        producers.check_epoch(header.producer_id, header.producer_epoch)
        if guard is not None and producers.transactions.guards.get(header.producer_id) is not guard:
            raise InvalidTransactionState(f"the transaction of producer {header.producer_id} was ended meanwhile")
    return None


def _advance(
    log: Log,
    batches: bytearray | memoryview,
    segment: Segment,
    index: Index,
    headers: list[BatchHeader],
    leader_epoch: int,
    now_ms: int,
    append_time_ms: int,
) -> None:
    """Account for batches that were written."""
    start, offset = segment.size, int(log.end_offset)
    if not start:
        segment.first_append_ms = now_ms
    segment.last_append_ms = now_ms
    if leader_epoch > log.epochs.latest:
        log.epochs.begin(leader_epoch, offset)
    for header in headers:
        segment.note(header, offset, start + header.position, index, log.settings.index_interval_bytes)
        if header.producer_id >= 0:
            log.producers.take(header, batches, offset, now_ms, append_time_ms)
        offset += header.last_offset_delta + 1
    log.advance_end(offset, segment.size - start)


def _stamped(batches: bytearray | memoryview, headers: list[BatchHeader], now_ms: int) -> list[BatchHeader]:
    """Set the broker's time in the batches and their headers."""
    for header in headers:
        stamp_append_time(batches, header, now_ms)
    return [header._replace(max_timestamp_ms=now_ms) for header in headers]
