"""The file layer: everything the log asks of a disk, as a parameter, so that tests can inject faults.

Descriptors are plain numbers and the calls mirror `os`, so the real layer adds nothing to the hot path. Every call may
raise `OSError`; a write may be short, as the operating system's may.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import re
import resource
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Protocol

from millstream.broker.log.kernel_sync import BackgroundSync, KernelSync
from millstream.core.errors import DataFolderInUse

_SYNCFS_REPORTS_ERRORS_SINCE = (5, 8)
"""Before this version of Linux, the call does not report write errors."""


def sync_file_system(descriptor: int) -> None:
    """Sync the file system of an open file, or raise `OSError`."""
    syncfs = _syncfs()
    if syncfs is None:
        raise OSError(errno.ENOSYS, "the system cannot sync a file system and report errors")
    if syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _syncfs() -> Callable[[int], int] | None:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if sys.platform != "linux" or release is None or (int(release[1]), int(release[2])) < _SYNCFS_REPORTS_ERRORS_SINCE:
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return found


Readable = bytes | bytearray | memoryview

OPEN_FILES_MIN = 16

OPEN_FILES_MAX = 4096

STAMP_NS = 50_000_000
"""The system's file times advance in steps of up to 10 ms; two writes within one step look the same."""


class Files(Protocol):
    """What the log asks of a disk."""

    def open(self, path: str, /, *, create: bool = False) -> int:
        """Open a file for reading and writing; create it if asked to."""

    def close(self, descriptor: int, /) -> None:
        """Close a descriptor."""

    def write_at(self, descriptor: int, data: Readable, position: int, /) -> int:
        """Write at a position; return how many bytes were written, perhaps not all."""

    def read_at(self, descriptor: int, size: int, position: int, /) -> bytes:
        """Read up to `size` bytes at a position; fewer at the end of the file."""

    def sync(self, descriptor: int, /) -> None:
        """Return once the contents of the file survive a power failure."""

    def background_sync(self) -> BackgroundSync | None:
        """Return what syncs files in the background of the running loop; None if only threads can."""

    def truncate(self, descriptor: int, size: int, /) -> None:
        """Truncate the file."""

    def size(self, descriptor: int, /) -> int:
        """Return the size of an open file."""

    def stamp(self, descriptor: int, /) -> int:
        """Return a number that every write into the file changes; -1 if the last write is too recent for that."""

    def allocate(self, descriptor: int, size: int, /) -> None:
        """Reserve space, so that later writes neither fail for lack of it nor change the file's size."""

    def names(self, directory: str, /) -> list[str]:
        """List a directory; nothing if it does not exist."""

    def exists(self, path: str, /) -> bool:
        """Whether a file or directory exists."""

    def make_directory(self, path: str, /) -> None:
        """Create a directory and its parents, unless they exist."""

    def sync_directory(self, path: str, /) -> None:
        """Return once the names in the directory survive a power failure."""

    def sync_all(self, path: str, /) -> None:
        """Return once everything on the file system that holds the path survives a power failure."""

    def rename(self, old: str, new: str, /) -> None:
        """Rename a file or directory, replacing a file of that name."""

    def remove(self, path: str, /) -> None:
        """Remove a file."""

    def remove_directory(self, path: str, /) -> None:
        """Remove an empty directory."""

    def lock(self, path: str, /) -> int:
        """Hold a lock file until its descriptor is closed, or raise `DataFolderInUse`."""

    def free_bytes(self, path: str, /) -> int:
        """Return how much can still be written to the disk that holds the path."""

    def open_files_max(self) -> int:
        """Return the number of files that the log may hold open at the same time."""


_PID_DIGITS_MAX = 32

_COMMAND_BYTES_MAX = 200

ORPHANS_S = 10.0
"""How long a lock whose owner was killed is waited for: its children hold it until the kernel has ended them."""
_ORPHANS_LOOK_S = 0.02


class DiskFiles:
    """The real disk."""

    write_at = staticmethod(os.pwrite)
    read_at = staticmethod(os.pread)
    sync = staticmethod(os.fdatasync)
    truncate = staticmethod(os.ftruncate)
    close = staticmethod(os.close)
    rename = staticmethod(os.replace)
    remove = staticmethod(os.unlink)
    remove_directory = staticmethod(os.rmdir)
    exists = staticmethod(os.path.lexists)

    def background_sync(self) -> BackgroundSync | None:
        """Return what syncs files in the background of the running loop; None if only threads can."""
        return KernelSync.open(asyncio.get_running_loop())

    def open(self, path: str, /, *, create: bool = False) -> int:
        """Open a file for reading and writing; create it if asked to."""
        flags = os.O_RDWR | os.O_CLOEXEC
        return os.open(path, flags | os.O_CREAT if create else flags, 0o600)

    def size(self, descriptor: int, /) -> int:
        """Return the size of an open file."""
        return os.fstat(descriptor).st_size

    def stamp(self, descriptor: int, /) -> int:
        """Return when the inode last changed, which cannot be set back; -1 while a write would not change it."""
        changed_ns = os.fstat(descriptor).st_ctime_ns
        return changed_ns if time.time_ns() - changed_ns > STAMP_NS else -1

    def allocate(self, descriptor: int, size: int, /) -> None:
        """Reserve space; where the file system cannot, later writes may fail instead."""
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL):
                raise

    def names(self, directory: str, /) -> list[str]:
        """List a directory; nothing if it does not exist."""
        try:
            return os.listdir(directory)
        except FileNotFoundError:
            return []

    def make_directory(self, path: str, /) -> None:
        """Create a directory and its parents, unless they exist, for this user only."""
        above = os.path.dirname(path)
        if above and not os.path.isdir(above):
            self.make_directory(above)
        os.makedirs(path, mode=0o700, exist_ok=True)

    def sync_directory(self, path: str, /) -> None:
        """Return once the names in the directory survive a power failure."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def sync_all(self, path: str, /) -> None:
        """Sync the whole file system; raise `OSError` where the system cannot, or does not report errors."""
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sync_file_system(descriptor)
        finally:
            os.close(descriptor)

    def lock(self, path: str, /) -> int:
        """Hold a lock file until its descriptor is closed, or raise `DataFolderInUse`."""
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + ORPHANS_S
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                written = os.pread(descriptor, _PID_DIGITS_MAX, 0)
                # Processes that inherited the lock from one that was killed are about to end.
                if not _has_ended(written) or time.monotonic() > deadline:
                    os.close(descriptor)
                    raise DataFolderInUse(
                        f"{_describe_holder(written)} holds {path}; stop it, or use another data folder"
                    ) from None
            time.sleep(_ORPHANS_LOOK_S)
        # Named in the error of the next process. A full disk has no room for it, and must not prevent a start.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return descriptor

    def free_bytes(self, path: str, /) -> int:
        """Return how much can still be written to the disk that holds the path."""
        found = os.statvfs(path)
        return found.f_bavail * found.f_frsize

    def open_files_max(self) -> int:
        """Return a quarter of what the process may open: connections need descriptors too."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(OPEN_FILES_MIN, min(OPEN_FILES_MAX, soft // 4))


def _has_ended(written: bytes) -> bool:
    """Whether the process that wrote its id into a lock file is gone, as far as can be seen from here."""
    text = written.decode(errors="replace").strip()
    if not text.isdigit() or not os.path.isdir("/proc/self"):
        return False
    try:
        with open(f"/proc/{text}/cmdline", "rb") as file:
            # A zombie has no command line.
            return not file.read(1)
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _describe_holder(written: bytes) -> str:
    """Describe the holder of a lock by what it wrote into the file."""
    text = written.decode(errors="replace").strip()
    if not text.isdigit():
        return "another process"
    if int(text) == os.getpid():
        return "this process"
    try:
        with open(f"/proc/{text}/cmdline", "rb") as file:
            words = file.read(_COMMAND_BYTES_MAX).decode(errors="replace").split("\0")
    except OSError:
        # It may run in another container.
        return f"process {text}"
    command = " ".join(words).strip()
    return f"process {text} ({command})" if command else f"process {text}"


def is_out_of_space(error: OSError) -> bool:
    """Whether the disk, or what its user may use of it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


WRITE_BYTES = 1024 * 1024
"""Larger writes are split: the system finds room for these in memory that it has used before."""


def write_fully(files: Files, descriptor: int, data: Readable, position: int) -> None:
    """Write all of the data, in as many writes as necessary; raise `OSError` if the disk is full."""
    written = 0
    if len(data) <= WRITE_BYTES:
        written = files.write_at(descriptor, data, position)
        if written == len(data):
            return
    rest = memoryview(data)
    while written < len(rest):
        taken = files.write_at(descriptor, rest[written : written + WRITE_BYTES], position + written)
        if taken <= 0:
            raise OSError(errno.EIO, "the disk accepted no bytes of a write")
        written += taken
