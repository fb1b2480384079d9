"""Memory is returned to the system where the C library supports it."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from millstream.core import heap

MIB = 1024 * 1024


def test_memory_can_be_returned_repeatedly() -> None:
    heap.release_freed_memory()
    heap.release_freed_memory()


def test_an_unsupported_c_library_is_not_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    heap._trim.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    try:
        heap.release_freed_memory()
    finally:
        heap._trim.cache_clear()


class Process:
    """A process whose size the test sets, and which records the threads in which its memory is returned."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.resident_bytes = 100 * MIB
        self.is_ours = threading.Event()
        self.is_ours.set()
        self.trims: list[int] = []
        monkeypatch.setattr(heap, "resident_bytes", lambda: self.resident_bytes)
        monkeypatch.setattr(heap, "_is_trimming_enabled", self.is_ours)
        monkeypatch.setattr(heap, "release_freed_memory", lambda: self.trims.append(threading.get_ident()))
        self._trimmer = heap.Trimmer()

    async def look(self, resident_bytes: int, *, moved_bytes: int = 0) -> int:
        """Set the size and check; return how often memory has been returned so far."""
        self.resident_bytes = resident_bytes
        loop = asyncio.get_running_loop()
        loop.set_default_executor(executor := ThreadPoolExecutor(1))
        self._trimmer.trim_if_grown(moved_bytes)
        executor.shutdown()
        return len(self.trims)


@pytest.fixture
def process(monkeypatch: pytest.MonkeyPatch) -> Process:
    return Process(monkeypatch)


async def test_memory_is_returned_in_a_thread_after_growth(process: Process) -> None:
    assert await process.look(150 * MIB) == 0
    assert await process.look(170 * MIB) == 1
    assert threading.get_ident() not in process.trims


async def test_returning_memory_in_use_is_retried_with_doubling_pauses(process: Process) -> None:
    trims = [await process.look(500 * MIB) for _ in range(16)]
    assert trims == [1, 2, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4, 4, 4, 4, 5]


async def test_a_pause_ends_when_the_process_grows_again(process: Process) -> None:
    for _ in range(9):
        tried = await process.look(500 * MIB)
    assert await process.look(570 * MIB) == tried + 1


async def test_memory_is_returned_again_after_further_growth(process: Process) -> None:
    assert await process.look(500 * MIB) == 1
    assert await process.look(110 * MIB) == 1
    assert await process.look(500 * MIB) == 2


async def test_a_busy_process_keeps_its_memory_until_it_is_calm(process: Process) -> None:
    assert await process.look(500 * MIB, moved_bytes=1000 * MIB) == 0
    assert await process.look(500 * MIB, moved_bytes=1 * MIB) == 1


async def test_a_program_that_embeds_a_broker_keeps_its_memory(process: Process) -> None:
    process.is_ours.clear()
    assert await process.look(500 * MIB) == 0


def test_the_size_of_this_process_is_known() -> None:
    assert heap.resident_bytes() > MIB
