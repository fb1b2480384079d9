"""A state store in memory: the test decides when a write is durable, whether it fails, and whether there is room."""

from __future__ import annotations

import asyncio

from millstream.broker.subscriptions.frame import may_concern
from millstream.broker.subscriptions.snapshot import FoldImage
from millstream.broker.subscriptions.state_store import PendingWrite, QueueWrite, StoredQueue
from millstream.core.errors import FencedLeaderEpoch, MillstreamError, OutOfOrderSequence
from millstream.core.ids import Epoch
from millstream.core.subscription import QueueKey


class _Kept:
    def __init__(self, key: QueueKey) -> None:
        self.image = FoldImage(key)
        self.sequence = -1
        self.leader_epoch = -1
        self.frames: list[bytes] = []


class MemoryStateStore:
    """Keeps the states of queues; `forget_unwritten` drops writes that are not durable yet."""

    def __init__(self) -> None:
        self.holds = False
        """Whether writes wait for `let_go`."""
        self.room = True
        self.refusal: MillstreamError | None = None
        """The errors of loading and writing."""
        self.loading = asyncio.Event()
        self.loading.set()
        self.writes = 0
        self._kept: dict[QueueKey, _Kept] = {}
        self._held: list[tuple[QueueWrite, PendingWrite]] = []

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Load a queue."""
        await self.loading.wait()
        if self.refusal is not None:
            raise self.refusal
        kept = self._kept.setdefault(key, _Kept(key))
        if kept.leader_epoch > leader_epoch:
            raise FencedLeaderEpoch(f"epoch {kept.leader_epoch} has the queue")
        kept.leader_epoch = leader_epoch
        return StoredQueue(None if kept.sequence < 0 else kept.image.snapshot(), kept.sequence)

    async def frames(self, key: QueueKey, offset: int, since_ms: int) -> list[bytes]:
        """Return the frames about a message."""
        return [frame for frame in self._kept[key].frames if may_concern(frame, offset)]

    def write(self, write: QueueWrite) -> PendingWrite:
        """Accept a write, or hold it back."""
        pending = PendingWrite()
        self.writes += 1
        self._held.append((write, pending))
        if not self.holds:
            self.let_go()
        return pending

    def has_room(self, _key: QueueKey) -> bool:
        """Return what the test has set."""
        return self.room

    def let_go(self) -> None:
        """Make every waiting write durable."""
        held, self._held = self._held, []
        for write, pending in held:
            pending.finish(self.refusal or self._take(write))

    def forget_unwritten(self) -> None:
        """Lose what is not durable, as in a crash."""
        self._held.clear()

    def _take(self, write: QueueWrite) -> MillstreamError | None:
        kept = self._kept[write.key]
        if kept.leader_epoch != write.leader_epoch:
            return FencedLeaderEpoch(f"epoch {kept.leader_epoch} has the queue")
        if write.sequence != kept.sequence + 1:
            return OutOfOrderSequence(f"{write.sequence} follows {kept.sequence}")
        kept.image.replay(write.deltas)
        kept.sequence = write.sequence
        kept.frames.append(write.deltas)
        return None
