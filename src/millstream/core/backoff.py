"""Growing pauses between attempts, each a little different so that many nodes do not come at once."""

from __future__ import annotations

import asyncio
from random import Random

FIRST_S = 0.05
MAX_S = 2.0


class Backoff:
    """The pauses of one task."""

    def __init__(self, random: Random, *, first_s: float = FIRST_S, max_s: float = MAX_S) -> None:
        self._random = random
        self._first_s = first_s
        self._max_s = max_s
        self._next_s = first_s

    def succeeded(self) -> None:
        """Begin with the shortest pause again."""
        self._next_s = self._first_s

    async def pause(self) -> None:
        """Wait, longer each time until something has succeeded."""
        pause_s, self._next_s = self._next_s, min(self._next_s * 2, self._max_s)
        await asyncio.sleep(pause_s * self._random.uniform(0.5, 1.0))
