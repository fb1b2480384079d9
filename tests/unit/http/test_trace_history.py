"""Completing a trace from the ledger's table: one reader at a time, and within a time limit."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from millstream.core.errors import NotFound
from millstream.gateway.api.routes import messages

FOUND = {"topic": "orders", "subscriptions": []}
NOTHING: Any = None


@pytest.fixture
def reading(monkeypatch: pytest.MonkeyPatch) -> asyncio.Semaphore:
    """The lock of the table reader; others wait briefly for it."""
    made = asyncio.Semaphore(1)
    monkeypatch.setattr(messages, "_READING", made)
    monkeypatch.setattr(messages, "HISTORY_S", 0.01)
    return made


async def test_a_trace_has_no_history_while_others_read_for_long(reading: asyncio.Semaphore) -> None:
    async with reading:
        traces = [messages.with_history(NOTHING, FOUND) for _ in range(5)]
        assert await asyncio.gather(*traces) == [FOUND] * 5
    assert not reading.locked()


async def test_a_missing_table_does_not_hold_the_lock(
    reading: asyncio.Semaphore, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def missing(_client: object) -> str:
        raise NotFound("there is no ledger")

    monkeypatch.setattr(messages, "ledger_lake", missing)
    services: Any = type("Services", (), {"client": None})
    for _ in range(2):
        assert await messages.with_history(services, FOUND) is FOUND
    assert not reading.locked()
