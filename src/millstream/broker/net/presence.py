"""Detects whether a client is still connected and waits for a response, even while nothing is read from it.

The end of a stream follows everything that was sent before, and a connection that waits for a response may have stopped
reading. Linux reports it as an event (`Hangups`); elsewhere it is noticed with the next read.
"""

from __future__ import annotations

import asyncio
import logging
import select
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from enum import Enum
from typing import Any

_logger = logging.getLogger(__name__)


class Presence:
    """A client that has ended its side still gets finished responses, but no request waits on its behalf any more."""

    __slots__ = ("_on_gone", "_on_leave", "_undelivered", "descriptor", "has_left", "is_gone")

    def __init__(self) -> None:
        self.descriptor = -1
        """The socket of the connection; -1 while there is none."""
        self.has_left = False
        # The callback of the request that waits; at most one does at a time.
        self._on_leave: Callable[[], object] | None = None
        self._on_gone: dict[object, Callable[[], object]] = {}
        self._undelivered: list[Callable[[], object]] = []
        self.is_gone = False

    @property
    def has_ended(self) -> bool:
        """Whether the client has ended its side by now, even if that has not been read yet."""
        return self.has_left or self.is_gone or (self.descriptor >= 0 and find_end(self.descriptor) is not End.NONE)

    def leave(self) -> None:
        """Record that the client has closed the connection, or its half of it."""
        self.has_left = True
        on_leave, self._on_leave = self._on_leave, None
        if on_leave is not None:
            on_leave()

    def on_close(self, who: object, callback: Callable[[], object]) -> None:
        """Call `callback` when the connection is gone, for state that lasts as long as it."""
        self._on_gone[who] = callback

    def forget(self, who: object) -> None:
        """Remove the callback of state that ended before its connection."""
        self._on_gone.pop(who, None)

    def end(self) -> None:
        """Record that the connection is gone; a callback that fails does not keep the others from being called."""
        self.is_gone = True
        self.descriptor = -1
        on_gone, self._on_gone = self._on_gone, {}
        undelivered, self._undelivered = self._undelivered, []
        for call in (*undelivered, *on_gone.values()):
            try:
                call()
            except Exception:
                _logger.exception("releasing what a connection held failed")

    def on_undelivered(self, undo: Callable[[], object]) -> None:
        """Call `undo` if the connection ends before the current response has left it."""
        if self.is_gone:
            undo()
        else:
            self._undelivered.append(undo)

    @property
    def has_undelivered(self) -> bool:
        """Whether a response that may have to be undone is not known to have been sent."""
        return bool(self._undelivered)

    def delivered(self) -> None:
        """Note that all responses so far have left the connection."""
        self._undelivered.clear()

    def cancel_on_disconnect(self, task: asyncio.Task[Any] | None = None) -> None:
        """Cancel a task, or the current one, when its client leaves; after its first step if it has already left."""
        task = task or asyncio.current_task()
        if task is not None:
            self.on_leave(task.cancel)

    def on_leave(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the client leaves, or soon if it has left already; for the request that waits."""
        if self.has_left:
            asyncio.get_running_loop().call_soon(callback)
        else:
            self._on_leave = callback

    def forget_on_leave(self, callback: Callable[[], object]) -> None:
        """Do not call `callback` any more: its request no longer waits. The callback of a later request stays."""
        if self._on_leave == callback:
            self._on_leave = None


class Hangups:
    """The sockets of one loop that are watched for the client's end only."""

    def __init__(self) -> None:
        self._watched: dict[int, Callable[[], None]] = {}
        self._poll: select.epoll | None = None

    def __len__(self) -> int:
        return len(self._watched)

    def watch(self, descriptor: int, hung_up: Callable[[], None]) -> None:
        """Call `hung_up` once if the client ends its side, or is gone."""
        if sys.platform != "linux":
            return
        if self._poll is None:
            self._poll = select.epoll()
            asyncio.get_running_loop().add_reader(self._poll.fileno(), self._on_ended)
        self._watched[descriptor] = hung_up
        self._poll.register(descriptor, select.EPOLLRDHUP | select.EPOLLONESHOT)

    def forget(self, descriptor: int, hung_up: Callable[[], None]) -> None:
        """Stop watching, unless the descriptor belongs to another connection by now."""
        if self._poll is not None and self._watched.get(descriptor) == hung_up:
            del self._watched[descriptor]
            # A closed descriptor is no longer watched anyway.
            with suppress(OSError):
                self._poll.unregister(descriptor)

    def close(self) -> None:
        """Stop watching all sockets."""
        self._watched.clear()
        if self._poll is not None:
            asyncio.get_running_loop().remove_reader(self._poll.fileno())
            self._poll.close()
            self._poll = None

    def _on_ended(self) -> None:
        if self._poll is None:
            return
        for descriptor, _ in self._poll.poll(0):
            with suppress(OSError):
                self._poll.unregister(descriptor)
            hung_up = self._watched.pop(descriptor, None)
            if hung_up is not None:
                hung_up()


class End(Enum):
    """Whether a client has left."""

    NONE = 0
    SENT_ALL = 1
    """It has ended its side, and may be gone."""
    GONE = 2
    """It has reset the connection."""


_RDHUP = getattr(select, "POLLRDHUP", 0)
_poll = select.poll()


def find_gone(descriptors: Iterable[int], *, or_ended: bool) -> list[int]:
    """Return the sockets that their clients have reset or, with `or_ended`, half-closed; do not wait."""
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, _RDHUP if or_ended else 0)
    return [descriptor for descriptor, _ in poll.poll(0)]


def find_end(descriptor: int) -> End:
    """Find out at once whether the client of a socket has left."""
    _poll.register(descriptor, _RDHUP)
    try:
        polled = _poll.poll(0)
    finally:
        _poll.unregister(descriptor)
    if not polled:
        return End.NONE
    return End.GONE if polled[0][1] & (select.POLLERR | select.POLLHUP) else End.SENT_ALL
