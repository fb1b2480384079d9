"""The interface between a queue and the store of its state.

The state of a queue is a fold over its deltas. A queue runs on the node that leads its data partition; its state is
stored in `__subscriptions`, whose partition another node may lead. Every write carries the queue's leader epoch and a
number, so that a replaced leader cannot write any more, and a repeated write counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Generator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from millstream.core.errors import MillstreamError
from millstream.core.ids import Epoch
from millstream.core.subscription import QueueKey

if TYPE_CHECKING:
    from millstream.broker.subscriptions.fold import Fold


class QueueImage(Protocol):
    """The state of a queue as the store holds it."""

    def replay(self, deltas: bytes) -> None:
        """Apply deltas in order."""

    @property
    def fold(self) -> Fold:
        """The state with all deltas, or as many as can be applied."""

    @property
    def has_ledger(self) -> bool:
        """Whether the events of the queue are for the ledger."""

    @property
    def is_broken(self) -> bool:
        """Whether deltas cannot be applied; they are in the snapshot, and reading that raises why."""

    @property
    def is_large(self) -> bool:
        """Whether encoding the snapshot would stall the loop."""

    def capture(self) -> Callable[[], bytes]:
        """Return a function that encodes the current state on any thread; decoding it gives an equal image."""


MakeImage = Callable[[QueueKey, bytes | None], QueueImage]


class StoredQueue(NamedTuple):
    snapshot: bytes | None
    """None for a queue that was never written."""
    sequence: int
    """The number of the last write; the next write has the next number."""


class QueueWrite(NamedTuple):
    key: QueueKey
    leader_epoch: Epoch
    sequence: int
    deltas: bytes


class PendingWrite:
    """A write on its way to the store; several requests may wait for it, with a listener or by awaiting it.

    Listeners are called in the moment when it is durable or has failed, without a turn of the loop in between. A
    request that awaits it and is cancelled leaves it as it is.
    """

    __slots__ = ("_listeners", "error", "is_done")

    def __init__(self) -> None:
        self.is_done = False
        self.error: MillstreamError | None = None
        self._listeners: list[Callable[[MillstreamError | None], None]] = []

    def finish(self, error: MillstreamError | None = None) -> None:
        """Record that the write is durable, or why it failed; only the first outcome counts."""
        if self.is_done:
            return
        self.is_done, self.error = True, error
        listeners, self._listeners = self._listeners, []
        for listener in listeners:
            listener(error)

    def listen(self, listener: Callable[[MillstreamError | None], None]) -> None:
        """Call `listener` with the outcome, immediately if it is known."""
        if self.is_done:
            listener(self.error)
        else:
            self._listeners.append(listener)

    def __await__(self) -> Generator[Any, None, None]:
        """Wait until the write is durable, or raise why it failed."""
        if not self.is_done:
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._listeners.append(lambda _error: None if waiter.done() else waiter.set_result(None))
            yield from waiter
        if self.error is not None:
            raise self.error


class StateStore(Protocol):
    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue's state, and durably fence every writer with an older leader epoch."""

    async def frames(self, key: QueueKey, offset: int, since_ms: int) -> Sequence[bytes]:
        """Return the stored frames about a message, of those written since a time; raise if they cannot be searched."""

    def write(self, write: QueueWrite) -> PendingWrite:
        """Write in the order of the calls; a write fails if the queue is led elsewhere."""

    def has_room(self, key: QueueKey) -> bool:
        """Whether more may be written; if not, the queue waits until its writes are durable."""
