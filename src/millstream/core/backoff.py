"""Delays between attempts that double after each failure, up to a maximum.

Given a source of randomness, each delay is shortened by up to half, so that many nodes do not retry in step.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from millstream.core.tasks import wait_up_to

if TYPE_CHECKING:
    from random import Random

FIRST_S: Final = 0.05
MAX_S: Final = 2.0
_DOUBLINGS_MAX: Final = 32


def delay_after(
    failures: int, *, first_s: float = FIRST_S, max_s: float = MAX_S, random: Random | None = None
) -> float:
    """Return the delay before the next attempt, given how many delays there were before it."""
    delay_s = min(first_s * 2.0 ** min(failures, _DOUBLINGS_MAX), max_s)
    return delay_s if random is None else delay_s * random.uniform(0.5, 1.0)


class Backoff:
    """The delays of one task, for callers that do not count failures themselves."""

    __slots__ = ("_first_s", "_max_s", "_random", "failures")

    def __init__(self, random: Random | None = None, *, first_s: float = FIRST_S, max_s: float = MAX_S) -> None:
        self._random = random
        self._first_s = first_s
        self._max_s = max_s
        self.failures = 0

    @property
    def next_s(self) -> float:
        """The longest that the next delay may be."""
        return delay_after(self.failures, first_s=self._first_s, max_s=self._max_s)

    def reset(self) -> None:
        """Start again from the shortest delay: an attempt has succeeded."""
        self.failures = 0

    def take_s(self) -> float:
        """Return the next delay and double the one after it."""
        delay_s = delay_after(self.failures, first_s=self._first_s, max_s=self._max_s, random=self._random)
        self.failures += 1
        return delay_s

    async def pause(self) -> None:
        """Sleep for the next delay."""
        await asyncio.sleep(self.take_s())

    async def pause_unless(self, event: asyncio.Event) -> None:
        """Pause, but no longer than until the event is set."""
        await wait_up_to(self.take_s(), event)
