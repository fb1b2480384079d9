from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.log.producers import BATCHES_REMEMBERED, Producers
from millstream.core.errors import FencedProducer, OutOfOrderSequence
from millstream.protocol.records.batch import BatchHeader, read_header
from millstream.protocol.records.record import NewRecord, encode_batch

HOUR_MS = 3_600_000
LAST_SEQUENCE = 2**31 - 1


def header(sequence: int, *, records: int = 1, producer_id: int = 7, epoch: int = 0) -> BatchHeader:
    batch = encode_batch(
        [NewRecord(None, b"v")] * records, producer_id=producer_id, producer_epoch=epoch, base_sequence=sequence
    )
    return read_header(batch)


def put(producers: Producers, batch_header: BatchHeader, offset: int, now_ms: int = 0) -> None:
    assert producers.check(batch_header, now_ms) is None
    producers.record(batch_header, offset, now_ms)


def test_a_duplicate_gets_its_original_offsets() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(0, records=3), 100)
    put(producers, header(3), 103)

    first = producers.check(header(0, records=3), 0)
    assert first is not None
    assert (first.base_offset, first.next_offset) == (100, 103)


def test_the_last_five_batches_are_remembered() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    for sequence in range(BATCHES_REMEMBERED + 1):
        put(producers, header(sequence), sequence)

    assert producers.check(header(1), 0) is not None
    with pytest.raises(OutOfOrderSequence):
        producers.check(header(0), 0)


@pytest.mark.parametrize("sequence", [5, 1, 3])
def test_a_gap_or_a_partial_duplicate_is_out_of_order(sequence: int) -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(0, records=4), 0)

    with pytest.raises(OutOfOrderSequence):
        producers.check(header(sequence), 0)


def test_any_first_sequence_of_an_unknown_producer_is_accepted() -> None:
    put(Producers(expiry_ms=HOUR_MS), header(1234), 0)


def test_sequences_wrap() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(LAST_SEQUENCE - 1, records=4), 0)
    put(producers, header(2), 4)

    assert producers.check(header(LAST_SEQUENCE - 1, records=4), 0) is not None
    put(producers, header(3), 5)


def test_sequence_zero_follows_the_maximum() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(LAST_SEQUENCE), 0)
    put(producers, header(0), 1)


def test_a_new_epoch_starts_at_zero_and_fences_the_old_one() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(0), 0)
    put(producers, header(1), 1)
    with pytest.raises(OutOfOrderSequence):
        producers.check(header(2, epoch=1), 0)
    put(producers, header(0, epoch=1), 2)

    with pytest.raises(FencedProducer):
        producers.check(header(2), 0)
    put(producers, header(1, epoch=1), 3)


def test_an_idle_producer_expires() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(0), 0, now_ms=0)
    put(producers, header(0, producer_id=8), 1, now_ms=HOUR_MS)

    assert producers.check(header(9), HOUR_MS + 1) is None
    producers.expire(HOUR_MS + 1)
    assert [producer.producer_id for producer in producers] == [8]


def test_the_longest_idle_producer_is_evicted() -> None:
    producers = Producers(expiry_ms=HOUR_MS, producers_max=2)
    put(producers, header(0, producer_id=1), 0)
    put(producers, header(0, producer_id=2), 1)
    put(producers, header(1, producer_id=1), 2)
    put(producers, header(0, producer_id=3), 3)

    assert sorted(producer.producer_id for producer in producers) == [1, 3]


def test_a_marker_raises_the_epoch_without_a_sequence() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(0), 0)
    marker = encode_batch([NewRecord(b"k", b"v")], producer_id=7, producer_epoch=3, control=True)
    producers.record(read_header(marker), 1, 0)

    known = producers.get(7)
    assert known is not None
    assert (known.epoch, known.batches) == (3, [])


def test_truncated_batches_are_forgotten() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    put(producers, header(0), 0)
    put(producers, header(1), 1)
    put(producers, header(0, producer_id=8), 2)
    producers.drop_range(1, 3)

    assert producers.get(8) is None
    put(producers, header(1), 1)


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), max_size=30))
def test_the_packed_state_round_trips(steps: list[tuple[int, int]]) -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    following: dict[int, int] = {}
    for offset, (producer_id, records) in enumerate(steps):
        sequence = following.get(producer_id, 0)
        put(producers, header(sequence, records=records, producer_id=producer_id), offset)
        following[producer_id] = sequence + records
    again = Producers(expiry_ms=HOUR_MS)
    again.unpack(producers.pack())

    assert again.pack() == producers.pack()
    for producer_id, sequence in following.items():
        assert again.check(header(sequence, producer_id=producer_id), 0) is None
