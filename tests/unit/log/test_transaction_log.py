"""A log with transactions, through kills, power failures, truncations and deletions, against a list of entries."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import NamedTuple
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millstream.broker.log.compaction import is_due
from millstream.broker.log.log import Log
from millstream.broker.log.scan import BadRange, Scan
from millstream.broker.log.store import LogStore
from millstream.core.errors import InspectionPending, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.topic import FLUSH_OS, TopicPartition, TopicSettings
from millstream.protocol.records.batch import BatchHeader
from millstream.protocol.records.control import Marker, encode_marker
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

TOPIC_ID = UUID(int=9)
WHERE = TopicPartition("orders", PartitionIndex(0))
SETTINGS = TopicSettings(segment_bytes=400, index_interval_bytes=100, flush=FLUSH_OS, retention_ms=-1)
LEADER = Epoch(1)


class Entry(NamedTuple):
    """One batch of one record; `commit` is None for data."""

    producer: int
    epoch: int
    commit: bool | None = None


LOST = Entry(-1, -1)


def open_store(files: MemoryFiles, clock: ManualClock) -> LogStore:
    return memory_store(files, clock, journal_bytes=100_000)


class Machine:
    def __init__(self) -> None:
        self.clock = ManualClock()
        self.files = MemoryFiles(open_files_max=64)
        self.entries: list[Entry] = []
        self.acknowledged = 0
        self.reopen()

    def reopen(self) -> None:
        self.store = open_store(self.files, self.clock)
        self.log: Log = self.store.open_log(TOPIC_ID, WHERE, SETTINGS)
        del self.entries[self.log.end_offset :]
        for first, after in self.log.damaged_ranges:
            # A crash may lose unsynced batches in the middle; the model does not track that.
            self.entries[first:after] = [LOST] * (after - first)
        self.acknowledged = max(self.log.start_offset, min(self.acknowledged, len(self.entries)))
        self.log.listen(acknowledged_offset=lambda: self.acknowledged)

    # -- steps ----------------------------------------------------------------------------------------------

    def epoch_of(self, producer: int) -> int:
        return max((entry.epoch for entry in self.entries if entry.producer == producer), default=0)

    def data(self, producer: int) -> None:
        epoch = self.epoch_of(producer)
        known = self.log.producers.get(producer)
        sequence = known.batches[-1].last_sequence + 1 if known and known.batches and known.epoch == epoch else 0
        guard = self.log.producers.start_guard(producer, epoch, 0, 0, bumps_epoch=False)
        if guard is not None:
            guard.lowest_sequence = sequence
        batch = encode_batch(
            [NewRecord(None, b"v", (), self.clock.now_ms())],
            producer_id=producer,
            producer_epoch=epoch,
            base_sequence=sequence,
            transactional=True,
        )
        assert not self.log.append(batch, leader_epoch=LEADER, guard=guard).duplicate
        self.entries.append(Entry(producer, epoch))

    def plain(self, size: int) -> None:
        batch = encode_batch([NewRecord(None, b"v" * size, (), self.clock.now_ms())])
        self.log.append(batch, leader_epoch=LEADER)
        self.entries.append(Entry(-1, -1))

    def end(self, producer: int, bump: int, commit: bool) -> None:
        epoch = self.epoch_of(producer) + bump
        marker = Marker(
            producer_id=ProducerId(producer),
            producer_epoch=ProducerEpoch(epoch),
            commit=commit,
            coordinator_epoch=0,
        )
        if self.log.producers.check_marker(marker):
            self.log.append(encode_marker(marker, self.clock.now_ms()), leader_epoch=LEADER, internal=True)
            self.entries.append(Entry(producer, epoch, commit))

    def sync(self) -> None:
        self.store.sync_soon(self.log)
        self.store.commit_once()

    def checkpoint(self) -> None:
        self.store.checkpoint_now(self.log)

    def acknowledge(self, count: int) -> None:
        self.acknowledged = min(len(self.entries), self.acknowledged + count)
        self.log.settle_transactions()

    def kill(self) -> None:
        self.files.kill()
        self.reopen()

    def crash(self) -> None:
        self.files.crash()
        self.reopen()

    def stop(self) -> None:
        self.store.close_now()
        self.reopen()

    def cut(self, count: int) -> None:
        point = max(int(self.log.start_offset), len(self.entries) - count)
        self.log.truncate_to(point)
        self.acknowledged = min(self.acknowledged, int(self.log.end_offset))
        del self.entries[self.log.end_offset :]

    def delete(self, count: int) -> None:
        self.log.delete_before(min(self.acknowledged, int(self.log.start_offset) + count))
        self.checkpoint()

    # -- invariants -----------------------------------------------------------------------------------------

    def expected(self, start: int) -> tuple[dict[int, int], list[tuple[int, int, int]]]:
        """The open and aborted transactions, derived from the entries."""
        opened: dict[int, int] = {}
        aborted = []
        for offset, entry in enumerate(self.entries):
            if entry.producer < 0 or offset < start:
                continue
            if entry.commit is None:
                opened.setdefault(entry.producer, offset)
            else:
                first = opened.pop(entry.producer, None)
                if first is not None and not entry.commit:
                    aborted.append((entry.producer, first, offset))
        return opened, aborted

    def check(self) -> None:
        log = self.log
        opened, aborted = self.expected(0)
        assert log.end_offset == len(self.entries)
        first_offsets = {
            transaction.producer_id: transaction.first_offset for transaction in log.producers.open_transactions()
        }
        transactions = [tuple(transaction)[:3] for transaction in log.producers.transactions.aborted]
        if log.start_offset == 0:
            assert first_offsets == opened
            assert transactions == aborted
            assert log.producers.transactions.stable_offset(self.acknowledged) == self.stable()
        else:
            # Deleted transactions are known from the state, or not at all if that was lost.
            assert set(self.expected(int(log.start_offset))[0]) <= set(first_offsets) <= set(opened)
            assert [entry[2] for entry in transactions] == [
                transaction[2] for transaction in aborted if transaction[2] >= log.start_offset
            ]

    def stable(self) -> int:
        """The first offset of a transaction without an acknowledged end, or the acknowledged offset."""
        opened: dict[int, int] = {}
        for offset, entry in enumerate(self.entries):
            if entry.producer >= 0 and entry.commit is None:
                opened.setdefault(entry.producer, offset)
            elif entry.producer >= 0 and offset < self.acknowledged:
                opened.pop(entry.producer, None)
        return min([self.acknowledged, *opened.values()])

    def check_copy(self) -> None:
        """A copy of the log knows the same transactions."""
        log = self.log
        if log.start_offset > 0 or log.damage:
            return
        copy = open_store(MemoryFiles(open_files_max=64), self.clock).open_log(TOPIC_ID, WHERE, SETTINGS)
        while copy.end_offset < log.end_offset:
            data = log.read(copy.end_offset, max_bytes=500, up_to=log.end_offset)
            copy.append_replica(bytes(data), leader_epoch=LEADER)
        assert copy.producers.open_transactions() == [
            transaction._replace(last_ms=self.clock.now_ms()) for transaction in log.producers.open_transactions()
        ]
        assert list(copy.producers.transactions.aborted) == list(log.producers.transactions.aborted)


PRODUCERS = st.integers(1, 3)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("data"), PRODUCERS),
        st.tuples(st.just("data"), PRODUCERS),
        st.tuples(st.just("end"), PRODUCERS, st.integers(0, 1), st.booleans()),
        st.tuples(st.just("end"), PRODUCERS, st.integers(0, 1), st.booleans()),
        st.tuples(st.just("plain"), st.integers(0, 150)),
        st.tuples(st.just("acknowledge"), st.integers(1, 9)),
        st.tuples(st.just("acknowledge"), st.integers(1, 9)),
        st.tuples(st.just("cut"), st.integers(1, 12)),
        st.tuples(st.just("cut"), st.integers(1, 3)),
        st.tuples(st.just("delete"), st.integers(1, 6)),
        *(st.tuples(st.just(name)) for name in ("sync", "checkpoint", "kill", "crash", "stop")),
    ),
    min_size=15,  # Without it, lists have five steps on average.
    max_size=40,
)


@settings(max_examples=3 * settings().max_examples)
@given(STEPS)
def test_a_log_knows_its_transactions_through_random_events(steps: list[tuple[object, ...]]) -> None:
    machine = Machine()
    for name, *arguments in steps:
        getattr(machine, str(name))(*arguments)
        machine.check()
    machine.check_copy()


async def test_transactions_below_a_truncation_are_read_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Truncated below a completed marker: the previous state of its transaction is only in the log."""
    trial = Machine()
    trial.data(1)
    trial.plain(10)
    trial.end(1, 0, False)
    trial.sync()
    trial.acknowledge(3)
    assert trial.log.producers.transactions.unsettled_from == 3
    loop_thread = threading.get_ident()
    read_on_loop: list[bool] = []
    scan = Scan.__iter__

    def watched(one: Scan) -> Iterator[BatchHeader | BadRange]:
        read_on_loop.append(threading.get_ident() == loop_thread)
        return scan(one)

    monkeypatch.setattr(Scan, "__iter__", watched)
    cut = trial.log.begin_truncation(2)
    assert cut is not None
    assert trial.log.end_offset == 2
    cutting = trial.store.truncate_soon(cut)
    # Nothing is readable while the aborted transactions are unknown, and no checkpoint claims that there are none.
    with pytest.raises(InspectionPending):
        trial.log.read(0, max_bytes=1000, up_to=2)
    trial.store.checkpoint_soon(trial.log)
    assert not trial.store.checkpoint_once()
    # A write or another truncation would be lost with the state that is being read; compaction would take aborted
    # records for committed ones.
    with pytest.raises(StorageFailure):
        trial.data(2)
    with pytest.raises(StorageFailure):
        trial.log.begin_truncation(1)
    assert not is_due(trial.log, 2.0)
    await cutting
    assert read_on_loop == [False]
    assert [transaction.first_offset for transaction in trial.log.producers.open_transactions()] == [0]
    assert trial.log.read(0, max_bytes=1000, up_to=2)
    trial.files.crash()
    trial.reopen()
    assert (
        trial.log.end_offset,
        [transaction.first_offset for transaction in trial.log.producers.open_transactions()],
    ) == (2, [0])
