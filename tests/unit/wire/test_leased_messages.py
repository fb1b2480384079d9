"""Only leased messages are read from the batches that come with leases."""

from __future__ import annotations

from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.ids import OffsetRange
from millstream.protocol.private.leasing import LeaseResponse
from millstream.protocol.private.subscription_messages import LeasedRange, PartitionMessages, ReceiveResponse
from millstream.protocol.private.subscriptions import leased_messages
from millstream.protocol.records.batch import (
    COMPRESSION_NONE,
    COMPRESSION_ZSTD,
    HEADER_BYTES,
    iterate_headers,
    seal_batch,
)
from millstream.protocol.records.record import NewRecord, decode_batch, decode_records, encode_batch

TOPIC_ID = UUID(int=7)


def _batches(sizes: list[tuple[int, int]]) -> bytes:
    """Batches of so many records, each after a gap."""
    made, offset = bytearray(), 0
    for hole, count in sizes:
        offset += hole
        compression = COMPRESSION_ZSTD if count % 2 else COMPRESSION_NONE
        records = [NewRecord(b"k", b"%d" % (offset + at), (("h", b"x"),), 1000 + at) for at in range(count)]
        made += encode_batch(records, base_offset=offset, compression=compression)
        offset += count
    return bytes(made)


@settings(max_examples=80)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 8)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(1, 6), st.integers(0, 5)), max_size=8),
)
def test_exactly_the_leased_messages_are_read(sizes: list[tuple[int, int]], spans: list[tuple[int, int]]) -> None:
    batches = _batches(sizes)
    leases, at = [], -1
    for number, (gap, length) in enumerate(spans):
        first = at + gap
        at = first + length
        leases.append(LeasedRange(first, at + 1, number + 1, 5000 + number))
    part = PartitionMessages("orders", TOPIC_ID.bytes, 2, leases, batches)
    expected = [
        (lease.attempt, lease.deadline_ms, record)
        for record in decode_records(batches)
        for lease in leases
        if lease.start <= record.offset < lease.end
    ]
    messages = leased_messages(None, LeaseResponse(ReceiveResponse(0, None, [part]), 0.0))
    assert [(message.attempt, message.deadline_ms, message.record) for message in messages] == expected
    assert all((message.topic, message.topic_id, message.partition) == ("orders", TOPIC_ID, 2) for message in messages)


def test_a_compacted_batch_is_read_by_offset() -> None:
    # Compaction keeps the offsets of the remaining records: here 0 to 3 of a batch that ended at 9.
    batch = encode_batch([NewRecord(None, b"%d" % at, (), 0) for at in range(4)])
    (header,) = iterate_headers(batch)
    seal_batch(
        batch,
        base_offset=0,
        attributes=0,
        last_offset_delta=9,
        base_timestamp_ms=0,
        max_timestamp_ms=0,
        producer_id=-1,
        producer_epoch=-1,
        base_sequence=-1,
        record_count=4,
    )
    (header,) = iterate_headers(batch)
    assert header.size_bytes > HEADER_BYTES
    assert [record.offset for record in decode_batch(batch, header, ranges=(OffsetRange(2, 9),))] == [2, 3]
    assert [record.offset for record in decode_batch(batch, header, ranges=(OffsetRange(0, 2),))] == [0, 1]
