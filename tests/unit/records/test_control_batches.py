from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.errors import CorruptBatch
from millstream.core.ids import ProducerEpoch, ProducerId
from millstream.protocol.records.batch import CONTROL_FLAG, TRANSACTIONAL_FLAG, check_crc, read_header
from millstream.protocol.records.control import Marker, encode_marker, read_marker
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch


@settings(deadline=None)
@given(
    producer_id=st.integers(0, 2**63 - 1),
    epoch=st.integers(0, 2**15 - 1),
    coordinator_epoch=st.integers(-1, 2**31 - 1),
    commit=st.booleans(),
)
def test_a_marker_round_trips(producer_id: int, epoch: int, coordinator_epoch: int, commit: bool) -> None:
    marker = Marker(
        producer_id=ProducerId(producer_id),
        producer_epoch=ProducerEpoch(epoch),
        commit=commit,
        coordinator_epoch=coordinator_epoch,
    )
    batch = encode_marker(marker, 1000)
    header = read_header(batch)
    check_crc(batch, header)

    assert read_marker(batch, header) == marker
    assert header.attributes == CONTROL_FLAG | TRANSACTIONAL_FLAG
    assert (header.base_sequence, header.record_count) == (-1, 1)


def test_the_encoding_is_that_of_kafka() -> None:
    marker = Marker(producer_id=ProducerId(1), producer_epoch=ProducerEpoch(2), commit=True, coordinator_epoch=3)
    (record,) = decode_records(encode_marker(marker, 1000), control=True)

    assert record.key == b"\0\0\0\1"
    assert record.value == b"\0\0\0\0\0\3"


def test_other_kinds_are_skipped_and_malformed_ones_refused() -> None:
    leader_change = encode_batch([NewRecord(b"\0\0\0\2", b"\0\0")], control=True)
    assert read_marker(leader_change, read_header(leader_change)) is None
    for key, value in ((b"\0", b""), (b"\0\0\0\1", b"\0"), (None, None)):
        broken = encode_batch([NewRecord(key, value)], producer_id=1, producer_epoch=0, control=True)
        with pytest.raises(CorruptBatch):
            read_marker(broken, read_header(broken))
    data = encode_batch([NewRecord(b"\0\0\0\1", b"\0\0\0\0\0\3")])
    with pytest.raises(CorruptBatch):
        read_marker(data, read_header(data))
