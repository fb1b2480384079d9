"""Waiting for an append to be acknowledged, in the order of the log."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from millstream.core.errors import MillstreamError
from millstream.core.ids import Offset

DISCARD_MIN = 64


class AcknowledgementListener(Protocol):
    """Somebody who waits for one append to be acknowledged."""

    @property
    def is_finished(self) -> bool:
        """Whether it waits no more, for example since its time was over."""

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Called on the loop once: the append is acknowledged, or the error says why it never will be."""


class AcknowledgementFuture:
    """Hands an acknowledgement to a future."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_finished(self) -> bool:
        """Whether the future is done; whoever waited may have gone away, which cancels it."""
        return self.future.done()

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Complete the future."""
        # Whoever waited may have gone away, which cancels the future.
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
            # Whoever waits hears of it; if nobody does any more, nothing is to be said.
            self.future.exception()


class AcknowledgementQueue:
    """Listeners in the order of the log, each with the offset below which everything has to be acknowledged.

    The high watermark may stand still for long while clients time out and retry. Finished listeners are therefore
    discarded on request (`discard_finished`) and as others are added, so the queue stays bounded by those that wait.
    """

    __slots__ = ("_discard_at", "_queue")

    def __init__(self) -> None:
        self._queue: deque[tuple[Offset, AcknowledgementListener]] = deque()
        self._discard_at = DISCARD_MIN

    def __len__(self) -> int:
        """How many there are, those included that wait no more and are not dropped yet."""
        return len(self._queue)

    def add(self, offset: Offset, listener: AcknowledgementListener) -> None:
        """Tell `listener` when everything below an offset is there."""
        queue = self._queue
        queue.append((offset, listener))
        if len(queue) > self._discard_at:
            self.discard_finished()

    def discard_finished(self) -> None:
        """Drop those who wait no more."""
        left = [one for one in self._queue if not one[1].is_finished]
        # The same queue, since somebody who is being told may be the one who adds.
        self._queue.clear()
        self._queue.extend(left)
        # So that looking through all of them costs no more than to add them did.
        self._discard_at = max(DISCARD_MIN, 2 * len(self._queue))

    def acknowledge(self, offset: Offset) -> None:
        """Tell everyone who waits for no more than what lies below an offset."""
        queue = self._queue
        while queue and queue[0][0] <= offset:
            queue.popleft()[1].acknowledged(None)

    def fail(self, error: MillstreamError) -> None:
        """Tell everyone that it will never be."""
        queue = self._queue
        while queue:
            queue.popleft()[1].acknowledged(error)
