"""Memory is given back where the C library can, and nothing happens where it cannot."""

from __future__ import annotations

import ctypes

import pytest

from millstream.model import heap


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
