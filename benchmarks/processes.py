"""What a server and its children cost: CPU seconds from /proc/PID/stat, memory as proportional set size."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


class Cpu(NamedTuple):
    """CPU seconds, in the program and in the kernel on its behalf."""

    user_s: float
    system_s: float

    def since(self, earlier: Cpu) -> Cpu:
        return Cpu(self.user_s - earlier.user_s, self.system_s - earlier.system_s)

    def per_gb(self, size_bytes: int) -> Cpu:
        return Cpu(self.user_s / size_bytes * 1e9, self.system_s / size_bytes * 1e9)


def tree_of(pid: int) -> list[int]:
    """A process and everything it started that still runs."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def cpu_of(pid: int) -> Cpu:
    """The CPU seconds of a process, its children, and those of them that have ended."""
    user = system = 0
    for each in tree_of(pid):
        # The name of the program stands in parentheses and may hold spaces, so count from behind it.
        fields = Path(f"/proc/{each}/stat").read_text().rpartition(")")[2].split()
        user += int(fields[11]) + int(fields[13])
        system += int(fields[12]) + int(fields[14])
    return Cpu(user / _TICKS_PER_S, system / _TICKS_PER_S)


def memory_of(pid: int) -> int:
    """The memory of a process and its children in bytes; what they share is counted once."""
    total = 0
    for each in tree_of(pid):
        for line in Path(f"/proc/{each}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) * 1024
    return total
