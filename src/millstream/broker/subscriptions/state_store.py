"""Where the queues keep their state: what a queue needs of it, and what it gets back.

The state of a queue is a fold over its deltas. A queue lives on the node that leads its data partition; its state is
kept in `__subscriptions`, whose partition another node may lead. Every write names the leader epoch under which the
queue runs and is numbered, so a leader that was replaced cannot write any more, and a write that is repeated counts
once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple, Protocol

from millstream.core.ids import Epoch
from millstream.core.subscription import QueueKey


class QueueImage(Protocol):
    """The state of a queue as the store keeps it."""

    def replay(self, deltas: bytes) -> None:
        """Take in what happened, in the order in which it did."""

    @property
    def is_large(self) -> bool:
        """Whether its snapshot takes longer to make than the loop should wait."""

    def capture(self) -> Callable[[], bytes]:
        """What makes the snapshot of it as it is now, on any thread: an image made of just that is the same."""


MakeImage = Callable[[QueueKey, bytes | None], QueueImage]
"""Makes the image of a queue from a snapshot, or an empty one."""


class StoredQueue(NamedTuple):
    """What the store knows of a queue."""

    snapshot: bytes | None
    """None for a queue that was never written."""
    sequence: int
    """The number of its last write; the next one has the next number."""


class QueueWrite(NamedTuple):
    """One write of a queue."""

    key: QueueKey
    leader_epoch: Epoch
    sequence: int
    deltas: bytes


class StateStore(Protocol):
    """Keeps the state of queues."""

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue back, and fence everybody who writes it under an older leader epoch, durably."""

    def write(self, write: QueueWrite) -> asyncio.Future[None]:
        """Write in the order of the calls; the future tells when it is durable, or that the queue is not led here."""

    def has_room(self, key: QueueKey) -> bool:
        """Whether more may be written; if not, a queue waits until what it wrote is durable."""
