"""The data folder: its lock and format, clean and unclean stops, logs that are created and deleted."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from millstream.broker.log.checkpoint import Checkpoints
from millstream.broker.log.commit import Commit
from millstream.broker.log.compaction import Job
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.folder import DataFolder, check_own_or_empty
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.errors import DamagedRange, DataFolderInUse, DataFolderInvalid, OutOfOrderSequence, StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, decode_records, encode_batch
from millstream_testing.files import MemoryFiles

OpenStore = Callable[[], LogStore]
TOPIC_ID = UUID(int=4)


def open_log(store: LogStore, partition: int = 0, topic_id: UUID = TOPIC_ID) -> Log:
    return store.open_log(topic_id, TopicPartition("t", PartitionIndex(partition)), TopicSettings())


def put(log: Log, *values: bytes) -> None:
    for value in values:
        log.append(encode_batch([NewRecord(None, value)]), leader_epoch=Epoch(0))


def values(log: Log) -> list[bytes | None]:
    return [record.value for record in decode_records(log.read(0, max_bytes=10_000, up_to=log.end_offset))]


def test_a_folder_has_one_owner(store: LogStore, open_store: OpenStore) -> None:
    with pytest.raises(DataFolderInUse):
        open_store()
    store.close_now()
    open_store()


def test_a_folder_in_another_format_is_refused(store: LogStore, open_store: OpenStore, files: MemoryFiles) -> None:
    store.close_now()
    files.flip_bit("/data/format", 3, 0)
    with pytest.raises(DataFolderInvalid, match="format"):
        open_store()


def test_a_folder_of_other_files_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("hello")
    with pytest.raises(DataFolderInvalid, match="holds other files"):
        check_own_or_empty(str(tmp_path), DiskFiles())
    assert [path.name for path in tmp_path.iterdir()] == ["letter.txt"]


def test_the_root_of_a_file_system_is_accepted_as_a_data_folder(tmp_path: Path) -> None:
    (tmp_path / "lost+found").mkdir()
    check_own_or_empty(str(tmp_path), DiskFiles())
    DataFolder(tmp_path, DiskFiles()).release()
    check_own_or_empty(str(tmp_path), DiskFiles())


def test_a_file_is_refused_as_a_data_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("x")
    with pytest.raises(DataFolderInvalid):
        LogStore.open(file, files=DiskFiles(), clock=SystemClock(), journal_bytes=1000, producer_expiry_ms=1000)


def test_a_clean_stop_is_marked_and_nothing_is_scanned(open_store: OpenStore, files: MemoryFiles) -> None:
    store = open_store()
    assert store.clean_start
    put(open_log(store), b"a", b"b")
    open_log(store, 1)
    store.close_now()
    reads = files.reads

    again = open_store()
    log, empty = open_log(again), open_log(again, 1)
    assert again.clean_start
    assert files.reads - reads <= 5
    assert (log.end_offset, log.synced_offset, empty.end_offset) == (2, 2, 0)
    assert values(log) == [b"a", b"b"]
    assert not again.recovery_reports


def test_the_clean_stop_mark_is_valid_for_one_start(open_store: OpenStore, files: MemoryFiles) -> None:
    open_store().close_now()
    open_store()
    files.kill()

    assert not open_store().clean_start


def test_a_log_that_was_not_opened_is_still_recovered_later(open_store: OpenStore, files: MemoryFiles) -> None:
    store = open_store()
    put(open_log(store), b"a")
    files.kill()
    open_store().close_now()

    again = open_store()
    assert again.clean_start
    assert values(open_log(again)) == [b"a"]


def test_after_a_kill_everything_written_is_present_and_durable(open_store: OpenStore, files: MemoryFiles) -> None:
    store = open_store()
    put(open_log(store), b"a", b"b")
    files.kill()
    assert values(open_log(open_store())) == [b"a", b"b"]
    files.crash()
    assert values(open_log(open_store())) == [b"a", b"b"]


def test_truncation_is_reported(open_store: OpenStore, files: MemoryFiles) -> None:
    store = open_store()
    log = open_log(store)
    put(log, b"a", b"b")
    files.flip_bit(log.segments[0].path, log.segments[0].size - 1, 0)
    files.kill()

    again = open_store()
    assert values(open_log(again)) == [b"a"]
    report = again.recovery_reports[0]
    assert (report.topic, report.partition, report.cut_from_offset, report.lost) == ("t", 0, 1, [])
    assert report.cut_bytes == log.segments[0].size // 2
    assert "truncated a torn tail of" in str(report)


@pytest.mark.parametrize("clean", [True, False])
def test_a_duplicate_is_recognised_after_a_restart(open_store: OpenStore, files: MemoryFiles, clean: bool) -> None:
    settings = TopicSettings(message_timestamp_type="LogAppendTime")
    partition = TopicPartition("t", PartitionIndex(0))

    def batch(sequence: int) -> bytearray:
        return encode_batch([NewRecord(None, b"v")] * 2, producer_id=5, producer_epoch=1, base_sequence=sequence)

    store = open_store()
    log = store.open_log(TOPIC_ID, partition, settings)
    first = [log.append(batch(sequence), leader_epoch=Epoch(0)) for sequence in (0, 2, 4)]
    if clean:
        store.close_now()
    else:
        files.kill()

    again = open_store().open_log(TOPIC_ID, partition, settings)
    for sequence, was in zip((0, 2, 4), first, strict=True):
        assert again.append(batch(sequence), leader_epoch=Epoch(0)) == was._replace(duplicate=True)
    with pytest.raises(OutOfOrderSequence):
        again.append(batch(8), leader_epoch=Epoch(0))


def test_a_deleted_log_is_not_restored(open_store: OpenStore, files: MemoryFiles) -> None:
    store = open_store()
    logs = [open_log(store, partition) for partition in range(6)]
    for log in logs:
        put(log, b"a")
        store.sync_soon(log)
    store.commit_once()
    assert any(path.endswith(".journal") for path in files.walk())
    store.delete_log(logs[2])
    files.crash()

    again = open_store()
    assert sorted(partition for _, partition in again.stored()) == [0, 1, 3, 4, 5]
    for log in [open_log(again, partition) for partition in (0, 1, 3, 4, 5)]:
        assert values(log) == [b"a"]
        again.delete_log(log)
    assert not list(again.stored())
    assert not any("partitions" in path for path in files.walk())


@pytest.mark.parametrize("end", ["clean stop", "crash", "crash after the return"])
def test_a_removed_replica_that_returns_is_empty(open_store: OpenStore, files: MemoryFiles, end: str) -> None:
    store = open_store()
    logs = [open_log(store, partition) for partition in range(6)]
    for log in logs:
        for value in (b"a", b"b"):
            put(log, value)
        store.sync_soon(log)
    store.commit_once()
    assert any(path.endswith(".journal") for path in files.walk())
    for log in logs:
        store.checkpoint_now(log)
    store.delete_log(logs[2], topic_remains=True)
    if end == "clean stop":
        store.close_now()
    elif end == "crash":
        files.crash()
    else:
        # What the journal has of the removed replica is not replayed into the new one.
        put(returned := open_log(store, 2), b"c")
        store.close_log(returned)
        files.crash()

    again = open_store()
    returned = open_log(again, 2)
    assert values(returned) == ([b"c"] if end == "crash after the return" else [])
    assert not returned.damage
    assert not any(report.is_notable for report in again.recovery_reports)


def test_a_removal_that_a_crash_interrupted_is_completed(
    open_store: OpenStore, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = open_store()
    for partition in range(2):
        put(log := open_log(store, partition), b"a")
        store.checkpoint_now(log)

    def crash(_keys: object) -> None:
        files.crash()
        raise OSError(5, "killed")

    monkeypatch.setattr(store, "_record_removed", crash)
    monkeypatch.setattr(store, "_remove_deleted", lambda _folder: None)
    store.delete_log(log, topic_remains=True)

    again = open_store()
    assert list(again.stored()) == [(TOPIC_ID, 0)]
    returned = open_log(again, 1)
    assert (values(returned), list(returned.damage)) == ([], [])
    assert values(open_log(again, 0)) == [b"a"]


@pytest.mark.parametrize("is_checkpoint", [True, False], ids=["checkpoint", "commit"])
def test_deleting_a_log_during_its_sync_affects_no_other_and_is_no_failure(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, is_checkpoint: bool
) -> None:
    files = DiskFiles()
    store = LogStore.open(
        tmp_path / "data", files=files, clock=SystemClock(), journal_bytes=100_000, producer_expiry_ms=1000
    )
    kept, deleted = open_log(store), open_log(store, topic_id=UUID(int=5))
    put(kept, b"a")
    put(deleted, b"a")
    job: Job
    if is_checkpoint:
        job = Checkpoints([kept, deleted], files, store._ledger)
    else:
        job = Commit([kept, deleted], files, store._journal, direct=True)
    store.delete_log(deleted)
    job.execute()
    store._finish_job(job)
    assert kept.stored_offset == kept.end_offset == 1
    assert not [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    store.close_now()


def test_a_log_can_be_closed_and_reopened(store: LogStore) -> None:
    log = open_log(store)
    put(log, b"a")
    store.close_log(log)
    again = open_log(store)
    put(again, b"b")
    store.close_log(again)

    assert values(open_log(store)) == [b"a", b"b"]


def test_a_removed_file_is_lost_and_writes_continue(store: LogStore, files: MemoryFiles, open_store: OpenStore) -> None:
    put(open_log(store), b"a")
    store.close_now()
    harmed = open_store()
    log = open_log(harmed)
    files.remove(log.segments[0].path)
    with pytest.raises(DamagedRange, match="t-0: the disk lost the offsets 0 to 0"):
        log.read(0, max_bytes=1, up_to=1)
    put(log, b"b")
    harmed.close_now()
    again = open_log(open_store())
    assert again.damaged_ranges == ((0, 1),)
    assert b"b" in bytes(again.read(1, max_bytes=1, up_to=2))


def test_an_unreachable_folder_is_not_reported_as_damage(store: LogStore, files: MemoryFiles) -> None:
    log = open_log(store)
    put(log, b"a")
    log.segments[0].sealed = True
    log.open_files.close(log.segments[0])
    files.rename(log.directory, f"{log.directory}-away")
    with pytest.raises(StorageFailure, match="t-0: reading from"):
        log.read(0, max_bytes=1, up_to=1)
    assert not log.damage


def test_the_number_of_descriptors_is_bounded(open_store: OpenStore, files: MemoryFiles) -> None:
    store = open_store()
    logs = [open_log(store, partition) for partition in range(100)]
    for log in logs:
        put(log, b"a")
        store.sync_soon(log)
    while store.commit_once():
        pass
    assert all(values(log) == [b"a"] for log in logs)
    assert files.open_descriptors <= 64 + 3


@pytest.mark.parametrize("partitions", [1, 6])
def test_a_killed_process_keeps_acknowledged_records(tmp_path: Path, partitions: int) -> None:
    """On the real file system with a real SIGKILL, both directly and through the journal."""
    topic_id = uuid4()
    script = f"""
import json, os, signal
from pathlib import Path
from uuid import UUID
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
store = LogStore.open(Path({str(tmp_path)!r}), files=DiskFiles(), clock=SystemClock(), journal_bytes=1_000_000,
                      producer_expiry_ms=10**9)
logs = [store.open_log(UUID({str(topic_id)!r}), TopicPartition("t", p), TopicSettings()) for p in range({partitions})]
for number in range(50):
    for log in logs:
        log.append(encode_batch([NewRecord(None, b"%d" % number)]), leader_epoch=0)
        store.sync_soon(log)
    store.commit_once()
print(json.dumps([log.synced_offset for log in logs]), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, check=False, env=dict(os.environ))
    assert json.loads(done.stdout) == [50] * partitions, done.stderr

    store = LogStore.open(
        tmp_path, files=DiskFiles(), clock=SystemClock(), journal_bytes=1_000_000, producer_expiry_ms=10**9
    )
    assert not store.clean_start
    for partition in range(partitions):
        log = open_log(store, partition, topic_id)
        assert values(log) == [b"%d" % number for number in range(50)]
    store.close_now()
