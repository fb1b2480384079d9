"""A follower's log has the same bytes as its leader's, across crashes, truncations and restarts."""

from __future__ import annotations

import os
from uuid import UUID

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from millstream.broker.log.compaction import cleanable_segments
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import CorruptBatch, PartitionClosed, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import FLUSH_OS, TopicPartition, TopicSettings
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream.protocol.records.rewrite import empty_batch
from millstream_testing.batches import encode_values
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store

TOPIC_ID = UUID(int=9)
WHERE = TopicPartition("orders", PartitionIndex(0))
EXAMPLES = int(os.environ.get("LOG_EXAMPLES", "40"))


def open_store(files: MemoryFiles, clock: ManualClock) -> LogStore:
    return memory_store(files, clock, journal_bytes=100_000)


def open_log(store: LogStore, *, segment_bytes: int = 700) -> Log:
    chosen = TopicSettings(segment_bytes=segment_bytes, index_interval_bytes=150, flush=FLUSH_OS, retention_ms=-1)
    return store.open_log(TOPIC_ID, WHERE, chosen)


def content(log: Log, *, start: int | None = None, up_to: int | None = None) -> bytes:
    """The whole content of a log as one byte string."""
    data_read, offset = bytearray(), int(log.start_offset) if start is None else start
    end = int(log.end_offset) if up_to is None else up_to
    while offset < end:
        data = bytes(log.read(offset, max_bytes=500, up_to=end))
        assert data
        for header in iterate_headers(data):
            offset = int(header.next_offset)
        data_read += data
    return bytes(data_read)


@pytest.fixture
def pair(clock: ManualClock) -> tuple[Log, Log]:
    return open_log(open_store(MemoryFiles(), clock)), open_log(open_store(MemoryFiles(), clock))


def copy(leader: Log, follower: Log, *, max_bytes: int = 10_000) -> None:
    while follower.end_offset < leader.end_offset:
        data = leader.read(follower.end_offset, max_bytes=max_bytes, up_to=leader.end_offset)
        follower.append_replica(memoryview(bytes(data)), leader_epoch=Epoch(9))


class TestTakingOver:
    def test_offsets_epochs_and_producers_are_copied(self, pair: tuple[Log, Log]) -> None:
        leader, follower = pair
        leader.append(encode_values(b"a", b"b", producer_id=5, sequence=0), leader_epoch=Epoch(1))
        leader.append(encode_values(b"c", producer_id=5, sequence=2), leader_epoch=Epoch(4))
        copy(leader, follower)
        assert content(follower) == content(leader)
        assert follower.epochs.entries() == [(1, 0), (4, 2)]
        again = follower.append(encode_values(b"c", producer_id=5, sequence=2), leader_epoch=Epoch(6))
        assert again.duplicate
        assert again.base_offset == 2

    def test_the_append_time_of_the_leader_is_kept(self, clock: ManualClock) -> None:
        stamped = TopicSettings(message_timestamp_type="LogAppendTime")
        leader = open_store(MemoryFiles(), clock).open_log(TOPIC_ID, WHERE, stamped)
        follower = open_store(MemoryFiles(), clock).open_log(TOPIC_ID, WHERE, stamped)
        first = leader.append(encode_values(b"a", producer_id=5, sequence=0), leader_epoch=Epoch(1))
        clock.advance_ms(60_000)
        copy(leader, follower)
        assert content(follower) == content(leader)
        again = follower.append(encode_values(b"a", producer_id=5, sequence=0), leader_epoch=Epoch(2))
        assert again.append_time_ms == first.append_time_ms

    def test_a_bit_flipped_in_transit_is_detected_and_nothing_is_appended(self, pair: tuple[Log, Log]) -> None:
        leader, follower = pair
        leader.append(encode_values(b"a" * 100), leader_epoch=Epoch(1))
        leader.append(encode_values(b"b" * 100), leader_epoch=Epoch(1))
        data = bytearray(leader.read(0, max_bytes=10_000, up_to=leader.end_offset))
        data[-20] ^= 4
        with pytest.raises(CorruptBatch):
            follower.append_replica(data, leader_epoch=Epoch(1))
        assert follower.end_offset == 0

    def test_epochs_neither_decrease_nor_exceed_the_leaders(self, pair: tuple[Log, Log]) -> None:
        leader, follower = pair
        leader.append(encode_values(b"a"), leader_epoch=Epoch(3))
        data = bytes(leader.read(0, max_bytes=10_000, up_to=1))
        with pytest.raises(CorruptBatch):
            follower.append_replica(data, leader_epoch=Epoch(2))
        follower.append_replica(data, leader_epoch=Epoch(3))
        older = empty_batch(1, 2, 2)
        with pytest.raises(CorruptBatch):
            follower.append_replica(older, leader_epoch=Epoch(3))

    def test_a_batch_across_the_log_end_is_refused_unless_it_is_empty(self, pair: tuple[Log, Log]) -> None:
        leader, follower = pair
        leader.append(encode_values(b"a", b"b", b"c"), leader_epoch=Epoch(1))
        follower.append_replica(empty_batch(0, 2, 1), leader_epoch=Epoch(1))
        with pytest.raises(CorruptBatch):
            follower.append_replica(bytes(leader.read(0, max_bytes=999, up_to=3)), leader_epoch=Epoch(1))
        follower.append_replica(empty_batch(0, 8, 1), leader_epoch=Epoch(1))
        assert follower.end_offset == 8
        assert [(h.base_offset, h.next_offset) for h in iterate_headers(content(follower))] == [(0, 2), (2, 8)]

    def test_missing_offsets_are_filled(self, pair: tuple[Log, Log], clock: ManualClock) -> None:
        _, follower = pair
        follower.append_replica(empty_batch(0, 2, 1), leader_epoch=Epoch(3))
        follower.append_replica(empty_batch(10, 12, 3), leader_epoch=Epoch(3))
        assert follower.end_offset == 12
        assert follower.epochs.entries() == [(1, 0), (3, 2)]
        assert [h.base_offset for h in iterate_headers(content(follower))] == [0, 2, 10]

    def test_a_closed_log_refuses_appends(self, pair: tuple[Log, Log]) -> None:
        _, follower = pair
        follower.close()
        with pytest.raises(PartitionClosed):
            follower.append_replica(empty_batch(0, 2, 1), leader_epoch=Epoch(3))


def test_a_restarted_log_holds_no_older_records_even_after_a_crash(clock: ManualClock) -> None:
    files = MemoryFiles()
    store = open_store(files, clock)
    log = open_log(store)
    for number in range(30):
        log.append(encode_values(b"x" * 100, producer_id=3, sequence=number), leader_epoch=Epoch(number // 10))
    store.sync_soon(log)
    store.commit_once()
    log.restart_at(1000)
    assert (log.start_offset, log.end_offset, log.latest_epoch, len(log.producers)) == (1000, 1000, -1, 0)
    files.crash()
    store = open_store(files, clock)
    log = open_log(store)
    assert (log.start_offset, log.end_offset, log.latest_epoch, len(log.producers)) == (1000, 1000, -1, 0)
    assert not log.damaged_ranges
    log.append_replica(empty_batch(1000, 1003, 7), leader_epoch=Epoch(7))
    store.close_now()
    log = open_log(open_store(files, clock))
    assert (log.start_offset, log.end_offset, log.latest_epoch) == (1000, 1003, 7)


class ReplicaMachine(RuleBasedStateMachine):
    """A leader that is written to, and a follower that fetches, is truncated, killed, crashed and restarted."""

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.clock = ManualClock()
        self.leader = open_log(open_store(MemoryFiles(seed), self.clock))
        self.files = MemoryFiles(seed + 1)
        self.epoch = 0
        self.sequences = {1: 0, 2: 0}
        self.open()

    def open(self) -> None:
        self.store = open_store(self.files, self.clock)
        # Other segment sizes than the leader's: the bytes are the same, not the files.
        self.follower = open_log(self.store, segment_bytes=1000)

    @rule(sizes=st.lists(st.integers(0, 150), min_size=1, max_size=3), producer_id=st.sampled_from([-1, 1, 2]))
    def append(self, sizes: list[int], producer_id: int) -> None:
        sequence = self.sequences.get(producer_id, -1)
        batch = encode_values(*(b"m" * size for size in sizes), producer_id=producer_id, sequence=sequence)
        assert not self.leader.append(batch, leader_epoch=Epoch(self.epoch)).duplicate
        if producer_id >= 0:
            self.sequences[producer_id] += len(sizes)

    @rule()
    def new_epoch(self) -> None:
        self.epoch += 1

    @rule(max_bytes=st.integers(1, 2000))
    def copy(self, max_bytes: int) -> None:
        leader, follower = self.leader, self.follower
        if follower.end_offset < leader.start_offset:
            follower.restart_at(leader.start_offset)
        data = leader.read(follower.end_offset, max_bytes=max_bytes, up_to=leader.end_offset)
        if data:
            follower.append_replica(data, leader_epoch=Epoch(self.epoch))

    @rule()
    def copy_all(self) -> None:
        while self.follower.end_offset < self.leader.end_offset:
            self.copy(5000)

    @rule(share=st.floats(0, 1))
    def cut(self, share: float) -> None:
        log = self.follower
        log.truncate_to(log.start_offset + int((log.end_offset - log.start_offset) * share))

    @rule(share=st.floats(0, 1))
    def delete_before(self, share: float) -> None:
        log = self.leader
        log.delete_before(log.start_offset + int((log.end_offset - log.start_offset) * share))

    @rule()
    def sync(self) -> None:
        self.store.sync_soon(self.follower)
        while self.store.commit_once():
            pass

    @rule()
    def checkpoint(self) -> None:
        self.store.checkpoint_soon(self.follower)
        while self.store.checkpoint_once():
            pass

    @rule()
    def kill(self) -> None:
        end = self.follower.end_offset
        self.files.kill()
        self.open()
        assert self.follower.end_offset == end

    @rule()
    def crash(self) -> None:
        synced = self.follower.synced_offset
        self.files.crash()
        self.open()
        assert self.follower.end_offset >= synced
        if self.follower.damaged_ranges:
            # Sectors of an unsynced tail survive in any combination: the rest is fetched again.
            self.follower.truncate_to(max(self.follower.start_offset, self.follower.damaged_ranges[0][0]))

    @invariant()
    def the_follower_holds_a_prefix_of_the_leaders_bytes(self) -> None:
        if not hasattr(self, "follower"):
            return
        leader, follower = self.leader, self.follower
        assert follower.end_offset <= leader.end_offset
        start = max(leader.start_offset, follower.start_offset)
        if start >= follower.end_offset:
            return
        # Both start with the batch that holds the offset, which may lie before it.
        assert content(follower, start=start) == content(leader, start=start, up_to=follower.end_offset)
        for epoch, first in follower.epochs.entries():
            assert leader.epochs.epoch_at(first) == epoch or first < leader.start_offset

    @invariant()
    def retries_are_recognised(self) -> None:
        if not hasattr(self, "follower"):
            return
        for producer in self.follower.producers:
            known = self.leader.producers.get(producer.producer_id)
            assert known is not None
            if self.follower.end_offset == self.leader.end_offset and producer.batches:
                mine = [batch[:4] for batch in producer.batches]
                assert [batch[:4] for batch in known.batches][-len(mine) :] == mine


ReplicaMachine.TestCase.settings = settings(max_examples=EXAMPLES, stateful_step_count=40, deadline=None)
TestReplicaHistories = ReplicaMachine.TestCase


@pytest.mark.parametrize("ending", ["checkpoints", ".log"])
def test_nothing_is_written_over_an_incomplete_truncation(clock: ManualClock, ending: str) -> None:
    """After a crash the leftover would be found behind the new records: as damage, or instead of some of them."""
    files = MemoryFiles()
    store = open_store(files, clock)
    log = open_log(store, segment_bytes=10_000)
    for number in range(8):
        log.append(encode_values(b"%d" % number * 300), leader_epoch=Epoch(1))
    files.fail_next_syncs(ending)
    with pytest.raises(StorageFailure):
        log.truncate_to(3)
    assert log.end_offset == 3
    with pytest.raises(StorageFailure, match="until the disk works again"):
        log.append(encode_values(b"new"), leader_epoch=Epoch(2))
    clock.advance_ms(2000)
    while store.commit_once():
        pass
    log.append(encode_values(b"new"), leader_epoch=Epoch(2))
    expected = content(log)
    files.kill()
    again = open_log(open_store(files, clock), segment_bytes=10_000)
    assert (again.end_offset, again.damaged_ranges) == (4, ())
    assert content(again) == expected


def test_a_late_checkpoint_of_a_failed_truncation_removes_no_recreated_file(clock: ManualClock) -> None:
    """The thread knows only the names of the truncated files, which the log may have reused by then."""
    files = MemoryFiles()
    store = open_store(files, clock)
    log = open_log(store)
    for number in range(8):
        log.append(encode_values(b"%d" % number * 300), leader_epoch=Epoch(1))
    names = [segment.path for segment in log.segments]
    assert len(names) > 2
    files.fail_next_syncs("checkpoints")
    with pytest.raises(StorageFailure):
        log.truncate_to(1)
    late = store.checkpoint_job(log)
    clock.advance_ms(2000)
    for number in range(1, 8):
        log.append(encode_values(b"%d" % number * 300), leader_epoch=Epoch(2))
    late.execute()
    late.finish()
    assert [segment.path for segment in log.segments] == names
    assert all(files.exists(name) for name in names)
    expected = content(log)
    files.kill()
    assert content(open_log(open_store(files, clock))) == expected


def test_unacknowledged_records_are_neither_deleted_nor_compacted(clock: ManualClock) -> None:
    store = open_store(MemoryFiles(), clock)
    compacted = TopicSettings(
        segment_bytes=300, retention_ms=1000, cleanup_policy="compact,delete", min_cleanable_dirty_ratio=0
    )
    log = store.open_log(TOPIC_ID, WHERE, compacted)
    acknowledged = 4
    log.listen(acknowledged_offset=lambda: acknowledged)
    for number in range(12):
        record = NewRecord(b"key", b"%d" % number * 100, (), clock.now_ms())
        log.append(encode_batch([record]), leader_epoch=Epoch(0))
    store.sync_soon(log)
    store.commit_once()
    assert [segment.next_offset for segment in cleanable_segments(log, clock.now_ms())][-1] == 4
    clock.advance_ms(60_000)
    store.delete_expired()
    assert log.start_offset == 4
    acknowledged = 12
    assert cleanable_segments(log, clock.now_ms())[-1].next_offset > 4
    store.delete_expired()
    assert log.start_offset == 12
