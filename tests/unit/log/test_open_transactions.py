"""The transaction state of a partition, against a model that rereads the whole log each time."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.log.producers import Producers
from millstream.broker.log.transactions import AbortedTransaction
from millstream.core.errors import (
    FencedProducer,
    InvalidTransactionState,
    OutOfOrderSequence,
    TransactionCoordinatorFenced,
    UnknownLeaderEpoch,
)
from millstream.core.ids import ProducerEpoch, ProducerId
from millstream.protocol.records.batch import BatchHeader, read_header
from millstream.protocol.records.control import Marker, encode_marker
from millstream.protocol.records.record import NewRecord, encode_batch

HOUR_MS = 3_600_000
SEVEN = 7


def batch_of(
    producer_id: int, epoch: int = 0, sequence: int = 0, *, transactional: bool = True, records: int = 1
) -> tuple[BatchHeader, bytearray]:
    batch = encode_batch(
        [NewRecord(None, b"v")] * records,
        producer_id=producer_id,
        producer_epoch=epoch,
        base_sequence=sequence,
        transactional=transactional,
    )
    return read_header(batch), batch


def marker_of(
    producer_id: int, epoch: int = 0, *, commit: bool = True, coordinator: int = 0, bumps: bool = False
) -> Marker:
    return Marker(
        producer_id=ProducerId(producer_id),
        producer_epoch=ProducerEpoch(epoch),
        commit=commit,
        coordinator_epoch=coordinator,
        bumps_epoch=bumps,
    )


def write(producers: Producers, offset: int, producer_id: int, epoch: int = 0, sequence: int = 0) -> None:
    header, batch = batch_of(producer_id, epoch, sequence)
    producers.take(header, batch, offset, 0)


def end(producers: Producers, offset: int, marker: Marker) -> None:
    assert producers.check_marker(marker)
    batch = encode_marker(marker, 0)
    producers.take(read_header(batch), batch, offset, 0)


def aborted(producers: Producers) -> list[tuple[int, int, int]]:
    return [tuple(transaction)[:3] for transaction in producers.transactions.aborted]  # type: ignore[misc]


# -- admission --------------------------------------------------------------------------------------------------


def test_a_transaction_starts_only_under_the_guard_of_its_verification() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    header, batch = batch_of(SEVEN)
    with pytest.raises(InvalidTransactionState):
        producers.check_client_batch_order(header, 0, None)
    guard = producers.start_guard(SEVEN, 0, 0, 0, bumps_epoch=False)
    assert guard is not None
    assert producers.check_client_batch_order(header, 0, guard) is None
    producers.take(header, batch, 0, 0)

    assert producers.start_guard(SEVEN, 0, 1, 0, bumps_epoch=False) is None
    assert producers.check_client_batch_order(batch_of(SEVEN, 0, 1)[0], 0, None) is None


def test_a_marker_invalidates_the_guard() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    guard = producers.start_guard(SEVEN, 0, 0, 0, bumps_epoch=False)
    end(producers, 0, marker_of(SEVEN, commit=False))
    with pytest.raises(InvalidTransactionState):
        producers.check_client_batch_order(batch_of(SEVEN)[0], 0, guard)
    later = producers.start_guard(SEVEN, 0, 0, 0, bumps_epoch=False)
    assert later is not None
    assert later is not guard
    with pytest.raises(InvalidTransactionState):
        producers.check_client_batch_order(batch_of(SEVEN)[0], 0, guard)


@pytest.mark.parametrize("verified", [(1, 2), (2, 1)])
def test_of_batches_verified_together_the_first_begins_the_transaction(verified: tuple[int, int]) -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    guard = [producers.start_guard(SEVEN, 0, sequence, 0, bumps_epoch=False) for sequence in verified][-1]
    with pytest.raises(OutOfOrderSequence):
        producers.check_client_batch_order(batch_of(SEVEN, 0, 2)[0], 0, guard)
    assert producers.check_client_batch_order(batch_of(SEVEN, 0, 1)[0], 0, guard) is None


def test_under_version_2_an_unknown_producer_starts_at_zero() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    guard = producers.start_guard(SEVEN, 0, 5, 0, bumps_epoch=True)
    with pytest.raises(OutOfOrderSequence):
        producers.check_client_batch_order(batch_of(SEVEN, 0, 5)[0], 0, guard)


def test_a_non_transactional_batch_is_refused_while_a_transaction_is_open() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    write(producers, 0, SEVEN)
    with pytest.raises(InvalidTransactionState):
        producers.check_client_batch_order(batch_of(SEVEN, 0, 1, transactional=False)[0], 0, None)
    end(producers, 1, marker_of(SEVEN))
    assert producers.check_client_batch_order(batch_of(SEVEN, 0, 1, transactional=False)[0], 0, None) is None


def test_a_retry_after_the_end_is_a_duplicate() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    write(producers, 0, SEVEN)
    end(producers, 1, marker_of(SEVEN))
    first = producers.check_client_batch_order(batch_of(SEVEN)[0], 0, None)
    assert first is not None
    assert first.base_offset == 0


def test_a_marker_with_a_higher_epoch_fences_the_previous_one() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    write(producers, 0, SEVEN)
    end(producers, 1, marker_of(SEVEN, 1, bumps=True))
    with pytest.raises(FencedProducer):
        producers.start_guard(SEVEN, 0, 1, 0, bumps_epoch=True)
    with pytest.raises(FencedProducer):
        producers.check_client_batch_order(batch_of(SEVEN, 0, 1)[0], 0, None)
    assert producers.start_guard(SEVEN, 1, 0, 0, bumps_epoch=True) is not None


# -- markers ----------------------------------------------------------------------------------------------------


def test_old_markers_are_refused_and_repeated_ones_change_nothing() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    write(producers, 0, SEVEN, 3)
    end(producers, 1, marker_of(SEVEN, 4, coordinator=5, bumps=True))

    assert not producers.check_marker(marker_of(SEVEN, 4, coordinator=5, bumps=True))
    with pytest.raises(FencedProducer):
        producers.check_marker(marker_of(SEVEN, 3, coordinator=5))
    with pytest.raises(TransactionCoordinatorFenced):
        producers.check_marker(marker_of(SEVEN, 4, coordinator=4))
    assert producers.check_marker(marker_of(SEVEN, 4, coordinator=6))


def test_a_coordinator_epoch_that_never_existed_is_ignored() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    made_up = 2**31 - 1
    with pytest.raises(UnknownLeaderEpoch):
        producers.check_marker(replace(marker_of(SEVEN, coordinator=6), latest_coordinator=5))
    write(producers, 0, SEVEN)
    end(producers, 1, marker_of(SEVEN, coordinator=made_up))
    write(producers, 2, SEVEN, sequence=1)
    of_a_tool = producers.check_marker(replace(marker_of(SEVEN, coordinator=made_up), latest_coordinator=5))
    assert of_a_tool is not None
    assert of_a_tool.coordinator_epoch == 5
    end(producers, 3, replace(marker_of(SEVEN, coordinator=4), latest_coordinator=5))
    assert not producers.open_transactions()
    with pytest.raises(TransactionCoordinatorFenced):
        producers.check_marker(replace(marker_of(SEVEN, coordinator=3), latest_coordinator=5))


def test_a_late_marker_does_not_end_the_next_transaction() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    write(producers, 0, SEVEN, 0)
    end(producers, 1, marker_of(SEVEN, 1, bumps=True))
    write(producers, 2, SEVEN, 1)
    with pytest.raises(FencedProducer):
        producers.check_marker(marker_of(SEVEN, 1, bumps=True))


def test_a_producer_with_an_open_transaction_never_expires() -> None:
    producers = Producers(expiry_ms=10, producers_max=2)
    write(producers, 0, 1)
    for producer_id in (2, 3, 4):
        header, batch = batch_of(producer_id, transactional=False)
        producers.take(header, batch, producer_id, 5)
    producers.expire(1000)

    assert [known.producer_id for known in producers] == [1]
    with pytest.raises(OutOfOrderSequence):
        producers.check(batch_of(1, 0, 5)[0], 1000)


def test_open_transactions_beyond_the_checkpoint_limit_are_restored() -> None:
    producers = Producers(expiry_ms=HOUR_MS, producers_max=2)
    for at in range(4):
        write(producers, at, at + 1)
    packed, transactions = producers.pack(), producers.pack_transactions()
    producers = Producers(expiry_ms=HOUR_MS, producers_max=2)
    producers.unpack(packed)
    producers.unpack_transactions(transactions)
    assert [transaction.producer_id for transaction in producers.open_transactions()] == [1, 2, 3, 4]


def test_a_marker_lost_by_the_disk_must_be_written_again() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    write(producers, 0, SEVEN)
    end(producers, 1, marker_of(SEVEN, 1, commit=False))
    producers.drop_range(1, 2)
    assert producers.has_open(SEVEN, 0)
    assert aborted(producers) == []
    assert producers.check_marker(marker_of(SEVEN, 1, commit=False))

    end(producers, 2, marker_of(SEVEN, 1))
    write(producers, 3, SEVEN, 1)
    end(producers, 4, marker_of(SEVEN, 2))
    producers.drop_range(2, 3)
    assert not producers.has_open(SEVEN, 0)
    known = producers.get(SEVEN)
    assert known is not None
    assert known.epoch == 2


def test_the_list_for_an_offset_range_stops_where_nothing_can_follow() -> None:
    producers = Producers(expiry_ms=HOUR_MS)
    for at in range(100):
        write(producers, 2 * at, at)
        end(producers, 2 * at + 1, marker_of(at, commit=False))
    transactions = producers.transactions.aborted.overlapping(10, 13)

    assert [transaction.producer_id for transaction in transactions] == [5, 6]


# -- the model --------------------------------------------------------------------------------------------------


class Data(NamedTuple):
    producer: int
    epoch: int
    sequence: int


class End(NamedTuple):
    producer: int
    epoch: int
    commit: bool
    coordinator: int


class Known(NamedTuple):
    """The state that the model derives by reading a log from its start."""

    epochs: dict[int, int]
    coordinators: dict[int, int]
    open: dict[int, int]
    aborted: list[AbortedTransaction]
    ended: list[tuple[int, int]]


def read_all(log: list[Data | End]) -> Known:
    known = Known({}, {}, {}, [], [])
    for offset, entry in enumerate(log):
        known.epochs[entry.producer] = entry.epoch
        if isinstance(entry, Data):
            known.open.setdefault(entry.producer, offset)
            continue
        known.coordinators[entry.producer] = entry.coordinator
        first = known.open.pop(entry.producer, None)
        if first is not None:
            known.ended.append((first, offset))
            if not entry.commit:
                stable = min(known.open.values(), default=offset + 1)
                known.aborted.append(AbortedTransaction(entry.producer, first, offset, stable))
    return known


class Pair:
    """The log as a list, and the state of `Producers`."""

    def __init__(self) -> None:
        self.log: list[Data | End] = []
        self.producers = Producers(expiry_ms=HOUR_MS)
        self.watermark = 0
        self.start = 0

    def data(self, producer: int) -> None:
        epoch = read_all(self.log).epochs.get(producer, 0)
        written = [
            entry
            for entry in self.log
            if isinstance(entry, Data) and (entry.producer, entry.epoch) == (producer, epoch)
        ]
        entry = Data(producer, epoch, len(written))
        write(self.producers, len(self.log), *entry)
        self.log.append(entry)

    def end(self, producer: int, bump: int, commit: bool, coordinator: int) -> None:
        known = read_all(self.log)
        entry = End(
            producer,
            known.epochs.get(producer, 0) + bump,
            commit,
            known.coordinators.get(producer, 0) + coordinator,
        )
        marker = marker_of(producer, entry.epoch, commit=commit, coordinator=entry.coordinator)
        if self.producers.check_marker(marker):
            end(self.producers, len(self.log), marker)
            self.log.append(entry)

    def advance(self, count: int) -> None:
        self.watermark = min(len(self.log), self.watermark + count)
        self.producers.transactions.settle(self.watermark)

    def cut(self, count: int) -> None:
        point = max(self.watermark, len(self.log) - count)
        del self.log[point:]
        assert self.producers.truncate(point)

    def delete(self, count: int) -> None:
        self.start = min(self.watermark, self.start + count)
        self.producers.transactions.cut_before(self.start)

    def reopen(self) -> None:
        packed, transactions = self.producers.pack(), self.producers.pack_transactions()
        self.producers = Producers(expiry_ms=HOUR_MS)
        self.producers.unpack(packed)
        self.producers.unpack_transactions(transactions)

    def check(self) -> None:
        known, transactions = read_all(self.log), self.producers.transactions
        assert {id_: transaction.open_from for id_, transaction in transactions.open.items()} == known.open
        assert list(transactions.open) == sorted(known.open, key=known.open.__getitem__)
        assert list(transactions.aborted) == [
            transaction for transaction in known.aborted if transaction.marker_offset >= self.start
        ]
        assert {producer.producer_id: producer.epoch for producer in self.producers} == known.epochs
        assert {
            producer.producer_id: producer.coordinator_epoch
            for producer in self.producers
            if producer.coordinator_epoch >= 0
        } == known.coordinators
        unknown = [first for first, marker in known.ended if marker >= self.watermark]
        stable = min([self.watermark, *known.open.values(), *unknown])
        assert transactions.stable_offset(self.watermark) == stable

    def check_ranges(self) -> None:
        known, transactions = read_all(self.log), self.producers.transactions
        for first in range(self.start, len(self.log) + 1):
            for after in range(first, len(self.log) + 1):
                expected = [
                    transaction
                    for transaction in known.aborted
                    if transaction.first_offset < after and transaction.marker_offset >= first
                ]
                assert transactions.aborted.overlapping(first, after) == expected


PRODUCERS = st.integers(1, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("data"), PRODUCERS),
        st.tuples(st.just("data"), PRODUCERS),
        st.tuples(st.just("end"), PRODUCERS, st.integers(0, 1), st.booleans(), st.integers(0, 1)),
        st.tuples(st.just("advance"), st.integers(1, 6)),
        st.tuples(st.just("cut"), st.integers(1, 6)),
        st.tuples(st.just("delete"), st.integers(1, 6)),
        st.tuples(st.just("reopen")),
    ),
    min_size=12,  # Without it, lists have five steps on average.
    max_size=30,
)


@given(STEPS)
def test_open_and_aborted_transactions_equal_those_of_the_model(steps: list[tuple[object, ...]]) -> None:
    pair = Pair()
    for name, *arguments in steps:
        getattr(pair, str(name))(*arguments)
        pair.check()
    pair.check_ranges()
