"""The open files of all logs together, so that ten thousand partitions do not need ten thousand descriptors."""

from __future__ import annotations

from collections import OrderedDict
from typing import Protocol

from millstream.broker.log.files import Files


class OpenFile(Protocol):
    """What can be held open; `descriptor` is -1 while it is not."""

    path: str
    descriptor: int
    used: bool
    pins: int
    released: bool
    """Whether it is no longer part of anything, so that its path may belong to something else."""

    def closed(self) -> None:
        """Drop the state that is in memory only while the file is open."""


class OpenFiles:
    """Opens files when they are needed and closes those that have not been used for a while.

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
        """Release one pin of a file."""
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
