"""A receiver reads exactly the leased messages out of batches."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.client.message import Lease, Message, read_leased
from millstream.core.errors import CorruptBatch
from millstream.protocol.private.subscription_messages import LeasedRange
from millstream.protocol.records.batch import HEADER_BYTES, read_header, seal_batch
from millstream.protocol.records.record import LOG_APPEND_TIME, NewRecord, decode_records, encode_batch, records_section
from millstream.protocol.records.rewrite import raw_records, rebuild_batch

OFFSET_MAX = 2**63 - 1

headers = st.lists(st.tuples(st.text(max_size=5), st.none() | st.binary(max_size=5)), max_size=3).map(tuple)
records = st.builds(
    NewRecord,
    st.none() | st.binary(max_size=200),
    st.none() | st.binary(max_size=20_000),
    headers,
    st.integers(10**12, 10**12 + 10**7),
)
batches = st.lists(st.lists(records, min_size=1, max_size=8), min_size=1, max_size=4)


class InertSettler:
    def settle(self, message: Message, verb: int, delay_ms: int | None, reason: str) -> asyncio.Future[None]:
        raise NotImplementedError


def lease() -> Lease:
    return Lease("orders", b"0" * 16, 3, settler=InertSettler(), attempt=3)


def log_of(parts: list[list[NewRecord]], compression: int = 0, timestamp_type: int = 0) -> bytes:
    log, offset = b"", 0
    for part in parts:
        log += encode_batch(part, base_offset=offset, compression=compression, timestamp_type=timestamp_type)
        offset += len(part)
    return log


@settings(max_examples=40, deadline=None)
@given(batches, st.data())
def test_only_leased_messages_are_read(parts: list[list[NewRecord]], data: st.DataObject) -> None:
    count = sum(map(len, parts))
    chosen = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    leases: list[LeasedRange] = []
    for offset in chosen:
        if leases and leases[-1].end == offset and data.draw(st.booleans()):
            leases[-1] = LeasedRange(leases[-1].start, offset + 1, 1, 0)
        else:
            leases.append(LeasedRange(offset, offset + 1, 1, 0))
    log = log_of(parts, data.draw(st.sampled_from([0, 1, 4])), data.draw(st.sampled_from([0, LOG_APPEND_TIME])))
    messages = read_leased(log, leases, lease())
    truth = [record for record in decode_records(log) if record.offset in set(chosen)]
    assert [
        (message.offset, message.timestamp_ms, message.key, message.value, message.all_headers) for message in messages
    ] == truth
    assert {message.attempt for message in messages} == {3}


@settings(max_examples=20, deadline=None)
@given(st.lists(records, min_size=2, max_size=8), st.data())
def test_compacted_batches_are_read(part: list[NewRecord], data: st.DataObject) -> None:
    whole = encode_batch(part, base_offset=100)
    header = read_header(whole)
    section = records_section(whole, header)
    positions = data.draw(st.sets(st.integers(0, len(part) - 1), min_size=1))
    log = bytes(
        rebuild_batch(
            header, section, [record for at, record in enumerate(raw_records(section, header)) if at in positions]
        )
    )
    first, last = sorted((data.draw(st.integers(95, 112)), data.draw(st.integers(95, 112))))
    messages = read_leased(log, [LeasedRange(first, last + 1, 1, 0)], lease())
    truth = [record for record in decode_records(log) if first <= record.offset <= last]
    assert [
        (message.offset, message.timestamp_ms, message.key, message.value, message.all_headers) for message in messages
    ] == truth


def test_control_batches_and_aborted_batches_are_skipped() -> None:
    new_records = [NewRecord(None, b"a", (), 1)]
    aborted = encode_batch(
        new_records, base_offset=0, producer_id=7, producer_epoch=0, base_sequence=0, transactional=True
    )
    control = encode_batch(new_records, base_offset=1, control=True)
    log = bytes(aborted + control + encode_batch([NewRecord(None, b"b", (), 1)], base_offset=2))
    everything = [LeasedRange(0, OFFSET_MAX, 0, 0)]
    assert [message.value for message in read_leased(log, everything, lease(), aborted=((7, 0),))] == [b"b"]
    assert [message.value for message in read_leased(log, everything, lease())] == [b"a", b"b"]


@pytest.mark.parametrize(
    "section", [b"\x10\x00\x00\x00\x01\x7f\x00\x00\x00", b"\x00", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01"]
)
def test_invalid_records_are_reported(section: bytes) -> None:
    batch = bytearray(HEADER_BYTES) + section
    for count in (1, 2):
        seal_batch(
            batch,
            base_offset=0,
            attributes=0,
            last_offset_delta=0 if count == 1 else 5,
            base_timestamp_ms=0,
            max_timestamp_ms=0,
            producer_id=-1,
            producer_epoch=-1,
            base_sequence=-1,
            record_count=count,
        )
        with pytest.raises(CorruptBatch):
            read_leased(bytes(batch), [LeasedRange(0, 10, 1, 0)], lease())
