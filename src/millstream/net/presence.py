"""Whether a client is still there to wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Presence:
    """A client that has ended its side gets what is there, but nothing is waited for on its behalf any more."""

    __slots__ = ("has_left", "when_left")

    def __init__(self) -> None:
        self.has_left = False
        self.when_left: Callable[[], object] | None = None
        """Called when the client leaves; set by the request that waits, of which there is one at a time."""

    def leave(self) -> None:
        """The client has closed the connection, or its half of it."""
        self.has_left = True
        when_left, self.when_left = self.when_left, None
        if when_left is not None:
            when_left()

    def give_up_when_left(self) -> None:
        """End the task that is running when its client leaves, or after its first step if it has left already."""
        task = asyncio.current_task()
        if task is not None and self.has_left:
            asyncio.get_running_loop().call_soon(task.cancel)
        elif task is not None:
            self.when_left = task.cancel
