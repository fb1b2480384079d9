"""Folders for what Spark writes on the side: blocks, sockets, libraries. Each goes with the process that has it.

Spark leaves them behind when it is killed. So a process holds a lock on its folder, and whoever makes one takes away
those that nobody holds any more.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

PREFIX: Final = "millstream-scratch-"

_held: dict[str, int] = {}


def make_scratch() -> str:
    """A folder for this process, until `remove_scratch` or its end."""
    remove_left_behind()
    while True:
        folder = tempfile.mkdtemp(prefix=PREFIX)
        lock = _locked(folder)
        # Another process that tidies up may have been faster than the lock.
        if lock is not None and os.path.isdir(folder):
            _held[folder] = lock
            # Registered before Spark's own, it is called after Java has ended.
            atexit.register(remove_scratch)
            return folder


@contextmanager
def temporary_files_in(folder: str) -> Iterator[None]:
    """Have libraries make their temporary files in a folder: a process that ends at once leaves them behind."""
    before = tempfile.tempdir
    tempfile.tempdir = folder
    try:
        yield
    finally:
        tempfile.tempdir = before


def remove_scratch() -> None:
    """Take away the folders of this process."""
    while _held:
        folder, lock = _held.popitem()
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)


def remove_left_behind() -> None:
    """Take away folders of processes that are no more."""
    for folder in map(str, Path(tempfile.gettempdir()).glob(f"{PREFIX}*")):
        lock = _locked(folder)
        if lock is not None:
            shutil.rmtree(folder, ignore_errors=True)
            os.close(lock)


def _locked(folder: str) -> int | None:
    """A lock on a folder, as an open file; None if somebody else has it, or nobody may."""
    try:
        opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except OSError:
        return None
    with suppress(OSError):
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return opened
    os.close(opened)
    return None
