"""Every decoder skips the records of aborted transactions, and nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.core.ids import ProducerEpoch, ProducerId
from millstream.protocol.records.batch import place_batch, read_header
from millstream.protocol.records.control import Marker, encode_marker
from millstream.protocol.records.decoder import decode_columns
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch

Step = tuple[int, bool | None, int]
STEPS = st.lists(st.tuples(st.integers(0, 3), st.sampled_from([None, None, True, False]), st.integers(1, 3)))
"""A producer, 0 for none; None to write so many records, or how its transaction ends."""


def log_of(steps: list[Step]) -> tuple[bytes, list[tuple[int, int]], list[int]]:
    """A log, its aborted transactions, and the offsets of committed and non-transactional records."""
    data = bytearray()
    opened: dict[int, list[int]] = {}
    aborted: list[tuple[int, int]] = []
    committed: list[int] = []
    offset = 0
    for producer, ending, count in steps:
        if ending is not None and producer:
            marker = Marker(
                producer_id=ProducerId(producer),
                producer_epoch=ProducerEpoch(0),
                commit=ending,
                coordinator_epoch=0,
            )
            batch = encode_marker(marker, 0)
            offsets = opened.pop(producer, [])
            if ending:
                committed += offsets
            elif offsets:
                aborted.append((producer, offsets[0]))
            count = 1
        else:
            batch = encode_batch(
                [NewRecord(None, b"v")] * count, producer_id=producer or -1, transactional=bool(producer)
            )
            offsets = list(range(offset, offset + count))
            if producer:
                opened.setdefault(producer, []).extend(offsets)
            else:
                committed += offsets
        place_batch(batch, read_header(batch), offset, 0)
        data += batch
        offset += count
    for offsets in opened.values():
        committed += offsets
    return bytes(data), aborted, sorted(committed)


@settings(deadline=None)
@given(STEPS)
def test_every_decoder_skips_aborted_records(steps: list[Step]) -> None:
    data, aborted, committed = log_of(steps)

    assert [record.offset for record in decode_records(data, aborted=aborted)] == committed
    columns = decode_columns(data, aborted=aborted)
    assert [offset for column in columns for offset in column.offsets.tolist()] == committed


def test_without_the_list_everything_is_read() -> None:
    data, aborted, _ = log_of([(1, None, 2), (1, False, 1), (0, None, 1)])

    assert aborted == [(1, 0)]
    assert [record.offset for record in decode_records(data)] == [0, 1, 3]
    assert [record.offset for record in decode_records(data, control=True)] == [0, 1, 2, 3]
    assert [record.offset for record in decode_records(data, aborted=aborted, control=True)] == [2, 3]
