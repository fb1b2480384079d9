"""Record batches for tests that set at most one of their fields."""

from __future__ import annotations

from millstream.protocol.records.record import NewRecord, encode_batch


def encode_values(
    *values: bytes,
    timestamp_ms: int = 1000,
    producer_id: int = -1,
    producer_epoch: int = 0,
    sequence: int = -1,
    transactional: bool = False,
    control: bool = False,
) -> bytearray:
    """Encode a batch with a record for each value, or with one record; the epoch is used if a producer is named."""
    return encode_batch(
        [NewRecord(None, value, (), timestamp_ms) for value in values or (b"v",)],
        producer_id=producer_id,
        producer_epoch=-1 if producer_id < 0 else producer_epoch,
        base_sequence=sequence,
        transactional=transactional,
        control=control,
    )
