"""Concurrent work: time limits, groups that end with their first failure, supervised background tasks.

A task group of Python 3.11 that ends because of an error loses a cancellation that arrives meanwhile, so that the code
that cancelled its task waits forever. Here the cancellation wins.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterable
from contextlib import suppress
from functools import wraps
from typing import Any, Final, ParamSpec, TypeVar

from millstream.core.errors import MillstreamError

_logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Parameters = ParamSpec("_Parameters")

RESTART_S: Final = 1.0


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run all coroutines and return their results in order; cancel the rest and raise on the first failure."""
    return [task.result() for task in await _run_until(work, asyncio.FIRST_EXCEPTION)]


async def run_until_first(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all coroutines until one completes, then cancel the others; raise its error if it failed."""
    await _run_until(work, asyncio.FIRST_COMPLETED)


async def _run_until(work: Iterable[Coroutine[Any, Any, _Result]], until: str) -> list[asyncio.Task[_Result]]:
    tasks = [asyncio.ensure_future(coroutine) for coroutine in work]
    if not tasks:
        return []
    try:
        ended, _ = await asyncio.wait(tasks, return_when=until)
    finally:
        await cancel_and_wait(*tasks)
    for task in ended:
        task.result()
    return tasks


Supervise = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts a named background task; its failure is a failure of the whole node."""


class TaskSupervisor:
    """Owns the background tasks of a node: no failure is lost, and the first one is reported as the node's."""

    def __init__(self) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Fails with the reason when a task has died."""
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run work in a task; it may end, but not fail."""
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._on_done)
        return task

    async def close(self) -> None:
        await cancel_and_wait(*self._tasks)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled() or task.exception() is None:
            return
        name, error = task.get_name(), task.exception()
        # An expected error explains itself; for any other, a defect, the traceback matters.
        defect = None if isinstance(error, MillstreamError) else error
        _logger.critical("a component of the node died", extra={"part": name, "error": str(error)}, exc_info=defect)
        if not self.failed.done():
            failure = RuntimeError(f"{name}: {error}")
            failure.__cause__ = error
            self.failed.set_exception(failure)


async def keep_running(name: str, run: Callable[[], Coroutine[Any, Any, None]], *, pause_s: float = RESTART_S) -> None:
    """Run work that must not return; if it does, log the defect and restart it after a pause."""
    while True:
        try:
            await run()
            _logger.error("%s ended; restarting it", name)
        except Exception:
            _logger.exception("%s failed; restarting it", name)
        await asyncio.sleep(pause_s)


async def within(seconds: float | None, work: Awaitable[_Result]) -> _Result:
    """Await work, and raise `TimeoutError` after a time; None means no limit.

    `asyncio.wait_for` of Python 3.11 loses a cancellation that arrives together with the result; this does not.
    """
    async with asyncio.timeout(seconds):
        return await work


async def cancel_and_wait(*tasks: asyncio.Future[Any]) -> None:
    """Cancel tasks and wait until they have ended, whatever their outcome."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def wait_up_to(seconds: float | None, event: asyncio.Event) -> bool:
    """Wait for an event, but no longer than some seconds; return whether it is set."""
    with suppress(TimeoutError):
        await within(seconds, event.wait())
    return event.is_set()


async def finish(work: Coroutine[Any, Any, _Result]) -> _Result:
    """Complete work that must not be left half done, even if the caller is cancelled meanwhile."""
    task = asyncio.ensure_future(work)
    # Retrieved here, since a cancelled caller does not retrieve the outcome.
    task.add_done_callback(lambda done: done.cancelled() or done.exception())
    return await asyncio.shield(task)


def finishing(
    work: Callable[_Parameters, Coroutine[Any, Any, _Result]],
) -> Callable[_Parameters, Coroutine[Any, Any, _Result]]:
    """Make every call of a coroutine function complete, as `finish` does."""

    @wraps(work)
    async def finished(*arguments: _Parameters.args, **named: _Parameters.kwargs) -> _Result:
        return await finish(work(*arguments, **named))

    return finished
