"""The queues' states that this node keeps: the partitions of `__subscriptions` that it leads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Final

from millstream.broker.coordination.runtime import Runtime, StateTopic, StateTopics
from millstream.broker.coordination.shard import RETRY_FIRST_S
from millstream.broker.subscriptions.state_shard import StateShard, WriteResult
from millstream.broker.subscriptions.state_store import MakeImage, QueueWrite, StoredQueue
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import CoordinatorUnavailable
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.core.topic import SUBSCRIPTIONS

_TOPIC_SETTINGS = {
    # Deltas of a queue build on each other, so none may go before a snapshot has taken its place.
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "segment.bytes": str(64 * 1024 * 1024),
    "max.message.bytes": str(64 * 1024 * 1024),
}

PARTITION_CACHE_MAX: Final = 100_000
"""For so many queues it is remembered which partition keeps them: it is asked with every write."""


class StateCoordinator:
    """Keeps the states of queues in the log."""

    def __init__(
        self,
        topics: StateTopics,
        config: Config,
        clock: Clock,
        make_image: MakeImage,
        *,
        retry_first_s: float = RETRY_FIRST_S,
    ) -> None:
        topic = StateTopic(name=SUBSCRIPTIONS, partitions=config.subscriptions_partitions, overrides=_TOPIC_SETTINGS)
        self._runtime: Runtime[StateShard] = Runtime(
            topics, topic, lambda _timers: StateShard(make_image), clock=clock, retry_first_s=retry_first_s
        )
        # The number of partitions never changes.
        self._partition_cache: dict[QueueKey, PartitionIndex] = {}

    async def start(self) -> None:
        """Begin to load what the log has."""
        await self._runtime.start()

    async def close(self) -> None:
        """Let what was appended be acknowledged."""
        await self._runtime.close()

    async def wait_loaded(self) -> None:
        """Wait until no shard is loading any more."""
        await self._runtime.wait_loaded()

    async def ensure(self) -> None:
        """Make the topic if this is its first use."""
        await self._runtime.ensure()

    def partition_of(self, key: QueueKey) -> PartitionIndex:
        """The partition of the topic that keeps a queue."""
        found = self._partition_cache.get(key)
        if found is None:
            found = self._runtime.partition_of(f"{key.subscription_id}/{key.topic_id}/{key.partition}")
            if len(self._partition_cache) >= PARTITION_CACHE_MAX:
                self._partition_cache.clear()
            self._partition_cache[key] = found
        return found

    def leader_of(self, index: PartitionIndex) -> NodeId | None:
        """The node that keeps one partition of the topic; None while nobody does."""
        return self._runtime.leader_at(index)

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue back for its leader."""
        shard = self._runtime.shard_at(self.partition_of(key))
        loaded = await shard.run(lambda state: state.load(key, leader_epoch), pure=True)
        if loaded.snapshot is None:
            return StoredQueue(None, loaded.sequence)
        snapshot = await asyncio.to_thread(loaded.snapshot) if loaded.is_large else loaded.snapshot()
        return StoredQueue(snapshot, loaded.sequence)

    def write(self, index: PartitionIndex, writes: Sequence[QueueWrite]) -> asyncio.Future[list[WriteResult]]:
        """Take in writes of one partition now; the future tells when they are durable."""
        if any(self.partition_of(write.key) != index for write in writes):
            raise CoordinatorUnavailable(f"a write was sent to partition {index}, which does not keep its queue")
        return self._runtime.shard_at(index).submit(lambda state: state.write(writes), pure=True)

    async def forget(self, is_gone: Callable[[QueueKey], bool]) -> int:
        """Drop the queues that are gone, as far as this node keeps them."""
        gone = 0
        for shard in self._runtime.shards:
            if shard.state is not None:
                gone += await shard.run(lambda state: state.forget(is_gone), pure=True)
        return gone

    def written(self) -> list[QueueKey]:
        """The queues that have begun, as far as this node keeps them."""
        return [key for shard in self._runtime.shards if shard.state is not None for key in shard.state.written()]

    @property
    def queues(self) -> int:
        """How many queues this node keeps the state of."""
        return sum(len(shard.state) for shard in self._runtime.shards if shard.state is not None)
