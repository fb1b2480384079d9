"""Background syncs of the loop: the kernel's, and commits of a store that uses them."""

from __future__ import annotations

import asyncio
import errno
import os
from pathlib import Path
from uuid import UUID

import pytest

from millstream.broker.log import store as store_module
from millstream.broker.log.commit import Commit
from millstream.broker.log.files import SLOTS, KernelSync, SyncListener
from millstream.broker.log.log import Log
from millstream.broker.log.store import LogStore
from millstream.core.clock import SystemClock
from millstream.core.errors import StorageFailure
from millstream.core.ids import Epoch, PartitionIndex
from millstream.core.topic import TopicPartition, TopicSettings
from millstream.protocol.records.record import NewRecord, encode_batch
from millstream_testing.files import MemoryFiles
from millstream_testing.logs import memory_store, running

TOPIC_ID = UUID(int=7)


class Listener:
    """Records its notifications in order."""

    def __init__(self, heard: list[object]) -> None:
        self._heard = heard
        self.done = asyncio.Event()

    def sync_ended(self, error: OSError | None) -> None:
        self._heard.append(error)

    def proceed(self) -> None:
        self._heard.append("proceed")
        self.done.set()


@pytest.fixture
async def kernel() -> KernelSync:
    kernel_sync = KernelSync.open(asyncio.get_running_loop())
    if kernel_sync is None:
        pytest.skip("this system does not sync in the background")
    return kernel_sync


async def test_a_file_is_synced_in_the_background(kernel: KernelSync, tmp_path: Path) -> None:
    heard: list[object] = []
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    # More syncs than slots, so that slots are reused.
    for _ in range(SLOTS + 1):
        os.write(descriptor, b"x")
        listener = Listener(heard)
        assert kernel.begin(descriptor, listener)
        await listener.done.wait()
    assert heard == [None, "proceed"] * (SLOTS + 1)
    os.close(descriptor)
    kernel.close()


async def test_files_that_cannot_be_synced_are_refused_or_fail(kernel: KernelSync, tmp_path: Path) -> None:
    read, write = os.pipe()
    heard: list[object] = []
    assert not kernel.begin(write, Listener(heard))
    assert not kernel.begin(99_999, Listener(heard))
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT)
    begun = [kernel.begin(descriptor, Listener(heard)) for _ in range(SLOTS + 1)]
    assert begun == [True] * SLOTS + [False]
    for fd in (read, write, descriptor):
        os.close(fd)
    kernel.close()
    # Waiters act on it when the loop is free again.
    assert heard == [None] * SLOTS
    await asyncio.sleep(0)
    assert heard == [None] * SLOTS + ["proceed"] * SLOTS


# -- a store ------------------------------------------------------------------------------------------------


def open_store(files: MemoryFiles) -> LogStore:
    return memory_store(files, SystemClock(), journal_bytes=1 << 20)


def open_log(store: LogStore, partition: int) -> Log:
    return store.open_log(TOPIC_ID, TopicPartition("t", PartitionIndex(partition)), TopicSettings())


def put(store: LogStore, log: Log) -> None:
    log.append(encode_batch([NewRecord(None, b"v" * 100, (), 1)]), leader_epoch=Epoch(0))
    store.sync_soon(log)


async def until_synced(log: Log) -> None:
    synced = asyncio.Event()
    log.listen(on_synced=synced.set)
    while log.synced_offset < log.end_offset:
        await synced.wait()
        synced.clear()


class HeldFiles(MemoryFiles):
    """Completes background syncs only when the test says so."""

    def __init__(self) -> None:
        super().__init__(open_files_max=64)
        self.held = HeldSync(self)

    def background_sync(self) -> HeldSync:
        return self.held


class HeldSync:
    def __init__(self, files: MemoryFiles) -> None:
        self._files = files
        self.begun: list[tuple[int, SyncListener]] = []
        self.arrived = asyncio.Event()
        self.drains = 0

    def begin(self, descriptor: int, listener: SyncListener) -> bool:
        self.begun.append((descriptor, listener))
        self.arrived.set()
        return True

    async def wait_for(self, count: int) -> None:
        while len(self.begun) < count:
            self.arrived.clear()
            await self.arrived.wait()

    def end(self, at: int, error: OSError | None = None) -> None:
        descriptor, listener = self.begun.pop(at)
        if error is None:
            self._files.sync(descriptor)
        listener.sync_ended(error)
        listener.proceed()

    def drain(self) -> None:
        self.drains += 1
        while self.begun:
            self.end(0)

    close = drain


async def warm(store: LogStore, files: HeldFiles, logs: list[Log]) -> None:
    """Commit once in the thread, which makes the file names durable."""
    for log in logs:
        put(store, log)
        await until_synced(log)
    assert files.held.begun == []


async def test_one_log_does_not_wait_for_the_sync_of_another() -> None:
    files = HeldFiles()
    store = open_store(files)
    async with running(store):
        first, second = open_log(store, 0), open_log(store, 1)
        await warm(store, files, [first, second])
        put(store, first)
        await files.held.wait_for(1)
        put(store, second)
        # Appends during a sync of a log wait for its next commit.
        put(store, first)
        await files.held.wait_for(2)
        files.held.end(1)
        assert (first.synced_offset, second.synced_offset) == (1, 2)
        files.held.end(0)
        assert first.synced_offset == 2
        await files.held.wait_for(1)
        files.held.end(0)
        assert first.synced_offset == 3


async def test_many_logs_are_committed_together(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    execute = Commit.execute

    def counted(commit: Commit) -> None:
        sizes.append(len(commit.logs))
        execute(commit)

    monkeypatch.setattr(Commit, "execute", counted)
    files = HeldFiles()
    store = open_store(files)
    async with running(store):
        logs = [open_log(store, number) for number in range(8)]
        await warm(store, files, logs)
        sizes.clear()
        for log in logs:
            put(store, log)
        await asyncio.gather(*map(until_synced, logs))
        assert sizes == [8]


async def test_a_failed_background_sync_moves_the_tail_to_another_file(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_module, "RETRY_S", 0.01)
    files = HeldFiles()
    store = open_store(files)
    async with running(store):
        log = open_log(store, 0)
        await warm(store, files, [log])
        put(store, log)
        await files.held.wait_for(1)
        broken = log.segments.active
        files.held.end(0, OSError(errno.EIO, "planted"))
        # The file is not trusted again: its unsynced tail is copied, and only then acknowledged.
        assert log.synced_offset == 1
        with pytest.raises(StorageFailure):
            put(store, log)
        await until_synced(log)
        assert log.synced_offset == 2
        assert log.segments.active is not broken


async def test_a_checkpoint_on_the_loop_finishes_background_syncs_first() -> None:
    """Both sync the same file under a lock, which only the loop would release."""
    files = HeldFiles()
    store = open_store(files)
    async with running(store):
        log = open_log(store, 0)
        await warm(store, files, [log])
        put(store, log)
        await files.held.wait_for(1)
        store.checkpoint_now(log)
        assert files.held.drains == 1
        assert log.synced_offset == 2


async def test_an_unexpected_error_of_a_commit_stops_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_commit: Commit) -> None:
        raise RuntimeError("planted")

    store = open_store(MemoryFiles())
    running = asyncio.create_task(store.run())
    await asyncio.sleep(0)
    monkeypatch.setattr(Commit, "finish", fail)
    put(store, open_log(store, 0))
    with pytest.raises(ExceptionGroup) as raised:
        await running
    assert raised.group_contains(RuntimeError, match="planted")
