"""The running store: commits, interval syncs, checkpoints and retention beside the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from uuid import UUID

import pytest

from millstream.broker.log import store as store_module
from millstream.broker.log.files import DiskFiles
from millstream.broker.log.log import Log
from millstream.broker.log.retention import delete_expired
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.errors import StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import FLUSH_INTERVAL, FLUSH_OS, TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import running

OpenStore = Callable[[], LogStore]
TOPIC_ID = UUID(int=6)


def open_log(store: LogStore, partition: int = 0, settings: TopicSettings | None = None) -> Log:
    return store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(partition)), settings or TopicSettings())


def put(log: Log, timestamp_ms: int = 1) -> None:
    log.append(encode_batch([NewRecord(None, b"v" * 100, (), timestamp_ms)]), leader_epoch=Epoch(0))


async def until_synced(log: Log) -> None:
    synced = asyncio.Event()
    log.listen(on_synced=synced.set)
    while log.synced_offset < log.end_offset:
        await synced.wait()
        synced.clear()


async def test_commits_of_one_and_of_many_logs_are_reported(tmp_path: Path) -> None:
    store = LogStore.open(
        tmp_path, files=DiskFiles(), clock=SystemClock(), journal_bytes=1 << 20, producer_expiry_ms=10**9
    )
    async with running(store):
        logs = [open_log(store, partition) for partition in range(10)]
        for _ in range(20):
            for log in logs:
                put(log)
                store.sync_soon(log)
            await asyncio.gather(*(until_synced(log) for log in logs))
    again = LogStore.open(
        tmp_path, files=DiskFiles(), clock=SystemClock(), journal_bytes=1 << 20, producer_expiry_ms=10**9
    )
    assert again.clean_start
    assert [open_log(again, partition).end_offset for partition in range(10)] == [20] * 10
    again.close_now()


async def test_interval_logs_sync_by_themselves(store: LogStore) -> None:
    async with running(store):
        log = open_log(store, settings=TopicSettings(flush=FLUSH_INTERVAL, flush_ms=5))
        for _ in range(3):
            put(log)
            await until_synced(log)


async def test_a_log_that_becomes_an_interval_log_is_synced_too(store: LogStore) -> None:
    async with running(store):
        log = open_log(store, settings=TopicSettings(flush=FLUSH_OS))
        put(log)
        log.change_settings(TopicSettings(flush=FLUSH_INTERVAL, flush_ms=5))
        await until_synced(log)


async def test_a_rolled_segment_is_synced_in_the_background(store: LogStore) -> None:
    async with running(store):
        log = open_log(store, settings=TopicSettings(flush=FLUSH_OS, segment_bytes=200))
        put(log)
        put(log)
        synced = asyncio.Event()
        log.listen(on_synced=synced.set)
        await synced.wait()
        assert log.stored_offset == 2


async def test_appends_from_before_the_store_ran_are_synced(store: LogStore) -> None:
    log = open_log(store, settings=TopicSettings(flush=FLUSH_INTERVAL, flush_ms=5))
    put(log)
    async with running(store):
        await until_synced(log)


async def test_logs_are_checkpointed_after_a_while(
    store: LogStore, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_module, "CHECKPOINT_S", 0.01)
    async with running(store):
        log = open_log(store)
        put(log)
        synced = asyncio.Event()
        log.listen(on_synced=synced.set)
        await synced.wait()
        assert files.content("/data/checkpoints")


async def test_a_failing_disk_is_retried(store: LogStore, files: MemoryFiles, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    async with running(store):
        log = open_log(store)
        put(log)
        failed = asyncio.get_running_loop().create_future()
        log.listen(on_sync_failed=lambda error: None if failed.done() else failed.set_result(error))
        files.fail_next_syncs(".log", ".log.repair")
        store.sync_soon(log)
        assert isinstance(await failed, StorageFailure)
        await until_synced(log)
        assert not store.failures


async def test_old_segments_are_deleted(monkeypatch: pytest.MonkeyPatch) -> None:
    store = LogStore.open(
        Path("/data"),
        files=MemoryFiles(),
        clock=SystemClock(),
        journal_bytes=1000,
        producer_expiry_ms=1000,
        retention_check_ms=5,
    )
    async with running(store):
        log = open_log(store, settings=TopicSettings(retention_ms=1000))
        deleted = asyncio.Event()
        monkeypatch.setattr(log, "delete_expired", lambda now_ms: deleted.set() if delete_expired(log, now_ms) else 0)
        put(log)
        store.sync_soon(log)
        await deleted.wait()
        assert log.start_offset == 1


async def test_a_log_is_deleted_while_the_store_runs(store: LogStore, files: MemoryFiles) -> None:
    async with running(store):
        log = open_log(store)
        put(log)
        store.sync_soon(log)
        store.delete_log(log)
        assert not list(store.stored())
    assert not any("partitions" in path for path in files.walk())


async def test_closing_syncs_pending_appends(store: LogStore, open_store: OpenStore, files: MemoryFiles) -> None:
    async with running(store):
        for partition, flush in enumerate((FLUSH_OS, FLUSH_INTERVAL)):
            put(open_log(store, partition, TopicSettings(flush=flush)))
    files.crash()
    again = open_store()
    assert again.clean_start
    assert [open_log(again, partition).end_offset for partition in range(2)] == [1, 1]


async def test_a_stop_on_a_failing_disk_is_not_marked_as_clean(
    store: LogStore, open_store: OpenStore, files: MemoryFiles
) -> None:
    async with running(store):
        put(open_log(store))
        files.fail_next_syncs("checkpoints")
    assert files.open_descriptors == 0
    again = open_store()
    assert not again.clean_start
    assert open_log(again).end_offset == 1


async def test_a_store_that_was_never_run_can_be_closed(store: LogStore, open_store: OpenStore) -> None:
    put(open_log(store))
    await store.close()
    await store.close()
    assert open_store().clean_start


async def test_a_cancelled_store_can_be_closed(store: LogStore, open_store: OpenStore) -> None:
    task = asyncio.create_task(store.run())
    log = open_log(store)
    put(log)
    store.sync_soon(log)
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.close()
    assert open_store().clean_start


async def test_metrics_are_reported(store: LogStore) -> None:
    async with running(store):
        log = open_log(store)
        put(log)
        store.sync_soon(log)
        await until_synced(log)
        names = {metric.name for metric in store.metrics()}
    assert "millstream_log_commit_seconds" in names
    assert all(name.startswith("millstream_log_") for name in names)
