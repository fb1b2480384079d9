"""Wait for other processes, threads and tasks, with timeouts that are long enough for a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

# Longer than the time limit of most tests, which shows the waiting line.
TIMEOUT_S: Final = 900.0
POLL_S: Final = 0.01
POLL_S_MAX: Final = 0.2
REQUEST_POLL_S: Final = 0.05
# Tasks that wait for nothing have finished after this many turns of the loop.
TURNS: Final = 100

T = TypeVar("T")


def wait_until(condition: Callable[[], T | None], *, timeout_s: float = TIMEOUT_S) -> T:
    """Return the first true result of `condition`; fail with its last result after the timeout.

    The longer `condition` takes, the less often it is asked: what is waited for needs the processor, too.
    """
    deadline = (checked_at := time.monotonic()) + timeout_s
    while not (found := condition()):
        if (answered := time.monotonic()) > deadline:
            raise AssertionError(f"not so within {timeout_s:g} s: {found!r}")
        time.sleep(min(max(POLL_S, 2 * (answered - checked_at)), POLL_S_MAX))
        checked_at = time.monotonic()
    return found


async def until(condition: Callable[[], T | None], *, timeout_s: float = TIMEOUT_S) -> T:
    """Let other tasks run until `condition` returns a true result, and return it; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    turns = 0
    while not (found := condition()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {timeout_s:g} s: {found!r}")
        turns += 1
        await asyncio.sleep(0 if turns < TURNS else POLL_S)
    return found


async def until_result(request: Callable[[], Awaitable[T | None]], *, timeout_s: float = TIMEOUT_S) -> T:
    """Await `request` until it returns a true result, and return it; fail after the timeout."""
    deadline = time.monotonic() + timeout_s
    while not (found := await request()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {timeout_s:g} s: {found!r}")
        await asyncio.sleep(REQUEST_POLL_S)
    return found
