"""The runtime of everything whose state is a fold over an internal topic: groups, transactions, queue states.

It owns a shard for each partition of the topic that this node leads, creates the topic when it is first needed, and
finds the shard of a name. Shards start and stop with the leadership: after a failover, the new leader reads the state
back from the log.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final, Generic, Protocol

from millstream.broker.coordination.shard import RETRY_FIRST_S, Release, Retention, S, Shard, StateLog, T
from millstream.broker.coordination.state_machine import Confirmation, Operation, Timers
from millstream.core.clock import Clock
from millstream.core.errors import CoordinatorUnavailable, NotCoordinator, TopicExists
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import FIRST_EPOCH, PartitionState
from millstream.core.topic import Topic

_MINIMUM = -(2**31)


def java_hash(text: str) -> int:
    """Return `String.hashCode` of Java: over UTF-16 code units, in signed 32-bit arithmetic."""
    value = 0
    units = text.encode("utf-16-be", "surrogatepass")
    for high, low in zip(units[::2], units[1::2], strict=True):
        value = (31 * value + ((high << 8) | low)) & 0xFFFFFFFF
    return value - 2**32 if value >= 2**31 else value


def partition_for(name: str, partitions: int) -> PartitionIndex:
    """Return the partition that stores the state of this name."""
    hashed = java_hash(name)
    # Kafka takes the absolute value, and zero for the minimum, which has none.
    return PartitionIndex((0 if hashed == _MINIMUM else abs(hashed)) % partitions)


COMPACTED: Final = {
    "cleanup.policy": "compact",
    "segment.bytes": str(64 * 1024 * 1024),
    "max.message.bytes": str(32 * 1024 * 1024),
}
"""The settings of a topic whose state is the last record of each key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTopic:
    """The internal topic of a kind of state, and the settings it is created with."""

    name: str
    partitions: int
    overrides: Mapping[str, str] = field(default_factory=dict)


class StateTopics(Protocol):
    """The topics that the runtime needs."""

    def get(self, name: str) -> Topic | None:
        """Return the topic with this name, if it exists."""

    def on_leadership_change(self, name: str, listener: Callable[[PartitionIndex, StateLog | None], None]) -> None:
        """Call `listener` for each partition of a topic that this node leads, now and after each change."""

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        """Return the replicas and leader of a partition; None if they are not agreed on yet."""

    async def create(
        self,
        name: str,
        *,
        partitions: int = -1,
        replication: int = -1,
        overrides: Mapping[str, str] | None = None,
        internal: bool = False,
        validate_only: bool = False,
    ) -> Topic:
        """Declare a topic durably."""


class Runtime(Generic[S]):
    """Every shard of one internal topic."""

    def __init__(
        self,
        topics: StateTopics,
        topic: StateTopic,
        make_state: Callable[[Timers], S],
        *,
        clock: Clock,
        retry_first_s: float = RETRY_FIRST_S,
        confirmation: Confirmation | None = None,
        retention: Retention | None = None,
    ) -> None:
        self._topics = topics
        self._confirmation = confirmation
        self._retention = retention
        self._topic = topic
        self._make_state = make_state
        self._clock = clock
        self._retry_first_s = retry_first_s
        self._shards: dict[PartitionIndex, Shard[S]] = {}
        self._resigning: set[asyncio.Task[None]] = set()
        self._is_watching = False
        self._creating = asyncio.Lock()
        # Loading is CPU-bound in this process: loading shards one by one makes the first ones available sooner.
        self._load_slot = asyncio.Semaphore(1)
        self._closed = False

    @property
    def shards(self) -> list[Shard[S]]:
        return list(self._shards.values())

    def led(self) -> list[tuple[int, int]]:
        """Return the shards that this node runs, as partition and leader epoch."""
        return sorted((index, shard.epoch) for index, shard in self._shards.items() if not shard.is_closed)

    @property
    def partitions(self) -> int:
        """How many shards the cluster has; 0 before the topic is created."""
        topic = self._topics.get(self._topic.name)
        return 0 if topic is None else topic.partitions

    async def start(self) -> None:
        """Start loading every shard that this node leads; requests wait or are refused in the meantime."""
        self._watch_leadership()

    async def wait_loaded(self) -> None:
        for shard in self.shards:
            await shard.wait_loaded()

    async def close(self) -> None:
        """Close every shard: parked requests are refused, appended ones are waited for."""
        self._closed = True
        await asyncio.gather(*(shard.close() for shard in self.shards), *self._resigning)

    async def ensure(self) -> None:
        """Create the topic on its first use."""
        if self._is_watching and self._topics.get(self._topic.name) is not None:
            return
        # The rest may need a task, but the request may have been started without one.
        await asyncio.sleep(0)
        async with self._creating:
            if self._closed:
                raise NotCoordinator(f"the coordinator on {self._topic.name} was closed")
            self._watch_leadership()
            if self._topics.get(self._topic.name) is None:
                await self._create()
                await self.wait_loaded()

    def partition_of(self, name: str) -> PartitionIndex:
        topic = self._topics.get(self._topic.name)
        if topic is None:
            raise CoordinatorUnavailable(f"the topic {self._topic.name} does not exist yet")
        return partition_for(name, topic.partitions)

    def leader_of(self, name: str) -> NodeId | None:
        return self.leader_at(self.partition_of(name))

    def leader_at(self, index: PartitionIndex) -> NodeId | None:
        """Return the node that leads a partition of the topic; None without a leader."""
        topic = self._topics.get(self._topic.name)
        state = None if topic is None else self._topics.state_of(topic, index)
        return state.leader if state is not None and state.has_leader else None

    def latest_epoch(self) -> int:
        """Return the latest epoch of any partition of the topic that this node knows of; at least 0."""
        topic = self._topics.get(self._topic.name)
        if topic is None:
            return FIRST_EPOCH
        states = (self._topics.state_of(topic, index) for index in range(topic.partitions))
        return max((state.leader_epoch for state in states if state is not None), default=FIRST_EPOCH)

    async def run(self, name: str, operation: Operation[S, T], *, pure: bool = False) -> T:
        await self.ensure()
        return await self.shard_of(name).run(operation, pure=pure)

    def call(self, name: str, operation: Operation[S, T], release: Release[T], *, pure: bool = False) -> bool:
        """Run an operation before returning, as `Shard.call` does; return False if `run` would wait."""
        if not self._is_watching or self._topics.get(self._topic.name) is None:
            return False
        shard = self.shard_of(name)
        if shard.state is None:
            return False
        shard.call(operation, release, pure=pure)
        return True

    def shard_of(self, name: str) -> Shard[S]:
        shard = self._shards.get(self.partition_of(name))
        if shard is None:
            raise NotCoordinator(f"this node does not coordinate {name!r}")
        return shard

    def shard_at(self, index: PartitionIndex) -> Shard[S]:
        shard = self._shards.get(index)
        if shard is None:
            raise NotCoordinator(f"this node does not lead {self._topic.name}-{index}")
        return shard

    def lead(self, index: PartitionIndex, partition: StateLog) -> None:
        """Start the shard of a partition that this node leads now."""
        known = self._shards.get(index)
        if self._closed or (known is not None and not known.is_closed):
            return
        shard = Shard(
            f"{self._topic.name}-{index}",
            partition,
            self._make_state,
            clock=self._clock,
            load_slot=self._load_slot,
            retry_first_s=self._retry_first_s,
            confirmation=self._confirmation,
            retention=self._retention,
        )
        self._shards[index] = shard
        shard.open()

    async def resign(self, index: PartitionIndex) -> None:
        """Stop running the shard of one partition: another node leads it now."""
        shard = self._shards.pop(index, None)
        if shard is not None:
            await shard.close()

    def _watch_leadership(self) -> None:
        if not self._is_watching and not self._closed:
            self._is_watching = True
            self._topics.on_leadership_change(self._topic.name, self._leadership_changed)

    def _leadership_changed(self, index: PartitionIndex, partition: StateLog | None) -> None:
        if partition is not None:
            self.lead(index, partition)
        elif index in self._shards:
            task = asyncio.get_running_loop().create_task(self.resign(index), name=f"resign {self._topic.name}-{index}")
            self._resigning.add(task)
            task.add_done_callback(self._resigning.discard)

    async def _create(self) -> None:
        topic = self._topic
        with suppress(TopicExists):
            await self._topics.create(topic.name, partitions=topic.partitions, overrides=topic.overrides, internal=True)


class Coordinator(Generic[S]):
    """The common part of all coordinators: loading, closing and creating the topic of their runtime."""

    _runtime: Runtime[S]

    async def start(self) -> None:
        await self._runtime.start()

    async def close(self) -> None:
        await self._runtime.close()

    async def wait_loaded(self) -> None:
        await self._runtime.wait_loaded()

    async def ensure(self) -> None:
        await self._runtime.ensure()
