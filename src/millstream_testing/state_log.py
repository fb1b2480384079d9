"""Partitions and topics in memory, for tests of components that keep their state in an internal topic.

The test decides when an append is acknowledged, when it fails, and what a crash leaves.
"""

from __future__ import annotations

import asyncio
import dataclasses
import uuid
from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

from millstream.broker.log.log import AppendedRange
from millstream.broker.replication.acknowledgement import AcknowledgementListener
from millstream.core.errors import MillstreamError, OffsetOutOfRange, TopicExists
from millstream.core.ids import Epoch, NodeId, Offset, PartitionIndex
from millstream.core.partition_state import FIRST_EPOCH, PartitionState
from millstream.core.topic import Topic
from millstream.protocol.records.batch import Buffer, place_batch, read_header

LeadershipListener = Callable[[PartitionIndex, "MemoryPartition | None"], None]


def single_replica_state(node: NodeId, epoch: Epoch = FIRST_EPOCH) -> PartitionState:
    return PartitionState(replicas=(node,), leader=node, leader_epoch=epoch, in_sync=(node,))


class _Batch(NamedTuple):
    next_offset: Offset
    content: bytes


class MemoryPartition:
    """A partition whose log is a list of batches."""

    def __init__(self, *, acknowledges: bool = True) -> None:
        self.acknowledges = acknowledges
        """Whether appends are acknowledged at once; if not, `acknowledge` and `fail` decide."""
        self.refusal: MillstreamError | None = None
        """The error with which every append is refused, if any."""
        self.high_watermark = Offset(0)
        self.log_start = Offset(0)
        self.leader_epoch = Epoch(0)
        self._batches: list[_Batch] = []
        self._waiting: list[tuple[Offset, AcknowledgementListener]] = []

    @property
    def log(self) -> MemoryPartition:
        """The log of the partition, which is the same object here."""
        return self

    @property
    def end_offset(self) -> Offset:
        """The end of what was written."""
        return self._batches[-1].next_offset if self._batches else self.log_start

    def write(self, batches: bytearray | memoryview, *, acks: int, internal: bool = False) -> AppendedRange:
        if self.refusal is not None:
            raise self.refusal
        base_offset = self.end_offset
        header = read_header(batches)
        place_batch(batches, header, base_offset, 0)
        next_offset = Offset(base_offset + header.last_offset_delta + 1)
        self._batches.append(_Batch(next_offset, bytes(batches)))
        if self.acknowledges:
            self.high_watermark = next_offset
        return AppendedRange(base_offset, next_offset, -1, self.log_start, False)

    def is_acknowledged(self, appended: AppendedRange) -> bool:
        return appended.next_offset <= self.high_watermark

    def notify_acknowledged(self, appended: AppendedRange, listener: AcknowledgementListener) -> None:
        """Notify `listener` once an append is acknowledged, or why it never will be."""
        self._waiting.append((appended.next_offset, listener))

    def read(self, offset: Offset, *, max_bytes: int) -> Buffer:
        """Return whole batches up to the high watermark, at least one if there is one."""
        if not self.log_start <= offset <= self.end_offset:
            raise OffsetOutOfRange(f"offset {offset}", start=self.log_start, end=self.end_offset)
        chunk = bytearray()
        for batch in self._batches:
            readable = offset < batch.next_offset <= self.high_watermark
            if readable and (not chunk or len(chunk) + len(batch.content) <= max_bytes):
                chunk += batch.content
            elif readable:
                break
        return bytes(chunk)

    async def settled(self) -> None:
        """Return at once, since there is no other writer."""

    def delete_before(self, offset: Offset) -> None:
        """Drop whole batches below `offset`."""
        self._batches = [batch for batch in self._batches if batch.next_offset > offset]
        self.log_start = offset

    def acknowledge(self, batches: int | None = None) -> None:
        """Acknowledge the next batches, this many or all."""
        unread = [batch for batch in self._batches if batch.next_offset > self.high_watermark]
        for batch in unread[:batches]:
            self.high_watermark = batch.next_offset
        while self._waiting and self._waiting[0][0] <= self.high_watermark:
            self._waiting.pop(0)[1].acknowledged(None)

    def fail(self, error: MillstreamError) -> None:
        """Lose what is not acknowledged, as after a failed sync."""
        self._batches = [batch for batch in self._batches if batch.next_offset <= self.high_watermark]
        waiting, self._waiting = self._waiting, []
        for _, listener in waiting:
            listener.acknowledged(error)

    def after_crash(self, *, kept: int = 0) -> MemoryPartition:
        """Return the partition as a restart finds it: what was acknowledged, and the first `kept` other batches."""
        restarted = MemoryPartition(acknowledges=self.acknowledges)
        synced = [batch for batch in self._batches if batch.next_offset <= self.high_watermark]
        unsynced = self._batches[len(synced) :]
        restarted._batches = [*synced, *unsynced[:kept]]
        restarted.log_start = self.log_start
        restarted.high_watermark = restarted.end_offset
        return restarted


class MemoryTopics:
    """Topics without a catalog."""

    def __init__(self, *, acknowledges: bool = True) -> None:
        self.acknowledges = acknowledges
        self.version = 0
        self.leader = NodeId(1)
        """The node that metadata names as the leader of every partition."""
        self._topics: dict[str, Topic] = {}
        self._partitions: dict[str, list[MemoryPartition]] = {}
        self._listeners: dict[str, LeadershipListener] = {}

    def get(self, name: str) -> Topic | None:
        """Return the topic of this name, if it exists."""
        return self._topics.get(name)

    def by_id(self, topic_id: uuid.UUID) -> Topic | None:
        """Return the topic with this id, if it exists."""
        return next((topic for topic in self._topics.values() if topic.topic_id == topic_id), None)

    def all(self) -> list[Topic]:
        return list(self._topics.values())

    def existing(self, names: Iterable[str]) -> list[Topic]:
        return [self._topics[name] for name in names if name in self._topics]

    def partitions_of(self, topic: Topic) -> list[MemoryPartition]:
        """Return the partitions of a topic, in order."""
        return self._partitions[topic.name]

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        """Return the only node: it leads every partition."""
        return single_replica_state(self.leader)

    def on_leadership_change(self, name: str, listener: LeadershipListener) -> None:
        """Notify of each partition of a topic, now or when it is created: all are led here."""
        self._listeners[name] = listener
        self._notify(name)

    def _notify(self, name: str) -> None:
        for index, partition in enumerate(self._partitions.get(name, ())):
            if name in self._listeners:
                self._listeners[name](PartitionIndex(index), partition)

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
        await asyncio.sleep(0)
        return self.add(name, partitions=max(1, partitions), overrides=overrides or {})

    def add(self, name: str, *, partitions: int = 1, overrides: Mapping[str, str] | None = None) -> Topic:
        if name in self._topics:
            raise TopicExists(f"topic {name!r} already exists")
        topic = Topic(
            name=name,
            topic_id=uuid.uuid4(),
            partitions=partitions,
            replication=1,
            overrides=dict(overrides or {}),
            created_ms=0,
        )
        self.version += 1
        self._topics[name] = topic
        self._partitions[name] = [MemoryPartition(acknowledges=self.acknowledges) for _ in range(partitions)]
        self._notify(name)
        return topic

    def grow(self, name: str, partitions: int) -> Topic:
        topic = self._topics[name] = dataclasses.replace(self._topics[name], partitions=partitions)
        missing = partitions - len(self._partitions[name])
        self._partitions[name] += [MemoryPartition(acknowledges=self.acknowledges) for _ in range(missing)]
        self.version += 1
        return topic

    def remove(self, name: str) -> None:
        self.version += 1
        del self._topics[name]
        del self._partitions[name]

    def after_crash(self) -> MemoryTopics:
        """Return what a restart finds: the same topics, with what was acknowledged."""
        restarted = MemoryTopics(acknowledges=self.acknowledges)
        restarted._topics = dict(self._topics)
        restarted._partitions = {
            name: [partition.after_crash() for partition in partitions] for name, partitions in self._partitions.items()
        }
        return restarted
