"""Records as bytes: found as by the decoder, kept unchanged, and refused where malformed."""

from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.core.errors import CorruptBatch
from millstream.core.ids import OffsetRange
from millstream.protocol.records.batch import DELETE_HORIZON_FLAG, check_crc, read_header
from millstream.protocol.records.record import NewRecord, decode_batch, decode_records, encode_batch, records_section
from millstream.protocol.records.rewrite import (
    can_shift,
    empty_batch,
    raw_records,
    rebuild_batch,
)

KEYS = st.none() | st.binary(max_size=200)
HEADERS = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3).map(tuple)
RECORDS = st.lists(
    st.builds(NewRecord, KEYS, KEYS, HEADERS, st.integers(-1, 2**45)),
    min_size=1,
    max_size=8,
)


@given(records=RECORDS, codec=st.sampled_from([0, 1, 2, 3, 4]), data=st.data())
def test_kept_records_are_unchanged(records: list[NewRecord], codec: int, data: st.DataObject) -> None:
    batch = encode_batch(records, base_offset=100, compression=codec, producer_id=5, producer_epoch=1, base_sequence=9)
    header = read_header(batch)
    section = records_section(batch, header)
    found_records = list(raw_records(section, header))
    before = list(decode_batch(batch, header))
    assert [(record.key, record.has_value) for record in found_records] == [
        (record.key, record.value is not None) for record in before
    ]
    chosen = data.draw(st.sets(st.sampled_from(range(len(records))), min_size=1))
    horizon_ms = data.draw(st.none() | st.integers(0, 2**50))
    chosen_records = [record for at, record in enumerate(found_records) if at in chosen]
    rebuilt = rebuild_batch(header, section, chosen_records, delete_horizon_ms=horizon_ms)
    after = read_header(rebuilt)
    check_crc(rebuilt, after)
    assert list(decode_batch(rebuilt, after)) == [record for at, record in enumerate(before) if at in chosen]
    assert after.next_offset == header.next_offset
    assert after[10:13] == header[10:13]
    assert after.compression == codec
    assert bool(after.attributes & DELETE_HORIZON_FLAG) == (horizon_ms is not None)
    bounds = sorted(data.draw(st.lists(st.integers(95, 115), max_size=6).map(lambda drawn: drawn[: len(drawn) & ~1])))
    ranges = [OffsetRange(start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True)]
    for written in (batch, rebuilt):
        expected = [
            record for record in decode_records(written) if any(start <= record.offset < end for start, end in ranges)
        ]
        assert list(decode_batch(written, read_header(written), ranges=ranges)) == expected


@given(section=st.binary(max_size=60), count=st.integers(0, 9))
def test_malformed_bytes_are_refused_or_read(section: bytes, count: int) -> None:
    header = read_header(empty_batch(0, 10, 0))._replace(record_count=count)
    with suppress(CorruptBatch):
        list(raw_records(section, header))


def test_an_empty_batch_covers_its_offsets() -> None:
    batch = empty_batch(7, 2**31, 3, producer_id=4, producer_epoch=1, base_sequence=2)
    header = read_header(batch)
    check_crc(batch, header)
    assert (header.base_offset, header.next_offset, header.leader_epoch, header.record_count) == (7, 2**31, 3, 0)
    assert list(decode_batch(batch, header)) == []


def test_times_indistinguishable_from_the_horizon_are_left_alone() -> None:
    batch = encode_batch([NewRecord(b"k", None, (), -(2**63))])
    header = read_header(batch)
    records = list(raw_records(records_section(batch, header), header))
    assert can_shift(header, records, 0)
    assert not can_shift(header, records, 1)


def test_a_truncated_section_is_refused() -> None:
    batch = encode_batch([NewRecord(b"key", b"value"), NewRecord(b"key", b"value")])
    header = read_header(batch)
    section = records_section(batch, header)
    for size in range(len(section)):
        with pytest.raises(CorruptBatch):
            list(raw_records(section[:size], header))
