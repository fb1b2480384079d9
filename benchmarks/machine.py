"""Facts about this machine, and its preparation for measurements."""

from __future__ import annotations

import mmap
import os
import platform
import tempfile
from pathlib import Path
from typing import Any

import psutil

TOUCHED_BYTES_MAX = 8 * 1024**3


def facts() -> dict[str, Any]:
    """Return the facts about the machine that are needed to interpret the numbers."""
    folder = tempfile.gettempdir()
    return {
        "cores": os.cpu_count(),
        "CPU": _cpu_model(),
        "memory GB": round(psutil.virtual_memory().total / 1e9, 1),
        "kernel": platform.release(),
        "system": platform.platform(),
        "file system": file_system(folder, Path("/proc/mounts").read_text()),
        "python": platform.python_version(),
        "load at the start": round(os.getloadavg()[0], 2),
    }


def _cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def file_system(folder: str, mounts: str) -> str:
    """Return the type of a folder's file system, given the table of mounts."""
    filesystem, depth = "unknown", -1
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split()
        inside = point == "/" or folder == point or folder.startswith(point + "/")
        if inside and len(point) > depth:
            filesystem, depth = kind, len(point)
    return filesystem


def touch_memory() -> None:
    """Allocate memory before the measurements.

    A virtual machine gets its memory from its host when a page is first used. Otherwise the first rounds would include
    the cost of the page cache, and measure the host.
    """
    size = min(psutil.virtual_memory().available // 2, TOUCHED_BYTES_MAX)
    mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | mmap.MAP_POPULATE).close()
