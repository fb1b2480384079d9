"""A partition on a disk in memory, with queues on it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from uuid import UUID

from millstream.broker.log.store import LogStore
from millstream.broker.replication.partition import Partition
from millstream.broker.subscriptions.delivery import Delivery, Demand, ReceivedMessages
from millstream.broker.subscriptions.filter_cache import QueueFilter
from millstream.broker.subscriptions.frame import may_concern
from millstream.broker.subscriptions.log_scan import ScannedRange
from millstream.broker.subscriptions.queue import Queue
from millstream.broker.subscriptions.snapshot import FoldImage
from millstream.broker.subscriptions.state_store import PendingWrite, QueueWrite, StoredQueue
from millstream.core.errors import FencedLeaderEpoch, MillstreamError, OutOfOrderSequence
from millstream.core.ids import Epoch, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.subscription import QueueKey, SubscriptionSettings
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.records.control import Marker
from millstream.protocol.records.record import Headers, NewRecord, encode_batch
from millstream_testing.clock import ManualClock
from millstream_testing.files import MemoryFiles


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


TOPIC = Topic(name="orders", topic_id=UUID(int=7), partitions=4, replication=1, overrides={}, created_ms=0)
SUBSCRIPTION_ID = UUID(int=9)


class Workbench:
    """The parts of a broker that a queue needs."""

    def __init__(self) -> None:
        """Create everything new and empty."""
        self.clock = ManualClock()
        self.store = MemoryStateStore()
        self.files = MemoryFiles(open_files_max=64)
        self.logs = LogStore.open(
            Path("/data"), files=self.files, clock=self.clock, journal_bytes=1_000_000, producer_expiry_ms=3_600_000
        )
        self.partition = self.make_partition(0)

    def make_partition(self, index: int, topic: Topic = TOPIC) -> Partition:
        """Return a partition of the topic, without other replicas."""
        settings = TopicSettings(flush="os")
        place = TopicPartition(topic.name, PartitionIndex(index))
        log = self.logs.open_log(topic.topic_id, place, settings)
        return Partition(topic, PartitionIndex(index), log, self.logs)

    def publish(self, *values: str, key: bytes | None = None, headers: Headers = (), compression: int = 0) -> int:
        """Append one batch; return its first offset."""
        records = [NewRecord(key, value.encode(), headers, self.clock.now_ms()) for value in values]
        appended = self.partition.write(encode_batch(records, compression=compression), acks=-1)
        return int(appended.base_offset)

    def publish_in_transaction(self, *values: str, producer_id: int, commit: bool | None) -> None:
        """Append one batch of a transaction, which is left open if `commit` is None."""
        records = [NewRecord(None, value.encode(), (), self.clock.now_ms()) for value in values]
        guard = self.partition.start_transaction(producer_id, 0, 0, bumps_epoch=False)
        batch = encode_batch(records, producer_id=producer_id, producer_epoch=0, base_sequence=0, transactional=True)
        self.partition.write(batch, acks=-1, guard=guard)
        if commit is not None:
            self.end_transaction(producer_id, commit=commit)

    def end_transaction(self, producer_id: int, *, commit: bool) -> None:
        ended = Marker(
            producer_id=ProducerId(producer_id), producer_epoch=ProducerEpoch(0), commit=commit, coordinator_epoch=0
        )
        self.partition.write_marker(ended)

    async def open(
        self,
        *,
        partition: Partition | None = None,
        queue_filter: QueueFilter | None = None,
        opener: Callable[[ScannedRange], Awaitable[ScannedRange]] | None = None,
        **settings: object,
    ) -> Delivery:
        on = partition or self.partition
        key = QueueKey(SUBSCRIPTION_ID, on.topic.topic_id, on.index)
        stored = await self.store.load(key, Epoch(on.leader_epoch))
        declared = SubscriptionSettings(**settings)  # type: ignore[arg-type]
        queue = Queue(key, declared, leader_epoch=on.leader_epoch, snapshot=stored.snapshot)
        if not queue.is_started:
            queue.begin(0, now_ms=self.clock.now_ms())
        sequence = stored.sequence + 1
        delivery = Delivery(
            key, queue, on, self.store, self.clock, next_sequence=sequence, queue_filter=queue_filter, opener=opener
        )
        delivery.queue_changed()
        return delivery


def demand_for(count: int = 1, worker: str = "one") -> Demand:
    return Demand(worker, count, 1_000_000)


def offsets(received: ReceivedMessages) -> list[int]:
    return [offset for lease in received.leases for offset in range(lease.first, lease.last + 1)]


async def turns(count: int = 20) -> None:
    """Run the loop for some turns."""
    for _ in range(count):
        await asyncio.sleep(0)
