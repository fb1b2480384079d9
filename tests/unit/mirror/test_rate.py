"""A mirror respects its rate limit."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from millstream.broker.mirror.copier import Copier
from millstream.core.ids import Offset, PartitionIndex
from millstream.core.topic import TopicPartition
from millstream.protocol.wire.fetch import FetchedPartition


def test_fetches_of_all_lines_together_respect_the_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    make: Any = Copier
    limited = make(
        None,
        None,
        SimpleNamespace(monotonic=lambda: 10.0),
        rate=1000,
        gates=False,
        cut_of=None,
        note_gaps=None,
        on_commit=None,
    )
    response = FetchedPartition(memoryview(bytes(500)), Offset(0), Offset(0), Offset(0))
    responses = {TopicPartition("orders", PartitionIndex(index)): response for index in range(2)}

    async def fetches() -> None:
        for _ in range(3):
            await limited._throttle(responses)

    with monkeypatch.context() as patched:
        patched.setattr("millstream.broker.mirror.copier.asyncio.sleep", sleep)
        asyncio.run(fetches())
    assert slept == [1.0, 2.0, 3.0]
    assert limited.bytes_copied == 3000


def test_the_current_rate_is_that_of_the_last_seconds() -> None:
    now = [100.0]
    make: Any = Copier
    copier = make(
        None,
        None,
        SimpleNamespace(monotonic=lambda: now[0]),
        rate=0,
        gates=False,
        cut_of=None,
        note_gaps=None,
        on_commit=None,
    )
    responses = {
        TopicPartition("orders", PartitionIndex(0)): FetchedPartition(
            memoryview(bytes(1000)), Offset(0), Offset(0), Offset(0)
        )
    }

    def copy_for(seconds: int) -> None:
        for _ in range(4 * seconds):
            now[0] += 0.25
            asyncio.run(copier._throttle(responses))

    assert copier.bytes_per_s == 0
    copy_for(2)
    assert copier.bytes_per_s == pytest.approx(4000, rel=0.2)
    copy_for(60)
    assert copier.bytes_per_s == pytest.approx(4000, rel=0.1)
    assert len(copier._copied_at) < 50
    now[0] += 5
    assert copier.bytes_per_s == pytest.approx(2000, rel=0.2)
    now[0] += 20
    assert copier.bytes_per_s == 0
