"""The topics of a node in a cluster: declared through the catalog, hosted as the coordination store says.

Partitions take their roles from the agreed states, but not before the cluster has admitted this node: until then a
state may still refer to an earlier process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from uuid import UUID

from millstream.broker.cluster import keys
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.election import elect, elect_preferred
from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.cluster.reassignment import Reassignment, begin_changes, end_changes, narrowed
from millstream.broker.cluster.store import Change, CoordinationStore, Delete, Expect, Put
from millstream.broker.cluster.store_values import Placement, placement_to_json
from millstream.broker.cluster.topics import AGREEMENT_S, Topics
from millstream.broker.cluster.view import ClusterView, ViewChange
from millstream.broker.log.store import LogStore
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff, delay_after
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import (
    ElectionNotNeeded,
    EligibleUnavailable,
    InvalidAssignment,
    MillstreamError,
    NoReassignment,
    PreferredUnavailable,
    RequestTimedOut,
    StoreUnavailable,
)
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.metric import Metric, gauge
from millstream.core.partition_state import PartitionState, Versioned
from millstream.core.topic import Topic, TopicPartition, TopicSettings

_logger = logging.getLogger(__name__)

_ATTEMPTS_MAX = 5
_OPENED_AT_ONCE = 100
"""Logs that are opened before other tasks get their turn: a node that stalls loses its lease."""

OPEN_AGAIN_S = 1.0
OPEN_AGAIN_S_MAX = 60.0
"""How long after a failure a log is opened again, at first and at most."""


class ClusterTopics(Topics):
    """Every topic of the cluster, and the partitions that this node hosts."""

    def __init__(
        self,
        declarations: Declarations,
        store: LogStore,
        config: Config,
        clock: Clock,
        *,
        view: ClusterView,
        coordination: CoordinationStore,
        backoff: Backoff,
        new_id: Callable[[], UUID],
    ) -> None:
        super().__init__(declarations, store, config, clock, new_id=new_id)
        self._view = view
        self._coordination = coordination
        self._backoff = backoff
        self._active = False
        self._removed: set[UUID] = set()
        self._removed_replicas: set[PartitionKey] = set()
        self._removed_some = asyncio.Event()
        self._unopened: dict[PartitionKey, None] = {}
        self._unopened_some = asyncio.Event()
        self._open_failures: dict[PartitionKey, int] = {}
        self._role_listeners: list[Callable[[Sequence[Partition]], None]] = []
        self._drop_listeners: list[Callable[[Sequence[Partition]], None]] = []

    async def load(self) -> None:
        """Open what this node hosts according to the first view of the cluster, and follow it from there."""
        # First: no topic is opened with another retention than was set for it.
        self.broker_settings.show(self._view.settings)
        for topic in tuple(self._view.topics.values()):
            self._take_topic(topic)
            while self._unopened:
                self._open_some()
                await asyncio.sleep(0)
        for topic_id in tuple(self._view.deleted):
            self._remove_files(topic_id)
        for partition in tuple(self._view.removed):
            self._remove_replica(partition)
        # After a rebuild, a topic appears when the controller has created its lost partitions.
        placed = {topic_id for topic_id, _ in self._view.states}
        self._warn_of_unknown_partitions({*self._view.topics, *self._view.deleted, *placed})
        self._view.listen(self.apply)

    def activate(self) -> None:
        """Take the roles that the cluster has given this node: it was admitted."""
        self._active = True
        self._notify_roles([self._take_state(one.topic, one.index) for one in tuple(self.hosted())])

    def on_roles_change(self, listener: Callable[[Sequence[Partition]], None]) -> None:
        """Call `listener` with the partitions here whose agreed state has changed."""
        self._role_listeners.append(listener)

    def on_dropped(self, listener: Callable[[Sequence[Partition]], None]) -> None:
        """Call `listener` with partitions that are no longer hosted here."""
        self._drop_listeners.append(listener)

    def apply(self, change: ViewChange) -> None:
        if change.settings:
            self.broker_settings.show(self._view.settings)
        shown: set[UUID] = set()
        changed: list[Partition | None] = []
        for topic_id in change.topics:
            before = self._by_id.get(topic_id)
            if before is not None and topic_id not in self._view.topics:
                self._drop_topic(before)
        for topic_id in change.topics & self._view.topics.keys():
            shown.add(topic_id)
            changed += self._take_topic(self._view.topics[topic_id])
        for topic_id, index in change.partitions:
            topic = self._by_id.get(topic_id)
            if topic is not None and topic_id not in shown and index < topic.partitions:
                changed.append(self._take_state(topic, index))
        self._notify_roles(changed)
        self._open_some()
        for topic_id in change.deleted:
            self._remove_files(topic_id)
        for partition in change.moved | change.partitions:
            self._remove_replica(partition)

    async def open_logs(self) -> None:
        """Open the logs of new partitions, some at a time so that the loop stays responsive; runs forever."""
        while True:
            await self._unopened_some.wait()
            self._unopened_some.clear()
            while self._unopened:
                self._open_some()
                await asyncio.sleep(0)

    async def report_removed(self) -> None:
        """Report which deleted topics have no files here any more; runs forever."""
        while True:
            await self._removed_some.wait()
            self._removed_some.clear()
            try:
                for topic_id in tuple(self._removed):
                    await self._coordination.change([Put(keys.done_key(topic_id, self._me), "")])
                    self._removed.discard(topic_id)
                for partition in tuple(self._removed_replicas):
                    await self._coordination.change([Delete(keys.removed_key(partition, self._me))])
                    self._removed_replicas.discard(partition)
                self._backoff.reset()
            except StoreUnavailable as error:
                _logger.warning("removed files could not be reported yet", extra={"error": str(error)})
                self._removed_some.set()
                await self._backoff.pause()

    def states_of(self, topic: Topic) -> Sequence[PartitionState | None]:
        """Return the state of each partition of a topic, in order; None where it is not agreed on yet."""
        return [None if one is None else one.state for one in self._view.states_of(topic)]

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        """Return the state of one partition; None if it is not agreed on yet."""
        self._check_index(topic, index)
        versioned = self.versioned((topic.topic_id, PartitionIndex(index)))
        return None if versioned is None else versioned.state

    def versioned(self, partition: PartitionKey) -> Versioned | None:
        """Return the state of a partition with the revision that a change of it must name."""
        return self._view.states.get(partition)

    async def elect(self, topic: Topic, index: int, *, unclean: bool = False) -> None:
        """Let the preferred replica lead or, with `unclean`, any replica if no other can.

        Any node may do so, because the state is compared before it is changed.
        """

        def elected(key: PartitionKey, state: PartitionState) -> list[Change]:
            return [Put(keys.partition_key(key), self._elected(topic, state, unclean=unclean).to_json())]

        await self._change_state(topic, index, elected)

    async def raise_epoch(self, topic: Topic, index: int, epoch: Epoch) -> None:
        """Let the leader of a partition lead in this epoch, unless it is in a later one already."""
        if self.partition(topic.name, index).leader_epoch >= epoch:
            return

        def raised(key: PartitionKey, state: PartitionState) -> list[Change]:
            later = dataclasses.replace(state, leader_epoch=Epoch(max(state.leader_epoch, epoch)))
            return [Put(keys.partition_key(key), later.to_json())]

        await self._change_state(topic, index, raised)

    async def reassign(self, topic: Topic, index: int, target: tuple[NodeId, ...] | None) -> None:
        """Begin to move a partition to other nodes, which the controller completes; None cancels a move."""

        def moving(key: PartitionKey, state: PartitionState) -> list[Change]:
            move = self._view.reassignments.get(key)
            if target is None:
                if move is None:
                    raise NoReassignment("the partition is not being moved")
                back = narrowed(state, move.before, self._view.live)
                if back is None:
                    raise InvalidAssignment("none of the replicas before the move can lead now")
                return end_changes(key, state, back)
            before = move.before if move is not None else state.replicas
            return begin_changes(
                key, state, Reassignment(target=target, before=before), self._view.removed.get(key, ())
            )

        await self._change_state(topic, index, moving)

    def reassignments(self) -> Mapping[PartitionKey, Reassignment]:
        return self._view.reassignments

    async def _change_state(
        self, topic: Topic, index: int, decide: Callable[[PartitionKey, PartitionState], list[Change]]
    ) -> None:
        """Change the agreed state of a partition, computed again if another node was faster."""
        self._check_index(topic, index)
        key = topic.topic_id, PartitionIndex(index)
        for _ in range(_ATTEMPTS_MAX):
            versioned = self.versioned(key)
            if versioned is None:
                raise EligibleUnavailable("the partition has no state yet")
            changes = decide(key, versioned.state)
            expected = Expect(keys.partition_key(key), versioned.revision)
            revision = await self._coordination.change(changes, [expected])
            seen = versioned.revision + 1 if revision is None else revision
            await self._view.until(partial(self._has_seen, key, seen), AGREEMENT_S, what=f"{topic.name}-{index}")
            if revision is not None:
                return
        raise RequestTimedOut("the partition changes too often; try again")

    def _elected(self, topic: Topic, state: PartitionState, *, unclean: bool) -> PartitionState:
        live = self._view.live
        if unclean:
            if state.leader in live:
                raise ElectionNotNeeded("the partition has a leader")
            elected = elect(state, live, min_in_sync=self.settings_of(topic).min_insync_replicas, unclean=True)
            if elected is None or not elected.has_leader:
                raise EligibleUnavailable("no replica of the partition is alive")
            return elected
        if state.leader == state.preferred and state.leader in live:
            raise ElectionNotNeeded("the partition is led by its preferred replica")
        preferred = elect_preferred(state, live.keys() - self._view.avoided)
        if preferred is None:
            raise PreferredUnavailable(f"the preferred replica, node {state.preferred}, is down or not in sync")
        return preferred

    def _has_seen(self, partition: PartitionKey, revision: int) -> bool:
        versioned = self._view.states.get(partition)
        return versioned is None or versioned.revision >= revision

    def may_follow(self, node: NodeId, registration: int) -> bool:
        """Whether a fetch may be that of a follower: from the process that registered last as this node.

        Liveness does not matter: a node that has just lost its lease continues, and is not waited for.
        """
        return self._view.registrations.get(node) == registration

    def led(self) -> Iterable[Partition]:
        """Return the partitions that this node leads."""
        return (partition for partition in self.hosted() if partition.is_leader)

    def leads_movable_partition(self) -> bool:
        """Whether this node leads a partition that another live node could lead as well."""
        live = self._view.live.keys() - {self._me} - self._view.avoided
        return any(
            versioned.state.leader == self._me and not live.isdisjoint(versioned.state.in_sync)
            for versioned in self._view.states.values()
        )

    def metrics(self) -> Iterable[Metric]:
        yield from super().metrics()
        led = list(self.led())
        states = [partition.state for partition in led if partition.state is not None]
        under_replicated = sum(len(state.in_sync) < len(state.replicas) for state in states)
        yield gauge("millstream_partitions_led", "Partitions that this node leads.", len(led))
        yield gauge(
            "millstream_partitions_under_replicated",
            "Partitions that this node leads with a replica out of sync.",
            under_replicated,
        )
        yield gauge(
            "millstream_partitions_under_min_in_sync",
            "Partitions that this node leads and that refuse acks=all.",
            self.under_min_in_sync(),
        )
        yield gauge(
            "millstream_partitions_without_leader", "Partitions of the cluster without a leader.", self.without_leader()
        )

    def without_leader(self) -> int:
        """Return how many partitions of the cluster have no leader."""
        return sum(not versioned.state.has_leader for versioned in self._view.states.values())

    def under_min_in_sync(self) -> int:
        """Return how many partitions that this node leads refuse `acks=all`."""
        return sum(partition.is_under_min_in_sync for partition in self.led())

    # -- when a declaration takes effect: once all nodes have agreed ----------------------------------------

    def _replication_max(self) -> int:
        return len(self._view.live)

    async def _place(self, topic_id: UUID, placement: Placement | None) -> None:
        if placement:
            await self._coordination.change([Put(keys.placement_key(topic_id), placement_to_json(placement))])

    def _node_ids(self) -> Iterable[NodeId]:
        return self._view.registrations.keys()

    async def _broker_declared(self) -> None:
        """Do nothing: the controller acts on the announcement, and the view shows the result."""

    async def _broker_agreed(self, scope: str, overrides: Mapping[str, str], timeout_s: float) -> None:
        before = self._view.settings.get(scope)

        def agreed() -> bool:
            now = self._view.settings.get(scope)
            # It may have been changed again meanwhile.
            return now == overrides or now != before

        await self._view.until(agreed, timeout_s, what="settings of nodes")

    def _declared(self, topic: Topic) -> None:
        """Do nothing: the controller acts on the announcement, and the view shows the result."""

    async def _await_agreement(self, topic: Topic, *, before: Topic | None, timeout_s: float) -> None:
        def agreed() -> bool:
            now = self._by_id.get(topic.topic_id)
            if now is None:
                return before is not None
            # It may have been changed again meanwhile.
            return now in (topic, None) or (before is not None and now != before)

        await self._view.until(agreed, timeout_s, what=f"topic {topic.name!r}")

    async def _await_topic(self, name: str) -> Topic:
        await self._view.until(lambda: name in self._by_name, AGREEMENT_S, what=f"topic {name!r}")
        return self._by_name[name]

    async def _deleted(self, topic: Topic) -> None:
        """Do nothing: the files are removed when the view shows the deletion."""

    async def _await_deletion(self, topic: Topic, timeout_s: float) -> None:
        await self._view.until(
            lambda: topic.topic_id not in self._by_id, timeout_s, what=f"the deletion of topic {topic.name!r}"
        )

    # -- the view -------------------------------------------------------------------------------------------

    def _take_topic(self, topic: Topic) -> list[Partition | None]:
        try:
            self._apply_topic(topic)
        except MillstreamError as error:
            # The disk fails, or a newer version wrote the settings: other topics continue.
            _logger.error("a topic cannot be hosted", extra={"topic": topic.name, "error": str(error)})
            return []
        return [self._take_state(topic, PartitionIndex(number)) for number in range(topic.partitions)]

    def _open_partition(self, topic: Topic, index: PartitionIndex, settings: TopicSettings) -> None:
        """Do nothing: a partition begins with the first state that names this node."""

    def _take_state(self, topic: Topic, index: PartitionIndex) -> Partition | None:
        """Apply the agreed state of a partition; return it if it is hosted here and has a role."""
        versioned = self._view.states.get((topic.topic_id, index))
        if versioned is None:
            return None
        partition = self._partitions[topic.name][index]
        if partition is None:
            if self._me in versioned.state.replicas:
                self._unopened[topic.topic_id, index] = None
            return None
        if not self._active:
            return None
        partition.apply(versioned, me=self._me)
        # Also if this changes nothing: a change of the in-sync set may have given the partition its role before.
        self._notify_leadership(partition)
        return partition

    def _open_some(self) -> None:
        """Open some of the logs that are not open yet, and let their partitions take their roles."""
        changed = []
        for topic_id, index in tuple(islice(self._unopened, _OPENED_AT_ONCE)):
            del self._unopened[topic_id, index]
            topic = self._by_id.get(topic_id)
            if topic is None or self._partitions[topic.name][index] is not None:
                continue
            try:
                self._open(topic, index)
            except MillstreamError as error:
                self._open_later(topic, index, error)
                continue
            self._open_failures.pop((topic_id, index), None)
            changed.append(self._take_state(topic, index))
        self._notify_roles(changed)
        if self._unopened:
            self._unopened_some.set()

    def _open_later(self, topic: Topic, index: PartitionIndex, error: MillstreamError) -> None:
        """Retry to open a log after a while, longer each time; the disk may be full, for example."""
        key = topic.topic_id, index
        failures = self._open_failures.get(key, 0)
        self._open_failures[key] = failures + 1
        _logger.log(
            logging.DEBUG if failures else logging.ERROR,
            "a partition cannot be opened; it is retried",
            extra={"topic": topic.name, "partition": index, "error": str(error)},
        )
        pause_s = delay_after(failures, first_s=OPEN_AGAIN_S, max_s=OPEN_AGAIN_S_MAX)
        asyncio.get_running_loop().call_later(pause_s, self._open_again, key)

    def _open_again(self, key: PartitionKey) -> None:
        topic, versioned = self._by_id.get(key[0]), self._view.states.get(key)
        if topic is None or versioned is None or self._me not in versioned.state.replicas:
            self._open_failures.pop(key, None)
            return
        self._unopened[key] = None
        self._unopened_some.set()

    def _notify_roles(self, partitions: Iterable[Partition | None]) -> None:
        changed = [partition for partition in partitions if partition is not None]
        if changed:
            for listener in self._role_listeners:
                listener(changed)

    def _open(self, topic: Topic, index: PartitionIndex) -> Partition:
        where = TopicPartition(topic.name, index)
        log = self._store.open_log(topic.topic_id, where, self.settings_of(topic))
        partition = Partition(topic, index, log, self._store, alone=False, clock=self._clock)
        self._partitions[topic.name][index] = partition
        return partition

    def _close(self, topic: Topic) -> list[Partition]:
        hosted = super()._close(topic)
        for listener in self._drop_listeners:
            listener(hosted)
        return hosted

    def _drop_topic(self, topic: Topic) -> None:
        """Drop a topic that is no longer agreed on. Its files are removed only by its deletion record."""
        if topic.topic_id in self._view.deleted:
            self._forget(topic)
        else:
            _logger.error("a topic disappeared without a deletion record; its files stay", extra={"topic": topic.name})
            for partition in self._close(topic):
                self._store.close_log(partition.log)
        self._notify_deleted(topic)

    def _remove_files(self, topic_id: UUID) -> None:
        deletion = self._view.deleted.get(topic_id)
        if deletion is None or self._me not in deletion.replicas or self._me in self._view.done.get(topic_id, ()):
            return
        try:
            self._remove_leftovers(topic_id)
        except MillstreamError as error:
            _logger.error("a deleted topic's files stay", extra={"topic": deletion.name, "error": str(error)})
            return
        self._removed.add(topic_id)
        self._removed_some.set()

    def _remove_replica(self, key: PartitionKey) -> None:
        """Remove the files of a partition that this node no longer hosts, if it was asked to."""
        versioned = self._view.states.get(key)
        if self._me not in self._view.removed.get(key, ()) or (
            versioned is not None and self._me in versioned.state.replicas
        ):
            return
        topic = self._by_id.get(key[0])
        partition = self._partitions[topic.name][key[1]] if topic is not None else None
        try:
            if topic is not None and partition is not None:
                self._partitions[topic.name][key[1]] = None
                partition.close()
                self._notify_leadership(partition)
                for listener in self._drop_listeners:
                    listener([partition])
                self._store.delete_log(partition.log)
            else:
                self._remove_leftovers(key[0], key[1])
        except MillstreamError as error:
            _logger.error("files of a partition stay", extra={"topic_id": str(key[0]), "error": str(error)})
            return
        self._removed_replicas.add(key)
        self._removed_some.set()
