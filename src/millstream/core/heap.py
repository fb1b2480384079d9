"""Limits what the garbage collector visits, and returns freed memory that the C allocator keeps.

Columns that grow to many megabytes move while they grow and leave holes that nothing else fills. The holes stay
resident until the allocator is asked to return them.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import resource
import sys
from functools import cache
from threading import Event
from typing import Any, Final

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3

_MMAP_BYTES = 32 * 1024 * 1024

_KEPT_BYTES_MAX = 64 * 1024 * 1024

_YOUNG_OBJECTS = 10_000


def keep_freed_memory() -> None:
    """Make glibc reuse large blocks: returning each to the kernel costs a page fault per 4 KiB sent."""
    if sys.platform != "linux":
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(_M_MMAP_THRESHOLD, _MMAP_BYTES)
        mallopt(_M_TRIM_THRESHOLD, _KEPT_BYTES_MAX)


def freeze_heap() -> None:
    """Exempt everything allocated so far, such as modules, from garbage collection."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(_YOUNG_OBJECTS, *gc.get_threshold()[1:])


GROWTH_BYTES: Final = 64 * 1024 * 1024
PAUSE_CALLS_MAX: Final = 720
"""The longest pause between two attempts to trim a process that stays large, in calls: an hour for one call in 5 s."""

_is_trimming_enabled: Final = Event()


def enable_trimming() -> None:
    """Allow trimming: this process belongs to the broker. An embedding program keeps control of its own memory."""
    _is_trimming_enabled.set()


class Trimmer:
    """Returns freed memory to the system after the process has grown, while it is mostly idle.

    A busy process would soon need the memory again, at a page fault per 4 KiB. Memory that was in use at the first
    attempt may be freed without the process growing again, so it is tried again after pauses that double.
    """

    def __init__(self) -> None:
        self._floor_bytes = self._tried_bytes = resident_bytes()
        """The least memory the process has used, and its memory after the last trim, or the minimum since."""
        self._pause = self._calls_left = 0

    def trim_if_grown(self, moved_bytes: int) -> None:
        """Trim off the event loop, if trimming is enabled; `moved_bytes` is the traffic since the last call."""
        if not _is_trimming_enabled.is_set():
            return
        resident = resident_bytes()
        self._floor_bytes = min(self._floor_bytes, resident)
        self._tried_bytes = min(self._tried_bytes, resident)
        self._calls_left -= 1
        if resident - self._tried_bytes > GROWTH_BYTES:
            self._pause = self._calls_left = 0
        if resident - self._floor_bytes <= GROWTH_BYTES or moved_bytes >= GROWTH_BYTES or self._calls_left > 0:
            return
        self._tried_bytes = resident
        self._pause = self._calls_left = min(2 * self._pause, PAUSE_CALLS_MAX) or 1
        asyncio.get_running_loop().run_in_executor(None, release_freed_memory)


def resident_bytes() -> int:
    """Return how much memory this process occupies; 0 where the system does not report it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return 0


def release_freed_memory() -> None:
    """Return freed memory to the system, which takes some milliseconds; a no-op where the C library cannot."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    return getattr(ctypes.CDLL(None), "malloc_trim", None)


_FORKING: Final = ("pyspark.daemon", "millstream.spark.daemon")
"""The modules that Spark's workers are forked from and run as."""

_spared = 0


def freeze_worker_heap() -> None:
    """Exclude existing objects from later collections; call this after the work of a task.

    Spark's workers collect garbage after every task, and a collection visits everything that a process holds. The
    modules of this package, which are loaded once and stay, double that.

    It has an effect only in Spark's workers, and only if modules were loaded since the last call.
    """
    global _spared
    if len(sys.modules) == _spared or not _is_worker():
        return
    gc.collect()
    gc.freeze()
    _spared = len(sys.modules)


def _is_worker() -> bool:
    return getattr(getattr(sys.modules.get("__main__"), "__spec__", None), "name", "") in _FORKING
