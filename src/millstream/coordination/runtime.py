"""The one runtime for everything whose state is a fold over an internal topic: groups now, more later.

It owns a shard per partition of the topic, makes the topic when it is first needed, and finds the shard of a name.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

from millstream.coordination.placement import partition_for
from millstream.coordination.shard import RETRY_FIRST_S, Shard, StateLog
from millstream.coordination.state import Operation, StateMachine
from millstream.coordination.timers import Timers
from millstream.model.clock import Clock
from millstream.model.errors import NotCoordinator, TopicExists
from millstream.model.ids import PartitionIndex
from millstream.model.topic import Topic

S = TypeVar("S", bound=StateMachine)
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateTopic:
    """The internal topic that holds a kind of state, as it is made when it is missing."""

    name: str
    partitions: int
    overrides: Mapping[str, str] = field(default_factory=dict)


class StateTopics(Protocol):
    """What the runtime needs of the topics."""

    def get(self, name: str) -> Topic | None:
        """The topic of this name, if there is one."""

    def partitions_of(self, topic: Topic) -> Sequence[StateLog]:
        """The partitions of a topic, in order."""

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
    ) -> None:
        self._topics = topics
        self._topic = topic
        self._make_state = make_state
        self._clock = clock
        self._retry_first_s = retry_first_s
        self._shards: dict[PartitionIndex, Shard[S]] = {}
        self._partitions = 0
        self._creating = asyncio.Lock()
        # Loading is work of this process's one core: one shard after the other is ready sooner than all at once.
        self._gate = asyncio.Semaphore(1)
        self._closed = False

    @property
    def shards(self) -> list[Shard[S]]:
        """Every shard that this node runs."""
        return list(self._shards.values())

    async def start(self) -> None:
        """Begin to load every shard, if the topic is there; requests meanwhile are told to wait."""
        topic = self._topics.get(self._topic.name)
        if topic is not None:
            self._open(topic)

    async def wait_loaded(self) -> None:
        """Wait until no shard is loading any more."""
        for shard in self.shards:
            await shard.wait_loaded()

    async def close(self) -> None:
        """Close every shard: parked requests are refused, appended ones are waited for."""
        self._closed = True
        await asyncio.gather(*(shard.close() for shard in self.shards))

    async def ensure(self) -> None:
        """Make the topic if this is its first use."""
        if self._shards:
            return
        async with self._creating:
            if not self._shards:
                self._open(await self._find_or_create())
                await self.wait_loaded()

    def partition_of(self, name: str) -> PartitionIndex:
        """The partition that holds the state of this name."""
        return partition_for(name, self._partitions)

    async def run(self, name: str, operation: Operation[S, T], *, pure: bool = False) -> T:
        """Carry out an operation on the shard of this name."""
        await self.ensure()
        return await self.shard_of(name).run(operation, pure=pure)

    def shard_of(self, name: str) -> Shard[S]:
        """The shard that holds the state of this name."""
        shard = self._shards.get(self.partition_of(name)) if self._shards else None
        if shard is None:
            raise NotCoordinator(f"this node does not coordinate {name!r}")
        return shard

    def lead(self, index: PartitionIndex, partition: StateLog) -> None:
        """Begin to run the shard of one partition: this node leads it now."""
        if index in self._shards or self._closed:
            return
        shard = Shard(
            f"{self._topic.name}-{index}",
            partition,
            self._make_state,
            clock=self._clock,
            gate=self._gate,
            retry_first_s=self._retry_first_s,
        )
        self._shards[index] = shard
        shard.open()

    async def resign(self, index: PartitionIndex) -> None:
        """Stop running the shard of one partition: another node leads it now."""
        shard = self._shards.pop(index, None)
        if shard is not None:
            await shard.close()

    def _open(self, topic: Topic) -> None:
        self._partitions = topic.partitions
        for number, partition in enumerate(self._topics.partitions_of(topic)):
            self.lead(PartitionIndex(number), partition)

    async def _find_or_create(self) -> Topic:
        if self._closed:
            raise NotCoordinator(f"the coordinator on {self._topic.name} was closed")
        wanted = self._topic
        existing = self._topics.get(wanted.name)
        if existing is not None:
            return existing
        try:
            return await self._topics.create(
                wanted.name, partitions=wanted.partitions, overrides=wanted.overrides, internal=True
            )
        except TopicExists:
            existing = self._topics.get(wanted.name)
            if existing is None:
                raise
            return existing
