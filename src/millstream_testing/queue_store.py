"""A state store in memory: the test decides whether and when writes become durable, and whether there is room."""

from __future__ import annotations

import asyncio

from millstream.broker.subscriptions.frame import may_concern
from millstream.broker.subscriptions.snapshot import FoldImage
from millstream.broker.subscriptions.state_store import PendingWrite, QueueWrite, StoredQueue
from millstream.core.errors import FencedLeaderEpoch, MillstreamError, OutOfOrderSequence
from millstream.core.ids import Epoch
from millstream.core.subscription import QueueKey


class _StoredState:
    def __init__(self, key: QueueKey) -> None:
        self.image = FoldImage(key)
        self.sequence = -1
        self.leader_epoch = -1
        self.frames: list[bytes] = []


class MemoryStateStore:
    """Stores the states of queues; `discard_pending` drops writes that are not durable yet."""

    def __init__(self) -> None:
        self.holds_writes = False
        """Whether writes wait for `release_writes`."""
        self.room = True
        self.error: MillstreamError | None = None
        """The error of every load and write, if any."""
        self.loading = asyncio.Event()
        self.loading.set()
        self.writes = 0
        self._states: dict[QueueKey, _StoredState] = {}
        self._held: list[tuple[QueueWrite, PendingWrite]] = []

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        await self.loading.wait()
        if self.error is not None:
            raise self.error
        state = self._states.setdefault(key, _StoredState(key))
        if state.leader_epoch > leader_epoch:
            raise FencedLeaderEpoch(f"epoch {state.leader_epoch} has the queue")
        state.leader_epoch = leader_epoch
        return StoredQueue(None if state.sequence < 0 else state.image.snapshot(), state.sequence)

    async def frames(self, key: QueueKey, offset: int, since_ms: int) -> list[bytes]:
        """Return the frames about a message."""
        return [frame for frame in self._states[key].frames if may_concern(frame, offset)]

    def write(self, write: QueueWrite) -> PendingWrite:
        """Apply a write, or hold it back."""
        pending = PendingWrite()
        self.writes += 1
        self._held.append((write, pending))
        if not self.holds_writes:
            self.release_writes()
        return pending

    def has_room(self, _key: QueueKey) -> bool:
        """Return what the test has set."""
        return self.room

    def release_writes(self) -> None:
        """Make every waiting write durable."""
        held, self._held = self._held, []
        for write, pending in held:
            pending.finish(self.error or self._apply(write))

    def discard_pending(self) -> None:
        """Lose the writes that are not durable, as in a crash."""
        self._held.clear()

    def _apply(self, write: QueueWrite) -> MillstreamError | None:
        state = self._states[write.key]
        if state.leader_epoch != write.leader_epoch:
            return FencedLeaderEpoch(f"epoch {state.leader_epoch} has the queue")
        if write.sequence != state.sequence + 1:
            return OutOfOrderSequence(f"{write.sequence} follows {state.sequence}")
        state.image.replay(write.deltas)
        state.sequence = write.sequence
        state.frames.append(write.deltas)
        return None
