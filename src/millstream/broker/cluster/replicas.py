"""Replication of the partitions that this node hosts: following their leaders, and tracking its own followers.

Nothing here polls partitions. A follower is woken by its leader's response. Of the partitions that this node leads,
only those with a lagging in-sync replica are checked periodically.
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
from millstream.broker.cluster.replica_fetcher import FetchLimits, ReplicaFetcher, ReplicaLink, ReplicaLinks, Throttle
from millstream.broker.cluster.store import CHANGES_MAX, EXPECTS_MAX, CoordinationStore, Expect, Put
from millstream.broker.log.damage import LostRange
from millstream.broker.replication.in_sync import NOT_REGISTERED, InSyncChange, MayJoin, any_replica
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff
from millstream.core.config import Config
from millstream.core.errors import (
    CorruptBatch,
    CorruptState,
    DamagedRange,
    DivergedLog,
    LogUnavailable,
    MillstreamError,
    MismatchedBatch,
    OffsetOutOfRange,
    StorageFailure,
    StoreRefused,
    StoreUnavailable,
)
from millstream.core.ids import NO_EPOCH, Epoch, NodeId, Offset
from millstream.core.metric import Metric, counter, gauge
from millstream.core.partition_state import PartitionState, Versioned, encode_value
from millstream.core.tasks import cancel_and_wait, keep_running
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.replica_fetch import (
    CLOSED_SESSION_EPOCH,
    PartitionKey,
    ReplicaFetch,
    ReplicaPosition,
    ReplicaResponse,
)

_logger = logging.getLogger(__name__)

REPAIR_RETRY_FIRST_S = 0.5
REPAIR_RETRY_MAX_S = 60.0
REPAIR_ASK_BYTES = 4 * 1024 * 1024
REPAIR_PART_BYTES = 16 * 1024 * 1024
"""A larger range is repaired in parts."""


class DamageRepair:
    """Repairs the partitions of a node, one by one, until `run` is cancelled.

    Leader or follower, a replica asks the others for the batches of a lost range, the leader first, and writes them in
    place. If several replicas lost different ranges, each gets what the others still have. A follower takes what its
    leader has; otherwise only acknowledged records are repaired, because all replicas are identical below the high
    watermark. If the leader's records there are of later epochs than what follows here, the log has diverged, and a
    follower truncates it. A leader that cannot repair a range that others have hands over to one of them. A range that
    no other replica has is permanently lost, and reported as such to readers.
    """

    def __init__(self, me: NodeId, links: ReplicaLinks, *, random: Random, registration: Callable[[], int]) -> None:
        self._me = me
        self._links = links
        self._random = random
        self._registration = registration
        self._due: dict[Partition, None] = {}
        self._retries: dict[Partition, asyncio.TimerHandle] = {}
        self._backoffs: dict[Partition, Backoff] = {}
        self._wake = asyncio.Event()
        self._repaired = 0

    def check_soon(self, partition: Partition) -> None:
        log = partition.log
        timer = self._retries.pop(partition, None)
        if timer is not None:
            timer.cancel()
        if log.damage and log.damage.has_replicas and not log.closed:
            self._due[partition] = None
            self._wake.set()
        else:
            self._backoffs.pop(partition, None)

    def forget(self, partition: Partition) -> None:
        self._due.pop(partition, None)
        self._backoffs.pop(partition, None)
        timer = self._retries.pop(partition, None)
        if timer is not None:
            timer.cancel()

    async def run(self) -> None:
        """Repair damaged partitions; runs forever."""
        while True:
            while not self._due:
                self._wake.clear()
                await self._wake.wait()
            partition = next(iter(self._due))
            del self._due[partition]
            await self._repair(partition)
            if partition.log.damage and partition not in self._due and not partition.log.closed:
                self._schedule_retry(partition)

    def _schedule_retry(self, partition: Partition) -> None:
        backoff = self._backoffs.get(partition)
        if backoff is None:
            backoff = self._backoffs[partition] = Backoff(
                self._random, first_s=REPAIR_RETRY_FIRST_S, max_s=REPAIR_RETRY_MAX_S
            )
        self._retries[partition] = asyncio.get_running_loop().call_later(backoff.take_s(), self.check_soon, partition)

    async def _repair(self, partition: Partition) -> None:
        for lost in tuple(partition.log.damage):
            if lost not in partition.log.damage:
                continue
            try:
                await self._repair_range(partition, lost)
            except MillstreamError as error:
                self._log(logging.WARNING, "lost offsets are not repaired yet; retrying", partition, lost, error)
            except Exception as error:
                _logger.exception("the repair of a partition failed because of a bug")
                self._log(logging.ERROR, "lost offsets could not be repaired", partition, lost, error)

    async def _repair_range(self, partition: Partition, lost: LostRange) -> None:
        undecided: MillstreamError | None = None
        cannot: MismatchedBatch | StorageFailure | None = None
        for node in self._other_replicas(partition):
            is_leader = node == partition.follows
            try:
                batches = await self._fetch(partition, node, lost)
            except MillstreamError as error:
                undecided = error
                continue
            try:
                if batches:
                    await partition.restore_range(lost, batches)
                    self._repaired += 1
                    return
            except DivergedLog as error:
                if is_leader:
                    truncated = partition.truncate_diverged(lost)
                    if truncated is not None:
                        await truncated
                    partition.log.damage.on_change()
                    return
                cannot = error
            except (MismatchedBatch, StorageFailure) as error:
                cannot = error
            except MillstreamError as error:
                # The response was damaged, or the log changed meanwhile.
                undecided = error
        if cannot is not None:
            # Other replicas have it, so one of them should lead.
            partition.hand_over()
            raise cannot
        if undecided is not None:
            raise undecided
        if lost.offsets not in partition.log.damage.beyond_repair:
            self._log(logging.ERROR, "no other replica has what the disk lost", partition, lost, None)
            partition.abandon_range(lost)

    def _other_replicas(self, partition: Partition) -> list[NodeId]:
        """Return the other replicas; those most likely to have everything come first."""
        state = partition.state
        if state is None:
            return []
        return [
            node
            for node in dict.fromkeys((state.leader, *state.in_sync, *state.replicas))
            if node in state.replicas and node != self._me
        ]

    async def _fetch(self, partition: Partition, node: NodeId, lost: LostRange) -> bytes:
        """Return the batches of a lost range, or the first of them, from another replica; empty if it has none."""
        epoch = partition.leader_epoch if node == partition.follows else NO_EPOCH
        if epoch == NO_EPOCH and lost.start >= partition.high_watermark:
            raise LogUnavailable(f"offset {lost.start} is not known to be acknowledged")
        link = self._links.open(node)
        batches, offset = bytearray(), lost.start
        try:
            while offset < lost.end and len(batches) < REPAIR_PART_BYTES:
                try:
                    response = await self._send_fetch(link, partition, offset, epoch)
                except (DamagedRange, CorruptBatch, OffsetOutOfRange):
                    break
                if not response.records:
                    raise LogUnavailable(f"node {node} does not know yet that offset {offset} is acknowledged")
                batches += response.records
                offset = [int(header.next_offset) for header in iterate_headers(response.records)][-1]
        except MillstreamError:
            if not batches:
                raise
        finally:
            await link.close()
        if epoch not in (NO_EPOCH, partition.leader_epoch):
            raise LogUnavailable(f"node {node} no longer leads")
        return bytes(batches)

    async def _send_fetch(self, link: ReplicaLink, partition: Partition, offset: int, epoch: Epoch) -> ReplicaResponse:
        key: PartitionKey = (partition.topic.topic_id, partition.index)
        position = ReplicaPosition(Offset(offset), epoch, NO_EPOCH, partition.log_start, REPAIR_ASK_BYTES)
        fetch = ReplicaFetch(
            self._me, self._registration(), 0, REPAIR_ASK_BYTES, {key: position}, session_epoch=CLOSED_SESSION_EPOCH
        )
        responses = await link.fetch(fetch)
        response = responses.partitions.get(key)
        if responses.code or response is None:
            raise error_from_code(responses.code or -1, None, about=f"repair of {partition.log.partition}")
        if response.code:
            raise error_from_code(response.code, None, about=f"repair of {partition.log.partition}")
        return response

    def _log(self, level: int, what: str, partition: Partition, lost: LostRange, error: Exception | None) -> None:
        extra: dict[str, object] = {
            "topic": partition.topic.name,
            "partition": partition.index,
            "first_offset": lost.start,
            "next_offset": lost.end,
        }
        if error is not None:
            extra["error"] = str(error)
        _logger.log(level, what, extra=extra)

    def metrics(self) -> list[Metric]:
        waiting = len(self._due) + len(self._retries)
        return [
            counter(
                "millstream_replicas_repaired_ranges_total", "Lost ranges repaired from a replica.", self._repaired
            ),
            gauge("millstream_replicas_to_repair", "Partitions on this node with lost ranges.", waiting),
        ]


class _PendingChange(NamedTuple):
    partition: Partition
    change: InSyncChange

    @property
    def key(self) -> str:
        return keys.partition_key((self.partition.topic.topic_id, self.partition.index))

    @property
    def put(self) -> Put:
        return Put(self.key, encode_value(self.change.state))

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
        self, store: CoordinationStore, next_change: Callable[[Partition], InSyncChange | None], backoff: Backoff
    ) -> None:
        self._store = store
        self._next_change = next_change
        self._backoff = backoff
        self._queue: dict[Partition, None] = {}
        self._wake = asyncio.Event()

    def __len__(self) -> int:
        return len(self._queue)

    def check_soon(self, partition: Partition) -> None:
        self._queue[partition] = None
        self._wake.set()

    async def run(self) -> None:
        """Request changes; runs forever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            while self._queue:
                await self._write(self._begin_changes())

    def _begin_changes(self) -> list[_PendingChange]:
        """Begin as many changes as fit into one step."""
        pending: list[_PendingChange] = []
        expects: set[Expect] = set()
        for partition in list(islice(self._queue, CHANGES_MAX)):
            del self._queue[partition]
            change = self._next_change(partition)
            if change is None:
                continue
            pending_change = _PendingChange(partition, change)
            if len(expects | pending_change.expects) > EXPECTS_MAX:
                self._queue[partition] = None
                break
            if partition.begin_in_sync_change(change):
                pending.append(pending_change)
                expects |= pending_change.expects
        return pending

    async def _write(self, pending: list[_PendingChange]) -> None:
        try:
            if len(pending) > 1 and await self._change(pending):
                return
        except StoreRefused as error:
            await self._handle_refusal(pending, error)
            return
        except StoreUnavailable as error:
            _logger.warning("the store did not confirm a change of in-sync sets", extra={"error": str(error)})
            await self._backoff.pause()
        for change in pending:
            await self._write_single(change)

    async def _change(self, pending: list[_PendingChange]) -> bool:
        expects = {expect for waiting in pending for expect in waiting.expects}
        revision = await self._store.change([waiting.put for waiting in pending], sorted(expects))
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
            self.check_soon(partition)
        return True

    async def _write_single(self, pending: _PendingChange) -> None:
        """Request one change until its outcome is certain, or the view has shown it."""
        while pending.partition.is_pending(pending.change):
            try:
                if not await self._change([pending]):
                    await self._read_back(pending)
                return
            except StoreRefused as error:
                await self._handle_refusal([pending], error)
                return
            except CorruptState as error:
                # Both sets count until the view shows a state that can be read.
                _logger.error("a state cannot be read back", extra={"key": pending.key, "error": str(error)})
                return
            except StoreUnavailable as error:
                _logger.warning(
                    "it is unknown whether an in-sync set changed; retrying",
                    extra={"partition": str(pending.partition.log.partition), "error": str(error)},
                )
                await self._backoff.pause()

    async def _read_back(self, pending: _PendingChange) -> None:
        """Resolve a failed condition: another node changed the state, or a joining node was restarted.

        Either way the change, and any earlier attempt of it that is still under way, never takes effect.
        """
        entry = (await self._store.read(pending.key)).entries.get(pending.key)
        if entry is not None and entry.revision > pending.change.revision:
            pending.partition.change_ended(Versioned(PartitionState.from_json(entry.value), entry.revision))
        else:
            pending.partition.change_refused(pending.change)
            await self._backoff.pause()
        self.check_soon(pending.partition)

    async def _handle_refusal(self, pending: list[_PendingChange], error: StoreRefused) -> None:
        _logger.warning("the store refused a change of in-sync sets", extra={"error": str(error)})
        for partition, change in pending:
            partition.change_refused(change)
            self.check_soon(partition)
        await self._backoff.pause()


def not_registered() -> int:
    """Return the registration of nodes without one: it is not checked when they join."""
    return NOT_REGISTERED


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaSettings:
    lag_s: float = 10.0
    """A follower that was behind for longer is not waited for."""
    fetch: FetchLimits = field(default_factory=FetchLimits)

    @classmethod
    def of(cls, config: Config) -> ReplicaSettings:
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
        throttle: Throttle | None = None,
    ) -> None:
        self._me = me
        self._links = links
        self._random = random
        self._settings = settings or ReplicaSettings()
        self._registration = registration
        self._may_join = may_join
        self._throttle = throttle
        self._writer = InSyncWriter(store, self._next_change, Backoff(random))
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
        await cancel_and_wait(*tasks)
        self._fetchers.clear()
        self._leader_of.clear()

    def _spawn(self, part: InSyncWriter | DamageRepair | ReplicaFetcher, name: str) -> None:
        self._tasks[part] = asyncio.get_running_loop().create_task(keep_running(name, part.run), name=name)

    # -- agreed states --------------------------------------------------------------------------------------

    def apply(self, partitions: Iterable[Partition]) -> None:
        """Fetch each partition from the leader of its new state, if that has changed."""
        for partition in partitions:
            if partition.in_sync_manager is not self:
                partition.in_sync_manager = self
                self.behind(partition)
                self.wants_change(partition)
            self._note_incomplete(partition)
            self._assign_fetcher(partition)
            self._watch_damage(partition)

    def _watch_damage(self, partition: Partition) -> None:
        """Repair the damage of a partition from other replicas, if there are any."""
        partition.log.damage.on_change = lambda: self._damage_changed(partition)
        self._repair.check_soon(partition)

    def _damage_changed(self, partition: Partition) -> None:
        if partition.in_sync_manager is not self:
            return
        self._repair.check_soon(partition)
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
        for partition in partitions:
            self._stop_fetching((partition.topic.topic_id, partition.index), None)
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

    def _assign_fetcher(self, partition: Partition) -> None:
        key = (partition.topic.topic_id, partition.index)
        leader = partition.follows
        self._stop_fetching(key, leader)
        if leader is None:
            return
        fetcher = self._fetchers.get(leader)
        if fetcher is None:
            fetcher = self._fetchers[leader] = self._new_fetcher(leader)
            if self._running:
                self._spawn(fetcher, f"following node {leader}")
        self._leader_of[key] = leader
        fetcher.follow(partition)

    def _stop_fetching(self, key: PartitionKey, leader: NodeId | None) -> None:
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

    # -- followers of led partitions -------------------------------------------------------------------------

    def behind(self, partition: Partition) -> None:
        """Check a partition until all in-sync replicas have caught up."""
        if partition.has_lagging:
            self._behind[partition] = None
            self._sweep_later()

    def wants_change(self, partition: Partition) -> None:
        """Check whether the in-sync set of a partition has to change."""
        if partition.is_leader:
            self._writer.check_soon(partition)

    def _sweep_later(self) -> None:
        if self._sweep is None and self._behind and self._running:
            self._sweep = asyncio.get_running_loop().call_later(self._settings.lag_s / 2, self._sweep_now)

    def _sweep_now(self) -> None:
        self._sweep = None
        for partition in tuple(self._behind):
            if not partition.has_lagging:
                del self._behind[partition]
            elif self._next_change(partition) is not None:
                self._writer.check_soon(partition)
        self._sweep_later()

    def _next_change(self, partition: Partition) -> InSyncChange | None:
        return partition.in_sync_change(lag_s=self._settings.lag_s, may_join=self._may_join)

    # -- numbers --------------------------------------------------------------------------------------------

    def metrics(self) -> Iterable[Metric]:
        followed = len(self._leader_of)
        yield gauge("millstream_replicas_followed", "Partitions that this node fetches from their leaders.", followed)
        yield from self._repair.metrics()
        yield gauge(
            "millstream_replicas_behind",
            "Partitions that this node leads with an in-sync replica that lags.",
            len(self._behind),
        )
