"""Completing a trace from the ledger's table: one reader at a time, and within a time limit."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
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


async def test_the_table_reveals_no_dead_letter_topic_that_the_caller_may_not_describe(
    reading: asyncio.Semaphore, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The table names the topic of every letter; a broker, which may have forgotten it, omits hidden ones."""
    letters = [{"topic": topic, "partition": 0, "offset": 1} for topic in ("seen-dlq", "hidden-dlq")]
    completed = {**FOUND, "subscriptions": [{"dead_letter": letter} for letter in [*letters, None]]}
    reader = tmp_path / "python"
    reader.write_text(f"#!/bin/sh\necho '{json.dumps(completed)}'\n")
    reader.chmod(0o700)

    async def lake(_client: object) -> str:
        return "lake"

    async def allowed_rights(_client: object, asked: list[Any]) -> list[bool]:
        return [name == "seen-dlq" for _operation, _kind, name in asked]

    monkeypatch.setattr(messages, "HISTORY_S", 30.0)
    monkeypatch.setattr(messages, "ledger_lake", lake)
    monkeypatch.setattr(messages, "allowed_rights", allowed_rights)
    monkeypatch.setattr(sys, "executable", str(reader))
    services: Any = type("Services", (), {"client": None})
    trace = await messages.with_history(services, FOUND)
    assert [subscription["dead_letter"] for subscription in trace["subscriptions"]] == [letters[0], None, None]
