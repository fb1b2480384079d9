"""A disk in memory that can be made to fail: the file layer of tests, deterministic from a seed.

It distinguishes the page cache from durable data. `crash` loses power: each unsynced sector is kept or lost by chance,
and so are names whose directory was not synced (a prefix of them survives, as in a journaling file system). `kill` ends
only the process, so that nothing is lost. Faults are injected with `fail_next_syncs`, `fail_next_writes`,
`capacity_bytes`, `short_write_chance` and `flip_bit`.
"""

from __future__ import annotations

import asyncio
import errno
import os
import random
import threading
from collections.abc import Iterator

from millstream.broker.log.files import BackgroundSync, Readable, SyncListener
from millstream.core.errors import DataFolderInUse

SECTOR_BYTES = 64
"""Small, so that small batches are torn too."""


class MemoryFile:
    """The contents of one file, as the process sees them and as they are on disk."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.durable = bytearray()
        self.pending: list[tuple[int, bytes] | int] = []
        """Writes (position and bytes) and truncations (the size) since the last sync."""
        self.changes = 0
        """The number of writes and truncations."""

    def write(self, position: int, data: bytes) -> None:
        """Write into the page cache."""
        if not data:
            return
        _put(self.data, position, data)
        self.pending.append((position, data))
        self.changes += 1

    def truncate(self, size: int) -> None:
        """Truncate or extend in the page cache."""
        _resize(self.data, size)
        self.pending.append(size)
        self.changes += 1

    def sync(self) -> None:
        """Make everything durable that was written since the last sync."""
        for change in self.pending:
            if isinstance(change, int):
                _resize(self.durable, change)
            else:
                _put(self.durable, *change)
        self.pending.clear()

    def crash(self, rng: random.Random) -> None:
        """Lose power: each unsynced sector is kept or lost."""
        keep = rng.choice((0.0, 0.5, 0.9, 1.0))
        for change in self.pending:
            if isinstance(change, int):
                if rng.random() < keep:
                    _resize(self.durable, change)
                continue
            position, data = change
            for start, piece in _sectors(position, data):
                if rng.random() < keep:
                    _put(self.durable, start, piece)
        self.pending.clear()
        self.data = bytearray(self.durable)


class MemoryDirectory:
    """The names in one directory, as the process sees them and as they are on disk."""

    def __init__(self) -> None:
        self.entries: dict[str, MemoryFile | MemoryDirectory] = {}
        self.durable: dict[str, MemoryFile | MemoryDirectory] = {}
        self.pending: list[dict[str, MemoryFile | MemoryDirectory | None]] = []
        """Changes since the last sync: names with what they refer to, or None for a removed name."""

    def change(self, names: dict[str, MemoryFile | MemoryDirectory | None]) -> None:
        """Change some names at once."""
        _apply(self.entries, names)
        self.pending.append(names)

    def sync(self) -> None:
        """Make the names durable."""
        self.durable = dict(self.entries)
        self.pending.clear()

    def crash(self, rng: random.Random) -> None:
        """Lose power: only the first few of the unsynced changes survive."""
        for names in self.pending[: rng.randint(0, len(self.pending))]:
            _apply(self.durable, names)
        self.pending.clear()
        self.entries = dict(self.durable)
        for entry in self.entries.values():
            entry.crash(rng)


class MemoryFiles:
    """The `Files` of tests."""

    def __init__(self, seed: int = 0, *, open_files_max: int = 16) -> None:
        self.capacity_bytes: int | None = None
        self.full_errno = errno.ENOSPC
        self.short_write_chance = 0.0
        self.syncs_in_background = True
        """Whether files may be synced without a thread."""
        self.keep_cache_after_failed_sync = True
        self.syncs = 0
        self.reads = 0
        self._rng = random.Random(seed)
        self._root = MemoryDirectory()
        self._open: dict[int, MemoryFile] = {}
        self._names: dict[int, str] = {}
        self._locked: dict[int, str] = {}
        self._next_descriptor = 3
        self._open_files_max = open_files_max
        self._failing_syncs: list[str] = []
        self._failing_writes: list[str] = []
        self._lock = threading.RLock()

    # -- faults ---------------------------------------------------------------------------------------------

    def crash(self) -> None:
        """Lose power and restart."""
        with self._lock:
            self._root.crash(self._rng)
            self.kill()

    def kill(self) -> None:
        """End the process that uses the files; the operating system continues."""
        with self._lock:
            self._open.clear()
            self._names.clear()
            self._locked.clear()
            self.forget_planted()

    def forget_planted(self) -> None:
        """Cancel the failures that have not happened yet."""
        self._failing_syncs.clear()
        self._failing_writes.clear()

    def fail_next_syncs(self, *endings: str) -> None:
        """Fail the next sync of a file for each given suffix; a directory's path counts too."""
        self._failing_syncs += endings

    def fail_next_writes(self, *endings: str) -> None:
        self._failing_writes += endings

    def flip_bit(self, path: str, position: int, bit: int) -> None:
        """Flip one bit of a file, as a bad disk does."""
        with self._lock:
            file = self._file(path)
            for content in (file.data, file.durable):
                if position < len(content):
                    content[position] ^= 1 << bit

    def overwrite(self, path: str, position: int, data: bytes) -> None:
        """Write into a file from outside, as another process does."""
        with self._lock:
            self._file(path).write(position, data)
            self._file(path).sync()

    def content(self, path: str) -> bytes:
        """Return the content of a file, as the process sees it."""
        return bytes(self._file(path).data)

    def walk(self, directory: str = "") -> Iterator[str]:
        for name in sorted(self.names(directory or "/")):
            path = f"{directory}/{name}"
            entry = self._find(path)
            if isinstance(entry, MemoryFile):
                yield path
            else:
                yield from self.walk(path)

    @property
    def open_descriptors(self) -> int:
        """Return the number of open descriptors, without locks."""
        return len(self._open) - len(self._locked)

    # -- the protocol ---------------------------------------------------------------------------------------

    def open(self, path: str, /, *, create: bool = False) -> int:
        """Open a file for reading and writing; create it if requested."""
        with self._lock:
            entry = self._find(path)
            if entry is None:
                if not create:
                    raise FileNotFoundError(errno.ENOENT, "no such file", path)
                parent, name = self._parent(path)
                entry = MemoryFile()
                parent.change({name: entry})
            if isinstance(entry, MemoryDirectory):
                raise IsADirectoryError(errno.EISDIR, "is a directory", path)
            return self._describe(entry, path)

    def open_to_read(self, path: str, /) -> int:
        """Open a file for reading; here, like any other."""
        return self.open(path)

    def close(self, descriptor: int, /) -> None:
        with self._lock:
            self._opened(descriptor)
            del self._open[descriptor], self._names[descriptor]
            self._locked.pop(descriptor, None)

    def write_at(self, descriptor: int, data: Readable, position: int, /) -> int:
        """Write at a position; return how many bytes were written, perhaps not all."""
        with self._lock:
            file = self._opened(descriptor)
            self._fail_if_planted(self._failing_writes, self._names[descriptor])
            content = bytes(data)
            room = self._room(file, position)
            if room is not None and len(content) > room:
                if room <= 0:
                    raise OSError(self.full_errno, os.strerror(self.full_errno))
                content = content[:room]
            if len(content) > 1 and self._rng.random() < self.short_write_chance:
                content = content[: self._rng.randint(1, len(content) - 1)]
            file.write(position, content)
            return len(content)

    def read_at(self, descriptor: int, size: int, position: int, /) -> bytes:
        """Read up to `size` bytes at a position; fewer at the end of the file."""
        with self._lock:
            self.reads += 1
            return bytes(self._opened(descriptor).data[position : position + size])

    def background_sync(self) -> BackgroundSync | None:
        """Sync files a little later, unless the test wants threads."""
        return MemorySync(self) if self.syncs_in_background else None

    def sync(self, descriptor: int, /) -> None:
        """Make the contents of a file durable."""
        with self._lock:
            file = self._opened(descriptor)
            self.syncs += 1
            try:
                self._fail_if_planted(self._failing_syncs, self._names[descriptor])
            except OSError:
                # The kernel marks the pages as clean, so that a second sync would not write them either.
                file.pending.clear()
                if not self.keep_cache_after_failed_sync:
                    file.data = bytearray(file.durable)
                raise
            file.sync()

    def truncate(self, descriptor: int, size: int, /) -> None:
        with self._lock:
            self._opened(descriptor).truncate(size)

    def size(self, descriptor: int, /) -> int:
        return len(self._opened(descriptor).data)

    def stamp(self, descriptor: int, /) -> int:
        """Return a number that changes with each write to the file, but not with a bit that a bad disk flips."""
        return self._opened(descriptor).changes

    def allocate(self, descriptor: int, size: int, /) -> None:
        """Reserve space."""
        with self._lock:
            file = self._opened(descriptor)
            room = self._room(file, len(file.data))
            if room is not None and size - len(file.data) > room:
                raise OSError(self.full_errno, os.strerror(self.full_errno))
            if len(file.data) < size:
                file.truncate(size)

    def names(self, directory: str, /) -> list[str]:
        """Return the names in a directory; none if it does not exist."""
        entry = self._find(directory)
        return list(entry.entries) if isinstance(entry, MemoryDirectory) else []

    def exists(self, path: str, /) -> bool:
        return self._find(path) is not None

    def make_directory(self, path: str, /) -> None:
        """Create a directory and its parents, unless they exist."""
        with self._lock:
            directory = self._root
            for name in _parts(path):
                entry = directory.entries.get(name)
                if entry is None:
                    entry = MemoryDirectory()
                    directory.change({name: entry})
                if isinstance(entry, MemoryFile):
                    raise NotADirectoryError(errno.ENOTDIR, "not a directory", path)
                directory = entry

    def sync_directory(self, path: str, /) -> None:
        """Make the names in a directory durable."""
        with self._lock:
            self.syncs += 1
            self._fail_if_planted(self._failing_syncs, path)
            entry = self._find(path)
            if not isinstance(entry, MemoryDirectory):
                raise FileNotFoundError(errno.ENOENT, "no such directory", path)
            entry.sync()

    def sync_all(self, path: str, /) -> None:
        """Make everything durable."""
        with self._lock:
            self.syncs += 1
            self._fail_if_planted(self._failing_syncs, path)
            _sync_below(self._root)

    def rename(self, old: str, new: str, /) -> None:
        with self._lock:
            parent, name = self._parent(old)
            other, new_name = self._parent(new)
            if parent is not other:
                raise OSError(errno.EXDEV, "the log renames within one directory only")
            entry = parent.entries.get(name)
            if entry is None:
                raise FileNotFoundError(errno.ENOENT, "no such file", old)
            parent.change({name: None, new_name: entry})

    def remove(self, path: str, /) -> None:
        with self._lock:
            self._file(path)
            parent, name = self._parent(path)
            parent.change({name: None})

    def remove_directory(self, path: str, /) -> None:
        with self._lock:
            if self.names(path):
                raise OSError(errno.ENOTEMPTY, "directory not empty", path)
            parent, name = self._parent(path)
            parent.change({name: None})

    def lock(self, path: str, /) -> int:
        """Hold a lock file until its descriptor is closed, or raise `DataFolderInUse`."""
        with self._lock:
            if path in self._locked.values():
                raise DataFolderInUse(f"another process holds {path}")
            descriptor = self.open(path, create=True)
            self._locked[descriptor] = path
            return descriptor

    def free_bytes(self, path: str, /) -> int:
        """Return how much can still be written."""
        return 2**40 if self.capacity_bytes is None else max(0, self.capacity_bytes - self._used(self._root))

    def open_files_max(self) -> int:
        """Return how many files the log may hold open."""
        return self._open_files_max

    # -- internals ------------------------------------------------------------------------------------------

    def _find(self, path: str) -> MemoryFile | MemoryDirectory | None:
        entry: MemoryFile | MemoryDirectory | None = self._root
        for name in _parts(path):
            if not isinstance(entry, MemoryDirectory):
                return None
            entry = entry.entries.get(name)
        return entry

    def _file(self, path: str) -> MemoryFile:
        entry = self._find(path)
        if not isinstance(entry, MemoryFile):
            raise FileNotFoundError(errno.ENOENT, "no such file", path)
        return entry

    def _parent(self, path: str) -> tuple[MemoryDirectory, str]:
        directory, _, name = path.rpartition("/")
        entry = self._find(directory)
        if not isinstance(entry, MemoryDirectory):
            raise FileNotFoundError(errno.ENOENT, "no such directory", directory)
        return entry, name

    def _describe(self, file: MemoryFile, path: str) -> int:
        descriptor = self._next_descriptor
        self._next_descriptor += 1
        self._open[descriptor] = file
        self._names[descriptor] = path
        return descriptor

    def _opened(self, descriptor: int) -> MemoryFile:
        file = self._open.get(descriptor)
        if file is None:
            raise OSError(errno.EBADF, "bad file descriptor")
        return file

    def _fail_if_planted(self, planted: list[str], path: str) -> None:
        for ending in planted:
            if path.endswith(ending):
                planted.remove(ending)
                raise OSError(errno.EIO, "input/output error", path)

    def _room(self, file: MemoryFile, position: int) -> int | None:
        """Return how many bytes fit after a position of a file; None if there is no limit."""
        if self.capacity_bytes is None:
            return None
        return max(0, self.capacity_bytes - self._used(self._root)) + max(0, len(file.data) - position)

    def _used(self, directory: MemoryDirectory) -> int:
        return sum(
            self._used(entry) if isinstance(entry, MemoryDirectory) else len(entry.data)
            for entry in directory.entries.values()
        )


def _sync_below(directory: MemoryDirectory) -> None:
    directory.sync()
    for entry in directory.entries.values():
        if isinstance(entry, MemoryDirectory):
            _sync_below(entry)
        else:
            entry.sync()


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]


def _put(content: bytearray, position: int, data: bytes) -> None:
    if len(content) < position:
        content.extend(bytes(position - len(content)))
    content[position : position + len(data)] = data


def _resize(content: bytearray, size: int) -> None:
    if size < len(content):
        del content[size:]
    else:
        content.extend(bytes(size - len(content)))


def _sectors(position: int, data: bytes) -> Iterator[tuple[int, bytes]]:
    """Split a write by the sectors of the disk."""
    start = 0
    while start < len(data):
        size = min(len(data) - start, SECTOR_BYTES - (position + start) % SECTOR_BYTES)
        yield position + start, data[start : start + size]
        start += size


def _apply(
    entries: dict[str, MemoryFile | MemoryDirectory], names: dict[str, MemoryFile | MemoryDirectory | None]
) -> None:
    for name, entry in names.items():
        if entry is None:
            entries.pop(name, None)
        else:
            entries[name] = entry


class MemorySync:
    """Syncs files of a `MemoryFiles` as the kernel does in the background: at once, with a delayed report.

    In a simulation the work of threads is done on the loop, where it must not wait for the end of a sync.
    """

    def __init__(self, files: MemoryFiles) -> None:
        self._files = files
        self._loop = asyncio.get_running_loop()

    def begin(self, descriptor: int, listener: SyncListener) -> bool:
        """Sync a file, and report it a little later."""
        try:
            self._files.sync(descriptor)
        except OSError as error:
            listener.sync_ended(error)
        else:
            listener.sync_ended(None)
        self._loop.call_soon_threadsafe(listener.proceed)
        return True

    def drain(self) -> None:
        """Do nothing: all have ended."""

    close = drain
