"""Whether a client is still connected and waits for a response."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Presence:
    """A client that has ended its side still gets finished responses, but no request waits on its behalf any more."""

    __slots__ = ("_on_gone", "_undelivered", "has_left", "is_gone", "when_left")

    def __init__(self) -> None:
        self.has_left = False
        self.when_left: Callable[[], object] | None = None
        """Called when the client leaves; set by the request that waits, of which there is one at a time."""
        self._on_gone: dict[object, Callable[[], object]] = {}
        self._undelivered: list[Callable[[], object]] = []
        self.is_gone = False

    def leave(self) -> None:
        """Note that the client has closed the connection, or its half of it."""
        self.has_left = True
        when_left, self.when_left = self.when_left, None
        if when_left is not None:
            when_left()

    def when_gone(self, who: object, callback: Callable[[], object]) -> None:
        """Call `callback` when the connection is gone, for state that lasts as long as it."""
        self._on_gone[who] = callback

    def forget(self, who: object) -> None:
        """Remove the callback of state that ended before its connection."""
        self._on_gone.pop(who, None)

    def end(self) -> None:
        """Note that the connection is gone."""
        self.is_gone = True
        farewells, self._on_gone = self._on_gone, {}
        undelivered, self._undelivered = self._undelivered, []
        for call in (*undelivered, *farewells.values()):
            call()

    def when_undelivered(self, undo: Callable[[], object]) -> None:
        """Call `undo` if the connection ends before the current response has left it."""
        if self.is_gone:
            undo()
        else:
            self._undelivered.append(undo)

    @property
    def has_undelivered(self) -> bool:
        """Whether a response that may have to be undone has not left yet, as far as is known."""
        return bool(self._undelivered)

    def delivered(self) -> None:
        """Note that all responses so far have left the connection."""
        self._undelivered.clear()

    def give_up_when_left(self) -> None:
        """Cancel the current task when its client leaves, or after its first step if it has left already."""
        task = asyncio.current_task()
        if task is not None and self.has_left:
            asyncio.get_running_loop().call_soon(task.cancel)
        elif task is not None:
            self.when_left = task.cancel
