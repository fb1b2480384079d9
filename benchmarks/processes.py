"""The cost of a server and its children: CPU seconds from /proc/PID/stat, and resident memory under load."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import NamedTuple, Self

import psutil

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_SAMPLE_S = 0.05


class Cpu(NamedTuple):
    """CPU seconds, in the program and in the kernel on its behalf."""

    user_s: float
    system_s: float

    def since(self, earlier: Cpu) -> Cpu:
        """The usage since an earlier reading."""
        return Cpu(self.user_s - earlier.user_s, self.system_s - earlier.system_s)


def tree_of(pid: int) -> list[int]:
    """Return a process and its running descendants."""
    return [pid, *(child.pid for child in psutil.Process(pid).children(recursive=True))]


def cpu_of(pid: int) -> Cpu:
    """Return the CPU seconds of a process, its threads and its children, including ended ones."""
    user = system = 0
    for process_id in tree_of(pid):
        # The program's name is in parentheses and may contain spaces, so count from the end of it.
        fields = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()
        user += int(fields[11]) + int(fields[13])
        system += int(fields[12]) + int(fields[14])
    return Cpu(user / _TICKS_PER_S, system / _TICKS_PER_S)


def resident_of(pid: int) -> int:
    """Return the resident memory of a process in bytes; 0 if it has ended."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE_BYTES
    except FileNotFoundError:
        return 0


def resident_of_tree(pid: int) -> int:
    """Return the resident memory of a process and its children; shared pages are counted more than once."""
    return sum(map(resident_of, tree_of(pid)))


class PeakMemory:
    """Samples the memory of a process and its children during a measurement."""

    def __init__(self, pid: int) -> None:
        self._pids = tree_of(pid)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self.peak_bytes = 0
        self.children_bytes = 0

    def _watch(self) -> None:
        while True:
            resident = [resident_of(pid) for pid in self._pids]
            if sum(resident) > self.peak_bytes:
                self.peak_bytes, self.children_bytes = sum(resident), sum(resident[1:])
            if self._stop.wait(_SAMPLE_S):
                return

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()


class Meter:
    """Measures the CPU seconds and peak memory of a server, and the client's CPU seconds."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self._memory = PeakMemory(pid)
        self.cpu = Cpu(0, 0)
        self.client_cpu_s = 0.0

    @property
    def memory(self) -> PeakMemory:
        """The peak of memory."""
        return self._memory

    def __enter__(self) -> Self:
        self._memory.__enter__()
        self._before, self._client_before = cpu_of(self._pid), sum(os.times()[:2])
        return self

    def __exit__(self, *exception: object) -> None:
        self.client_cpu_s = sum(os.times()[:2]) - self._client_before
        self.cpu = cpu_of(self._pid).since(self._before)
        self._memory.__exit__()
