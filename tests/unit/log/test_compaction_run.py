"""Compaction in the running store: by a child process on a real disk, concurrently with everything else."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from uuid import UUID

import msgspec
import pytest

from millstream.broker.log.cleaner import CleaningCancelled, CompactionPass, DamagedSource, SourceSegment
from millstream.broker.log.compaction import ChildWorker, Compactor, InlineWorker
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.records.record import NewRecord, Record, decode_records, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.waiting import until

SETTINGS = TopicSettings(
    cleanup_policy="compact", segment_bytes=20_000, min_cleanable_dirty_ratio=0.0, segment_ms=3_600_000
)


def opened(folder: Path, clock: ManualClock | None = None) -> LogStore:
    return LogStore.open(
        folder,
        files=DiskFiles(),
        clock=clock or ManualClock(),
        journal_bytes=100_000,
        producer_expiry_ms=3_600_000,
        retention_check_ms=20,
    )


def open_log(store: LogStore) -> Log:
    return store.open_log(UUID(int=3), TopicPartition("t", PartitionIndex(0)), SETTINGS)


def fill(log: Log, count: int) -> None:
    for number in range(count):
        batch = encode_batch([NewRecord(b"k%d" % (number % 10), b"v%d" % number + bytes(100))])
        log.append(batch, leader_epoch=Epoch(0))


def read(log: Log) -> list[Record]:
    records: list[Record] = []
    offset = int(log.start_offset)
    while offset < log.end_offset:
        data = bytes(log.read(offset, max_bytes=10_000, up_to=log.end_offset))
        records += decode_records(data)
        offset = [header.next_offset for header in iterate_headers(data)][-1]
    return records


async def until_compacted(log: Log, offset: int) -> None:
    await until(lambda: log.cleaned_offset >= offset)


async def test_a_running_store_compacts_by_itself(tmp_path: Path) -> None:
    store = opened(tmp_path / "data")
    running = asyncio.create_task(store.run())
    log = open_log(store)
    fill(log, 1000)
    log.roll()
    store.sync_soon(log)
    await until_compacted(log, 1000)
    assert [record.offset for record in read(log)] == list(range(990, 1000))
    numbers = {metric.name: next(iter(metric.samples)).value for metric in store.metrics()}
    assert numbers["millstream_log_compaction_passes_total"] == 1
    assert numbers["millstream_log_compaction_failures_total"] == 0
    await store.close()
    await running
    store = opened(tmp_path / "data")
    assert store.clean_start
    assert [record.offset for record in read(open_log(store))] == list(range(990, 1000))
    store.close_now()


def test_a_segment_that_becomes_old_enough_during_a_pass_is_compacted(tmp_path: Path) -> None:
    """The pass has started before, and no append or timer would start the next one."""
    clock = ManualClock()
    store = opened(tmp_path / "data", clock)
    log = open_log(store)
    compactor = Compactor(DiskFiles(), clock)
    fill(log, 10)
    compactor.begin_round([log])
    assert compactor.due_in_s(log) == SETTINGS.segment_ms / 1000
    clock.advance_ms(SETTINGS.segment_ms + 1)
    assert compactor.due_in_s(log) == 0
    compactor.begin_round([log])
    assert [segment.sealed for segment in log.segments] == [True, False]
    store.close_now()


async def test_closing_does_not_wait_for_a_pass(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The child never responds, as if it were busy."""
    asked = asyncio.Event()
    loop = asyncio.get_running_loop()
    popen = subprocess.Popen

    def sleeper(_command: list[str], **named: object) -> subprocess.Popen[bytes]:
        loop.call_soon_threadsafe(asked.set)
        return popen(["sleep", "600"], **named)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(subprocess, "Popen", sleeper)
    store = opened(tmp_path / "data")
    running = asyncio.create_task(store.run())
    log = open_log(store)
    fill(log, 300)
    log.roll()
    store.sync_soon(log)
    async with asyncio.timeout(60):
        await asked.wait()
        await store.close()
        await running
    assert opened_cleanly(tmp_path)


def opened_cleanly(folder: Path) -> bool:
    store = opened(folder / "data")
    clean = store.clean_start
    store.close_now()
    return clean


def compaction_pass(folder: Path) -> CompactionPass:
    store = opened(folder / "data")
    log = open_log(store)
    fill(log, 20)
    store.close_now()
    segment = log.segments[0]
    return CompactionPass(
        directory=log.directory,
        token="token",
        groups=[[SourceSegment(0, segment.path, segment.size, segment.next_offset)]],
        dirty_from=0,
        cleanable_to=20,
        epochs=[(0, 0)],
        retained_offsets=[],
        now_ms=0,
        delete_retention_ms=0,
        keep_tombstones=False,
        index_interval_bytes=4096,
    )


def test_the_child_does_the_same_as_the_thread(tmp_path: Path) -> None:
    compaction = compaction_pass(tmp_path)
    child, inline = ChildWorker(compaction), InlineWorker(DiskFiles(), with_token(compaction, "other"))
    try:
        assert child.map_keys() == inline.map_keys()
        assert child.clean(0) == inline.clean(0)
    finally:
        child.close()
    files = sorted(Path(compaction.directory).glob("*.cleaned"))
    assert files[0].read_bytes() == files[1].read_bytes()


def with_token(compaction: CompactionPass, token: str) -> CompactionPass:
    return msgspec.structs.replace(compaction, token=token)


def test_the_child_reports_errors(tmp_path: Path) -> None:
    compaction = compaction_pass(tmp_path)
    path = Path(compaction.groups[0][0].path)
    content = bytearray(path.read_bytes())
    content[100] ^= 1
    path.write_bytes(content)
    damaged = ChildWorker(compaction)
    with pytest.raises(DamagedSource) as caught:
        damaged.map_keys()
    damaged.close()
    assert (caught.value.base_offset, caught.value.position) == (0, 0)
    path.unlink()
    missing = ChildWorker(compaction)
    with pytest.raises(OSError, match="No such file"):
        missing.map_keys()
    missing.close()


def test_cancelled_work_ends(tmp_path: Path) -> None:
    compaction = compaction_pass(tmp_path)
    for worker in (ChildWorker(compaction), InlineWorker(DiskFiles(), compaction)):
        worker.cancel()
        with pytest.raises(CleaningCancelled):
            worker.map_keys()
        worker.close()
        worker.close()
