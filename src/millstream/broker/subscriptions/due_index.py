"""Which messages to look at when a time has come: leases that end, waits that are over.

An entry is a hint: "of these offsets, some may be due then". Who asks looks at the messages themselves, so what was
settled meanwhile costs nothing to take out, and hints of offsets that follow each other are one. What is far away
lies in coarse compartments and moves to finer ones as its time comes near, so a million different times take little.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable
from heapq import heappop, heappush
from typing import Final

DueRuns = Callable[[int, int], Iterable[tuple[int, int, int]]]
"""The messages of a range of offsets that wait for a time, as runs: first, last, due."""

NEVER_MS: Final = 2**63 - 1

_SHIFTS: Final = (0, 11, 17)
"""Compartments of 1 ms, of 2 seconds, and of 2 minutes."""
_NEAR_MS: Final = 1 << _SHIFTS[1]
_FAR_MS: Final = 1 << _SHIFTS[2]


class DueIndex:
    """Hints by time, in three levels of compartments."""

    __slots__ = ("_heaps", "_hints", "_now_ms", "_runs", "next_ms")

    def __init__(self, runs: DueRuns) -> None:
        self._runs = runs
        self._hints: list[dict[int, array[int]]] = [{} for _ in _SHIFTS]
        self._heaps: list[list[int]] = [[] for _ in _SHIFTS]
        self._now_ms = 0
        self.next_ms = NEVER_MS
        """When to ask again: never too late, and too early only if something far away is to be sorted."""

    def add(self, first: int, last: int, due_ms: int) -> None:
        """Messages are due at a time."""
        away_ms = due_ms - self._now_ms
        level = 0 if away_ms < _NEAR_MS else 1 if away_ms < _FAR_MS else 2
        compartment = due_ms >> _SHIFTS[level]
        hints = self._hints[level].get(compartment)
        if hints is not None and hints[-1] + 1 == first:
            hints[-1] = last
        else:
            self._put(level, first, last, compartment)

    def pop(self, now_ms: int) -> list[tuple[int, int]]:
        """Ranges of offsets in which something may be due by now."""
        self._now_ms = max(self._now_ms, now_ms)
        due: list[tuple[int, int]] = []
        for level in (2, 1):
            heap = self._heaps[level]
            while heap and heap[0] << _SHIFTS[level] <= now_ms:
                self._refine(level, heappop(heap))
        heap = self._heaps[0]
        while heap and heap[0] <= now_ms:
            hints = self._hints[0].pop(heappop(heap))
            due.extend(zip(hints[::2], hints[1::2], strict=True))
        times = [heap[0] << shift for heap, shift in zip(self._heaps, _SHIFTS, strict=True) if heap]
        self.next_ms = min(times, default=NEVER_MS)
        return due

    def _refine(self, level: int, compartment: int) -> None:
        hints = self._hints[level].pop(compartment)
        for first, last in zip(hints[::2], hints[1::2], strict=True):
            for run_first, run_last, due_ms in self._runs(first, last):
                # Anything else has been given another time meanwhile, and a hint of its own.
                if due_ms >> _SHIFTS[level] == compartment:
                    finer = level - 1 if due_ms >> _SHIFTS[level - 1] > self._now_ms >> _SHIFTS[level - 1] else 0
                    self._put(finer, run_first, run_last, due_ms >> _SHIFTS[finer])

    def _put(self, level: int, first: int, last: int, compartment: int) -> None:
        hints = self._hints[level].get(compartment)
        if hints is None:
            self._hints[level][compartment] = array("q", (first, last))
            heappush(self._heaps[level], compartment)
            self.next_ms = min(self.next_ms, compartment << _SHIFTS[level])
        elif hints[-1] + 1 == first:
            hints[-1] = last
        else:
            hints.append(first)
            hints.append(last)
