"""The file layer: the disk and its in-memory stand-in agree, and the stand-in fails as documented."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millstream.broker.log.files import DiskFiles, Files, OpenFiles, write_fully
from millstream.core.errors import DataFolderInUse
from millstream_testing.files import SECTOR_BYTES, MemoryFiles


@pytest.fixture(params=["disk", "memory"])
def layer(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Files, str]:
    if request.param == "disk":
        return DiskFiles(), str(tmp_path)
    files = MemoryFiles()
    files.make_directory("/root")
    return files, "/root"


# -- both ---------------------------------------------------------------------------------------------------


def test_files_are_written_read_and_truncated(layer: tuple[Files, str]) -> None:
    files, root = layer
    descriptor = files.open(f"{root}/a", create=True)
    assert files.write_at(descriptor, memoryview(b"hello"), 0) == 5
    assert files.write_at(descriptor, bytearray(b"!"), 7) == 1
    assert files.read_at(descriptor, 100, 0) == b"hello\0\0!"
    assert files.read_at(descriptor, 2, 1) == b"el"
    assert files.read_at(descriptor, 5, 50) == b""
    files.truncate(descriptor, 3)
    assert files.size(descriptor) == 3
    files.allocate(descriptor, 10)
    assert files.size(descriptor) == 10
    files.sync(descriptor)
    files.close(descriptor)
    with pytest.raises(OSError, match=r"(?i)bad file descriptor"):
        files.read_at(descriptor, 1, 0)


def test_files_are_created_renamed_and_removed(layer: tuple[Files, str]) -> None:
    files, root = layer
    files.make_directory(f"{root}/x/y")
    files.make_directory(f"{root}/x/y")
    files.close(files.open(f"{root}/x/a", create=True))
    files.rename(f"{root}/x/a", f"{root}/x/b")
    files.sync_directory(f"{root}/x")
    assert sorted(files.names(f"{root}/x")) == ["b", "y"]
    assert files.exists(f"{root}/x/b")
    assert not files.exists(f"{root}/x/a")
    assert files.names(f"{root}/nowhere") == []
    with pytest.raises(OSError, match="not empty"):
        files.remove_directory(f"{root}/x")
    files.remove(f"{root}/x/b")
    files.remove_directory(f"{root}/x/y")
    files.remove_directory(f"{root}/x")
    assert not files.exists(f"{root}/x")


def test_missing_files_are_reported(layer: tuple[Files, str]) -> None:
    files, root = layer
    with pytest.raises(FileNotFoundError):
        files.open(f"{root}/a")
    with pytest.raises(FileNotFoundError):
        files.open(f"{root}/no/a", create=True)
    with pytest.raises(FileNotFoundError):
        files.remove(f"{root}/a")
    with pytest.raises(FileNotFoundError):
        files.sync_directory(f"{root}/no")


def test_a_removed_file_can_still_be_read(layer: tuple[Files, str]) -> None:
    files, root = layer
    descriptor = files.open(f"{root}/a", create=True)
    files.write_at(descriptor, b"hello", 0)
    files.remove(f"{root}/a")
    assert files.read_at(descriptor, 5, 0) == b"hello"
    files.close(descriptor)


def test_a_lock_has_one_holder(layer: tuple[Files, str]) -> None:
    files, root = layer
    held = files.lock(f"{root}/lock")
    with pytest.raises(DataFolderInUse):
        files.lock(f"{root}/lock")
    files.close(held)
    files.close(files.lock(f"{root}/lock"))


def test_a_lock_is_awaited_while_only_children_of_its_owner_are_left(tmp_path: Path) -> None:
    owner = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    (tmp_path / "lock").write_bytes(owner.stdout)
    inherited = os.open(tmp_path / "lock", os.O_RDWR)
    fcntl.flock(inherited, fcntl.LOCK_EX)
    threading.Timer(0.2, os.close, [inherited]).start()
    os.close(DiskFiles().lock(str(tmp_path / "lock")))


def test_free_space_is_reported(layer: tuple[Files, str]) -> None:
    files, root = layer
    assert files.free_bytes(root) > 0
    assert files.open_files_max() >= 16


# -- memory only --------------------------------------------------------------------------------------------


def written(files: MemoryFiles, path: str, data: bytes, *, sync: bool) -> int:
    descriptor = files.open(path, create=True)
    write_fully(files, descriptor, data, 0)
    if sync:
        files.sync(descriptor)
    return descriptor


def test_synced_files_with_synced_names_survive_a_crash() -> None:
    files = MemoryFiles()
    written(files, "/a", b"hello", sync=True)
    files.sync_directory("/")
    files.crash()

    assert files.content("/a") == b"hello"


def test_an_unsynced_name_may_be_gone_and_an_unsynced_removal_may_be_undone() -> None:
    outcomes = set()
    for seed in range(40):
        files = MemoryFiles(seed)
        written(files, "/a", b"a", sync=True)
        files.sync_directory("/")
        written(files, "/b", b"b", sync=True)
        files.remove("/a")
        files.crash()
        outcomes.add(tuple(sorted(files.names("/"))))

    assert outcomes == {("a",), ("a", "b"), ("b",)}


def test_unsynced_bytes_may_be_lost_or_torn_by_sector() -> None:
    outcomes = set()
    data = b"x" * (3 * SECTOR_BYTES)
    for seed in range(60):
        files = MemoryFiles(seed)
        descriptor = written(files, "/a", b"", sync=True)
        files.sync_directory("/")
        files.write_at(descriptor, data, 0)
        files.crash()
        outcomes.add(files.content("/a"))

    assert b"" in outcomes
    assert data in outcomes
    assert any(len(outcome) == len(data) and outcome != data for outcome in outcomes)


def test_a_failed_sync_drops_dirty_data() -> None:
    files = MemoryFiles()
    descriptor = written(files, "/a", b"hello", sync=False)
    files.sync_directory("/")
    files.fail_next_syncs("/a")
    with pytest.raises(OSError, match="input/output"):
        files.sync(descriptor)
    files.sync(descriptor)
    assert files.content("/a") == b"hello"
    files.crash()
    assert files.content("/a") == b""


def test_a_full_disk_writes_what_fits() -> None:
    files = MemoryFiles()
    files.capacity_bytes = 8
    descriptor = files.open("/a", create=True)
    assert files.write_at(descriptor, b"0123456789", 0) == 8
    with pytest.raises(OSError, match="No space left"):
        files.write_at(descriptor, b"x", 8)
    assert files.write_at(descriptor, b"yy", 0) == 2
    assert files.free_bytes("/") == 0
    with pytest.raises(OSError, match="No space left"):
        files.allocate(descriptor, 9)


def test_a_kill_loses_only_the_descriptors() -> None:
    files = MemoryFiles()
    descriptor = written(files, "/a", b"hello", sync=False)
    files.lock("/lock")
    files.kill()

    assert files.content("/a") == b"hello"
    with pytest.raises(OSError, match="bad file descriptor"):
        files.size(descriptor)
    files.lock("/lock")


@given(st.binary(max_size=500), st.integers(0, 100))
def test_short_writes_are_continued(data: bytes, seed: int) -> None:
    files = MemoryFiles(seed)
    files.short_write_chance = 0.9
    descriptor = files.open("/a", create=True)
    write_fully(files, descriptor, data, 3)

    assert files.content("/a") == (bytes(3) + data if data else b"")


# -- the pool -----------------------------------------------------------------------------------------------


class Opened:
    def __init__(self, path: str) -> None:
        self.path = path
        self.descriptor = -1
        self.used = False
        self.pins = 0
        self.released = False
        self.closings = 0

    def closed(self) -> None:
        self.closings += 1


def test_the_least_recently_used_file_is_closed() -> None:
    files = MemoryFiles()
    pool = OpenFiles(files, 2)
    first, second, third = (Opened(f"/{name}") for name in "abc")
    pool.descriptor(first, create=True)
    pool.descriptor(second, create=True)
    first.used, second.used = True, False
    pool.descriptor(third, create=True)

    assert (first.descriptor >= 0, second.descriptor, third.descriptor >= 0) == (True, -1, True)
    assert second.closings == 1
    assert files.open_descriptors == 2


def test_a_pinned_file_stays_open_until_it_is_unpinned() -> None:
    files = MemoryFiles()
    pool = OpenFiles(files, 1)
    pinned, other = Opened("/a"), Opened("/b")
    pool.descriptor(pinned, create=True)
    descriptor = pool.pin(pinned)
    pool.descriptor(other, create=True)
    assert pinned.descriptor == descriptor
    pool.release(pinned)
    assert pinned.descriptor == descriptor
    pool.unpin(pinned)
    assert pinned.descriptor == -1
    pool.close_all()
    assert files.open_descriptors == 0
