"""Waiting for an append to be acknowledged, in the order of the log."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Protocol

from millstream.model.errors import MillstreamError
from millstream.model.ids import Offset


class AcknowledgementListener(Protocol):
    """Somebody who waits for one append to be acknowledged."""

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Called on the loop once: the append is acknowledged, or the error says why it never will be."""


class Told:
    """Hands an acknowledgement to a future."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

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


Waiting = deque[tuple[Offset, AcknowledgementListener]]
"""Those who wait, each with the offset below which everything has to be there."""


def acknowledge(waiting: Waiting, offset: Offset) -> None:
    """Tell everyone who waits for no more than what lies below an offset."""
    while waiting and waiting[0][0] <= offset:
        waiting.popleft()[1].acknowledged(None)
