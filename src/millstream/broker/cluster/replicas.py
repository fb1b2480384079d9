"""Replication of the partitions that this node hosts: following their leaders, and tracking its own followers.

Nothing here polls partitions. A follower is woken by its leader's response. Of the partitions that this node leads,
only those with a lagging in-sync replica are looked at periodically.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice
from random import Random
from typing import NamedTuple

from millstream.broker.cluster import keys
from millstream.broker.cluster.damage_repair import DamageRepair
from millstream.broker.cluster.replica_fetcher import FetchLimits, ReplicaFetcher, ReplicaLinks, Throttle, no_pause
from millstream.broker.cluster.store import CHANGES_MAX, EXPECTS_MAX, CoordinationStore, Expect, Put
from millstream.broker.replication.in_sync import NOT_REGISTERED, InSyncChange, MayJoin, any_replica
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff
from millstream.core.config import Config
from millstream.core.errors import CorruptState, StoreRefused, StoreUnavailable
from millstream.core.ids import NodeId
from millstream.core.metric import Metric, gauge
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.tasks import keep_running
from millstream.protocol.wire.replica_fetch import PartitionKey

_logger = logging.getLogger(__name__)


class _PendingChange(NamedTuple):
    partition: Partition
    change: InSyncChange

    @property
    def key(self) -> str:
        return keys.partition_key((self.partition.topic.topic_id, self.partition.index))

    @property
    def put(self) -> Put:
        return Put(self.key, self.change.state.to_json())

    @property
    def expects(self) -> set[Expect]:
        joining = {
            Expect(keys.node_key(node), revision)
            for node, revision in self.change.registrations.items()
            if revision >= 0
        }
        return {Expect(self.key, self.change.revision), *joining}


class InSyncWriter:
    """Requests the changes that partitions want from the store."""

    def __init__(
        self, store: CoordinationStore, wanted: Callable[[Partition], InSyncChange | None], backoff: Backoff
    ) -> None:
        self._store = store
        self._wanted = wanted
        self._backoff = backoff
        self._queue: dict[Partition, None] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        """Return how many partitions wait for a change."""
        return len(self._queue)

    def look_at(self, partition: Partition) -> None:
        """Check before long whether a partition wants a change."""
        self._queue[partition] = None
        self._wake.set()

    async def run(self) -> None:
        """Request changes; runs forever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._write(self._take())

    def _take(self) -> list[_PendingChange]:
        """Begin as many changes as fit into one step."""
        pending: list[_PendingChange] = []
        expects: set[Expect] = set()
        for partition in list(islice(self._queue, CHANGES_MAX)):
            del self._queue[partition]
            change = self._wanted(partition)
            if change is None:
                continue
            one = _PendingChange(partition, change)
            if len(expects | one.expects) > EXPECTS_MAX:
                self._queue[partition] = None
                break
            if partition.change_began(change):
                pending.append(one)
                expects |= one.expects
        return pending

    async def _write(self, pending: list[_PendingChange]) -> None:
        try:
            if len(pending) > 1 and await self._change(pending):
                return
        except StoreRefused as error:
            await self._give_up(pending, error)
            return
        except StoreUnavailable as error:
            _logger.warning("the store did not answer about in-sync sets", extra={"error": str(error)})
            await self._backoff.pause()
        for one in pending:
            await self._write_alone(one)

    async def _change(self, pending: list[_PendingChange]) -> bool:
        expects = {expect for one in pending for expect in one.expects}
        revision = await self._store.change([one.put for one in pending], sorted(expects))
        if revision is None:
            return False
        self._backoff.reset()
        for partition, change in pending:
            _logger.info(
                "an in-sync set changed",
                extra={"partition": str(partition.log.partition), "in_sync": str(list(change.state.in_sync))},
            )
            partition.change_ended(Versioned(change.state, revision))
            # Events since then may require another change.
            self.look_at(partition)
        return True

    async def _write_alone(self, one: _PendingChange) -> None:
        """Request one change until its outcome is certain, or the view has shown it."""
        while one.partition.is_pending(one.change):
            try:
                if not await self._change([one]):
                    await self._read_back(one)
                return
            except StoreRefused as error:
                await self._give_up([one], error)
                return
            except CorruptState as error:
                # Both sets count until the view shows a state that can be read.
                _logger.error("a state cannot be read back", extra={"key": one.key, "error": str(error)})
                return
            except StoreUnavailable as error:
                _logger.warning(
                    "it is unknown whether an in-sync set changed; retrying",
                    extra={"partition": str(one.partition.log.partition), "error": str(error)},
                )
                await self._backoff.pause()

    async def _read_back(self, one: _PendingChange) -> None:
        """Resolve a failed condition: the state was changed by another, or a joining node is another process now.

        Either way the change, and any earlier attempt of it that is still under way, never takes effect.
        """
        entry = (await self._store.read(one.key)).entries.get(one.key)
        if entry is not None and entry.revision > one.change.revision:
            one.partition.change_ended(Versioned(PartitionState.from_json(entry.value), entry.revision))
        else:
            one.partition.change_refused(one.change)
            await self._backoff.pause()
        self.look_at(one.partition)

    async def _give_up(self, pending: list[_PendingChange], error: StoreRefused) -> None:
        _logger.warning("the store refused a change of in-sync sets", extra={"error": str(error)})
        for partition, change in pending:
            partition.change_refused(change)
            self.look_at(partition)
        await self._backoff.pause()


def not_registered() -> int:
    """Return the registration of nodes without one: it is not checked when they join."""
    return NOT_REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    """The limits of replication."""

    lag_s: float = 10.0
    """A follower that was behind for longer is not waited for."""
    fetch: FetchLimits = field(default_factory=FetchLimits)

    @classmethod
    def of(cls, config: Config) -> ReplicaSettings:
        """Return the settings of a node's configuration."""
        fetch = FetchLimits(wait_ms=config.replica_fetch_wait_ms, bytes_max=config.replica_fetch_bytes)
        return cls(lag_s=config.replica_lag_ms / 1000, fetch=fetch)


class Replicas:
    """Every replica here, led or followed."""

    def __init__(
        self,
        me: NodeId,
        links: ReplicaLinks,
        store: CoordinationStore,
        *,
        random: Random,
        settings: ReplicaSettings | None = None,
        registration: Callable[[], int] = not_registered,
        may_join: MayJoin = any_replica,
        throttle: Throttle = no_pause,
    ) -> None:
        self._me = me
        self._links = links
        self._random = random
        self._settings = settings or ReplicaSettings()
        self._registration = registration
        self._may_join = may_join
        self._throttle = throttle
        self._writer = InSyncWriter(store, self._wanted, Backoff(random))
        self._repair = DamageRepair(me, links, random=random, registration=registration)
        self._fetchers: dict[NodeId, ReplicaFetcher] = {}
        self._tasks: dict[object, asyncio.Task[None]] = {}
        self._leader_of: dict[PartitionKey, NodeId] = {}
        """The leader from which each partition is fetched."""
        self._behind: dict[Partition, None] = {}
        self._incomplete: dict[Partition, None] = {}
        """Partitions led here with a replica that is not in sync."""
        self._sweep: asyncio.TimerHandle | None = None
        self._running = False

    # -- start and stop -------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Begin to fetch and to write; states applied before count."""
        self._running = True
        self._spawn(self._writer, "changes of in-sync sets")
        self._spawn(self._repair, "repair of damage")
        for fetcher in self._fetchers.values():
            self._spawn(fetcher, f"following node {fetcher.leader}")
        self._sweep_later()

    async def close(self) -> None:
        """End every task; the partitions stay as they are."""
        self._running = False
        if self._sweep is not None:
            self._sweep.cancel()
            self._sweep = None
        tasks, self._tasks = list(self._tasks.values()), {}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._fetchers.clear()
        self._leader_of.clear()

    def _spawn(self, part: InSyncWriter | DamageRepair | ReplicaFetcher, name: str) -> None:
        self._tasks[part] = asyncio.get_running_loop().create_task(keep_running(name, part.run), name=name)

    # -- what the cluster has agreed on ---------------------------------------------------------------------

    def apply(self, partitions: Iterable[Partition]) -> None:
        """Fetch each partition from the leader of its new state, if that has changed."""
        for partition in partitions:
            if partition.in_sync_manager is not self:
                partition.in_sync_manager = self
                self.behind(partition)
                self.wants_change(partition)
            self._note_incomplete(partition)
            self._place(partition)
            self._watch_damage(partition)

    def _watch_damage(self, partition: Partition) -> None:
        """Repair what the disk lost of a partition from other replicas, if there are any."""
        partition.log.damage.on_change = lambda: self._damage_changed(partition)
        self._repair.look_at(partition)

    def _damage_changed(self, partition: Partition) -> None:
        if partition.in_sync_manager is not self:
            return
        self._repair.look_at(partition)
        key = (partition.topic.topic_id, partition.index)
        leader = self._leader_of.get(key)
        if leader is not None:
            self._fetchers[leader].resend_position(key)
        partition.damage_changed()

    def nodes_changed(self) -> None:
        """Check partitions whose followers may join now that nodes came or went."""
        for partition in self._incomplete:
            self.wants_change(partition)

    def forget(self, partitions: Iterable[Partition]) -> None:
        """Forget partitions that are no longer hosted here."""
        for partition in partitions:
            self._leave((partition.topic.topic_id, partition.index), None)
            self._behind.pop(partition, None)
            self._incomplete.pop(partition, None)
            self._repair.forget(partition)
            partition.in_sync_manager = None

    def _note_incomplete(self, partition: Partition) -> None:
        state = partition.state
        if partition.is_leader and state is not None and len(state.in_sync) < len(state.replicas):
            self._incomplete[partition] = None
        else:
            self._incomplete.pop(partition, None)

    def _place(self, partition: Partition) -> None:
        key = (partition.topic.topic_id, partition.index)
        leader = partition.follows
        self._leave(key, leader)
        if leader is None:
            return
        fetcher = self._fetchers.get(leader)
        if fetcher is None:
            fetcher = self._fetchers[leader] = self._new_fetcher(leader)
            if self._running:
                self._spawn(fetcher, f"following node {leader}")
        self._leader_of[key] = leader
        fetcher.follow(partition)

    def _leave(self, key: PartitionKey, leader: NodeId | None) -> None:
        """Stop fetching a partition from its former leader, unless that still leads."""
        before = self._leader_of.get(key)
        if before is None or before == leader:
            return
        del self._leader_of[key]
        fetcher = self._fetchers[before]
        fetcher.leave(key)
        if not len(fetcher):
            del self._fetchers[before]
            task = self._tasks.pop(fetcher, None)
            if task is not None:
                task.cancel()

    def _new_fetcher(self, leader: NodeId) -> ReplicaFetcher:
        return ReplicaFetcher(
            leader,
            self._me,
            self._links.open(leader),
            limits=self._settings.fetch,
            random=self._random,
            registration=self._registration,
            throttle=self._throttle,
        )

    # -- the followers of what is led here ------------------------------------------------------------------

    def behind(self, partition: Partition) -> None:
        """Check a partition until all in-sync replicas have caught up."""
        if partition.has_lagging:
            self._behind[partition] = None
            self._sweep_later()

    def wants_change(self, partition: Partition) -> None:
        """Check whether a partition wants a change of its in-sync set."""
        if partition.is_leader:
            self._writer.look_at(partition)

    def _sweep_later(self) -> None:
        if self._sweep is None and self._behind and self._running:
            self._sweep = asyncio.get_running_loop().call_later(self._settings.lag_s / 2, self._sweep_now)

    def _sweep_now(self) -> None:
        self._sweep = None
        for partition in tuple(self._behind):
            if not partition.has_lagging:
                del self._behind[partition]
            elif self._wanted(partition) is not None:
                self._writer.look_at(partition)
        self._sweep_later()

    def _wanted(self, partition: Partition) -> InSyncChange | None:
        return partition.in_sync_change(lag_s=self._settings.lag_s, may_join=self._may_join)

    # -- numbers --------------------------------------------------------------------------------------------

    def metrics(self) -> Iterable[Metric]:
        """Return how much is followed, and how many led partitions have a lagging replica."""
        followed = len(self._leader_of)
        yield gauge("millstream_replicas_followed", "Partitions that this node fetches from their leaders.", followed)
        yield from self._repair.metrics()
        yield gauge(
            "millstream_replicas_behind",
            "Partitions that this node leads with an in-sync replica that lags.",
            len(self._behind),
        )
