"""The scripted broker for the client's tests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from millstream_testing.scripted_broker import ScriptedBroker


@pytest.fixture
async def broker() -> AsyncIterator[ScriptedBroker]:
    """One scripted broker; checks that nothing of the test still runs afterwards."""
    scripted = ScriptedBroker()
    await scripted.start()
    yield scripted
    await scripted.stop()
    tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    assert not tasks, f"tasks were left behind: {tasks}"
