"""Tasks that continue when their page is left: redriving many dead letters, dry runs.

A task runs in the gateway with the rights of the user who started it. It ends early when these lapse, when it is
stopped, or with the gateway. Its page shows its progress, and its result for an hour.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager
from http import HTTPStatus
from typing import Any, Final, NamedTuple

from millstream.core.errors import MillstreamError
from millstream.core.tasks import cancel_and_wait
from millstream.gateway.api.problem import Refused
from millstream.gateway.api.services import Services
from millstream.gateway.console.visit import Done, Page, PageRoute, Response, Visit, address, change

_logger = logging.getLogger(__name__)

TASKS_PER_USER_MAX: Final = 4
TASKS_MAX: Final = 32
KEPT_MAX: Final = 200
KEPT_S: Final = 3600.0
SOON_S: Final = 1.0
"""A task that ends within this time gets the same response as any other change."""

RUNNING, DONE, FAILED, STOPPED = "running", "done", "failed", "stopped"


class TaskProgress(NamedTuple):
    """The progress of a task, from 0 to 1, and in words."""

    share: float
    text: str


class UserServices(NamedTuple):
    """Services with a user's rights, and a future that completes when they have lapsed."""

    services: Services
    lapsed: asyncio.Future[Any]


Start = Callable[[], AbstractAsyncContextManager[UserServices]]
Act = Callable[["Task", Services], Awaitable[str]]


class Task:
    def __init__(self, user: str, session: str, title: str, back: str, words: str = "") -> None:
        self.id = secrets.token_urlsafe(12)
        self.user = user
        self.session = session
        """The session to which the task is shown; the user's other sessions may have fewer rights."""
        self.title = title
        self.back = back
        """The page that it was started from."""
        self.words = words
        """The command that does the same."""
        self.state = RUNNING
        self.text = ""
        """The text with which it ended."""
        self.result: Any = None
        """The details that the page shows in addition to the text."""
        self.measure: Callable[[], TaskProgress | None] = lambda: None
        self.on_stop: Callable[[], None] | None = None
        """Asks the task to end at the next opportunity; without it, the task is cancelled."""
        self.is_stopping = False
        self.started_s = time.time()
        self.ended_s: float | None = None
        self.running: asyncio.Task[None] | None = None

    @property
    def is_running(self) -> bool:
        return self.state == RUNNING

    @property
    def took_s(self) -> float:
        return (self.ended_s or time.time()) - self.started_s

    def response(self) -> Done:
        """Redirect to the page that started the task if it has ended, otherwise to the task's page."""
        if self.is_running:
            return Done(address("tasks", self.id), "")
        if self.state == FAILED:
            raise Refused(HTTPStatus.CONFLICT, self.text)
        return Done(self.back, f"{self.text}: {self.words}" if self.words else self.text)

    def stop(self) -> None:
        """End it early; what it has done stays done."""
        if not self.is_running or self.running is None:
            return
        self.is_stopping = True
        if self.on_stop is not None:
            self.on_stop()
        else:
            self._finish(STOPPED, "Stopped. Completed work is kept.")
            self.running.cancel()

    async def run(self, act: Act, start: Start) -> None:
        """Act with the rights of the person, for as long as they last."""
        try:
            async with start() as (services, lapsed):
                acting = asyncio.ensure_future(act(self, services))
                try:
                    await asyncio.wait({acting, lapsed}, return_when=asyncio.FIRST_COMPLETED)
                    if acting.done():
                        self._finish(STOPPED if self.is_stopping else DONE, acting.result())
                    else:
                        self._finish(STOPPED, "Stopped, because the session of the user who started it has ended.")
                finally:
                    await cancel_and_wait(acting)
        except asyncio.CancelledError:
            self._finish(STOPPED, "Stopped, because the gateway is shutting down.")
            raise
        except Refused as error:
            self._finish(FAILED, error.detail)
        except MillstreamError as error:
            self._finish(FAILED, str(error))
        except Exception:
            _logger.exception("a task of the console failed", extra={"title": self.title})
            self._finish(FAILED, "The task failed unexpectedly; see the gateway's log for the reason.")

    def _finish(self, state: str, text: str) -> None:
        if self.is_running:
            self.state, self.text, self.ended_s = state, text, time.time()


class Tasks:
    def __init__(self, on_end: Callable[[], None]) -> None:
        """`on_end` is called when a task has ended, since pages may have changed."""
        self._on_end = on_end
        self._tasks: dict[str, Task] = {}

    async def start(self, task: Task, act: Act, start: Start) -> Task:
        """Start a task, and wait a moment for its end; refuse one too many."""
        self._forget()
        running = [task for task in self._tasks.values() if task.is_running]
        if len(running) >= TASKS_MAX or sum(other.user == task.user for other in running) >= TASKS_PER_USER_MAX:
            raise Refused(
                HTTPStatus.TOO_MANY_REQUESTS,
                f"at most {TASKS_PER_USER_MAX} tasks per user, and {TASKS_MAX} in total, can run at the same time; "
                "wait until one has ended, or stop one",
            )
        self._tasks[task.id] = task
        task.running = asyncio.create_task(task.run(act, start), name=f"task of the console: {task.title}")
        task.running.add_done_callback(lambda _: self._on_end())
        await asyncio.wait({task.running}, timeout=SOON_S)
        return task

    def find(self, task_id: str, session: str) -> Task:
        task = self._tasks.get(task_id)
        if task is None or task.session != session:
            raise Refused(
                HTTPStatus.NOT_FOUND,
                "this node does not know this task: it ended more than an hour ago, the node has restarted, or another "
                "node or another session runs it",
            )
        return task

    def running(self, session: str) -> list[Task]:
        return [task for task in self._tasks.values() if task.is_running and task.session == session]

    async def close(self) -> None:
        tasks = [task.running for task in self._tasks.values() if task.running is not None]
        await cancel_and_wait(*tasks)

    def _forget(self) -> None:
        """Drop tasks that ended long ago, and the oldest beyond the limit."""
        ended = sorted((task.ended_s, task.id) for task in self._tasks.values() if task.ended_s is not None)
        expired = [key for at, key in ended if at < time.time() - KEPT_S]
        for key in {*expired, *(key for _, key in ended[: max(0, len(ended) - KEPT_MAX)])}:
            del self._tasks[key]


async def show(visit: Visit) -> Response:
    """Show the progress of a task or its result, and a button that stops it."""
    task = visit.tasks.find(visit.names["task"], visit.session)
    return Page("task.html", {"task": task, "measured": task.measure()})


async def stop(visit: Visit) -> Response:
    """Stop a task; what it has done stays done."""
    task = visit.tasks.find(visit.names["task"], visit.session)
    task.stop()
    return Done(address("tasks", task.id), "")


ROUTES: Final = (
    PageRoute(path="/tasks/{task}", handle=show),
    change("/tasks/{task}/stop", stop),
)
