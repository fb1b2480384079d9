"""Group commit: one sync for many appends, the journal for many logs, and failed syncs."""

from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest

from millstream.broker.log.commit import DIRECT_LOGS_MAX, JOURNAL_BYTES_MAX
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.errors import DamagedRange, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.files import MemoryFiles

OpenStore = Callable[[], LogStore]
TOPIC_ID = UUID(int=5)
MANY = DIRECT_LOGS_MAX + 2


def open_logs(store: LogStore, count: int) -> list[Log]:
    return [
        store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(partition)), TopicSettings(segment_bytes=2000))
        for partition in range(count)
    ]


def put(store: LogStore, log: Log, value: bytes, *, sequence: int = -1) -> None:
    batch = encode_batch(
        [NewRecord(None, value)],
        producer_id=-1 if sequence < 0 else 9,
        producer_epoch=-1 if sequence < 0 else 0,
        base_sequence=sequence,
    )
    log.append(batch, leader_epoch=Epoch(0))
    store.sync_soon(log)


def commit(store: LogStore) -> None:
    while store.commit_once():
        pass


def values(log: Log) -> list[bytes | None]:
    found_values: list[bytes | None] = []
    offset = int(log.start_offset)
    while offset < log.end_offset:
        records = list(decode_records(log.read(offset, max_bytes=100_000, up_to=log.end_offset)))
        found_values += [record.value for record in records]
        offset = records[-1].offset + 1
    return found_values


def test_many_appends_share_one_sync(store: LogStore, files: MemoryFiles) -> None:
    (log,) = open_logs(store, 1)
    put(store, log, b"first")
    commit(store)
    reported: list[int] = []
    log.listen(on_synced=lambda: reported.append(log.synced_offset))
    before = files.syncs
    for number in range(20):
        put(store, log, b"%d" % number)
    assert log.synced_offset == 1
    commit(store)

    assert files.syncs - before == 1
    assert reported == [21]
    assert not store.commit_once()


def test_a_commit_covers_the_appends_before_its_start(store: LogStore) -> None:
    (log,) = open_logs(store, 1)
    put(store, log, b"a")
    job = store._begin_commit()
    assert job is not None
    put(store, log, b"b")
    job.execute()
    store._finish_job(job)

    assert (log.synced_offset, log.end_offset) == (1, 2)
    commit(store)
    assert log.synced_offset == 2


def test_many_logs_share_one_sync_of_the_journal(store: LogStore, files: MemoryFiles, open_store: OpenStore) -> None:
    logs = open_logs(store, MANY)
    for value in (b"a", b"b"):
        for log in logs:
            put(store, log, value)
        before = files.syncs
        commit(store)
    assert files.syncs - before == 1
    assert all(log.synced_offset == 2 > log.stored_offset for log in logs)

    files.crash()
    again = open_store()
    assert all(values(log) == [b"a", b"b"] for log in open_logs(again, MANY))
    assert {report.replayed_bytes for report in again.recovery_reports} == {
        2 * len(encode_batch([NewRecord(None, b"a")]))
    }


def test_the_journal_stays_within_its_bounds(store: LogStore, files: MemoryFiles, open_store: OpenStore) -> None:
    logs = open_logs(store, MANY)
    for number in range(120):
        for log in logs:
            put(store, log, b"%0300d" % number)
        commit(store)
        if number % 10 == 9:
            while store.checkpoint_once():
                pass
        assert all(log.synced_offset == number + 1 for log in logs)
    journal = [len(files.content(path)) for path in files.walk() if path.endswith(".journal")]
    assert journal == [100_000, 100_000]

    files.crash()
    assert all(values(log) == [b"%0300d" % number for number in range(120)] for log in open_logs(open_store(), MANY))


def test_a_full_journal_does_not_stop_commits(store: LogStore, files: MemoryFiles, open_store: OpenStore) -> None:
    logs = open_logs(store, MANY)
    for number in range(120):
        for log in logs:
            put(store, log, b"%0300d" % number)
        commit(store)
    assert all(log.synced_offset == 120 for log in logs)

    files.crash()
    assert all(log.end_offset == 120 for log in open_logs(open_store(), MANY))


@pytest.mark.parametrize("writing", [True, False])
def test_commits_continue_without_a_failed_journal(
    store: LogStore, files: MemoryFiles, open_store: OpenStore, writing: bool
) -> None:
    logs = open_logs(store, MANY)
    for round_number in range(4):
        if round_number == 1:
            (files.fail_next_writes if writing else files.fail_next_syncs)(".journal")
        for log in logs:
            put(store, log, b"%d" % round_number)
        commit(store)
        assert all(log.synced_offset == round_number + 1 for log in logs)
        while store.checkpoint_once():
            pass

    files.crash()
    assert all(values(log) == [b"0", b"1", b"2", b"3"] for log in open_logs(open_store(), MANY))


def test_large_appends_bypass_the_journal(store: LogStore, files: MemoryFiles) -> None:
    logs = open_logs(store, MANY)
    for log in logs:
        put(store, log, b"x" * JOURNAL_BYTES_MAX)
    commit(store)

    assert all(log.stored_offset == 1 for log in logs)
    assert not any(path.endswith(".journal") for path in files.walk())


# -- failed syncs -------------------------------------------------------------------------------------------


def test_after_a_failed_sync_the_log_continues_in_another_file(
    store: LogStore, files: MemoryFiles, open_store: OpenStore
) -> None:
    (log,) = open_logs(store, 1)
    put(store, log, b"a")
    commit(store)
    failures: list[StorageFailure] = []
    log.listen(on_sync_failed=failures.append)
    put(store, log, b"b")
    put(store, log, b"c")
    files.fail_next_syncs(".log")
    commit(store)

    assert not failures
    assert log.synced_offset == log.end_offset == 3
    assert [(segment.base_offset, segment.next_offset) for segment in log.segments] == [(0, 1), (1, 3)]
    put(store, log, b"d")
    commit(store)
    assert values(log) == [b"a", b"b", b"c", b"d"]
    files.crash()
    assert values(open_logs(open_store(), 1)[0]) == [b"a", b"b", b"c", b"d"]


def test_a_file_without_synced_data_is_replaced(store: LogStore, files: MemoryFiles, open_store: OpenStore) -> None:
    (log,) = open_logs(store, 1)
    put(store, log, b"a")
    files.fail_next_syncs(".log")
    commit(store)

    assert log.synced_offset == 1
    assert [segment.base_offset for segment in log.segments] == [0]
    files.crash()
    assert values(open_logs(open_store(), 1)[0]) == [b"a"]


def test_while_the_disk_fails_writes_are_refused_and_reads_continue(store: LogStore, files: MemoryFiles) -> None:
    (log,) = open_logs(store, 1)
    put(store, log, b"a")
    commit(store)
    failures: list[StorageFailure] = []
    log.listen(on_sync_failed=failures.append)
    put(store, log, b"b", sequence=0)
    files.fail_next_syncs(".log", ".log.repair")
    commit(store)

    assert len(failures) == 1
    assert "free space" in str(failures[0])
    assert log.synced_offset == 1
    with pytest.raises(StorageFailure, match="writes are refused"):
        put(store, log, b"c")
    assert values(log) == [b"a", b"b"]
    assert list(store.failures) == [log.partition]

    # The disk works again: pending records are stored after all, and a retry is recognised.
    store.sync_soon(log)
    commit(store)
    assert log.synced_offset == 2
    assert not store.failures
    put(store, log, b"b", sequence=0)
    assert log.end_offset == 2


def test_pages_dropped_by_the_kernel_are_lost_but_were_not_acknowledged(store: LogStore, files: MemoryFiles) -> None:
    files.keep_cache_after_failed_sync = False
    (log,) = open_logs(store, 1)
    put(store, log, b"a")
    commit(store)
    failures: list[StorageFailure] = []
    log.listen(on_sync_failed=failures.append)
    put(store, log, b"b", sequence=0)
    files.fail_next_syncs(".log")
    commit(store)

    assert len(failures) == 1
    assert log.damaged_ranges == ((1, 2),)
    with pytest.raises(DamagedRange):
        log.read(1, max_bytes=10, up_to=2)
    # The producer retries, and this time the batch is stored.
    put(store, log, b"b", sequence=0)
    commit(store)
    assert [record.value for record in decode_records(log.read(2, max_bytes=1000, up_to=3))] == [b"b"]


@pytest.mark.parametrize("is_under_way", [True, False])
def test_records_lost_with_their_file_before_the_sync_are_not_acknowledged(
    store: LogStore, files: MemoryFiles, is_under_way: bool
) -> None:
    (log,) = open_logs(store, 1)
    put(store, log, b"first", sequence=0)
    commit(store)
    put(store, log, b"second", sequence=1)
    reported: list[object] = []
    log.listen(on_synced=lambda: reported.append(log.synced_offset), on_sync_failed=reported.append)
    under_way = store._begin_commit() if is_under_way else None
    files.remove(log.segments[0].path)
    while store.scrub_once():
        pass
    assert log.damaged_ranges == ((0, 2),)
    assert [type(error) for error in reported] == [StorageFailure]
    if under_way is not None:
        store._run_job(under_way)
    # The retry is stored, and not taken for a duplicate.
    put(store, log, b"second", sequence=1)
    commit(store)
    assert (log.end_offset, reported[-1]) == (3, 3)
    (record,) = decode_records(log.read(2, max_bytes=1000, up_to=3))
    assert record.value == b"second"
    while store.scrub_once():
        pass
    assert sum(isinstance(error, StorageFailure) for error in reported) == 1


def test_records_in_the_journal_survive_a_failed_sync_of_the_segment(store: LogStore, files: MemoryFiles) -> None:
    files.keep_cache_after_failed_sync = False
    logs = open_logs(store, MANY)
    for log in logs:
        put(store, log, b"a")
    commit(store)
    assert logs[0].stored_offset == 0
    files.fail_next_syncs(".log")
    store.checkpoint_soon(logs[0])
    while store.checkpoint_once() or store.commit_once():
        pass

    assert logs[0].damaged_ranges == ()
    assert values(logs[0]) == [b"a"]


def test_a_failed_directory_sync_is_reported_and_retried(store: LogStore, files: MemoryFiles) -> None:
    (log,) = open_logs(store, 1)
    failures: list[StorageFailure] = []
    log.listen(on_sync_failed=failures.append)
    put(store, log, b"a")
    files.fail_next_syncs("/0")
    commit(store)
    assert len(failures) == 1
    assert log.synced_offset == 0

    store.sync_soon(log)
    commit(store)
    assert log.synced_offset == 1


def test_a_commit_is_repeated_when_old_segments_are_deleted_meanwhile(store: LogStore) -> None:
    (log,) = open_logs(store, 1)
    put(store, log, b"old")
    commit(store)
    log.roll()
    put(store, log, b"new")
    under_way = store._begin_commit()
    assert under_way is not None
    log.delete_before(1)
    store._run_job(under_way)
    assert log.synced_offset == 1
    commit(store)
    assert log.synced_offset == 2
