"""Tasks of the console: they outlive their page, are bounded, and end with the rights of their user."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, cast

import pytest

from millstream.core.errors import InvalidRequest
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.services import Services
from millstream.gateway.console import tasks as module
from millstream.gateway.console.tasks import TASKS_PER_USER_MAX, Task, Tasks, UserServices
from millstream_testing.waiting import until


class Rights:
    """Rights of a user that a test revokes."""

    def __init__(self) -> None:
        self.lapsed: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.held = 0

    def __call__(self) -> AbstractAsyncContextManager[UserServices]:
        return self._held()

    @asynccontextmanager
    async def _held(self) -> AsyncIterator[UserServices]:
        self.held += 1
        try:
            yield UserServices(cast("Services", None), self.lapsed)
        finally:
            self.held -= 1


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SOON_S", 0.01)


async def forever(_task: Task, _services: Services) -> str:
    await asyncio.Event().wait()
    return ""


async def soon(_task: Task, _services: Services) -> str:
    return "7 messages delivered again"


async def wrong(_task: Task, _services: Services) -> str:
    raise InvalidRequest("there is no such topic")


async def ended(task: Task) -> None:
    await until(lambda: not task.is_running)


async def test_a_short_task_responds_at_once() -> None:
    ends: list[int] = []
    tasks, rights = Tasks(lambda: ends.append(1)), Rights()
    task = await tasks.start(
        Task("alice", "alice-1", "Redrive", "/console/x", "millstream dlq redrive x"), soon, rights
    )
    assert task.response().to == "/console/x"
    assert task.response().notice == "7 messages delivered again: millstream dlq redrive x"
    assert (rights.held, ends, tasks.running("alice-1")) == (0, [1], [])
    assert tasks.find(task.id, "alice-1") is task
    failed = await tasks.start(Task("alice", "alice-1", "Redrive", "/console/x"), wrong, rights)
    with pytest.raises(Refused, match="no such topic"):
        failed.response()


async def test_a_long_task_continues_and_is_visible_to_its_session_only() -> None:
    tasks, rights = Tasks(lambda: None), Rights()
    task = await tasks.start(Task("alice", "alice-1", "Redrive", "/console/x"), forever, rights)
    assert task.response().to == f"/console/tasks/{task.id}"
    assert (tasks.running("alice-1"), tasks.running("alice-2"), rights.held) == ([task], [], 1)
    with pytest.raises(Refused, match="does not know"):
        tasks.find(task.id, "alice-2")
    task.stop()
    await ended(task)
    assert task.state == "stopped"
    await until(lambda: rights.held == 0)


async def test_a_task_that_can_be_stopped_is_asked_to_stop() -> None:
    tasks, stops = Tasks(lambda: None), asyncio.Event()

    async def wait_until_stopped(_task: Task, _services: Services) -> str:
        await stops.wait()
        return "3 messages delivered again; stopped before the rest"

    task = Task("alice", "alice-1", "Redrive", "/console/x")
    task.on_stop = stops.set
    await tasks.start(task, wait_until_stopped, Rights())
    task.stop()
    await ended(task)
    assert (task.state, task.text) == ("stopped", "3 messages delivered again; stopped before the rest")


async def test_a_task_ends_with_the_session_of_its_user_and_with_the_gateway() -> None:
    tasks, rights = Tasks(lambda: None), Rights()
    lapsing = await tasks.start(Task("alice", "alice-1", "Redrive", "/console/x"), forever, rights)
    rights.lapsed.set_result(None)
    await ended(lapsing)
    assert "session" in lapsing.text
    others = Rights()
    task = await tasks.start(Task("bob", "bob-1", "Redrive", "/console/x"), forever, others)
    await tasks.close()
    assert (task.state, others.held) == ("stopped", 0)


async def test_concurrent_tasks_per_user_are_limited_and_finished_ones_forgotten(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tasks, rights = Tasks(lambda: None), Rights()
    for _ in range(TASKS_PER_USER_MAX):
        await tasks.start(Task("alice", "alice-1", "Redrive", "/console/x"), forever, rights)
    with pytest.raises(Refused, match="at the same time"):
        await tasks.start(Task("alice", "alice-1", "Redrive", "/console/x"), forever, rights)
    first = await tasks.start(Task("bob", "bob-1", "Redrive", "/console/x"), soon, rights)
    monkeypatch.setattr(module, "KEPT_MAX", 1)
    for _ in range(3):
        last = await tasks.start(Task("bob", "bob-1", "Redrive", "/console/x"), soon, rights)
    assert tasks.find(last.id, "bob-1") is last
    with pytest.raises(Refused):
        tasks.find(first.id, "bob-1")
    await tasks.close()
