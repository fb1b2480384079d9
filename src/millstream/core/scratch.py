"""Temporary folders that are removed even after a process was killed.

A process locks its folder while it uses it. Before a process creates a folder, it removes those that no process locks,
but only folders with the prefix that belong to the same user.
"""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Final, NamedTuple

PREFIX: Final = "millstream-scratch-"

_REMOVE_S_MAX: Final = 5.0
_REMOVE_AGAIN_S: Final = 0.1

REMOVED_MAX: Final = 100
"""How many folders one process examines at most; the next process examines others."""


class LockedFolder(NamedTuple):
    """A temporary folder, which only its user can read, with the descriptor that locks it."""

    path: str
    lock: int

    def remove(self) -> None:
        """Remove the folder with its files, then release it."""
        deadline = time.monotonic() + _REMOVE_S_MAX
        shutil.rmtree(self.path, ignore_errors=True)
        # Java and its workers, which outlive a killed process for a moment, may write into it meanwhile.
        while os.path.isdir(self.path) and time.monotonic() < deadline:
            time.sleep(_REMOVE_AGAIN_S)
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self.lock)


def create_locked_folder() -> LockedFolder:
    """Create a temporary folder that others do not remove while this process lives."""
    remove_left_behind()
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        lock = _locked(folder)
        # Another process that cleans up may have been faster than the lock.
        if lock is not None and os.path.isdir(folder):
            return LockedFolder(folder, lock)


@contextmanager
def temporary_folder() -> Iterator[str]:
    """Provide a temporary folder, which is removed at the end, or by the next process if this one is killed."""
    folder = create_locked_folder()
    try:
        yield folder.path
    finally:
        folder.remove()


def remove_left_behind() -> None:
    """Remove folders of processes that have ended."""
    for folder in islice(Path(tempfile.gettempdir()).glob(f"{PREFIX}*"), REMOVED_MAX):
        lock = _locked(str(folder))
        if lock is not None:
            LockedFolder(str(folder), lock).remove()


def _locked(folder: str) -> int | None:
    """Lock a folder of this user and return the descriptor; None if another process holds it, or locking fails."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        if os.fstat(opened).st_uid == os.getuid():
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return opened
    os.close(opened)
    return None
