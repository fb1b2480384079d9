"""Waiting for an append to be acknowledged, in the order of the log."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from millstream.core.errors import MillstreamError
from millstream.core.ids import Offset

DROP_MIN = 64


class AcknowledgementListener(Protocol):
    """Somebody who waits for one append to be acknowledged."""

    @property
    def is_over(self) -> bool:
        """Whether it waits no more, for example since its time was over."""

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Called on the loop once: the append is acknowledged, or the error says why it never will be."""


class Told:
    """Hands an acknowledgement to a future."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_over(self) -> bool:
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


class Waiting:
    """Those who wait, each with the offset below which everything has to be there, in the order of the log.

    The high watermark may stand still for long, while clients give up and send again. So those who wait no more are
    dropped: when somebody tells (`drop_over`), and by and by as others come. There are never many more than still wait.
    """

    __slots__ = ("_drop_at", "_queue")

    def __init__(self) -> None:
        self._queue: deque[tuple[Offset, AcknowledgementListener]] = deque()
        self._drop_at = DROP_MIN

    def __len__(self) -> int:
        """How many there are, those included that wait no more and are not dropped yet."""
        return len(self._queue)

    def add(self, offset: Offset, listener: AcknowledgementListener) -> None:
        """Tell `listener` when everything below an offset is there."""
        queue = self._queue
        queue.append((offset, listener))
        if len(queue) > self._drop_at:
            self.drop_over()

    def drop_over(self) -> None:
        """Drop those who wait no more."""
        left = [one for one in self._queue if not one[1].is_over]
        # The same queue, since somebody who is being told may be the one who adds.
        self._queue.clear()
        self._queue.extend(left)
        # So that looking through all of them costs no more than to add them did.
        self._drop_at = max(DROP_MIN, 2 * len(self._queue))

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
