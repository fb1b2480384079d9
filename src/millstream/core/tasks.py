"""Concurrent tasks of which the first failure cancels the others.

A `TaskGroup` of Python 3.11 that ends with an error swallows a cancellation that arrives meanwhile, so that the
canceller waits forever. Here the cancellation wins.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

_Result = TypeVar("_Result")


async def gather_or_cancel(work: Iterable[Coroutine[Any, Any, _Result]]) -> list[_Result]:
    """Run all coroutines and return their results in order; cancel the rest and raise on the first failure."""
    return [task.result() for task in await _ended(work, asyncio.FIRST_EXCEPTION)]


async def run_until_first(work: Iterable[Coroutine[Any, Any, Any]]) -> None:
    """Run all coroutines until one completes, then cancel the others; raise its error if it failed."""
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
"""Starts a named background task; its failure fails the node."""
