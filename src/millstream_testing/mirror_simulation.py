"""Two sites, one of which mirrors the other, on a deterministic loop: a seed decides every delay, crash and cut.

The copier, the mirror service, the cuts of a failover and the failback are the real ones, on real partitions and logs.
Simulated are the link, the clients, the coordination store of each site and its transaction coordinator, which decides,
writes markers one by one and holds back decisions during a barrier.

One seed: clients write to the first site while the link fails and sites crash; the second takes over, perhaps with a
second attempt after a crash; clients write to both sites, because those of the first are unaware of the failover; the
first site returns and follows. These rules are checked at random times and after each step:

- below the cut of a failover, both sites have the same records at the same offsets; in the compacted partition, the
  second site has the last update of each key;
- a failover that is repeated cuts at the same offsets;
- readers of committed records never see a part of a transaction;
- the offsets of a group are never ahead of what the same transactions wrote, and after the failover not behind it;
- what a site has acknowledged after it took over is stored;
- at the end both sites are equal; in the compacted partition, in the last update of each key.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, Self
from unittest import mock
from uuid import UUID

from millstream.broker.log.store import LogStore
from millstream.broker.mirror import failover as failover_module
from millstream.broker.mirror import follower as follower_module
from millstream.broker.mirror import service as service_module
from millstream.broker.mirror.declared import Mirrors
from millstream.broker.mirror.service import MirrorService
from millstream.broker.replication.partition import Partition
from millstream.core import ids
from millstream.core.errors import BrokerUnreachable, MillstreamError, NotLeader, OffsetOutOfRange
from millstream.core.ids import Epoch, EpochEnd, NodeId, Offset, PartitionIndex, ProducerEpoch, ProducerId
from millstream.core.mirror import Mirror
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import FLUSH_ALWAYS, Topic, TopicPartition, TopicSettings
from millstream.protocol.private.mirror_messages import (
    BarrierRequest,
    CutRequest,
    FenceRequest,
    OfferResponse,
)
from millstream.protocol.records.batch import iterate_whole_headers
from millstream.protocol.records.control import Marker, read_marker
from millstream.protocol.records.record import NewRecord, decode_batch, encode_batch
from millstream.protocol.wire.cluster_metadata import ClusterMetadata, TopicMetadata
from millstream.protocol.wire.fetch import FetchedPartition
from millstream.protocol.wire.group_offsets import MIRRORED, Commit
from millstream_testing.files import MemoryFiles
from millstream_testing.simulation.loop import SimulatedClock, SimulatedLoop
from millstream_testing.simulation.world import Outcome, Trace, seeded_entropy

NODE_ID = NodeId(1)
TOPIC = Topic(name="orders", topic_id=UUID(int=7), partitions=4, replication=1, overrides={}, created_ms=0)
INPUT, OUTPUT, COMPACTED = 0, 1, 3
"""The partition that the group reads, the one it writes to, and a compacted one."""
KEYS = 5
GROUP, MIRROR = "group", "site"
EQUAL_S_MAX = 60.0
LOSS = 0.05
"""How many requests and responses are lost, and sent again."""
_WAIT_S = 0.2

Place = tuple[int, int]
"""Partition and offset."""


class Violation(Exception):
    """A rule was violated."""


def _settings(index: int) -> TopicSettings:
    if index != COMPACTED:
        return TopicSettings(flush=FLUSH_ALWAYS)
    return TopicSettings(
        flush=FLUSH_ALWAYS, cleanup_policy="compact", segment_ms=300, min_cleanable_dirty_ratio=0.01, retention_ms=-1
    )


def _key_of(value: str) -> str:
    return value.partition(":")[0]


def newest(updates: Mapping[int, str]) -> dict[str, tuple[int, str]]:
    """Return the last update of each key, with its offset."""
    return {_key_of(value): (offset, value) for offset, value in sorted(updates.items())}


class _Coordinator:
    """Decides transactions and writes their markers one by one, unless a barrier holds decisions back.

    A crash of its site does not interrupt it: a real coordinator resumes its decisions after a restart.
    """

    partitions = 1

    def __init__(self) -> None:
        self._may_decide = asyncio.Event()
        self._may_decide.set()
        self._ending = 0
        self._ended = asyncio.Event()
        self._ended.set()

    def led(self) -> list[tuple[int, int]]:
        return [(0, 0)]

    @asynccontextmanager
    async def hold_decisions(self) -> AsyncIterator[None]:
        self._may_decide.clear()
        try:
            await self._ended.wait()
            yield
        finally:
            self._may_decide.set()

    @asynccontextmanager
    async def ending(self) -> AsyncIterator[None]:
        """Decide; inside, markers are written."""
        await self._may_decide.wait()
        self._ending += 1
        self._ended.clear()
        try:
            yield
        finally:
            self._ending -= 1
            if not self._ending:
                self._ended.set()


class _Store:
    """The catalog and the coordination store of a site, which survive every crash."""

    def __init__(self) -> None:
        self.declared: dict[UUID, Mirror] = {}
        self.topic = TOPIC
        self.states = {
            index: Versioned(
                PartitionState(replicas=(NODE_ID,), leader=NODE_ID, leader_epoch=Epoch(0), in_sync=(NODE_ID,)),
                revision=1,
            )
            for index in range(TOPIC.partitions)
        }
        self.groups: dict[TopicPartition, int] = {}
        self.applied: dict[TopicPartition, int] = {}
        """The offsets that a mirror has committed last."""
        self.next_producer = 0

    async def mirrors(self) -> list[Mirror]:
        return list(self.declared.values())

    async def add_mirror(self, mirror: Mirror) -> None:
        self.declared[mirror.mirror_id] = mirror

    async def alter_mirror(self, mirror_id: UUID, change: Callable[[Mirror], Mirror]) -> Mirror:
        await asyncio.sleep(0.001)
        self.declared[mirror_id] = change(self.declared[mirror_id])
        return self.declared[mirror_id]

    async def call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        """Carry out the method of this name, in place of the catalog's."""
        return await getattr(self, method.__name__)(*arguments)

    change = call


class Site:
    """A single node: its disk and its store, and its process while it runs. It is also its own `Topics`."""

    def __init__(self, world: World, name: str) -> None:
        self.name = name
        self.world = world
        self.files = MemoryFiles(len(name))
        self.store = _Store()
        self.store.next_producer = ids.first_producer_id(name)
        self.coordinator = _Coordinator()
        self.stored: dict[Place, str] = {}
        """The records that were acknowledged to a client."""
        self.updates: dict[int, str] = {}
        """Those of the compacted partition, by offset."""
        self.is_up = False
        self.starts = 0

    # -- the process ----------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.starts += 1
        self._tasks: list[asyncio.Task[Any]] = []
        self.logs = LogStore.open(
            Path("/data"), files=self.files, clock=self.world.clock, journal_bytes=1 << 20, producer_expiry_ms=1 << 40
        )
        self._supervise("logs", self.logs.run())
        self.partitions_by_index = {}
        for index in range(TOPIC.partitions):
            log = self.logs.open_log(
                TOPIC.topic_id, TopicPartition(TOPIC.name, PartitionIndex(index)), _settings(index)
            )
            opened = Partition(
                self.store.topic, PartitionIndex(index), log, self.logs, alone=False, clock=self.world.clock
            )
            opened.apply(self.store.states[index], me=NODE_ID)
            self.partitions_by_index[index] = opened
        membership = SimpleNamespace(
            me=SimpleNamespace(node_id=NODE_ID),
            controller_id=NODE_ID,
            cluster_id=self.name,
            node=lambda _: None,
            nodes=lambda: [SimpleNamespace(node_id=NODE_ID)],
            addresses=lambda: self.name,
        )
        mirrors = Mirrors(self.store, self.world.clock, new_id=lambda: UUID(int=self.starts))  # type: ignore[arg-type]
        await mirrors.load()
        made: Any = MirrorService
        self.service: MirrorService = made(
            self,
            membership,
            mirrors,
            SimpleNamespace(),
            self.coordinator,
            SimpleNamespace(partitions=1, transactional_groups=self._transactional_groups),
            SimpleNamespace(),
            SimpleNamespace(),
            self.world.clock,
            self._supervise,
        )
        self.is_up = True
        self.service.start()

    def kill(self, *, loses_cache: bool) -> None:
        """End the process; with the power, everything that was not synced may be lost."""
        self.is_up = False
        for task in self._tasks:
            task.cancel()
        for partition in self.partitions_by_index.values():
            partition.close()
        self.files.kill()
        if loses_cache:
            self.files.crash()

    def _supervise(self, name: str, work: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        task = asyncio.get_running_loop().create_task(work, name=f"{self.name}: {name}")
        task.add_done_callback(self.world.ended)
        self._tasks.append(task)
        return task

    def _transactional_groups(self, *_: object) -> tuple[dict[int, dict[str, dict[str, dict[int, int]]]], bool]:
        offsets: dict[str, dict[int, int]] = {}
        for where, offset in self.store.groups.items():
            offsets.setdefault(where.topic, {})[where.partition] = offset
        return {0: {GROUP: offsets}}, False

    # -- as its topics ---------------------------------------------------------------------------------------

    def all(self) -> list[Topic]:
        return [self.store.topic]

    def get(self, name: str) -> Topic | None:
        return self.store.topic if name == TOPIC.name else None

    def existing(self, names: Iterable[str]) -> list[Topic]:
        return [self.store.topic for name in names if name == TOPIC.name]

    def hosted(self) -> Iterable[Partition]:
        return self.partitions_by_index.values()

    def partitions_of(self, _topic: Topic) -> Sequence[Partition]:
        return list(self.partitions_by_index.values())

    def partition(self, _name: str, index: int) -> Partition:
        return self.partitions_by_index[index]

    async def list_offsets_of(self, partitions: Iterable[TopicPartition]) -> Mapping[TopicPartition, Any]:
        """Respond for partitions that this node does not lead: it was killed."""
        return dict.fromkeys(partitions, NotLeader("the site is down"))

    states_revision = 0

    async def await_revision(self, revision: int, timeout_s: float = 0.0) -> None:
        """Return at once: this node leads everything while it runs."""
        if revision > self.states_revision:
            await asyncio.sleep(timeout_s)

    def on_roles_change(self, _listener: Any) -> None:
        pass

    on_dropped = on_roles_change

    async def await_mirror(self, _topic_ids: Any, _mirror: str) -> None:
        pass

    def state_of(self, _topic: Topic, index: int) -> PartitionState:
        return self.store.states[index].state

    async def raise_epoch(self, _topic: Topic, index: int, epoch: Epoch) -> None:
        state, revision = self.store.states[index]
        if state.leader_epoch < epoch:
            raised = dataclasses.replace(state, leader_epoch=epoch)
            self.store.states[index] = Versioned(raised, revision=revision + 1)
            await asyncio.sleep(0.001)
            self.partitions_by_index[index].apply(self.store.states[index], me=NODE_ID)

    def set_mirror(self, mirror: str) -> None:
        self._change_topic(mirror=mirror, original_id=TOPIC.topic_id if mirror else None)

    async def set_origins(self, _name: str, origins: tuple[str, ...], original_id: UUID) -> None:
        await asyncio.sleep(0.001)
        self._change_topic(origins=origins, original_id=original_id)

    def _change_topic(self, **changes: Any) -> None:
        self.store.topic = dataclasses.replace(self.store.topic, **changes)
        if self.is_up:
            for index, partition in self.partitions_by_index.items():
                partition.change_settings(self.store.topic, _settings(index))

    # -- reading --------------------------------------------------------------------------------------------

    def read(self) -> dict[Place, str]:
        """Return every record that clients can read, committed or not; without the compacted partition."""
        return {place: value for place, value, _ in self._records(range(COMPACTED))}

    def read_updates(self) -> dict[str, tuple[int, str]]:
        """The last update of each key of the compacted partition, and its offset."""
        return newest({place[1]: value for place, value, _ in self._records([COMPACTED])})

    def read_everything(self) -> list[Mapping[Any, Any]]:
        """The records that both sites must have in the end."""
        return [self.read(), self.read_updates()]

    def read_committed(self, partitions: Iterable[int] | None = None, start: int = 0) -> dict[Place, str]:
        """Every record whose transaction, if it has one, was committed where clients can read.

        Unlike readers, this does not stop where an earlier transaction is still open.
        """
        return {place: value for place, value, is_committed in self._records(partitions, start) if is_committed}

    def _records(self, partitions: Iterable[int] | None = None, start: int = 0) -> Iterator[tuple[Place, str, bool]]:
        for index in range(COMPACTED) if partitions is None else partitions:
            partition = self.partitions_by_index[index]
            end, offset = partition.high_watermark, Offset(max(start, partition.log_start))
            opened: dict[int, list[tuple[Place, str]]] = {}
            while offset < end and (data := memoryview(partition.log.read(offset, max_bytes=1 << 20, up_to=end))):
                for header in iterate_whole_headers(data):
                    offset = Offset(header.next_offset)
                    if header.is_control:
                        marker = read_marker(data, header)
                        for place, value in opened.pop(header.producer_id, ()):
                            yield place, value, marker is not None and marker.commit
                    elif header.record_count:
                        records = [
                            ((index, record.offset), (record.value or b"").decode())
                            for record in decode_batch(data, header)
                        ]
                        if header.is_transactional:
                            opened.setdefault(header.producer_id, []).extend(records)
                        else:
                            yield from ((place, value, True) for place, value in records)
            for left in opened.values():
                yield from ((place, value, False) for place, value in left)


class _SourceClient:
    """A client of the other site, over a link that delays requests and responses, and may be cut."""

    def __init__(self, world: World, site: Site) -> None:
        self._world = world
        self._site = site
        self._knows_leaders = False

    async def leader_of(self, _topic: str, _partition: int) -> NodeId:
        if not self._knows_leaders:
            await self._world.cross_link(self._site)
            self._knows_leaders = True
        return NODE_ID

    def forget_leaders(self) -> None:
        self._knows_leaders = False

    async def fetch_from(
        self, _leader: NodeId, positions: Mapping[TopicPartition, Offset], _limits: Any
    ) -> dict[TopicPartition, FetchedPartition | MillstreamError]:
        await self._world.cross_link(self._site)
        deadline = self._world.clock.monotonic() + _WAIT_S
        while True:
            responses: dict[TopicPartition, FetchedPartition | MillstreamError] = {}
            for where, offset in positions.items():
                responses[where] = self._fetch_response(where.partition, offset)
            if self._world.clock.monotonic() > deadline or any(
                not isinstance(response, FetchedPartition) or len(response.records) for response in responses.values()
            ):
                await self._world.cross_link(self._site)
                return responses
            await asyncio.sleep(0.02)

    def _fetch_response(self, index: int, offset: Offset) -> FetchedPartition | MillstreamError:
        partition = self._site.partitions_by_index[index]
        end = partition.high_watermark
        if offset > partition.log.end_offset or offset < partition.log_start:
            return OffsetOutOfRange("out of range", start=partition.log_start, end=end)
        data = partition.log.read(offset, max_bytes=self._world.random.choice(self._world.fetch_bytes), up_to=end)
        return FetchedPartition(memoryview(data), end, partition.log_start, end)


class SimulatedSource:
    """Stands for `Source`."""

    world: World
    is_millstream = True

    def __init__(self, settings: Any, *, name: str) -> None:
        self._site = self.world.sites[settings.source.partition(":")[0]]
        self.client = _SourceClient(self.world, self._site)
        self.cluster_id = self._site.name

    async def __aenter__(self) -> Self:
        await self.world.cross_link(self._site)
        return self

    async def __aexit__(self, *exception: object) -> None:
        pass

    async def metadata(self, topics: Any = None) -> ClusterMetadata:
        await self.world.cross_link(self._site)
        partitions: Any = dict.fromkeys(range(TOPIC.partitions))
        known = TopicMetadata(name=TOPIC.name, topic_id=TOPIC.topic_id, is_internal=False, partitions=partitions)
        found = {TOPIC.name: known} if topics is None or TOPIC.name in topics else {}
        return ClusterMetadata(cluster_id=self.cluster_id, controller_id=NODE_ID, nodes={}, topics=found, errors={})

    async def ask(self, _node: Any, request: Any, *, waits: bool = False) -> Any:
        await self.world.cross_link(self._site)
        if isinstance(request, BarrierRequest):
            response = await self._site.service.barriers.take(request)
            await self.world.cross_link(self._site)
            return response
        return OfferResponse(mirrored=[topic.name for topic in self._site.all() if topic.mirror])

    async def fetch(
        self, leader: NodeId, positions: Mapping[TopicPartition, Offset], limits: Any, topic_ids: Mapping[str, UUID]
    ) -> dict[TopicPartition, FetchedPartition | MillstreamError]:
        if any(topic_ids[where.topic] != TOPIC.topic_id for where in positions):
            raise AssertionError(f"{topic_ids} are not the ids of the originals")
        return await self.client.fetch_from(leader, positions, limits)

    async def end_of_epoch(self, where: TopicPartition, epoch: int) -> EpochEnd:
        await self.world.cross_link(self._site)
        found = self._site.partitions_by_index[where.partition].log.end_of_epoch(Epoch(epoch))
        return EpochEnd(*found)


class World:
    """The simulated world of one seed."""

    def __init__(self, seed: int) -> None:
        self.random = Random(seed)
        self.loop = SimulatedLoop(Random(seed + 1))
        self.clock = SimulatedClock(self.loop)
        self.trace = Trace(self.loop)
        self.is_link_cut = False
        self.delay_s = self.random.choice((0.001, 0.02, 0.2))
        self.fetch_bytes = self.random.choice(((150,), (300, 1 << 20)))
        """How much a response to a fetch holds. A copy that gets little is so slow that the source compacts what it has
        not copied yet."""
        self.sites: dict[str, Site] = {}
        self._number = 0
        self._batches = 0
        self._pairs: dict[str, tuple[int, ...]] = {}
        """The partitions of each transaction, by the value that it writes to all of them."""
        self._writers: list[asyncio.Task[None]] = []
        self.failed: list[BaseException | None] = []

    @property
    def batches(self) -> int:
        return self._batches

    def ended(self, task: asyncio.Task[Any]) -> None:
        """Record that a task of a site failed, which would end the process of a real node."""
        if not task.cancelled() and task.exception() is not None:
            self.failed.append(task.exception())

    async def cross_link(self, site: Site) -> None:
        """Wait for the delay of the link; raise `BrokerUnreachable` if the link is cut or the site is down."""
        await asyncio.sleep(self.random.uniform(self.delay_s / 2, self.delay_s))
        if self.random.random() < LOSS:
            await asyncio.sleep(self.random.uniform(0.2, 2))
        if self.is_link_cut or not site.is_up:
            await asyncio.sleep(self.random.uniform(0, 1))
            raise BrokerUnreachable(f"{site.name} is not reached")

    async def run(self) -> None:
        """Run the simulation; raise the first violation or error."""
        # Sites are named here: the ids of their producers depend on it.
        first, second = Site(self, "first"), Site(self, "second")
        self.sites = {"first": first, "second": second}
        await first.start()
        second.store.topic = dataclasses.replace(TOPIC, mirror=MIRROR, original_id=TOPIC.topic_id)
        await second.start()
        await second.service.mirrors.create(MIRROR, {"from": "first:1"})
        self._write_to(first)
        for _ in range(self.random.randrange(2, 8)):
            await asyncio.sleep(self.random.uniform(0.1, 3))
            await self._fault(first, second)
            self._check_readers(second)
        await asyncio.sleep(self.random.uniform(0, 2))
        self._check_readers(second)
        # The second site cannot reach the first any more; clients of the first still write to it.
        self.is_link_cut = True
        cuts = await self._fail_over(second)
        self.trace.record("second", f"took over at {cuts}")
        self._check_cut(first, second, cuts)
        self._check_readers(second)
        self._check_repeats(second)
        self._write_to(second)
        await asyncio.sleep(self.random.uniform(0.2, 3))
        await self._stop_writing()
        self._check_stored(second, "after the failover")
        self.is_link_cut = False
        await self._reverse(first, second, cuts)
        self._check_stored(second, "after the failback")

    # -- clients --------------------------------------------------------------------------------------------

    def _write_to(self, site: Site) -> None:
        for work in (self._write_plain, self._write_pairs, self._write_as_group, self._write_keyed):
            self._writers.append(self.loop.create_task(self._write_until_stopped(site, work)))

    async def _write_until_stopped(self, site: Site, work: Callable[[Site], Coroutine[Any, Any, None]]) -> None:
        while True:
            try:
                await work(site)
            except (MillstreamError, asyncio.CancelledError) as error:
                if isinstance(error, asyncio.CancelledError) and site.is_up:
                    raise
            await asyncio.sleep(self.random.uniform(0.01, 0.3))

    async def _stop_writing(self) -> None:
        for task in self._writers:
            task.cancel()
        await asyncio.gather(*self._writers, return_exceptions=True)
        self._writers.clear()

    def _producer(self, site: Site) -> int:
        site.store.next_producer += 1
        return site.store.next_producer

    def _value(self) -> str:
        self._number += 1
        return str(self._number)

    async def _write_plain(self, site: Site) -> None:
        """Write as an idempotent producer until it fails."""
        producer, sequences = self._producer(site), [0] * TOPIC.partitions
        for _ in range(self.random.randrange(1, 20)):
            index = self.random.choice((INPUT, 2))
            value = self._value()
            batch = encode_batch(
                [NewRecord(None, value.encode())],
                producer_id=producer,
                producer_epoch=0,
                base_sequence=sequences[index],
            )
            appended = await self._running_partition(site, index).append(batch)
            sequences[index] += 1
            site.stored[index, appended.base_offset] = value
            self._batches += 1
            await asyncio.sleep(self.random.uniform(0, 0.1))

    async def _write_keyed(self, site: Site) -> None:
        """Update a key of the compacted partition."""
        value = f"k{self.random.randrange(KEYS)}:{self._value()}"
        batch = encode_batch([NewRecord(_key_of(value).encode(), value.encode(), (), self.clock.now_ms())])
        appended = await self._running_partition(site, COMPACTED).append(batch)
        site.updates[appended.base_offset] = value
        self._batches += 1

    def _running_partition(self, site: Site, index: int) -> Partition:
        if not site.is_up:
            raise NotLeader("the site is down")
        return site.partitions_by_index[index]

    async def _transact(self, site: Site, values: Mapping[int, Sequence[str]], read_until: int | None = None) -> None:
        producer, written_to = self._producer(site), list[int]()
        try:
            await self._write_parts(site, producer, values, written_to)
        except MillstreamError:
            # As when a transaction times out.
            async with site.coordinator.ending():
                for index in written_to:
                    await self._write_marker(site, index, producer, commit=False)
            raise
        async with site.coordinator.ending():
            is_commit = self.random.random() < 0.9
            steps: list[int | None] = [*values]
            if read_until is not None and is_commit:
                steps.append(None)
            self.random.shuffle(steps)
            for step in steps:
                if step is None:
                    site.store.groups[TopicPartition(TOPIC.name, PartitionIndex(INPUT))] = read_until or 0
                    continue
                await self._write_marker(site, step, producer, commit=is_commit)
                await asyncio.sleep(self.random.uniform(0, 0.1))

    async def _write_parts(
        self, site: Site, producer: int, values: Mapping[int, Sequence[str]], written_to: list[int]
    ) -> None:
        for index, written in values.items():
            partition = self._running_partition(site, index)
            guard = partition.start_transaction(producer, 0, 0, bumps_epoch=False)
            batch = encode_batch(
                [NewRecord(None, value.encode()) for value in written],
                producer_id=producer,
                producer_epoch=0,
                base_sequence=0,
                transactional=True,
            )
            written_to.append(index)
            appended = partition.write(batch, acks=-1, guard=guard)
            waiting = partition.acknowledged(appended)
            if waiting is not None:
                await waiting
            await asyncio.sleep(self.random.uniform(0, 0.05))

    async def _write_marker(self, site: Site, index: int, producer: int, *, commit: bool) -> None:
        """Write a marker, with retries until it is stored: decisions are carried out after a crash, too."""
        marker = Marker(
            producer_id=ProducerId(producer), producer_epoch=ProducerEpoch(0), commit=commit, coordinator_epoch=0
        )
        while True:
            try:
                partition = self._running_partition(site, index)
                waiting = partition.acknowledged(partition.write_marker(marker))
                if waiting is not None:
                    await waiting
                return
            except MillstreamError:
                await asyncio.sleep(0.1)

    async def _write_pairs(self, site: Site) -> None:
        value = self._value()
        places = tuple(self.random.sample(range(COMPACTED), 2))
        self._pairs[value] = places
        await self._transact(site, {index: [value] for index in places})

    async def _write_as_group(self, site: Site) -> None:
        """Read committed input from the group's offset on; write it out, and commit the offset with it."""
        where = TopicPartition(TOPIC.name, PartitionIndex(INPUT))
        position = site.store.groups.get(where, 0)
        partition = self._running_partition(site, INPUT)
        end = partition.last_stable_offset
        read = site.read_committed([INPUT], position)
        found = [value for place, value in sorted(read.items()) if position <= place[1] < end]
        if found:
            await self._transact(site, {OUTPUT: [f"out-{value}" for value in found]}, read_until=int(end))

    # -- faults ---------------------------------------------------------------------------------------------

    async def _fault(self, first: Site, second: Site) -> None:
        kind = self.random.choice(("kill", "crash", "cut", "pause"))
        site = self.random.choice((first, second))
        self.trace.record("world", f"{kind} {site.name}")
        if kind in ("kill", "crash"):
            site.kill(loses_cache=kind == "crash")
            await asyncio.sleep(self.random.uniform(0, 2))
            await site.start()
        elif kind == "cut":
            self.is_link_cut = True
            await asyncio.sleep(self.random.uniform(0.1, 5))
            self.is_link_cut = False
        else:
            with_pause = second.service.mirrors
            await with_pause.set_enabled(MIRROR, is_enabled=False)
            await asyncio.sleep(self.random.uniform(0, 1))
            await with_pause.set_enabled(MIRROR, is_enabled=True)

    async def _fail_over(self, site: Site) -> dict[int, int]:
        """Cut all copies as `fail_over` does; sometimes the site crashes when only some of them are cut."""
        order = self.random.sample(range(TOPIC.partitions), TOPIC.partitions)
        first: dict[int, int] = {}
        if self.random.random() < 0.5:
            first = await self._cut(site, order[: self.random.randrange(1, TOPIC.partitions)])
            site.kill(loses_cache=self.random.random() < 0.5)
            await site.start()
        cuts = await self._cut(site, order)
        await failover_module.apply_recorded_offsets(site.service, site.service.mirrors.all()[0])
        for index, offset in first.items():
            if cuts[index] != offset:
                raise Violation(f"a repeated failover cuts {index} at {cuts[index]}, and at first it was {offset}")
        site.set_mirror("")
        return cuts

    async def _cut(self, site: Site, order: Iterable[int]) -> dict[int, int]:
        mirror = await site.service.begin_cut(site.service.mirrors.all()[0], [site.store.topic])
        await asyncio.sleep(self.random.uniform(0, 0.1))
        cuts = {}
        for index in order:
            request = CutRequest(
                mirror=MIRROR,
                topic=TOPIC.name,
                partition=index,
                epoch=mirror.cut_epochs[TOPIC.name][index],
                verified=mirror.verified_until(TOPIC.name, index),
                gap=mirror.gap_of(TOPIC.name, index),
            )
            cuts[index] = (await site.service.cut(request)).offset
        return cuts

    async def _reverse(self, first: Site, second: Site, cuts: dict[int, int]) -> None:
        """Make the first site follow, as `adopt` does; wait until both are equal."""
        first.set_mirror(MIRROR)
        mirrors = first.service.mirrors
        await mirrors.create(MIRROR, {"from": "second:1"}, is_enabled=False)
        offsets = {TOPIC.name: cuts}
        if self.random.random() < 0.5:
            # Otherwise the copier finds the common offset itself, like a node that was down.
            for index, cut in cuts.items():
                fence = FenceRequest(mirror=MIRROR, topic_ids=[TOPIC.topic_id], cuts={TOPIC.name: {index: cut}})
                await first.service.fence(fence)
        await mirrors.change(
            MIRROR,
            lambda now: dataclasses.replace(now, cuts=offsets, verified=offsets, is_gated=True, is_enabled=True),
        )
        deadline = self.clock.monotonic() + EQUAL_S_MAX
        while first.read_everything() != second.read_everything():
            if self.clock.monotonic() > deadline:
                for first_contents, second_contents in zip(
                    first.read_everything(), second.read_everything(), strict=True
                ):
                    self._check_equal(first_contents, second_contents)
            await asyncio.sleep(5)

    def _check_equal(self, first_contents: Mapping[Any, Any], second_contents: Mapping[Any, Any]) -> None:
        differ = sorted(
            place
            for place in first_contents.keys() | second_contents.keys()
            if first_contents.get(place) != second_contents.get(place)
        )
        if differ:
            raise Violation(
                f"{len(differ)} positions differ after the failback; {differ[0]} is {first_contents.get(differ[0])} "
                f"and {second_contents.get(differ[0])}"
            )

    # -- invariants ----------------------------------------------------------------------------------------

    def _check_readers(self, site: Site) -> None:
        if not site.is_up:
            return
        found = site.read_committed()
        seen: dict[str, set[int]] = {}
        for (index, _), value in found.items():
            seen.setdefault(value, set()).add(index)
        for value, places in self._pairs.items():
            if value in seen and seen[value] != set(places):
                raise Violation(f"{site.name} shows {value} in {seen[value]}, of the transaction in {places}")
        read = site.store.groups.get(TopicPartition(TOPIC.name, PartitionIndex(INPUT)), 0)
        for (index, offset), value in found.items():
            if index == INPUT and offset < read and f"out-{value}" not in seen:
                raise Violation(f"{site.name}: the group has read up to {read}, and {value} was not written out")

    def _check_repeats(self, site: Site) -> None:
        found = site.read_committed()
        outputs, read = set(found.values()), site.store.groups.get(TopicPartition(TOPIC.name, PartitionIndex(INPUT)), 0)
        for (index, offset), value in found.items():
            if index == INPUT and offset >= read and f"out-{value}" in outputs:
                raise Violation(f"{site.name}: the group reads from {read} on, and writes {value} out again")

    def _check_cut(self, first: Site, second: Site, cuts: dict[int, int]) -> None:
        first_contents = {place: value for place, value in first.read().items() if place[1] < cuts[place[0]]}
        second_contents = {place: value for place, value in second.read().items() if place[1] < cuts[place[0]]}
        if first_contents != second_contents:
            differ = min(
                place
                for place in second_contents.keys() | first_contents.keys()
                if second_contents.get(place) != first_contents.get(place)
            )
            raise Violation(
                f"below the cut, {differ} is {first_contents.get(differ)} and {second_contents.get(differ)}"
            )
        cut, updates = cuts[COMPACTED], second.read_updates()
        below = newest({offset: value for offset, value in first.updates.items() if offset < cut})
        for key, update in below.items():
            found = updates.get(key, (-1, ""))
            # A later update may be stored without an acknowledgement.
            if found != update and found[0] <= update[0]:
                raise Violation(f"below the cut, {key} is {update} and {found}")

    def _check_stored(self, site: Site, when: str) -> None:
        found = site.read()
        for place, value in site.stored.items():
            if found.get(place) != value:
                raise Violation(f"{when}, {site.name} has {found.get(place)} at {place}, where it had stored {value}")
        updates = site.read_updates()
        for key, update in newest(site.updates).items():
            # A later update may be stored without an acknowledgement.
            if updates.get(key, (-1, ""))[0] < update[0]:
                raise Violation(f"{when}, {site.name} has {updates.get(key)} of {key}, and had stored {update}")


async def _committed_by_group(client: Any, _names: Any) -> dict[str, dict[TopicPartition, int]]:
    site: Site = client._site
    await client._world.cross_link(site)
    return {GROUP: dict(site.store.groups)}


async def _commits_by_group(site: Site, names: Sequence[str]) -> dict[str, dict[TopicPartition, Commit]]:
    applied = site.store.applied
    return {
        name: {
            where: Commit(offset, MIRRORED if applied.get(where) == offset else "")
            for where, offset in site.store.groups.items()
        }
        for name in names
    }


async def _topic_configs(client: Any, _name: str) -> dict[str, Any]:
    await client._world.cross_link(client._site)
    return {}


async def _list_groups(client: Any) -> list[tuple[str, str, str]]:
    return [(GROUP, "", "classic")]


def simulate_mirror(seed: int, *, tracing: bool = False) -> Outcome:
    outcome = Outcome(seed)
    with seeded_entropy(seed), ExitStack() as stack:
        # Every crash would be logged.
        logging.disable(logging.NOTSET if tracing else logging.CRITICAL)
        stack.callback(logging.disable, logging.NOTSET)
        world = World(seed)

        async def commit(site: Site, _group: str, offsets: Mapping[TopicPartition, int], *, metadata: str) -> None:
            await asyncio.sleep(world.random.uniform(0.001, 1))
            site.store.groups.update(offsets)
            site.store.applied.update(offsets)

        for target, name, replacement in (
            (service_module, "Source", type("Line", (SimulatedSource,), {"world": world})),
            (follower_module, "topic_configs", _topic_configs),
            (follower_module, "list_groups", _list_groups),
            (follower_module, "committed_by_group", _committed_by_group),
            (follower_module, "commits_by_group", _commits_by_group),
            (follower_module, "commit_offsets", commit),
            (failover_module, "commits_by_group", _commits_by_group),
            (failover_module, "commit_offsets", commit),
            (MirrorService, "client", lambda self: self.topics),
        ):
            stack.enter_context(mock.patch.object(target, name, replacement))
        try:
            world.loop.run_until_complete(world.run())
            if world.failed:
                raise Violation(f"a component of a site failed: {world.failed[0]!r}")
        except Exception as error:
            outcome.failure = f"{type(error).__name__}: {error}"
            world.trace.record("world", outcome.failure)
        outcome.digest = world.trace.digest()
        outcome.steps = world.loop.steps
        outcome.virtual_s = world.trace.elapsed_s
        outcome.batches = world.batches
        outcome.trace = world.trace.lines() if tracing or outcome.failure else []
        world.loop.shut_down()
    return outcome
