"""Small batches for simulated producers, built without compiled code so that a simulation starts quickly."""

from __future__ import annotations

from millstream.protocol.records.batch import HEADER_BYTES, TRANSACTIONAL_FLAG, seal_batch


def make_batch(
    values: list[bytes],
    *,
    now_ms: int,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> bytes:
    records = b"".join(_record(delta, value) for delta, value in enumerate(values))
    batch = bytearray(HEADER_BYTES) + records
    seal_batch(
        batch,
        base_offset=0,
        attributes=TRANSACTIONAL_FLAG if transactional else 0,
        last_offset_delta=len(values) - 1,
        base_timestamp_ms=now_ms,
        max_timestamp_ms=now_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(values),
    )
    return bytes(batch)


def _record(delta: int, value: bytes) -> bytes:
    """Lengths are below 32 and deltas below 64, so every number takes one byte."""
    body = bytes((0, 0, 2 * delta, 1, 2 * len(value))) + value + b"\0"
    return bytes((2 * len(body),)) + body
