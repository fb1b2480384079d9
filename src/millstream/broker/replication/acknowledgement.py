"""Waiting for an append to be acknowledged, in the order of the log; checks before appends of transactions."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol

from millstream.core.errors import MillstreamError
from millstream.core.ids import Offset
from millstream.core.topic import TopicPartition


class TransactionGate(Protocol):
    """Asks the coordinator of a transaction, on this node or another one."""

    async def admit(
        self,
        transactional_id: str,
        producer_id: int,
        producer_epoch: int,
        partitions: Sequence[TopicPartition],
        *,
        add: bool,
    ) -> Mapping[TopicPartition, MillstreamError | None]:
        """Return None for each partition that the open transaction holds, otherwise why it may not be written.

        With `add` the coordinator adds the partitions to the transaction, as in transaction version 2; otherwise it
        only says whether it has them.
        """


DISCARD_MIN = 64


class AcknowledgementListener(Protocol):
    """Waits for one append to be acknowledged."""

    @property
    def is_finished(self) -> bool:
        """Whether it no longer waits, for example because it timed out."""

    def acknowledged(self, error: MillstreamError | None) -> None:
        """Receive the outcome, once, on the loop; the error says why the append never will be acknowledged."""


class AcknowledgementFuture:
    """Passes an acknowledgement on to a future."""

    __slots__ = ("future",)

    def __init__(self) -> None:
        self.future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_finished(self) -> bool:
        """Whether the future is done; cancelling its waiter cancels it."""
        return self.future.done()

    def acknowledged(self, error: MillstreamError | None) -> None:
        # Cancelling its waiter cancels the future.
        if self.future.done():
            return
        if error is None:
            self.future.set_result(None)
        else:
            self.future.set_exception(error)
            # Without a waiter nothing retrieves the exception.
            self.future.exception()


class AcknowledgementQueue(deque["tuple[Offset, AcknowledgementListener]"]):
    """Listeners in the order of the log, each with the offset below which everything has to be acknowledged.

    The high watermark may not move for long while clients time out and retry. Finished listeners are therefore
    discarded on request (`discard_finished`) and as others are added, so the queue stays bounded by those that wait.
    """

    __slots__ = ("_discard_at",)

    def __init__(self) -> None:
        super().__init__()
        self._discard_at = DISCARD_MIN

    def add(self, offset: Offset, listener: AcknowledgementListener) -> None:
        """Call `listener` when everything below an offset is acknowledged."""
        self.append((offset, listener))
        if len(self) > self._discard_at:
            self.discard_finished()

    def discard_finished(self) -> None:
        """Remove the listeners that no longer wait."""
        left = [entry for entry in self if not entry[1].is_finished]
        self.clear()
        self.extend(left)
        # The next scan then costs no more than the additions since.
        self._discard_at = max(DISCARD_MIN, 2 * len(self))

    def acknowledge(self, offset: Offset) -> None:
        # A listener that is called may add another one, or discard finished ones.
        while self and self[0][0] <= offset:
            self.popleft()[1].acknowledged(None)

    def fail(self, error: MillstreamError) -> None:
        while self:
            self.popleft()[1].acknowledged(error)
