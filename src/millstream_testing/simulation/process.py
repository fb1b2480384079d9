"""A process of a simulation, which can be paused, resumed and killed: a node, a client, the coordination store.

Everything that runs in a simulation belongs to a process. It is found by its context: tasks, timers and callbacks
inherit the context in which they were made, so that the code under test is unaware of it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextvars import Context, ContextVar, copy_context
from typing import Any

_TASKS_MIN = 32


class Process:
    """A process. Its callbacks run in the order of scheduling; between processes there is no order."""

    def __init__(self, name: str, number: int) -> None:
        self.name = name
        self.number = number
        self.alive = True
        self.paused = False
        self.ready: deque[asyncio.Handle] = deque()
        self.context: Context = copy_context()
        self.context.run(PROCESS.set, self)
        self.generators: list[AsyncGenerator[Any, Any]] = []
        self._tasks: list[asyncio.Task[Any]] = []
        self._tasks_max = _TASKS_MIN

    def __repr__(self) -> str:
        return f"Process({self.name})"

    @property
    def runs(self) -> bool:
        """Whether its callbacks may be called now."""
        return self.alive and not self.paused

    def keep(self, task: asyncio.Task[Any]) -> None:
        """Keep a reference to a task, so that its `finally` does not run after the process has died."""
        tasks = self._tasks
        tasks.append(task)
        if len(tasks) > self._tasks_max:
            self._tasks = [task for task in tasks if not task.done()]
            self._tasks_max = max(_TASKS_MIN, 2 * len(self._tasks))

    def pending_tasks(self) -> list[asyncio.Task[Any]]:
        return [task for task in self._tasks if not task.done()]


PROCESS: ContextVar[Process] = ContextVar("PROCESS")


def current_process() -> Process:
    return PROCESS.get()
