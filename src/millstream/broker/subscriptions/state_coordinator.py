"""The states of queues in the partitions of `__subscriptions` that this node leads."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from millstream.broker.coordination.runtime import Coordinator, Runtime, StateTopic, StateTopics
from millstream.broker.coordination.shard import RETRY_FIRST_S, Release
from millstream.broker.coordination.state_machine import StateRecord
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.state_shard import Loaded, Overflow, StateShard, WriteResult
from millstream.broker.subscriptions.state_store import MakeImage, QueueWrite, StoredQueue
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import CoordinatorUnavailable
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.subscription import QueueKey
from millstream.core.topic import SUBSCRIPTIONS, TopicPartition

_logger = logging.getLogger(__name__)

_TOPIC_SETTINGS = {
    # Deltas build on each other, so none may be deleted before a snapshot replaces it.
    "cleanup.policy": "delete",
    "retention.ms": "-1",
    "segment.bytes": str(64 * 1024 * 1024),
    "max.message.bytes": str(64 * 1024 * 1024),
}

PARTITION_CACHE_MAX: Final = 100_000
"""The number of queues whose state partition is cached, since every write looks it up."""


class LedgerRetention:
    """Keeps superseded deltas in the log until the ledger has landed them, within a number of bytes.

    Beyond that the oldest ones go, whole segments at a time, and a record in the log says which.
    """

    def __init__(self, clock: Clock, bytes_max: int) -> None:
        self._clock = clock
        self._bytes_max = bytes_max
        self.landed: Callable[[TopicPartition], int] = lambda _partition: 0
        """Returns the first offset of a partition that is not landed."""
        self.overflows = 0
        """How many offsets were deleted before they had landed, since this node started."""

    def keep_from(
        self, state: StateShard, partition: Partition, rewritten: Offset
    ) -> tuple[Offset, Sequence[StateRecord]]:
        """Return from which offset on a partition is kept, and a record about what overflows."""
        if not state.has_ledger:
            return rewritten, ()
        log = partition.log
        needed = max(partition.log_start, min(rewritten, self.landed(log.partition)))
        fitting = needed
        kept_bytes = 0
        for segment in reversed(log.segments):
            kept_bytes += segment.size
            if kept_bytes > self._bytes_max and segment.next_offset <= rewritten:
                fitting = max(needed, segment.next_offset)
                break
        if fitting <= needed:
            return Offset(needed), ()
        self.overflows += fitting - needed
        _logger.error(
            "events of the ledger are deleted before they have landed; is its pipeline running? "
            "(millstream pipeline list)",
            extra={"partition": str(log.partition), "start": needed, "end": fitting},
        )
        return Offset(fitting), [Overflow(needed, fitting, self._clock.now_ms()).write()]


class StateCoordinator(Coordinator[StateShard]):
    """Stores the states of queues in the log."""

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
        self.retention = LedgerRetention(clock, config.ledger_bytes_max)
        self._runtime = Runtime(
            topics,
            topic,
            lambda _timers: StateShard(make_image),
            clock=clock,
            retry_first_s=retry_first_s,
            retention=self.retention,
        )
        # The number of partitions never changes.
        self._partition_cache: dict[QueueKey, PartitionIndex] = {}

    def partition_of(self, key: QueueKey) -> PartitionIndex:
        """Return the partition of the topic that stores a queue."""
        found = self._partition_cache.get(key)
        if found is None:
            found = self._runtime.partition_of(f"{key.subscription_id}/{key.topic_id}/{key.partition}")
            if len(self._partition_cache) >= PARTITION_CACHE_MAX:
                self._partition_cache.clear()
            self._partition_cache[key] = found
        return found

    def leader_of(self, index: PartitionIndex) -> NodeId | None:
        """Return the node that leads a partition of the topic; None without a leader."""
        return self._runtime.leader_at(index)

    async def load(self, key: QueueKey, leader_epoch: Epoch) -> StoredQueue:
        """Read a queue's state for its leader."""
        shard = self._runtime.shard_at(self.partition_of(key))
        loaded = await shard.run(lambda state: state.load(key, leader_epoch), pure=True)
        if loaded.snapshot is None:
            return StoredQueue(None, loaded.sequence)
        snapshot = await asyncio.to_thread(loaded.snapshot) if loaded.is_large else loaded.snapshot()
        return StoredQueue(snapshot, loaded.sequence)

    def write(self, index: PartitionIndex, writes: Sequence[QueueWrite], release: Release[list[WriteResult]]) -> None:
        """Write to one partition; `release` gets the results in the moment when the writes are durable."""
        if any(self.partition_of(write.key) != index for write in writes):
            raise CoordinatorUnavailable(f"a write was sent to partition {index}, which does not store its queue")
        self._runtime.shard_at(index).call(lambda state: state.write(writes), release, pure=True)

    async def forget(self, is_gone: Callable[[QueueKey], bool]) -> int:
        """Delete the states of deleted queues that this node stores; return how many."""
        gone = 0
        for shard in self._runtime.shards:
            if shard.state is not None:
                gone += await shard.run(lambda state: state.forget(is_gone), pure=True)
        return gone

    def changed(self, is_wanted: Callable[[QueueKey, int], bool]) -> Iterator[tuple[QueueKey, Loaded]]:
        """Yield the states on this node that are wanted, given the number of their last write."""
        for shard in self._runtime.shards:
            if shard.state is not None:
                yield from shard.state.changed(is_wanted)

    def written(self) -> list[QueueKey]:
        """Return the queues with a state on this node."""
        return [key for shard in self._runtime.shards if shard.state is not None for key in shard.state.written()]

    @property
    def queues(self) -> int:
        """The number of queues stored on this node."""
        return sum(len(shard.state) for shard in self._runtime.shards if shard.state is not None)
