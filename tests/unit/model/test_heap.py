"""Memory is given back where the C library can, and nothing happens where it cannot."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from typing import Any

import pytest

from millstream.core import heap


def test_memory_is_given_back_as_often_as_asked() -> None:
    heap.give_back()
    heap.give_back()


def test_a_c_library_that_cannot_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    heap._trim.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: object())
    try:
        heap.give_back()
    finally:
        heap._trim.cache_clear()


@pytest.mark.parametrize("is_ours", [True, False])
async def test_it_happens_beside_the_loop_and_only_in_a_process_of_ones_own(
    monkeypatch: pytest.MonkeyPatch, is_ours: bool
) -> None:
    done: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def trim(_pad: int) -> None:
        loop.call_soon_threadsafe(done.put_nowait, threading.get_ident())

    monkeypatch.setattr(heap, "_trim", lambda: trim)
    monkeypatch.setattr(heap, "_is_ours", threading.Event())
    if is_ours:
        heap.enable_trimming()
    waiting = put_off(monkeypatch, loop)
    heap.trim_after(0)
    assert len(waiting) == is_ours
    if is_ours:
        assert await done.get() != threading.get_ident()


def put_off(monkeypatch: pytest.MonkeyPatch, loop: asyncio.AbstractEventLoop) -> list[float]:
    """Note what is put off, and put it off."""
    noted: list[float] = []
    call_later = loop.call_later

    def later(seconds: float, *call: Any) -> asyncio.TimerHandle:
        noted.append(seconds)
        return call_later(seconds, *call)

    monkeypatch.setattr(loop, "call_later", later)
    return noted
