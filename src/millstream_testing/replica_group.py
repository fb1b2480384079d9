"""Nodes that replicate partitions in one process: real logs, partitions and fetches, over links that can be cut.

There is no controller: a test sets the states itself, and every node that can reach the store follows them.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from random import Random
from typing import TypeVar
from uuid import UUID

from millstream.broker.cluster import keys
from millstream.broker.cluster.embedded_store import EmbeddedService, EmbeddedStore
from millstream.broker.cluster.replica_fetcher import FetchLimits
from millstream.broker.cluster.replicas import Replicas, ReplicaSettings
from millstream.broker.cluster.store import Event, Expect, Put
from millstream.broker.kafka.follower_fetch import FollowerFetch
from millstream.broker.log.store import LogStore
from millstream.broker.net.budget import Budget
from millstream.broker.replication.partition import Partition
from millstream.core.clock import Clock, SystemClock
from millstream.core.errors import BrokerUnreachable, StoreUnavailable, UnknownTopicId
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, Versioned, encode_value
from millstream.core.topic import Topic, TopicPartition, TopicSettings
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.wire.replica_fetch import (
    FETCH_KEY,
    VERSION,
    ReplicaFetch,
    ReplicaResponses,
    read_replica_responses,
    write_replica_fetch,
)
from millstream_testing.files import MemoryFiles

TOPIC = Topic(name="orders", topic_id=UUID(int=77), partitions=1, replication=3, overrides={}, created_ms=0)
LAG_S = 1.0


def partition_key(index: int = 0) -> keys.PartitionKey:
    return TOPIC.topic_id, PartitionIndex(index)


T = TypeVar("T")


class FaultyStore(EmbeddedStore):
    """Access to the store that can be blocked, or lose responses."""

    def __init__(self, service: EmbeddedService, clock: Clock) -> None:
        super().__init__(service, clock)
        self.is_reachable = True
        self.responds = True
        self.events_pass = asyncio.Event()
        self.events_pass.set()

    def block(self, *, requests_pass: bool = False) -> None:
        """Block everything, or only the responses to requests."""
        self.is_reachable = requests_pass
        self.responds = False
        self.events_pass.clear()

    def unblock(self) -> None:
        """Stop blocking."""
        self.is_reachable = self.responds = True
        self.events_pass.set()

    async def _send(self, request: Callable[[], T]) -> T:
        if not self.is_reachable:
            raise StoreUnavailable("the store cannot be reached")
        response = await super()._send(request)
        if not self.responds:
            raise StoreUnavailable("the response was lost")
        return response

    async def _deliver(self) -> None:
        await self.events_pass.wait()


class ReplicaNode:
    """A node: a disk in memory, partitions, and replication between them and other nodes."""

    def __init__(self, group: ReplicaGroup, node_id: NodeId) -> None:
        self.node_id = node_id
        self.files = MemoryFiles(int(node_id), open_files_max=64)
        self.partitions: dict[keys.PartitionKey, Partition] = {}
        self._group = group
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start a process on the node's disk."""
        group = self._group
        self.logs = LogStore.open(
            Path("/data"), files=self.files, clock=group.clock, journal_bytes=1 << 20, producer_expiry_ms=10**9
        )
        self.store = FaultyStore(group.service, group.clock)
        self.follower_fetch = FollowerFetch(
            self, Budget(1 << 26), bytes_max=1 << 20, new_id=lambda: group.random.randrange(1, 2**31)
        )
        self.replicas = Replicas(
            self.node_id,
            _Links(group, self.node_id),
            self.store,
            random=group.random,
            settings=ReplicaSettings(lag_s=LAG_S, fetch=FetchLimits(wait_ms=100)),
        )
        for index in range(group.topic.partitions):
            where = TopicPartition(group.topic.name, PartitionIndex(index))
            log = self.logs.open_log(group.topic.topic_id, where, group.settings)
            self.partitions[partition_key(index)] = Partition(
                group.topic, PartitionIndex(index), log, self.logs, alone=False, clock=group.clock
            )
        loop = asyncio.get_running_loop()
        self._tasks = [loop.create_task(self.logs.run()), loop.create_task(self._follow_store())]
        await self.replicas.start()

    async def stop(self) -> None:
        await self._end()
        await self.logs.close()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def kill(self) -> None:
        """Kill the process; the machine keeps running."""
        await self._end()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self.files.kill()

    async def _end(self) -> None:
        self._tasks[1].cancel()
        await self.replicas.close()
        self.follower_fetch.stop()
        for partition in self.partitions.values():
            partition.close()
        self.partitions.clear()

    def partition_by_id(self, topic_id: UUID, index: int) -> Partition:
        partition = self.partitions.get((topic_id, PartitionIndex(index)))
        if partition is None:
            raise UnknownTopicId("not here")
        return partition

    async def _follow_store(self) -> None:
        snapshot = await self.store.read(keys.PARTITIONS)
        self._apply_events([Event(key, entry.value, entry.revision) for key, entry in snapshot.entries.items()])
        async with aclosing(self.store.watch(keys.PARTITIONS, after=snapshot.revision)) as batches:
            async for events in batches:
                self._apply_events(events)

    def _apply_events(self, events: Sequence[Event]) -> None:
        for event in events:
            partition = self.partitions.get(keys.parse_partition(event.key.removeprefix(keys.PARTITIONS)))
            if event.value is not None and partition is not None:
                partition.apply(Versioned(PartitionState.from_json(event.value), event.revision), me=self.node_id)
                self.replicas.apply([partition])


class _Link:
    def __init__(self, group: ReplicaGroup, me: NodeId, leader: NodeId) -> None:
        self._group = group
        self._way = (me, leader)

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaResponses:
        await self._check_link()
        header = RequestHeader(FETCH_KEY, VERSION, 1, None, 0, True)
        leader = self._group.nodes[self._way[1]]
        response = leader.follower_fetch.handle_frame(memoryview(write_replica_fetch(fetch)), header)
        pieces = await response if inspect.isawaitable(response) else response
        await self._check_link()
        if not isinstance(pieces, list):
            raise TypeError("a fetch gets buffers")
        return read_replica_responses(memoryview(b"".join(map(bytes, pieces)))[4:])

    async def close(self) -> None:
        pass

    async def _check_link(self) -> None:
        await asyncio.sleep(0)
        if self._way in self._group.cut:
            raise BrokerUnreachable("the link is cut")


class _Links:
    def __init__(self, group: ReplicaGroup, me: NodeId) -> None:
        self._group = group
        self._me = me

    def open(self, node: NodeId) -> _Link:
        return _Link(self._group, self._me, node)


class ReplicaGroup:
    """Nodes 1 to 3, one topic with a replica on each, and the states of its partitions."""

    def __init__(self, *, settings: TopicSettings | None = None, topic: Topic = TOPIC) -> None:
        self.clock: Clock = SystemClock()
        self.random = Random(5)
        self.topic = topic
        self.settings = settings or TopicSettings(flush="os", min_insync_replicas=2)
        self.service = EmbeddedService(self.clock)
        self.cut: set[tuple[NodeId, NodeId]] = set()
        """Pairs of follower and leader whose link is cut."""
        self.nodes = {NodeId(number): ReplicaNode(self, NodeId(number)) for number in (1, 2, 3)}

    async def __aenter__(self) -> ReplicaGroup:
        for node in self.nodes.values():
            await node.start()
        return self

    async def __aexit__(self, *_error: object) -> None:
        for node in self.nodes.values():
            if node.partitions:
                await node.stop()

    def stored_state(self, index: int = 0) -> Versioned | None:
        key = keys.partition_key(partition_key(index))
        entry = self.service.read(key).entries.get(key)
        return None if entry is None else Versioned(PartitionState.from_json(entry.value), entry.revision)

    def set_state(self, state: PartitionState, index: int = 0) -> None:
        """Change the state of a partition, as a controller does."""
        key = keys.partition_key(partition_key(index))
        before = self.stored_state(index)
        if (
            self.service.change([Put(key, encode_value(state))], [Expect(key, before.revision if before else 0)], None)
            is None
        ):
            raise AssertionError("another node changed the state at the same time")

    def partition(self, node: int, index: int = 0) -> Partition:
        return self.nodes[NodeId(node)].partitions[partition_key(index)]

    def isolate(self, node: int) -> None:
        """Cut a node off from the others and from the store."""
        self.nodes[NodeId(node)].store.block()
        for other in self.nodes:
            self.cut |= {(NodeId(node), other), (other, NodeId(node))}

    def heal(self) -> None:
        self.cut.clear()
        for node in self.nodes.values():
            node.store.unblock()


def content(partition: Partition) -> bytes:
    """Return everything that a replica holds, joined."""
    log, found = partition.log, bytearray()
    offset = log.start_offset
    while offset < log.end_offset:
        data = bytes(log.read(offset, max_bytes=1 << 20, up_to=log.end_offset))
        for header in iterate_headers(data):
            offset = header.next_offset
        found += data
    return bytes(found)
