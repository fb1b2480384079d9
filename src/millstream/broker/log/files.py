"""The file layer: all disk operations of the log, as a parameter, so that tests can inject faults.

Descriptors are plain numbers and the calls mirror `os`, so the real layer adds nothing to the hot path. Every call may
raise `OSError`; a write may be short, as the operating system's may.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import fcntl
import os
import platform
import re
import resource
import struct
import sys
import time
from collections import OrderedDict
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from typing import Final, NamedTuple, Protocol, cast

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
    syncfs: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return syncfs


Readable = bytes | bytearray | memoryview

OPEN_FILES_MIN = 16

OPEN_FILES_MAX = 4096

STAMP_NS = 50_000_000
"""The system's file times advance in steps of up to 10 ms; two writes within one step look the same."""


class Files(Protocol):
    """The disk operations of the log."""

    def open(self, path: str, /, *, create: bool = False) -> int:
        """Open a file for reading and writing; create it if asked to."""

    def open_to_read(self, path: str, /) -> int:
        """Open a file for reading alone, which a read-only file system allows."""

    def close(self, descriptor: int, /) -> None:
        """Close a descriptor."""

    def write_at(self, descriptor: int, data: Readable, position: int, /) -> int:
        """Write at a position; return how many bytes were written, perhaps not all."""

    def read_at(self, descriptor: int, size: int, position: int, /) -> bytes:
        """Read up to `size` bytes at a position; fewer at the end of the file."""

    def sync(self, descriptor: int, /) -> None:
        """Return once the contents of the file survive a power failure."""

    def background_sync(self) -> BackgroundSync | None:
        """Return the background sync of the running loop; None if only threads can sync."""

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
        """Return the free space of the disk that holds the path."""

    def open_files_max(self) -> int:
        """Return the number of files that the log may hold open at the same time."""


_PID_DIGITS_MAX = 32

_COMMAND_BYTES_MAX = 200

ORPHANS_S = 10.0
"""How long a lock whose owner was killed is waited for: its children hold it until the kernel has ended them."""
_ORPHANS_CHECK_S = 0.02


class DiskFiles:
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
        return KernelSync.open(asyncio.get_running_loop())

    def open(self, path: str, /, *, create: bool = False) -> int:
        flags = os.O_RDWR | os.O_CLOEXEC
        return os.open(path, flags | os.O_CREAT if create else flags, 0o600)

    def open_to_read(self, path: str, /) -> int:
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

    def size(self, descriptor: int, /) -> int:
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
            time.sleep(_ORPHANS_CHECK_S)
        # Named in the error of the next process. A full disk has no room for it, and must not prevent a start.
        with suppress(OSError):
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
        return descriptor

    def free_bytes(self, path: str, /) -> int:
        statistics = os.statvfs(path)
        return statistics.f_bavail * statistics.f_frsize

    def open_files_max(self) -> int:
        """Return a quarter of the limit of open files: connections need descriptors too."""
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return max(OPEN_FILES_MIN, min(OPEN_FILES_MAX, soft // 4))


def _has_ended(written: bytes) -> bool:
    """Whether the process that wrote its id into a lock file has ended, if that is visible from here."""
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
    """Describe the holder of a lock, as it wrote itself into the file."""
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
    """Whether the disk, or the user's quota on it, is full."""
    return error.errno in (errno.ENOSPC, errno.EDQUOT)


WRITE_BYTES = 1024 * 1024
"""Larger writes are split, so that the system can reuse page cache memory for them."""


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


SLOTS: Final = 16


class SyncListener(Protocol):
    """Waits for one sync."""

    def sync_ended(self, error: OSError | None) -> None:
        """Record the outcome; nothing else may happen here, since the loop may be in the middle of other work."""

    def proceed(self) -> None:
        """Act on the outcome."""


class BackgroundSync(Protocol):
    """Syncs files in the background."""

    def begin(self, descriptor: int, listener: SyncListener) -> bool:
        """Begin to sync a file; return False if that has to be done otherwise."""

    def drain(self) -> None:
        """Wait here until all have ended; code that blocks the loop on its own sync needs that first."""

    def close(self) -> None:
        """Wait for the rest, and begin no more."""


class _Calls(NamedTuple):
    """The numbers of the system calls, which glibc has no functions for."""

    setup: int
    destroy: int
    submit: int
    get_events: int


_CALLS: Final = {"x86_64": _Calls(206, 207, 209, 208), "aarch64": _Calls(0, 1, 2, 4)}
# The kernel's `struct iocb` and `struct io_event`, on machines of either kind.
_REQUEST: Final = struct.Struct("<QIiHhIQQqQII")
_EVENT: Final = struct.Struct("<QQqq")
_FDSYNC: Final = 3
_NOTIFIES: Final = 1
_no_wait = ctypes.create_string_buffer(16)


class KernelSync:
    """Lets the kernel sync files in the background: no thread, and one wake-up of the loop per sync.

    A thread that syncs has to take the interpreter's lock before and after the call, and a busy loop keeps it for up to
    five milliseconds at a time; its hand-overs also cost more CPU time than the sync. Linux syncs a file asynchronously
    (`IOCB_CMD_FDSYNC` of io_submit) and counts up an event descriptor that the loop watches. What a sync promises, and
    that an error is reported once, is the same as for fdatasync(2). Where the system has or allows no such call, `open`
    returns None, and a thread syncs.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: _Calls, context: int) -> None:
        self._loop = loop
        self._calls = calls
        self._context = context
        self._requests = [ctypes.create_string_buffer(_REQUEST.size) for _ in range(SLOTS)]
        self._pointers = [(ctypes.c_void_p * 1)(ctypes.addressof(request)) for request in self._requests]
        self._events = ctypes.create_string_buffer(_EVENT.size * SLOTS)
        self._free = list(range(SLOTS))
        self._listeners: dict[int, SyncListener] = {}
        self._event = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        loop.add_reader(self._event, self._collect)

    @classmethod
    def open(cls, loop: asyncio.AbstractEventLoop) -> KernelSync | None:
        """Start watching for ends of syncs; None where the system offers none in the background."""
        calls = _CALLS.get(platform.machine())
        if sys.platform != "linux" or calls is None:
            return None
        context = ctypes.c_ulong(0)
        if _call(calls.setup, SLOTS, ctypes.addressof(context)) != 0:
            return None
        return cls(loop, calls, context.value)

    def begin(self, descriptor: int, listener: SyncListener) -> bool:
        if not self._free:
            return False
        slot = self._free[-1]
        _REQUEST.pack_into(
            self._requests[slot], 0, slot, 0, 0, _FDSYNC, 0, descriptor, 0, 0, 0, 0, _NOTIFIES, self._event
        )
        if _call(self._calls.submit, self._context, 1, ctypes.addressof(self._pointers[slot])) != 1:
            return False
        self._free.pop()
        self._listeners[slot] = listener
        return True

    def drain(self) -> None:
        while self._listeners:
            for listener in self._take_ended(least=1):
                self._loop.call_soon(listener.proceed)

    def close(self) -> None:
        self.drain()
        self._loop.remove_reader(self._event)
        _call(self._calls.destroy, self._context)
        os.close(self._event)

    def _collect(self) -> None:
        with suppress(BlockingIOError):
            os.eventfd_read(self._event)
        for listener in self._take_ended(least=0):
            listener.proceed()

    def _take_ended(self, least: int) -> list[SyncListener]:
        """Report the outcomes of completed syncs, at least this many; return who waits for them."""
        patience = 0 if least else ctypes.addressof(_no_wait)
        count = _call(self._calls.get_events, self._context, least, SLOTS, ctypes.addressof(self._events), patience)
        if count < 0 and ctypes.get_errno() != errno.EINTR:
            raise OSError(ctypes.get_errno(), "the outcome of a sync could not be read")
        listeners = []
        for at in range(max(0, count)):
            slot, _, result, _ = _EVENT.unpack_from(self._events, at * _EVENT.size)
            self._free.append(slot)
            listener = self._listeners.pop(slot)
            listener.sync_ended(None if result == 0 else OSError(-result, os.strerror(-result)))
            listeners.append(listener)
        return listeners


@cache
def _system_call(arguments: int) -> Callable[..., int]:
    """Return the function for calls with this many arguments, declared so that ctypes converts them itself."""
    # The interpreter's lock is kept: the calls are short, and taking it again is what costs.
    syscall = ctypes.PyDLL(None, use_errno=True)["syscall"]
    syscall.argtypes = (ctypes.c_long,) * (1 + arguments)
    syscall.restype = ctypes.c_long
    return cast("Callable[..., int]", syscall)


def _call(number: int, *arguments: int) -> int:
    return _system_call(len(arguments))(number, *arguments)


class OpenFile(Protocol):
    """A file that can be held open; `descriptor` is -1 while it is closed."""

    path: str
    descriptor: int
    used: bool
    pins: int
    released: bool
    """Whether it was removed, so that its path may belong to another file."""

    def closed(self) -> None:
        """Drop the state that is in memory only while the file is open."""


class OpenFiles:
    """Opens files when they are needed and closes those that have not been used for a while.

    It holds those of all logs together, so that ten thousand partitions do not need ten thousand descriptors.

    Files are chosen by second chance: users set `used`, which is all that the hot path pays. A pinned file is in use by
    a thread or a response and is not closed before it is unpinned.
    """

    def __init__(self, files: Files, limit: int) -> None:
        self.files = files
        self._limit = limit
        self._pinned = 0
        self._open: OrderedDict[int, OpenFile] = OrderedDict()
        self._closing: set[int] = set()

    def __len__(self) -> int:
        return len(self._open)

    def descriptor(self, opened: OpenFile, *, create: bool = False) -> int:
        """Return the descriptor of a file, opening it if necessary."""
        opened.used = True
        if opened.descriptor >= 0:
            return opened.descriptor
        if len(self._open) >= self._limit:
            self._make_room()
        opened.descriptor = self.files.open(opened.path, create=create)
        self._open[id(opened)] = opened
        return opened.descriptor

    def pin(self, opened: OpenFile) -> int:
        """Open a file for a thread or a response; `unpin` must follow."""
        descriptor = self.descriptor(opened)
        self._pinned += not opened.pins
        opened.pins += 1
        return descriptor

    @property
    def has_room_to_pin(self) -> bool:
        """Whether enough files are left that can be closed for others."""
        return self._pinned < self._limit // 2

    def unpin(self, opened: OpenFile) -> None:
        opened.pins -= 1
        self._pinned -= not opened.pins
        if opened.pins == 0 and id(opened) in self._closing:
            self._closing.discard(id(opened))
            self._close(opened)

    def release(self, opened: OpenFile) -> None:
        """Close a file that will not be used again, at the latest when it is unpinned."""
        opened.released = True
        if opened.descriptor < 0:
            return
        if opened.pins:
            self._closing.add(id(opened))
        else:
            self._close(opened)

    def close(self, opened: OpenFile) -> None:
        """Close a file whose name now refers to something else, unless it is in use."""
        if opened.descriptor >= 0 and not opened.pins:
            self._close(opened)

    def close_all(self) -> None:
        """Close everything; no thread may use the files any more."""
        self._closing.clear()
        for opened in list(self._open.values()):
            self._close(opened)

    def _make_room(self) -> None:
        for _ in range(2 * len(self._open)):
            key, opened = next(iter(self._open.items()))
            if not opened.used and not opened.pins:
                self._close(opened)
                return
            opened.used = False
            self._open.move_to_end(key)

    def _close(self, opened: OpenFile) -> None:
        del self._open[id(opened)]
        descriptor, opened.descriptor = opened.descriptor, -1
        self.files.close(descriptor)
        opened.closed()
