"""Loaded modules are exempt from garbage collection in Spark workers."""

from __future__ import annotations

import gc
import sys
from types import ModuleType, SimpleNamespace

import pytest

from millstream.core import heap


@pytest.fixture
def frozen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    reported: list[str] = []
    monkeypatch.setattr(gc, "collect", lambda: reported.append("collect"))
    monkeypatch.setattr(gc, "freeze", lambda: reported.append("freeze"))
    monkeypatch.setattr(heap, "_spared", 0)
    return reported


def test_a_worker_does_not_collect_loaded_modules(monkeypatch: pytest.MonkeyPatch, frozen: list[str]) -> None:
    worker = ModuleType("__main__")
    worker.__spec__ = SimpleNamespace(name="pyspark.daemon")  # type: ignore[assignment]
    monkeypatch.setitem(sys.modules, "__main__", worker)
    heap.freeze_worker_heap()
    heap.freeze_worker_heap()
    assert frozen == ["collect", "freeze"]
    monkeypatch.setitem(sys.modules, "loaded-later", ModuleType("loaded-later"))
    heap.freeze_worker_heap()
    assert frozen == ["collect", "freeze"] * 2


def test_other_programs_are_unaffected(frozen: list[str]) -> None:
    heap.freeze_worker_heap()
    assert frozen == []
