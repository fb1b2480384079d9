"""Memory that the allocator of C keeps although nothing is in it any more.

Columns that grow to many megabytes are moved as they do, and leave holes that other things do not fill. They stay
resident until the system is told that nobody needs them.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import sys
from functools import cache
from threading import Event
from typing import Any, Final

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


def freeze_heap() -> None:
    """Have the collector look only at what is made from now on, not at the thousands of objects of the modules."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


_is_ours: Final = Event()


def enable_trimming() -> None:
    """Say that this process is the broker's own. In that of somebody else memory is left as its program wants it."""
    _is_ours.set()


def trim_after(seconds: float) -> None:
    """Tell the system later, beside the loop, if the process is the broker's."""
    if _is_ours.is_set():
        loop = asyncio.get_running_loop()
        loop.call_later(seconds, loop.run_in_executor, None, give_back)


def give_back() -> None:
    """Tell the system, which takes some milliseconds; does nothing where the C library cannot."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)
