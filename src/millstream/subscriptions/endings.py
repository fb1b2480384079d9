"""How messages of a queue have ended, for as long as that is remembered, and who waits to be told.

A queue itself only knows that a message is done. The frames that were written last say how; they are kept as they are
and read when somebody asks, so that nothing is done for each message that nobody asks about.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final

from millstream.model.errors import PolicyViolation
from millstream.subscriptions.delta import Delta, DeltaKind
from millstream.subscriptions.frame import read_frame

FRAMES_BYTES_MAX: Final = 256 * 1024
"""How much is remembered of one queue."""
WATCHERS_MAX: Final = 256
"""How many may wait to be told of messages of one queue."""

_ENDS: Final = frozenset(
    {
        DeltaKind.ACCEPTED,
        DeltaKind.DEAD_LETTERED,
        DeltaKind.DROPPED,
        DeltaKind.FILTERED,
        DeltaKind.ABSENT,
        DeltaKind.SOUGHT,
        DeltaKind.RETENTION_CUT,
    }
)


class Endings:
    """The last frames of one queue."""

    __slots__ = ("_bytes", "_frames", "_watchers")

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._watchers: set[asyncio.Future[None]] = set()

    def wrote(self, frame: bytes) -> None:
        """Keep a frame; the oldest ones go."""
        self._frames.append(frame)
        self._bytes += len(frame)
        while self._bytes > FRAMES_BYTES_MAX:
            self._bytes -= len(self._frames.popleft())

    def changed(self) -> None:
        """Something has happened: tell whoever waits."""
        watchers, self._watchers = self._watchers, set()
        for watcher in watchers:
            if not watcher.done():
                watcher.set_result(None)

    def next_change(self) -> asyncio.Future[None]:
        """Done when something has happened."""
        self._watchers = {watcher for watcher in self._watchers if not watcher.done()}
        if len(self._watchers) >= WATCHERS_MAX:
            raise PolicyViolation(f"{WATCHERS_MAX} wait to be told of messages of this queue already; ask without wait")
        watcher = asyncio.get_running_loop().create_future()
        self._watchers.add(watcher)
        return watcher

    def how(self, offset: int) -> Delta | None:
        """How a message has ended, if that is remembered."""
        for frame in reversed(self._frames):
            for delta in reversed(read_frame(frame).deltas):
                if delta.kind in _ENDS and _is_about(delta, offset):
                    return delta
        return None


def _is_about(delta: Delta, offset: int) -> bool:
    if delta.kind == DeltaKind.SOUGHT:
        # The queue went on elsewhere: nothing before says anything of what it does with the message now.
        return True
    if not delta.first <= offset <= delta.last:
        return False
    if delta.kind in (DeltaKind.FILTERED, DeltaKind.ABSENT) and delta.extra:
        place = offset - delta.first
        return bool(delta.extra[place // 8] >> place % 8 & 1)
    return True
