"""Whether a client is still there to wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Presence:
    """A client that has ended its side gets what is there, but nothing is waited for on its behalf any more."""

    __slots__ = ("_farewells", "has_left", "when_left")

    def __init__(self) -> None:
        self.has_left = False
        self.when_left: Callable[[], object] | None = None
        """Called when the client leaves; set by the request that waits, of which there is one at a time."""
        self._farewells: dict[object, Callable[[], object]] = {}

    def leave(self) -> None:
        """The client has closed the connection, or its half of it."""
        self.has_left = True
        when_left, self.when_left = self.when_left, None
        if when_left is not None:
            when_left()

    def when_gone(self, who: object, farewell: Callable[[], object]) -> None:
        """Have `farewell` called when the connection is gone, for something that lasts as long as it."""
        self._farewells[who] = farewell

    def forget(self, who: object) -> None:
        """Something has ended before its connection."""
        self._farewells.pop(who, None)

    def end(self) -> None:
        """The connection is gone."""
        farewells, self._farewells = self._farewells, {}
        for farewell in farewells.values():
            farewell()

    def give_up_when_left(self) -> None:
        """End the task that is running when its client leaves, or after its first step if it has left already."""
        task = asyncio.current_task()
        if task is not None and self.has_left:
            asyncio.get_running_loop().call_soon(task.cancel)
        elif task is not None:
            self.when_left = task.cancel
