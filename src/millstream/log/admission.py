"""What a batch must be before it enters the log. Nothing here looks at single records."""

from __future__ import annotations

from millstream.model.errors import BatchTooLarge, InvalidBatch
from millstream.records.batch import BatchHeader, Buffer, iterate_headers, read_header


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
    if header.base_offset != 0:
        raise InvalidBatch(f"the base offset of a record batch from a client is 0, not {header.base_offset}")
    if header.producer_id >= 0 and (header.base_sequence < 0 or header.producer_epoch < 0):
        raise InvalidBatch(
            f"producer {header.producer_id} sent epoch {header.producer_epoch} and sequence {header.base_sequence}; "
            "both must be 0 or more"
        )
