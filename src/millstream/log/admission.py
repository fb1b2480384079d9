"""What a batch must be before it enters the log. Only on compacted topics are records looked at, for their keys."""

from __future__ import annotations

from millstream.model.errors import BatchRejected, BatchTooLarge, InvalidBatch, InvalidTimestamp
from millstream.model.topic import TopicSettings
from millstream.records.batch import HEADER_BYTES, BatchHeader, Buffer, iterate_headers, read_header
from millstream.records.compression import size_bound
from millstream.records.raw_record import first_without_key, records_section

KEYED_RECORDS_MAX = 100_000
"""Of more records keys are not looked for: a compacted topic refuses the batch."""

_LIGHT_RECORDS_MAX = 2_000
_LIGHT_BYTES_MAX = 1024 * 1024


def read_headers(batches: Buffer, *, internal: bool, max_message_bytes: int) -> list[BatchHeader]:
    """Read the headers of everything that is to be appended; a client may send one batch at a time, as in Kafka."""
    if not len(batches):
        raise InvalidBatch("there is no record batch to append")
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


def check_times(header: BatchHeader, settings: TopicSettings, now_ms: int) -> None:
    """Raise `InvalidTimestamp` for a batch whose times are too far from the broker's; -1 means that it has none."""
    oldest, newest = header.base_timestamp_ms, header.max_timestamp_ms
    if 0 <= oldest < now_ms - settings.message_timestamp_before_max_ms:
        limit = f"message.timestamp.before.max.ms allows {settings.message_timestamp_before_max_ms} ms"
        raise InvalidTimestamp(f"the batch's time {oldest} is {now_ms - oldest} ms before the broker's; {limit}")
    if newest > now_ms + settings.message_timestamp_after_max_ms:
        limit = f"message.timestamp.after.max.ms allows {settings.message_timestamp_after_max_ms} ms"
        raise InvalidTimestamp(f"the batch's time {newest} is {newest - now_ms} ms after the broker's; {limit}")


def needs_time_for_keys(batch: Buffer) -> bool:
    """Whether `check_keys` may take more than a few milliseconds."""
    try:
        header = read_header(batch)
    except BatchRejected:
        return False
    section = memoryview(batch)[HEADER_BYTES : header.end_position]
    return header.record_count > _LIGHT_RECORDS_MAX or size_bound(header.compression, section) > _LIGHT_BYTES_MAX


def check_keys(batches: Buffer, header: BatchHeader) -> None:
    """Raise `InvalidBatch` for a batch of a compacted topic with a record that has no key."""
    if header.record_count > KEYED_RECORDS_MAX:
        raise BatchTooLarge(
            f"the record batch has {header.record_count} records; on a compacted topic {KEYED_RECORDS_MAX} are the most"
        )
    section = records_section(batches, header)
    without = first_without_key(section, header.record_count)
    if without >= 0:
        raise InvalidBatch(f"record {without} of the batch has no key, and the topic is compacted by key")
