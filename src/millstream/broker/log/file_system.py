"""Syncing a whole file system with one call, which Python does not have by itself."""

from __future__ import annotations

import ctypes
import errno
import os
import re
import sys
from collections.abc import Callable
from functools import cache

_TELLS_ERRORS_SINCE = (5, 8)
"""Before this version of Linux, the call does not tell when something could not be written."""


def sync_file_system(descriptor: int) -> None:
    """Return once everything on the file system of an open file is on the disk, or raise `OSError`."""
    syncfs = _syncfs()
    if syncfs is None:
        raise OSError(errno.ENOSYS, "the system cannot sync a file system and tell whether it did")
    if syncfs(descriptor) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


@cache
def _syncfs() -> Callable[[int], int] | None:
    release = re.match(r"(\d+)\.(\d+)", os.uname().release)
    if sys.platform != "linux" or release is None or (int(release[1]), int(release[2])) < _TELLS_ERRORS_SINCE:
        return None
    found: Callable[[int], int] | None = getattr(ctypes.CDLL(None, use_errno=True), "syncfs", None)
    return found
