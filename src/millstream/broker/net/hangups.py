"""Notices that clients hang up while nothing is read from them.

The end of a stream is behind everything that was sent before it, and a connection that waits for a response may have
stopped reading. Linux reports the end by itself; elsewhere it is noticed with the next read.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Callable
from contextlib import suppress


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
            asyncio.get_running_loop().add_reader(self._poll.fileno(), self._ended)
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

    def _ended(self) -> None:
        if self._poll is None:
            return
        for descriptor, _ in self._poll.poll(0):
            with suppress(OSError):
                self._poll.unregister(descriptor)
            hung_up = self._watched.pop(descriptor, None)
            if hung_up is not None:
                hung_up()
