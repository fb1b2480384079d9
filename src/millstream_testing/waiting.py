"""Wait for other processes, threads and tasks, patiently enough for a busy machine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Final, TypeVar

# Longer than most tests may take: their time limit ends them sooner, and shows the line that waits.
PATIENCE_S: Final = 900.0
LOOK_S: Final = 0.01
ASK_S: Final = 0.05
# Tasks that wait for nothing have finished after this many turns of the loop.
TURNS: Final = 100

Found = TypeVar("Found")


def wait_until(look: Callable[[], Found | None], *, patience_s: float = PATIENCE_S) -> Found:
    """Return the first true result of `look`; fail with its last one when patience runs out."""
    deadline = time.monotonic() + patience_s
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {patience_s:g} s: {found!r}")
        time.sleep(LOOK_S)
    return found


async def until(look: Callable[[], Found | None], *, patience_s: float = PATIENCE_S) -> Found:
    """Let other tasks run until `look` has a true result, and return it; fail when patience runs out."""
    deadline = time.monotonic() + patience_s
    turns = 0
    while not (found := look()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {patience_s:g} s: {found!r}")
        turns += 1
        await asyncio.sleep(0 if turns < TURNS else LOOK_S)
    return found


async def until_result(ask: Callable[[], Awaitable[Found | None]], *, patience_s: float = PATIENCE_S) -> Found:
    """Await `ask` until it has a true result, and return it; fail when patience runs out."""
    deadline = time.monotonic() + patience_s
    while not (found := await ask()):
        if time.monotonic() > deadline:
            raise AssertionError(f"not so within {patience_s:g} s: {found!r}")
        await asyncio.sleep(ASK_S)
    return found
