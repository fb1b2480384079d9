"""Notices that clients hang up while nothing is read from them.

The end of a stream is behind what has been sent before, and a connection that waits for an answer may have stopped to
read. Linux tells of the end by itself, whatever has not been read; elsewhere it is noticed with the next reading.
"""

from __future__ import annotations

import asyncio
import select
import sys
from collections.abc import Callable
from contextlib import suppress


class Hangups:
    """The sockets of one loop that are watched for their end, and only for that."""

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
        """Stop watching, unless the descriptor is that of another connection by now."""
        if self._poll is not None and self._watched.get(descriptor) == hung_up:
            del self._watched[descriptor]
            # A closed descriptor is not watched any more anyway.
            with suppress(OSError):
                self._poll.unregister(descriptor)

    def close(self) -> None:
        """Watch nothing any more."""
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
