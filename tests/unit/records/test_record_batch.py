"""The header of a batch, and the batches of a fetch response."""

from __future__ import annotations

import struct

import pytest

from millstream.core.errors import CorruptBatch, InvalidBatch, UnsupportedCompression
from millstream.protocol.records.batch import (
    HEADER_BYTES,
    check_crc,
    iterate_headers,
    iterate_whole_headers,
    place_batch,
    read_header,
    seal_batch,
    stamp_append_time,
)
from millstream.protocol.records.record import NewRecord, encode_batch


def make_batch(base_offset: int = 0) -> bytearray:
    return encode_batch([NewRecord(b"k", b"v", (), 7), NewRecord(None, b"w", (), 3)], base_offset=base_offset)


def test_a_header_describes_its_batch() -> None:
    batch = encode_batch(
        [NewRecord(b"k", b"v", (), 7), NewRecord(None, b"w", (), 9)],
        base_offset=40,
        producer_id=5,
        producer_epoch=2,
        base_sequence=2**31 - 1,
        transactional=True,
    )
    header = read_header(batch)
    check_crc(batch, header)
    assert (header.base_offset, header.last_offset, header.next_offset) == (40, 41, 42)
    assert (header.base_timestamp_ms, header.max_timestamp_ms, header.record_count) == (7, 9, 2)
    assert (header.producer_id, header.producer_epoch, header.base_sequence, header.last_sequence) == (
        5,
        2,
        2**31 - 1,
        0,
    )
    assert header.is_transactional
    assert not header.is_control
    assert header.size_bytes == header.end_position == len(batch)


def test_a_batch_without_a_producer_has_no_sequence() -> None:
    assert read_header(make_batch()).last_sequence == -1


def test_setting_the_offset_keeps_the_crc_valid() -> None:
    batch = make_batch()
    place_batch(batch, read_header(batch), 1234, 9)
    header = read_header(batch)
    check_crc(batch, header)
    assert (header.base_offset, header.leader_epoch) == (1234, 9)


def test_stamping_a_batch_updates_its_crc() -> None:
    batch = make_batch()
    stamp_append_time(batch, read_header(batch), 99)
    header = read_header(batch)
    check_crc(batch, header)
    assert header.max_timestamp_ms == 99


def test_a_changed_byte_is_detected() -> None:
    batch = make_batch()
    batch[-1] ^= 1
    with pytest.raises(CorruptBatch, match="CRC-32C"):
        check_crc(batch, read_header(batch))


@pytest.mark.parametrize(
    ("at", "layout", "value", "error", "message"),
    [
        (16, ">b", 1, CorruptBatch, "magic is 1"),
        (8, ">i", 48, CorruptBatch, "below the size"),
        (8, ">i", -1, CorruptBatch, "below the size"),
        (8, ">i", 2**31 - 1, CorruptBatch, "cut off"),
        (23, ">i", -1, CorruptBatch, "last offset delta -1"),
        (57, ">i", -1, CorruptBatch, "-1 records"),
        (21, ">h", 5, UnsupportedCompression, "codec 5"),
    ],
)
def test_an_invalid_header_is_refused(at: int, layout: str, value: int, error: type[Exception], message: str) -> None:
    batch = make_batch()
    struct.pack_into(layout, batch, at, value)
    with pytest.raises(error, match=message):
        read_header(batch)


def test_a_truncated_header_is_refused() -> None:
    with pytest.raises(CorruptBatch, match="at least 61"):
        read_header(make_batch()[: HEADER_BYTES - 1])


def test_a_response_may_end_within_a_batch() -> None:
    response = make_batch() + make_batch(2) + make_batch(4)
    size = len(make_batch())
    for end in range(len(response) + 1):
        assert [header.base_offset for header in iterate_whole_headers(response[:end])] == [0, 2, 4][: end // size]


def test_a_log_may_not_end_within_a_batch() -> None:
    assert len(list(iterate_headers(make_batch() + make_batch()))) == 2
    with pytest.raises(CorruptBatch):
        list(iterate_headers(make_batch() + make_batch()[:-1]))


@pytest.mark.parametrize("base_offset", [-1, 2**63 - 2])
def test_invalid_offsets_are_refused(base_offset: int) -> None:
    with pytest.raises(CorruptBatch, match="offsets"):
        list(iterate_whole_headers(make_batch(base_offset)))


def test_numbers_that_overflow_a_header_are_refused() -> None:
    with pytest.raises(InvalidBatch, match="does not fit"):
        encode_batch([NewRecord(b"", b"", (), 2**63)])
    with pytest.raises(InvalidBatch, match="does not fit"):
        seal_batch(
            bytearray(HEADER_BYTES),
            base_offset=0,
            attributes=0,
            last_offset_delta=0,
            base_timestamp_ms=0,
            max_timestamp_ms=0,
            producer_id=0,
            producer_epoch=2**15,
            base_sequence=0,
            record_count=1,
        )
