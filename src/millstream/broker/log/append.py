"""Appends: validation, offsets and the write, on three paths into the log.

The fast path handles the ordinary batch of a producer, if nothing about it needs a decision. The checked path
handles every other batch of a client or coordinator; its checks are authoritative, and each condition of the fast path
is the negation of one of them. A follower stores batches as its leader wrote them, offsets, epochs and timestamps
included, so replicas of a topic that is not compacted are identical byte for byte.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, NamedTuple

from crc32c import crc32c

from millstream.broker.log.files import Files
from millstream.broker.log.segment import RELATIVE_OFFSET_MAX, Index, Segment
from millstream.broker.log.transactions import Guard, ProducedBatch
from millstream.broker.log.truncation import begin_restart
from millstream.core.errors import (
    BatchRejected,
    BatchTooLarge,
    CorruptBatch,
    FencedLeaderEpoch,
    InvalidBatch,
    InvalidTimestamp,
    InvalidTransactionState,
    RecordError,
)
from millstream.core.ids import Offset
from millstream.core.topic import TopicSettings
from millstream.protocol.records.batch import (
    BATCH_HEADER,
    COMPRESSION_MASK,
    COMPRESSION_ZSTD,
    CONTROL_FLAG,
    CRC_FROM,
    HEADER_BYTES,
    LOG_OVERHEAD_BYTES,
    MAGIC,
    OFFSET_LENGTH_EPOCH,
    SEQUENCE_MASK,
    TIMESTAMP_TYPE_FLAG,
    TRANSACTIONAL_FLAG,
    BatchHeader,
    Buffer,
    check_crc,
    check_offsets,
    iterate_headers,
    place_batch,
    read_header,
    stamp_append_time,
)
from millstream.protocol.records.compression import size_bound
from millstream.protocol.records.record import records_section, walk_records
from millstream.protocol.records.rewrite import empty_batch

if TYPE_CHECKING:
    from millstream.broker.log.log import Log
    from millstream.broker.log.producers import Producers
    from millstream.broker.log.transactions import Producer


# Checks of batches before they are appended.
#
# Records are decoded only on topics that need it (`TopicSettings.reads_records`), and in a batch that is refused for
# some of its records, to name these.

READ_RECORDS_MAX = 100_000
"""The maximum number of records that are checked: a topic that must check records refuses a larger batch."""
LISTED_MAX = 10
"""The maximum number of records that an error names by their index."""

_LIGHT_RECORDS_MAX = 2_000
_LIGHT_BYTES_MAX = 1024 * 1024


def read_headers(batches: Buffer, *, internal: bool, max_message_bytes: int) -> list[BatchHeader]:
    """Read the headers of the batches to append; as in Kafka, a client may send one batch at a time."""
    if not len(batches):
        raise InvalidBatch("the request holds no record batch")
    header = read_header(batches)
    if header.length + 12 != len(batches):
        if not internal:
            raise InvalidBatch("a produce request may hold exactly one record batch per partition")
        return list(iterate_headers(batches))
    if not internal:
        check_client_batch(header, max_message_bytes)
    return [header]


def check_client_batch(header: BatchHeader, max_message_bytes: int) -> None:
    """Raise `BatchRejected` for a batch that a client may not send."""
    if header.length + 12 > max_message_bytes:
        raise BatchTooLarge(
            f"the record batch has {header.length + 12} bytes; max.message.bytes allows {max_message_bytes}: "
            "send less at once, or raise the topic's max.message.bytes"
        )
    if header.record_count != header.last_offset_delta + 1:
        raise InvalidBatch(
            f"the record batch has {header.record_count} records but its last offset delta is "
            f"{header.last_offset_delta}"
        )
    if header.attributes & 0x20:
        raise InvalidBatch("clients may not write control batches")
    if header.is_transactional and header.producer_id < 0:
        raise InvalidBatch("a record batch of a transaction has to name its producer")
    if header.base_offset != 0:
        raise InvalidBatch(f"the base offset of a record batch from a client is 0, not {header.base_offset}")
    if header.producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise InvalidBatch(
            f"producer {header.producer_id} sent epoch {header.producer_epoch} and sequence {header.base_sequence}; "
            "both must be 0 or more"
        )


def check_records(batches: Buffer, header: BatchHeader, settings: TopicSettings, now_ms: int) -> None:
    """Raise for records that the topic does not accept, and name them.

    As in Kafka, a record without a key is reported for that alone, and a batch with any wrong timestamp is
    `InvalidTimestamp`.
    """
    if settings.reads_records and header.record_count > READ_RECORDS_MAX:
        raise BatchTooLarge(
            f"the record batch has {header.record_count} records; {READ_RECORDS_MAX} are the most on a topic that is "
            "compacted or sets message.timestamp.before.max.ms"
        )
    without_key: list[int] = []
    if settings.compacts:
        section = records_section(batches, header)
        without_key = [index for index, fields in enumerate(walk_records(section, header)) if fields[2] < 0]
    wrong_times = _find_wrong_times(batches, header, settings, now_ms, set(without_key))
    if wrong_times is None and not without_key:
        return
    records = [RecordError(index, "the record has no key; the topic is compacted by key") for index in without_key]
    error: InvalidBatch | InvalidTimestamp
    if wrong_times is None:
        error = InvalidBatch(f"{_list_records(records, header, 'no key')}; the topic is compacted by key")
    else:
        named = (
            _list_records(wrong_times, header, "an invalid timestamp")
            if wrong_times
            else "the batch has an invalid timestamp"
        )
        error = InvalidTimestamp(
            f"{named}; the broker's time is {now_ms}, message.timestamp.before.max.ms "
            f"{settings.message_timestamp_before_max_ms}, message.timestamp.after.max.ms "
            f"{settings.message_timestamp_after_max_ms}"
        )
        records = sorted([*records, *wrong_times])
    error.records = records
    raise error


def _find_wrong_times(
    batches: Buffer, header: BatchHeader, settings: TopicSettings, now_ms: int, excluded: set[int]
) -> list[RecordError] | None:
    """Find the records whose timestamps are too far from the broker's; return None if there are none.

    A timestamp of -1 means none. The header has the first and the latest timestamp, so an old one in between shows only
    in the records. The list is empty if the header shows a wrong timestamp but the batch is too large to be searched
    here.
    """
    if settings.message_timestamp_type == "LogAppendTime":
        return None
    oldest = now_ms - settings.message_timestamp_before_max_ms
    newest = now_ms + settings.message_timestamp_after_max_ms
    is_wrong = 0 <= header.base_timestamp_ms < oldest or header.max_timestamp_ms > newest
    if not (is_wrong or settings.bounds_past):
        return None
    if not (settings.reads_records or _is_light(batches, header)):
        return []
    try:
        section = records_section(batches, header)
        deltas = [fields[1] for fields in walk_records(section, header)]
    except BatchRejected:
        if is_wrong:
            return []
        raise
    times = [(index, header.base_timestamp_ms + delta) for index, delta in enumerate(deltas)]
    wrong = [
        RecordError(index, f"timestamp {time_ms} is outside the range that the topic allows now, {oldest} to {newest}")
        for index, time_ms in times
        if (0 <= time_ms < oldest or time_ms > newest) and index not in excluded
    ]
    return wrong if wrong or is_wrong else None


def _list_records(records: Sequence[RecordError], header: BatchHeader, fault: str) -> str:
    """Describe the records with a fault: how many, and the first few by their index."""
    first = ", ".join(str(record.batch_index) for record in records[:LISTED_MAX])
    more = ", …" if len(records) > LISTED_MAX else ""
    verb = "has" if len(records) == 1 else "have"
    return f"{len(records)} of {header.record_count} records {verb} {fault} (at index {first}{more})"


def is_expensive_to_check(batch: Buffer) -> bool:
    """Whether `check_records` may take more than a few milliseconds."""
    try:
        header = read_header(batch)
    except BatchRejected:
        return False
    return not _is_light(batch, header)


def _is_light(batches: Buffer, header: BatchHeader) -> bool:
    section = memoryview(batches)[header.position + HEADER_BYTES : header.end_position]
    return header.record_count <= _LIGHT_RECORDS_MAX and size_bound(header.compression, section) <= _LIGHT_BYTES_MAX


class AppendedRange(NamedTuple):
    """The offsets of an append, or of its first copy if it is a duplicate."""

    base_offset: Offset
    next_offset: Offset
    append_time_ms: int
    log_start: Offset
    duplicate: bool


class AppendedRun(NamedTuple):
    """Batches that were appended in one write."""

    appended: AppendedRange
    """The offsets of all of them."""
    base_offsets: list[int]
    size_bytes: int


def append_checked(
    log: Log,
    batches: bytearray | memoryview,
    leader_epoch: int,
    *,
    internal: bool,
    guard: Guard | None,
    is_checked: bool = False,
) -> AppendedRange:
    """Validate batches, assign their offsets in place, and write them. Internal appends may hold several batches, or a
    marker.
    """
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
        headers = _stamp(batches, headers, now_ms)
    if not (internal or is_checked):
        check_records(batches, headers[0], settings, now_ms)
    base_offset = log.end_offset
    next_offset = int(base_offset)
    for header in headers:
        place_batch(batches, header, next_offset, leader_epoch)
        next_offset += header.last_offset_delta + 1
    segment = log.segment_for(len(batches), next_offset, now_ms)
    index = log.write(segment, batches)
    _record_append(log, batches, segment, index, headers, leader_epoch, now_ms, append_time_ms)
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


def _record_append(
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
        segment.add_batch(header, offset, start + header.position, index, log.settings.index_interval_bytes)
        if header.producer_id >= 0:
            log.producers.take(header, batches, offset, now_ms, append_time_ms)
        offset += header.last_offset_delta + 1
    log.advance_end(offset, segment.size - start)


def _stamp(batches: bytearray | memoryview, headers: list[BatchHeader], now_ms: int) -> list[BatchHeader]:
    """Set the broker's time in the batches and their headers."""
    for header in headers:
        stamp_append_time(batches, header, now_ms)
    return [header._replace(max_timestamp_ms=now_ms) for header in headers]


_CODEC_AND_CONTROL = COMPRESSION_MASK | CONTROL_FLAG


ByteRanges = Iterable[tuple[int, int]]
"""Where batches are in a buffer: start and end, end exclusive."""


def append_fast(log: Log, data: memoryview, ranges: ByteRanges, leader_epoch: int) -> tuple[list[int], int]:
    """Append client batches in one write, up to the first one that needs a decision; return their offsets and size.

    A batch needs none if it is whole, valid and within all limits, new to the log and next in its sequence, keeps the
    producer's timestamps, begins no transaction, fits the open segment, and comes from the leader that wrote last.
    `append_checked` handles every other batch, and its checks are authoritative: each condition here is the negation of
    one of them. If the disk refuses the write, nothing is appended, and the batches are as they were.
    """
    settings, segment, now_ms = log.settings, log.segments.active, log.clock.now_ms()
    if (
        segment is None
        or not segment.size
        or (index := segment.index) is None
        or not log.allows_fast_append
        or leader_epoch != log.epochs.latest
        or now_ms - segment.first_append_ms >= settings.segment_ms
    ):
        return [], 0
    latest_ms, bytes_max = now_ms + settings.message_timestamp_after_max_ms, settings.max_message_bytes
    position_max, offset_max = settings.segment_bytes, segment.base_offset + RELATIVE_OFFSET_MAX
    offset, position, newest_ms = int(log.end_offset), segment.size, segment.max_timestamp_ms
    indexed, interval_bytes = index.last_position, settings.index_interval_bytes
    batches: list[memoryview] = []
    base_offsets: list[int] = []
    entries: list[tuple[int, int, int]] = []
    headers: list[tuple[BatchHeader, int]] = []
    for start, end in ranges:
        size = end - start
        if size < HEADER_BYTES:
            break
        fields = BATCH_HEADER.unpack_from(data, start)
        base, length, _, magic, crc, attributes, delta, _, max_ms, producer_id, _, _, count = fields
        next_offset = offset + delta + 1
        if (
            magic != MAGIC
            or base
            or length != size - LOG_OVERHEAD_BYTES
            or delta < 0
            or count != delta + 1
            or attributes & _CODEC_AND_CONTROL > COMPRESSION_ZSTD
            or size > bytes_max
            or max_ms > latest_ms
            or position + size > position_max
            or next_offset > offset_max
            or crc32c(data[start + CRC_FROM : end]) != crc
        ):
            break
        if producer_id >= 0:
            header = BatchHeader(0, *fields)
            if not (_continues(headers, header) if batches else _is_next(log.producers, header, now_ms)):
                break
            headers.append((header, offset))
        elif attributes & TRANSACTIONAL_FLAG or headers:
            break
        OFFSET_LENGTH_EPOCH.pack_into(data, start, offset, length, leader_epoch)
        batches.append(data[start:end])
        base_offsets.append(offset)
        if position - indexed >= interval_bytes:
            entries.append((offset, position, newest_ms))
            indexed = position
        newest_ms = max_ms if max_ms > newest_ms else newest_ms
        offset, position = next_offset, position + size
    if not batches:
        return [], 0
    _write_placed(log, segment, batches)
    size = segment.extend_to(position, offset, newest_ms, entries, index, now_ms)
    for header, base in headers:
        log.producers.record(header, base, now_ms)
    log.advance_end(offset, size)
    return base_offsets, size


def _write_placed(log: Log, segment: Segment, batches: Sequence[memoryview]) -> None:
    """Write batches that have their offsets; take the offsets back if that fails."""
    try:
        log.write(segment, batches[0] if len(batches) == 1 else b"".join(batches))
    except BaseException:
        for batch in batches:
            OFFSET_LENGTH_EPOCH.pack_into(batch, 0, 0, len(batch) - LOG_OVERHEAD_BYTES, -1)
        raise


def _is_next(producers: Producers, header: BatchHeader, now_ms: int) -> bool:
    """Return whether a producer's batch is new, and neither begins a transaction nor bypasses its open one."""
    opened = producers.transactions.open
    if (opened or header.attributes & TRANSACTIONAL_FLAG) and not _continues_transaction(
        header, opened.get(header.producer_id)
    ):
        return False
    return header.base_sequence >= 0 and header.producer_epoch >= 0 and producers.check(header, now_ms) is None


def _continues(headers: Sequence[tuple[BatchHeader, int]], header: BatchHeader) -> bool:
    """Return whether a batch follows the last one, which its producer sent in the same way."""
    if not headers:
        return False
    before, _ = headers[-1]
    return (
        header.producer_id == before.producer_id
        and header.producer_epoch == before.producer_epoch
        and not (header.attributes ^ before.attributes) & TRANSACTIONAL_FLAG
        and header.base_sequence == (before.last_sequence + 1) & SEQUENCE_MASK
    )


def _continues_transaction(header: BatchHeader, known: Producer | None) -> bool:
    """Return whether a batch neither begins a transaction nor bypasses the open one of its producer."""
    if known is None:
        return not header.is_transactional
    return header.is_transactional and known.epoch == header.producer_epoch


_EMPTY_OFFSETS_MAX = 2**31 - 1


def append_replica(log: Log, batches: Buffer, leader_epoch: int, compacted_until: int, files: Files) -> None:
    """Validate batches from a leader and write them at the end of the log; nothing is synced yet."""
    headers, in_row = _check_replicated(log, batches, leader_epoch)
    start_offset = log.start_offset
    if not in_row:
        if headers[0].base_offset < start_offset == log.end_offset:
            # The leader's log starts within a batch; this log must start there too.
            log.maintenance.truncate_now(begin_restart(log, headers[0].base_offset, files))
        batches = _align_to_end(log, batches, headers)
        headers = list(iterate_headers(batches))
    if not headers:
        return
    now_ms = log.clock.now_ms()
    segment = log.segment_for(len(batches), headers[-1].next_offset, now_ms)
    index = log.write(segment, memoryview(batches))
    start = segment.size
    if not start:
        segment.first_append_ms = now_ms
    segment.last_append_ms = now_ms
    interval_bytes = log.settings.index_interval_bytes
    for header in headers:
        log.epochs.begin(header.leader_epoch, header.base_offset)
        segment.add_batch(header, header.base_offset, start + header.position, index, interval_bytes)
        if header.producer_id >= 0:
            append_time_ms = header.max_timestamp_ms if header.attributes & TIMESTAMP_TYPE_FLAG else -1
            log.producers.take(header, batches, header.base_offset, now_ms, append_time_ms)
    log.advance_end(headers[-1].next_offset, segment.size - start)
    log.settle_transactions()
    if log.settings.compacts and compacted_until > log.superseded_by and has_gaps(headers):
        log.record_superseding(compacted_until)
    if log.start_offset < start_offset:
        log.delete_before(start_offset)


def has_gaps(headers: Iterable[BatchHeader]) -> bool:
    """Whether compaction has removed records of contiguous batches."""
    return any(header.record_count <= header.last_offset_delta for header in headers)


def _check_replicated(log: Log, batches: Buffer, leader_epoch: int) -> tuple[list[BatchHeader], bool]:
    """Return the headers of valid batches whose epochs may follow those of the log, and whether they are contiguous."""
    headers: list[BatchHeader] = []
    latest, expected, in_row = int(log.latest_epoch), int(log.end_offset), True
    for header in iterate_headers(batches):
        check_offsets(header)
        check_crc(batches, header)
        if not latest <= header.leader_epoch <= leader_epoch:
            raise CorruptBatch(
                f"{log.partition}: the leader of epoch {leader_epoch} sent a batch of epoch {header.leader_epoch} "
                f"to follow one of epoch {latest}"
            )
        if header.base_offset != expected:
            in_row = False
        latest, expected = header.leader_epoch, int(header.next_offset)
        headers.append(header)
    return headers, in_row


def _align_to_end(log: Log, batches: Buffer, headers: list[BatchHeader]) -> bytearray:
    """Return the batches so that they are contiguous and begin where the log ends."""
    aligned = bytearray()
    expected = int(log.end_offset)
    for header in headers:
        if header.next_offset <= expected:
            # The log already has it.
            continue
        if header.base_offset < expected and header.record_count:
            raise CorruptBatch(
                f"{log.partition} ends at {expected}, within the batch of offsets {header.base_offset} to "
                f"{header.last_offset} that the leader sent"
            )
        if header.base_offset < expected:
            aligned += empty_batch(expected, header.next_offset, header.leader_epoch)
        else:
            while expected < header.base_offset:
                after = min(int(header.base_offset), expected + _EMPTY_OFFSETS_MAX)
                aligned += empty_batch(expected, after, header.leader_epoch)
                expected = after
            aligned += memoryview(batches)[header.position : header.end_position]
        expected = int(header.next_offset)
    return aligned
