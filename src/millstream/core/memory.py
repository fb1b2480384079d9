"""How the process keeps the memory it has freed."""

from __future__ import annotations

import ctypes
import gc
import sys

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_MMAP_BYTES = 32 * 1024 * 1024
_KEPT_BYTES_MAX = 64 * 1024 * 1024
_YOUNG_OBJECTS = 10_000


def keep_freed_memory() -> None:
    """Ask glibc to use large blocks again: giving each back to the kernel costs a page fault per 4 KiB sent."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES_MAX)


def leave_what_stays_alone() -> None:
    """Have the collector look only at what is made from now on, not at the thousands of objects of the modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])
