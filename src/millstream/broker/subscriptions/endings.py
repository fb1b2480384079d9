"""How messages of a queue have ended, for as long as that is remembered, and who waits to be told.

A queue itself only knows that a message is done. The frames that were written last say how; they are kept as they are
and read when somebody asks, so that nothing is done for each message that nobody asks about.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Final

from millstream.broker.subscriptions.delta import Delta, DeltaKind
from millstream.broker.subscriptions.fold import Fold
from millstream.broker.subscriptions.frame import read_frame
from millstream.broker.subscriptions.message_state import DONE
from millstream.broker.subscriptions.remembered import Remembered
from millstream.core.errors import PolicyViolation

FRAMES_BYTES_MAX: Final = 32 * 1024
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

    __slots__ = ("_bytes", "_frames", "_remembered", "_watchers")

    def __init__(self) -> None:
        self._frames: deque[bytes] = deque()
        self._bytes = 0
        self._remembered: Remembered | None = None
        # Who waits, and for which message.
        self._watchers: dict[asyncio.Future[Delta | None], int] = {}

    def share(self, remembered: Remembered) -> None:
        """Let what is kept count together with that of other queues."""
        self._remembered = remembered
        remembered.grew(self, self._bytes)

    def forget(self) -> int:
        """Keep no frame any more."""
        self._frames.clear()
        freed, self._bytes = self._bytes, 0
        return freed

    def wrote(self, frame: bytes) -> None:
        """Keep a frame; the oldest ones go. Whoever waits for one of its messages is told how that has ended."""
        before = self._bytes
        self._frames.append(frame)
        self._bytes += len(frame)
        while self._bytes > FRAMES_BYTES_MAX:
            self._bytes -= len(self._frames.popleft())
        if self._remembered is not None:
            self._remembered.grew(self, self._bytes - before)
        if self._watchers:
            deltas = read_frame(frame).deltas
            for watcher, offset in self._watchers.items():
                ended = _end_of(offset, deltas)
                if ended is not None and not watcher.done():
                    watcher.set_result(ended)

    def changed(self, fold: Fold) -> None:
        """Something has happened: have those look again whose message has ended, although that is not written yet."""
        for watcher, offset in self._watchers.items():
            if offset < fold.window.end and fold.state_of(offset) == DONE and not watcher.done():
                watcher.set_result(None)

    def closed(self) -> None:
        """The queue has gone: tell everybody who waits."""
        if self._remembered is not None:
            self._remembered.left(self)
        for watcher in self._watchers:
            if not watcher.done():
                watcher.set_result(None)

    def end_of(self, offset: int) -> asyncio.Future[Delta | None]:
        """Done when a message has ended, with how, if that is written already; or when the queue has gone."""
        self._watchers = {watcher: one for watcher, one in self._watchers.items() if not watcher.done()}
        if len(self._watchers) >= WATCHERS_MAX:
            raise PolicyViolation(f"{WATCHERS_MAX} wait to be told of messages of this queue already; ask without wait")
        watcher: asyncio.Future[Delta | None] = asyncio.get_running_loop().create_future()
        self._watchers[watcher] = offset
        return watcher

    def how(self, offset: int) -> Delta | None:
        """How a message has ended, if that is remembered."""
        for frame in reversed(self._frames):
            ended = _end_of(offset, read_frame(frame).deltas)
            if ended is not None:
                return ended
        return None


def _end_of(offset: int, deltas: Sequence[Delta]) -> Delta | None:
    """The last of some events that ends a message."""
    for delta in reversed(deltas):
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
