"""Checks of batches before they are appended.

Records are decoded only on topics that need it (`TopicSettings.reads_records`), and in a batch that is refused for some
of its records, to name these.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.core.errors import BatchRejected, BatchTooLarge, InvalidBatch, InvalidTimestamp, RecordError
from millstream.core.topic import TopicSettings
from millstream.protocol.records.batch import HEADER_BYTES, BatchHeader, Buffer, iterate_headers, read_header
from millstream.protocol.records.compression import size_bound
from millstream.protocol.records.record import records_section, walk_records

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
            f"the record batch has {header.length + 12} bytes, max.message.bytes allows {max_message_bytes}"
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
