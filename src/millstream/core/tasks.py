"""Several things done at the same time, of which the first failure ends the others.

A task group of Python 3.11 that ends for an error forgets a cancellation that comes meanwhile, so that whoever stops
its task waits for ever. Here the cancellation wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Do all of it and return what came of it, in order; raises the first failure as it is."""
    return [task.result() for task in await _ended(work, asyncio.FIRST_EXCEPTION)]


async def run_until_first(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Do all of it until one thing is done, then cancel the others; raises a failure as it is."""
    await _ended(work, asyncio.FIRST_COMPLETED)


async def _ended(work: Iterable[Coroutine[Any, Any, _Result]], until: str) -> list[asyncio.Task[_Result]]:
    tasks = [asyncio.ensure_future(one) for one in work]
    if not tasks:
        return []
    try:
        ended, _ = await asyncio.wait(tasks, return_when=until)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in ended:
        task.result()
    return tasks


Supervise = Callable[[str, Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Starts work under a name; a failure of it is one of the whole node."""
