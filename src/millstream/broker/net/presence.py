"""Whether a client is still there to wait for an answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Presence:
    """A client that has ended its side gets what is there, but nothing is waited for on its behalf any more."""

    __slots__ = ("_on_gone", "_undelivered", "has_left", "is_gone", "when_left")

    def __init__(self) -> None:
        self.has_left = False
        self.when_left: Callable[[], object] | None = None
        """Called when the client leaves; set by the request that waits, of which there is one at a time."""
        self._on_gone: dict[object, Callable[[], object]] = {}
        self._undelivered: list[Callable[[], object]] = []
        self.is_gone = False

    def leave(self) -> None:
        """The client has closed the connection, or its half of it."""
        self.has_left = True
        when_left, self.when_left = self.when_left, None
        if when_left is not None:
            when_left()

    def when_gone(self, who: object, callback: Callable[[], object]) -> None:
        """Have `callback` called when the connection is gone, for something that lasts as long as it."""
        self._on_gone[who] = callback

    def forget(self, who: object) -> None:
        """Something has ended before its connection."""
        self._on_gone.pop(who, None)

    def end(self) -> None:
        """The connection is gone."""
        self.is_gone = True
        farewells, self._on_gone = self._on_gone, {}
        undelivered, self._undelivered = self._undelivered, []
        for call in (*undelivered, *farewells.values()):
            call()

    def when_undelivered(self, undo: Callable[[], object]) -> None:
        """Have `undo` called if the connection ends before the answer that is given now has left it."""
        if self.is_gone:
            undo()
        else:
            self._undelivered.append(undo)

    @property
    def has_undelivered(self) -> bool:
        """Whether an answer that may have to be undone has not left yet, as far as is known."""
        return bool(self._undelivered)

    def delivered(self) -> None:
        """Everything that was answered has left the connection."""
        self._undelivered.clear()

    def give_up_when_left(self) -> None:
        """End the task that is running when its client leaves, or after its first step if it has left already."""
        task = asyncio.current_task()
        if task is not None and self.has_left:
            asyncio.get_running_loop().call_soon(task.cancel)
        elif task is not None:
            self.when_left = task.cancel
