"""The interface between a queue and the store of its state.

The state of a queue is a fold over its deltas. A queue runs on the node that leads its data partition; its state is
stored in `__subscriptions`, whose partition another node may lead. Every write carries the queue's leader epoch and a
number, so that a replaced leader cannot write any more, and a repeated write counts once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from millstream.core.ids import Epoch
from millstream.core.subscription import QueueKey


class QueueImage(Protocol):
    """The state of a queue as the store holds it."""

    def replay(self, deltas: bytes) -> None:
        """Apply deltas in order."""

    @property
    def is_large(self) -> bool:
        """Whether encoding the snapshot would stall the loop."""

    def capture(self) -> Callable[[], bytes]:
        """Return a function that encodes the current state on any thread; an image made of it is equal."""


MakeImage = Callable[[QueueKey, bytes | None], QueueImage]
"""Makes the image of a queue from a snapshot, or an empty one."""


class StoredQueue(NamedTuple):
    """The stored state of a queue."""

    snapshot: bytes | None
    """None for a queue that was never written."""
    sequence: int
    """The number of the last write; the next write has the next number."""


class QueueWrite(NamedTuple):
    """One write of a queue."""

    key: QueueKey
    leader_epoch: Epoch
    sequence: int
    deltas: bytes


class StateStore(Protocol):
    """Stores the states of queues."""

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue's state, and durably fence every writer with an older leader epoch."""

    def write(self, write: QueueWrite) -> asyncio.Future[None]:
        """Write in the order of the calls; the future is done when it is durable, or fails if the queue is led
        elsewhere.
        """

    def has_room(self, key: QueueKey) -> bool:
        """Whether more may be written; if not, the queue waits until its writes are durable."""
