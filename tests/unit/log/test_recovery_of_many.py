"""Recovering many logs at once: one sync and one log line for all, without weaker durability."""

from __future__ import annotations

import logging
from collections.abc import Callable
from uuid import UUID

import pytest

from millstream.broker.log import recovery as recovery_module
from millstream.broker.log import store as store_module
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.log import Log
from millstream.broker.log.log_contents import RecoveryReport
from millstream.broker.log.recovery import RecoveryProgress
from millstream.broker.log.store import LogStore
from millstream.core.ids import Epoch, OffsetRange, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.files import MemoryFiles

OpenStore = Callable[[], LogStore]
TOPIC_ID = UUID(int=1)
LOGS = 20


@pytest.fixture(autouse=True)
def lower_sync_all_threshold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "SYNC_ALL_LOGS_MIN", 10)


def open_logs(store: LogStore) -> list[Log]:
    partitions = (TopicPartition("t", PartitionIndex(number)) for number in range(LOGS))
    return [store.open_log(TOPIC_ID, partition, TopicSettings()) for partition in partitions]


def filled(open_store: OpenStore, *, synced: int = 1, unsynced: int = 1, checkpoint: bool = False) -> None:
    """Write to every log, partly without a sync."""
    store = open_store()
    logs = open_logs(store)
    for number in range(synced + unsynced):
        for log in logs:
            log.append(encode_batch([NewRecord(None, b"%d" % number, (), 1000)]), leader_epoch=Epoch(0))
            if number < synced:
                store.sync_soon(log)
        while store.commit_once():
            pass
        while checkpoint and store.checkpoint_once():
            pass


def values(log: Log) -> list[bytes | None]:
    read = log.read(0, max_bytes=10_000, up_to=log.end_offset) if log.end_offset else b""
    return [record.value for record in decode_records(read)]


@pytest.mark.parametrize("checkpoint", [False, True])
def test_all_logs_are_synced_together_and_durably(open_store: OpenStore, files: MemoryFiles, checkpoint: bool) -> None:
    filled(open_store, checkpoint=checkpoint)
    files.kill()
    before = files.syncs
    recovered = open_store()
    logs = open_logs(recovered)
    assert files.syncs - before < LOGS
    assert [values(log) for log in logs] == [[b"0", b"1"]] * LOGS
    assert all(log.synced_offset == 2 for log in logs)

    # The recovered state survives even if the power fails now.
    files.crash()
    assert [values(log) for log in open_logs(open_store())] == [[b"0", b"1"]] * LOGS


def test_without_a_whole_sync_each_log_is_synced_separately(open_store: OpenStore, files: MemoryFiles) -> None:
    filled(open_store)
    files.kill()
    files.fail_next_syncs("/partitions")
    before = files.syncs
    logs = open_logs(open_store())
    assert files.syncs - before > LOGS
    files.crash()
    assert [values(log) for log in open_logs(open_store())] == [[b"0", b"1"]] * len(logs)


def test_a_torn_tail_is_still_truncated_durably(open_store: OpenStore, files: MemoryFiles) -> None:
    filled(open_store, unsynced=0)
    files.kill()
    path = f"/data/partitions/{TOPIC_ID}/3/{0:020d}.log"
    descriptor = files.open(path)
    files.write_at(descriptor, b"torn", len(files.content(path)))
    files.close(descriptor)
    whole = len(files.content(path)) - 4
    store = open_store()
    open_logs(store)
    assert [report.cut_bytes for report in store.recovery_reports if report.cut_bytes] == [4]
    files.crash()
    assert len(files.content(path)) == whole


def test_a_new_log_among_them_is_made_durable_too(open_store: OpenStore, files: MemoryFiles) -> None:
    filled(open_store)
    files.kill()
    store = open_store()
    log = store.open_log(UUID(int=2), TopicPartition("new", PartitionIndex(0)), TopicSettings())
    log.append(encode_batch([NewRecord(None, b"x", (), 1000)]), leader_epoch=Epoch(0))
    store.sync_soon(log)
    assert store.commit_once()
    files.crash()
    again = open_store().open_log(UUID(int=2), TopicPartition("new", PartitionIndex(0)), TopicSettings())
    assert values(again) == [b"x"]


def test_new_logs_are_not_reported_as_recovered(
    open_store: OpenStore, files: MemoryFiles, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "millstream.broker.log.recovery")
    store = open_store()
    filled_later = [TopicPartition("new", PartitionIndex(number)) for number in range(5)]
    for where in filled_later:
        store.open_log(UUID(int=3), where, TopicSettings())
    store.finish_recovery()
    assert caplog.messages == []


def test_the_real_disk_supports_a_whole_sync(tmp_path: object) -> None:
    DiskFiles().sync_all(str(tmp_path))


def test_one_line_summarises_the_recovery(
    open_store: OpenStore, files: MemoryFiles, caplog: pytest.LogCaptureFixture
) -> None:
    filled(open_store)
    files.kill()
    store = open_store()
    caplog.set_level(logging.INFO, "millstream.broker.log.recovery")
    caplog.clear()
    open_logs(store)
    assert caplog.messages == []
    store.finish_recovery()
    store.finish_recovery()
    (line,) = caplog.records
    assert (line.message, line.levelname, vars(line)["logs"]) == ("recovered logs", "INFO", LOGS)


def report(partition: int, *, cut: int = 0, lost: tuple[int, int] | None = None) -> RecoveryReport:
    made = RecoveryReport(directory="d", topic="t", partition=partition, cut_bytes=cut, cut_from_offset=7)
    if lost is not None:
        made.lost.append(OffsetRange(*lost))
    return made


def test_a_listener_is_notified_of_the_progress() -> None:
    heard: list[tuple[int, int]] = []
    reported = RecoveryProgress(lambda done, left: heard.append((done, left)))
    for number in range(30):
        reported.add(report(number), left=29 - number, now=number * recovery_module.LISTENER_S / 10)
    assert heard == [(1, 29), (11, 19), (21, 9)]


def test_the_first_few_logs_are_named_and_a_long_recovery_logs_its_progress(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "millstream.broker.log.recovery")
    reported = RecoveryProgress()
    for number in range(30):
        reported.add(report(number, cut=1), left=40 - number, now=number * recovery_module.PROGRESS_S / 10)
    for number in range(30, 40):
        reported.add(report(number, lost=(3, 5)), left=40 - number, now=30 * recovery_module.PROGRESS_S / 10)
    reported.log_summary()
    progress = [vars(line) for line in caplog.records if line.message == "recovering logs"]
    assert [(line["done"], line["left"]) for line in progress] == [(11, 30), (21, 20), (31, 10)]
    damaged = [line for line in caplog.records if line.message == "a log is damaged"]
    assert len(damaged) == recovery_module.NAMED_MAX
    last = caplog.records[-1]
    assert (last.message, last.levelname) == ("recovered logs", "ERROR")
    facts = vars(last)
    assert (facts["cut"], facts["damaged"]) == (30, 10)
    assert facts["cut_logs"].endswith("| and 25 more")
    assert "t-30: " in facts["damaged_logs"]
