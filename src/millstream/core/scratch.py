"""Temporary folders that are removed even after a process was killed.

A process locks its folder while it uses it. Before a process creates a folder, it removes those that no process locks,
but only folders with the prefix that belong to the same user.

All of it may block: code on an event loop uses `temporary_folder_async`, or calls the rest in a thread.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import shutil
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Final, NamedTuple

from millstream.core.tasks import finish

PREFIX: Final = "millstream-scratch-"

REMOVE_S_MAX: Final = 5.0
"""How long the removal of a folder is retried while others still write to it."""
_REMOVE_AGAIN_S: Final = 0.1

REMOVED_MAX: Final = 100
"""How many folders one call removes at most; the next call removes others.

Folders that are in use, belong to other users or cannot be removed do not count.
"""


class LockedFolder(NamedTuple):
    """A temporary folder, which only its user can read, with the descriptor that locks it."""

    path: str
    lock: int

    def remove(self, patience_s: float = REMOVE_S_MAX) -> bool:
        """Remove the folder with its files, then release it; return whether it is gone.

        Files written to it meanwhile are removed too, for as long as the patience lasts.
        """
        deadline = time.monotonic() + patience_s
        shutil.rmtree(self.path, ignore_errors=True)
        # Java and its workers, which outlive a killed process for a moment, may write into it meanwhile.
        while os.path.isdir(self.path) and time.monotonic() < deadline:
            time.sleep(_REMOVE_AGAIN_S)
            shutil.rmtree(self.path, ignore_errors=True)
        is_gone = not os.path.isdir(self.path)
        os.close(self.lock)
        return is_gone


def create_locked_folder() -> LockedFolder:
    """Create a temporary folder that others do not remove while this process lives, after cleaning up."""
    remove_left_behind()
    return _create()


def _create() -> LockedFolder:
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        lock = _try_lock(folder)
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


@asynccontextmanager
async def temporary_folder_async() -> AsyncIterator[str]:
    """Provide a temporary folder as `temporary_folder` does, with everything that may block in threads.

    The folder is removed even if the task is cancelled while it is created or removed.
    """
    await asyncio.to_thread(remove_left_behind)
    creating = asyncio.ensure_future(asyncio.to_thread(_create))
    try:
        folder = await asyncio.shield(creating)
        yield folder.path
    finally:
        await finish(_remove_created(creating))


async def _remove_created(creating: asyncio.Future[LockedFolder]) -> None:
    folder = await creating
    await asyncio.to_thread(folder.remove)


def remove_left_behind(patience_s: float = 0.0) -> None:
    """Remove folders of processes that have ended, at most `REMOVED_MAX`.

    Each is tried once. With patience, a time limit for all of them together, folders that are still written to are
    retried, for callers that have just killed their process.
    """
    deadline = time.monotonic() + patience_s
    removed = 0
    for folder in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
        lock = _try_lock(str(folder))
        if lock is not None:
            removed += LockedFolder(str(folder), lock).remove(deadline - time.monotonic())
            if removed >= REMOVED_MAX:
                return


def _try_lock(folder: str) -> int | None:
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
