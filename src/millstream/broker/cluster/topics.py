"""The topics of a node: declared through the catalog, hosted as the coordination store says.

A declaration takes effect once the controller has carried it out and the view shows it, on one node as on many.
Partitions take their roles from the agreed states, but not before the cluster has admitted this node: until then a
state may still refer to an earlier process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import islice
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import election, keys
from millstream.broker.cluster.broker_settings import ALL_NODES, BrokerSettings, check_changes
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.election import Reassignment, elect, elect_preferred
from millstream.broker.cluster.keys import PartitionKey, Placement
from millstream.broker.cluster.new_topics import (
    CreationContext,
    NewTopic,
    check_partitions,
    exists_error,
    metric_name,
    safe_defaults,
)
from millstream.broker.cluster.reconciliation import Declared, count_domains
from millstream.broker.cluster.store import CHANGES_MAX, Change, CoordinationStore, Delete, Expect, Put
from millstream.broker.cluster.topic_metrics import topic_metrics
from millstream.broker.cluster.view import ClusterView, ViewChange
from millstream.broker.log.retention import DeliveryFloor, LandedFloor
from millstream.broker.log.store import LogStore
from millstream.broker.replication.partition import Partition
from millstream.core.backoff import Backoff, delay_after
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import (
    ElectionNotNeeded,
    EligibleUnavailable,
    InvalidAssignment,
    InvalidPartitions,
    InvalidRequest,
    MillstreamError,
    NoReassignment,
    NotLeader,
    PolicyViolation,
    PreferredUnavailable,
    RequestTimedOut,
    StoreUnavailable,
    TopicExists,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.metric import Metric
from millstream.core.partition_state import PartitionState, Versioned, encode_value
from millstream.core.tasks import finish
from millstream.core.topic import AUDIT, Topic, TopicPartition, TopicSettings, check_topic_name

_logger = logging.getLogger(__name__)

AGREEMENT_S = 30.0
"""How long a change waits by default until the cluster has agreed on it."""

_ATTEMPTS_MAX = 5
_OPENED_AT_ONCE = 100
"""Logs that are opened before other tasks get their turn: a node that stalls loses its lease."""

REOPEN_S = 1.0
REOPEN_S_MAX = 60.0
"""How long after a failure a log is opened again, at first and at most."""

_NAMES_SHOWN_MAX = 5
_CLEANUP = "cleanup.policy"
_MIN_IN_SYNC = "min.insync.replicas"

LeadershipListener = Callable[[PartitionIndex, Partition | None], None]
"""Called with the partition while this node leads it, and with None when it no longer does."""


class Topics:
    """Every topic of the cluster, by name and by id, and the partitions that this node hosts."""

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
        self._declarations = declarations
        self._store = store
        self._config = config
        self._clock = clock
        self._new_id = new_id
        self._me = NodeId(config.node_id)
        self._static_defaults = self._defaults = TopicSettings(
            flush=config.topic_flush,
            retention_ms=config.default_retention_ms,
            unclean_leader_election_enable=config.unclean_leader_election,
        )
        self._is_minimum_set = False
        self.broker_settings = BrokerSettings(config)
        """Settings of nodes that were changed while they run; they change the defaults of topics."""
        self.broker_settings.on_change(self._defaults_changed)
        self._by_name: dict[str, Topic] = {}
        self._by_id: dict[UUID, Topic] = {}
        self._by_metric_name: dict[str, str] = {}
        self.with_schema_rules: set[UUID] = set()
        """The topics that name the schemas of their records; while it is empty, producing looks at none."""
        self._partitions: dict[str, list[Partition | None]] = {}
        self._version = 0
        self._deletion_listeners: list[Callable[[Topic], None]] = []
        self._leadership_listeners: dict[str, list[LeadershipListener]] = {}
        # One change of the catalog at a time; readers never wait for it.
        self._changing = asyncio.Lock()
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
        self._declared_listeners: list[Callable[[Declared], None]] = []
        self._role_listeners: list[Callable[[Sequence[Partition]], None]] = []
        self._drop_listeners: list[Callable[[Sequence[Partition]], None]] = []

    async def load(self) -> None:
        """Open what this node hosts according to the first view of the cluster, and follow it from there."""
        # Loaded first, so that no topic is opened with the wrong retention.
        self.broker_settings.apply(self._view.settings)
        for topic in tuple(self._view.topics.values()):
            self._try_apply_topic(topic)
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
        """Assume the assigned roles: the cluster has admitted this node."""
        self._active = True
        self._notify_roles([self._apply_state(partition.topic, partition.index) for partition in tuple(self.hosted())])

    def on_declared(self, listener: Callable[[Declared], None]) -> None:
        self._declared_listeners.append(listener)

    def _notify_declared(self, declared: Declared) -> None:
        for listener in self._declared_listeners:
            listener(declared)

    def on_roles_change(self, listener: Callable[[Sequence[Partition]], None]) -> None:
        self._role_listeners.append(listener)

    def on_dropped(self, listener: Callable[[Sequence[Partition]], None]) -> None:
        self._drop_listeners.append(listener)

    def apply(self, change: ViewChange) -> None:
        if change.settings:
            self.broker_settings.apply(self._view.settings)
        shown: set[UUID] = set()
        changed: list[Partition | None] = []
        for topic_id in change.topics:
            before = self._by_id.get(topic_id)
            if before is not None and topic_id not in self._view.topics:
                self._drop_topic(before)
        for topic_id in change.topics & self._view.topics.keys():
            shown.add(topic_id)
            changed += self._try_apply_topic(self._view.topics[topic_id])
        for topic_id, index in change.partitions:
            topic = self._by_id.get(topic_id)
            if topic is not None and topic_id not in shown and index < topic.partitions:
                changed.append(self._apply_state(topic, index))
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
                while topics := tuple(islice(self._removed, CHANGES_MAX)):
                    await self._coordination.change([Put(keys.done_key(topic, self._me), "") for topic in topics])
                    self._removed.difference_update(topics)
                while partitions := tuple(islice(self._removed_replicas, CHANGES_MAX)):
                    await self._coordination.change([Delete(keys.removed_key(where, self._me)) for where in partitions])
                    self._removed_replicas.difference_update(partitions)
                self._backoff.reset()
            except StoreUnavailable as error:
                _logger.warning("removed files could not be reported yet", extra={"error": str(error)})
                self._removed_some.set()
                await self._backoff.pause()

    @property
    def version(self) -> int:
        """A number that changes whenever a topic is created, grown or deleted; it does not outlive the process."""
        return self._version

    def use_delivery_floor(self, floor: DeliveryFloor) -> None:
        """Limit the retention of topics that keep messages until subscriptions have accepted them, by `floor`."""
        self._store.floors.delivery = floor

    def use_landed_floor(self, floor: LandedFloor) -> None:
        """Limit the retention of topics that keep messages until pipelines have landed them, by `floor`."""
        self._store.floors.landed = floor

    def get(self, name: str) -> Topic | None:
        return self._by_name.get(name)

    def by_id(self, topic_id: UUID) -> Topic | None:
        return self._by_id.get(topic_id)

    def existing(self, names: Iterable[str]) -> list[Topic]:
        """Return the existing topics among these."""
        return [topic for name in names if (topic := self._by_name.get(name)) is not None]

    def all(self) -> list[Topic]:
        """Return every topic, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    @property
    def states_revision(self) -> int:
        """A number that changes whenever the state of a partition does."""
        return self._view.revision

    def partition(self, name: str, index: int) -> Partition:
        partitions = self._partitions.get(name)
        if partitions is not None and 0 <= index < len(partitions):
            partition = partitions[index]
            if partition is not None:
                return partition
        raise self._missing_error(name, index)

    def partition_by_id(self, topic_id: UUID, index: int) -> Partition:
        topic = self._by_id.get(topic_id)
        if topic is None:
            raise UnknownTopicId(f"no topic has the id {topic_id}")
        return self.partition(topic.name, index)

    def may_follow(self, node: NodeId, registration: int) -> bool:
        """Whether a fetch may be a follower's: it must come from the latest registration of that node.

        Liveness does not matter: a node that has just lost its lease continues, but is not waited for.
        """
        return self._view.registrations.get(node) == registration

    def high_watermark(self, name: str, index: int) -> int | None:
        """Return the high watermark of a partition; None if this node does not host it."""
        partitions = self._partitions.get(name, ())
        partition = partitions[index] if 0 <= index < len(partitions) else None
        return None if partition is None else partition.high_watermark

    def partitions_of(self, topic: Topic) -> list[Partition]:
        """Return the partitions of a topic that this node hosts, in order."""
        return [partition for partition in self._partitions[topic.name] if partition is not None]

    def hosted(self) -> Iterable[Partition]:
        for partitions in self._partitions.values():
            for partition in partitions:
                if partition is not None:
                    yield partition

    def led(self) -> Iterable[Partition]:
        return (partition for partition in self.hosted() if partition.is_leader)

    def led_of(self, names: Iterable[str]) -> list[Partition]:
        """Return the partitions of these topics that this node leads."""
        return [replica for topic in self.existing(names) for replica in self.partitions_of(topic) if replica.is_leader]

    def leads_movable_partition(self) -> bool:
        """Whether this node leads a partition that another live node could lead as well."""
        live = self._view.live.keys() - {self._me} - self._view.avoided
        return any(
            versioned.state.leader == self._me and not live.isdisjoint(versioned.state.in_sync)
            for versioned in self._view.states.values()
        )

    def states_of(self, topic: Topic) -> Sequence[PartitionState | None]:
        """Return the state of each partition of a topic, in order; None where it is not agreed on yet."""
        return [None if state is None else state.state for state in self._view.states_of(topic)]

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        """Return the state of one partition; None if it is not agreed on yet."""
        self._check_index(topic, index)
        versioned = self.versioned((topic.topic_id, PartitionIndex(index)))
        return None if versioned is None else versioned.state

    def versioned(self, partition: PartitionKey) -> Versioned | None:
        """Return the state of a partition with the revision that a change of it must name."""
        return self._view.states.get(partition)

    async def confirm_leader(self, partition: Partition, epoch: Epoch) -> None:
        """Raise `NotLeader` if the coordination store names another leader, of which this node may not know yet."""
        key = keys.partition_key((partition.topic.topic_id, PartitionIndex(partition.index)))
        entry = (await self._coordination.read(key)).entries.get(key)
        state = None if entry is None else PartitionState.from_json(entry.value)
        if state is None or (state.leader, state.leader_epoch) != (self._me, epoch):
            raise NotLeader(f"another node may lead {partition.log.partition} by now")

    async def elect(self, topic: Topic, index: int, *, unclean: bool = False) -> None:
        """Elect the preferred replica or, with `unclean`, any replica if no other can lead.

        Any node may do so, because the state is compared before it is changed.
        """

        def elected(key: PartitionKey, state: PartitionState) -> list[Change]:
            return [Put(keys.partition_key(key), encode_value(self._elect_leader(topic, state, unclean=unclean)))]

        await self._change_state(topic, index, elected)

    async def raise_epoch(self, topic: Topic, index: int, epoch: Epoch) -> None:
        """Raise the leader epoch of a partition to this one, unless it is higher already."""
        if self.partition(topic.name, index).leader_epoch >= epoch:
            return

        def raised(key: PartitionKey, state: PartitionState) -> list[Change]:
            later = dataclasses.replace(state, leader_epoch=Epoch(max(state.leader_epoch, epoch)))
            return [Put(keys.partition_key(key), encode_value(later))]

        await self._change_state(topic, index, raised)

    async def reassign(self, topic: Topic, index: int, target: tuple[NodeId, ...] | None) -> None:
        """Begin to move a partition to other nodes, which the controller completes; None cancels a move."""

        def moving(key: PartitionKey, state: PartitionState) -> list[Change]:
            move = self._view.reassignments.get(key)
            if target is None:
                if move is None:
                    raise NoReassignment("the partition is not being moved")
                back = election.narrowed(state, move.before, self._view.live)
                if back is None:
                    raise InvalidAssignment("none of the replicas before the move can lead now")
                return election.end_changes(key, state, back)
            before = move.before if move is not None else state.replicas
            return election.begin_changes(
                key, state, Reassignment(target=target, before=before), self._view.removed.get(key, ())
            )

        await self._change_state(topic, index, moving)

    def reassignments(self) -> Mapping[PartitionKey, Reassignment]:
        return self._view.reassignments

    async def _change_state(
        self, topic: Topic, index: int, decide: Callable[[PartitionKey, PartitionState], list[Change]]
    ) -> None:
        """Change the agreed state of a partition; recompute the change if another node came first."""
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

    def _elect_leader(self, topic: Topic, state: PartitionState, *, unclean: bool) -> PartitionState:
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

    def on_leadership_change(self, name: str, listener: LeadershipListener) -> None:
        """Call `listener` with each partition of a topic that this node leads, now and whenever that changes."""
        self._leadership_listeners.setdefault(name, []).append(listener)
        for partition in self._partitions.get(name, ()):
            if partition is not None and partition.is_leader:
                listener(partition.index, partition)

    def settings_of(self, topic: Topic) -> TopicSettings:
        """Return the settings of a topic: the node's defaults, overridden by the topic's own.

        Settings of nodes changed at run time apply to users' topics, not to the broker's own state.
        """
        is_static = topic.is_internal
        base = self.static_defaults_for(topic.replication) if is_static else self.defaults_for(topic.replication)
        return TopicSettings.from_strings(topic.overrides, base=base)

    def defaults_for(self, replication: int) -> TopicSettings:
        """Return the settings of a topic with this number of replicas and default settings."""
        return self._defaults if self._is_minimum_set else safe_defaults(self._defaults, replication)

    def static_defaults_for(self, replication: int) -> TopicSettings:
        """Return the default settings from the node's configuration alone."""
        return safe_defaults(self._static_defaults, replication)

    def _defaults_changed(self) -> None:
        changed = self.broker_settings.topic_defaults
        self._defaults = TopicSettings.from_strings(changed, base=self._static_defaults)
        self._is_minimum_set = _MIN_IN_SYNC in changed
        known: dict[tuple[object, ...], TopicSettings] = {}
        for topic in self._by_name.values():
            same = (topic.is_internal, topic.replication, *sorted(topic.overrides.items()))
            if same not in known:
                known[same] = self.settings_of(topic)
            for partition in self.partitions_of(topic):
                partition.change_settings(topic, known[same])

    async def alter_broker(
        self,
        scope: str,
        changes: Mapping[str, str | None],
        *,
        replace: bool = False,
        validate_only: bool = False,
    ) -> None:
        """Set some settings of a node, or of all (`ALL_NODES`), durably; None, and `replace` all others, unset them."""
        nodes = sorted(map(str, self._view.registrations))
        if scope != ALL_NODES and scope not in nodes:
            raise InvalidRequest(f"no node has the id {scope!r}; the nodes are {', '.join(nodes)}")
        check_changes(scope, changes)
        if validate_only:
            return
        async with self._changing:
            overrides = await self._declarations.change(Catalog.change_broker_settings, scope, changes, replace=replace)
            self._notify_declared(None)
        await self._broker_agreed(scope, overrides)
        _logger.info("node settings changed", extra={"node": scope or "all", "settings": str(overrides)})

    async def _broker_agreed(self, scope: str, overrides: Mapping[str, str]) -> None:
        before = self._view.settings.get(scope)

        def agreed() -> bool:
            now = self._view.settings.get(scope)
            # It may have been changed again meanwhile.
            return now == overrides or now != before

        await self._view.until(agreed, AGREEMENT_S, what="settings of nodes")

    async def create(
        self,
        name: str,
        *,
        partitions: int = -1,
        replication: int = -1,
        overrides: Mapping[str, str] | None = None,
        internal: bool = False,
        validate_only: bool = False,
        placement: Placement | None = None,
        timeout_s: float = AGREEMENT_S,
    ) -> Topic:
        """Declare a topic durably, then open its partitions. `placement` chooses the replicas."""
        new = NewTopic(
            name=name,
            partitions=partitions,
            replication=replication,
            overrides=overrides or {},
            internal=internal,
            placement=placement,
        )
        [created] = await self.create_all([new], validate_only=validate_only, timeout_s=timeout_s)
        if isinstance(created, MillstreamError):
            raise created
        return created

    async def create_all(
        self, new: Sequence[NewTopic], *, validate_only: bool = False, timeout_s: float = AGREEMENT_S
    ) -> list[Topic | MillstreamError]:
        """Declare topics durably and together, then open their partitions; return each topic, or why it failed."""
        if validate_only:
            return self._creation_terms.declare_all(new)
        # A client that disconnects meanwhile must not leave a topic that only the catalog knows.
        outcomes = await finish(self._add_all(new))
        waiting = {outcome.topic_id: outcome for outcome in outcomes if isinstance(outcome, Topic)}
        timed_out = await self._await_creation(waiting, timeout_s)
        return [
            timed_out
            if timed_out is not None and isinstance(outcome, Topic) and outcome.topic_id in waiting
            else outcome
            for outcome in outcomes
        ]

    async def _add_all(self, new: Sequence[NewTopic]) -> list[Topic | MillstreamError]:
        """Store new topics in the catalog, and notify the controller."""
        has_ids = any(new_topic.topic_id is not None for new_topic in new)
        deleted = await self._declarations.call(Catalog.deleted_topic_ids) if has_ids else ()
        async with self._changing:
            outcomes = self._creation_terms.declare_all(new, deleted)
            declared = [outcome for outcome in outcomes if isinstance(outcome, Topic)]
            placed = [
                (outcome.topic_id, new_topic.placement)
                for new_topic, outcome in zip(new, outcomes, strict=True)
                if isinstance(outcome, Topic) and new_topic.placement
            ]
            for topic_id, placement in placed:
                await self._store_placement(topic_id, placement)
            added = await self._declarations.change(Catalog.add_topics, declared) if declared else ()
            for topic in declared:
                if topic.topic_id in added:
                    self._notify_declared(topic)
        return [
            exists_error(outcome.name) if isinstance(outcome, Topic) and outcome.topic_id not in added else outcome
            for outcome in outcomes
        ]

    async def _await_creation(self, waiting: dict[UUID, Topic], timeout_s: float) -> RequestTimedOut | None:
        """Wait until the cluster has agreed on new topics; those that time out remain in `waiting`."""

        def agreed() -> bool:
            for topic in [topic for topic_id, topic in waiting.items() if topic_id in self._by_id]:
                del waiting[topic.topic_id]
                _logger.info("topic created", extra={"topic": topic.name, "partitions": topic.partitions})
            return not waiting

        what = ", ".join(repr(topic.name) for topic in islice(waiting.values(), _NAMES_SHOWN_MAX))
        try:
            await self._view.until(agreed, timeout_s, what=f"topic {what}")
        except RequestTimedOut as error:
            return error
        return None

    async def ensure(self, name: str) -> Topic:
        """Return the topic with this name; create it if it is missing and the configuration allows that."""
        topic = self._by_name.get(name)
        if topic is not None:
            return topic
        check_topic_name(name)
        if not self._config.auto_create_topics:
            raise UnknownTopic(f"topic {name!r} does not exist, and auto-create-topics is off")
        try:
            return await self.create(name)
        except TopicExists:
            await self._view.until(lambda: name in self._by_name, AGREEMENT_S, what=f"topic {name!r}")
            return self._by_name[name]

    async def delete(self, name: str, *, timeout_s: float = AGREEMENT_S) -> None:
        """Delete a topic and its data. The deletion record comes first, so that a crash cannot bring it back."""
        [outcome] = await self.delete_all([name], timeout_s=timeout_s)
        if isinstance(outcome, MillstreamError):
            raise outcome

    async def delete_all(
        self, named: Sequence[str | Topic], *, timeout_s: float = AGREEMENT_S
    ) -> list[Topic | MillstreamError]:
        """Delete topics together; return each deleted topic, or why it was not deleted."""
        outcomes = await finish(self._delete_declared(named))
        waiting = {outcome.topic_id for outcome in outcomes if isinstance(outcome, Topic)}

        def agreed() -> bool:
            waiting.intersection_update(self._by_id)
            return not waiting

        what = ", ".join(repr(name if isinstance(name, str) else name.name) for name in named[:_NAMES_SHOWN_MAX])
        try:
            await self._view.until(agreed, timeout_s, what=f"the deletion of topic {what}")
        except RequestTimedOut as error:
            return [
                error if isinstance(outcome, Topic) and outcome.topic_id in waiting else outcome for outcome in outcomes
            ]
        return outcomes

    async def _delete_declared(self, named: Sequence[str | Topic]) -> list[Topic | MillstreamError]:
        outcomes: list[Topic | MillstreamError] = []
        async with self._changing:
            for requested in named:
                try:
                    name = requested if isinstance(requested, str) else requested.name
                    topic = self._require(name)
                    if isinstance(requested, Topic) and requested.topic_id != topic.topic_id:
                        raise UnknownTopicId(
                            f"topic {name!r} with id {requested.topic_id} was deleted and created again"
                        )
                    if topic.is_internal:
                        raise PolicyViolation(f"topic {name!r} holds the broker's own state and cannot be deleted")
                    outcomes.append(topic)
                except MillstreamError as error:
                    outcomes.append(error)
            to_delete = [outcome for outcome in outcomes if isinstance(outcome, Topic)]
            now_ms = self._clock.now_ms()
            deleted = (
                await self._declarations.change(Catalog.delete_topics, to_delete, now_ms=now_ms) if to_delete else ()
            )
            for topic_id in deleted:
                self._notify_declared(topic_id)
        return [
            UnknownTopic(f"topic {outcome.name!r} is not in the catalog")
            if isinstance(outcome, Topic) and outcome.topic_id not in deleted
            else outcome
            for outcome in outcomes
        ]

    def on_deletion(self, listener: Callable[[Topic], None]) -> None:
        self._deletion_listeners.append(listener)

    async def add_partitions(
        self,
        name: str,
        total: int,
        *,
        validate_only: bool = False,
        placement: Placement | None = None,
        timeout_s: float = AGREEMENT_S,
    ) -> Topic:
        """Grow a topic to `total` partitions; it never shrinks."""

        def grow(topic: Topic) -> Topic:
            if total <= topic.partitions:
                raise InvalidPartitions(
                    f"topic {name!r} has {topic.partitions} partitions; ask for more than that, not {total}"
                )
            check_partitions(total)
            return dataclasses.replace(topic, partitions=total)

        return await self._change(name, grow, placement, validate_only=validate_only, timeout_s=timeout_s)

    async def alter(
        self,
        name: str,
        changes: Mapping[str, str | None],
        *,
        replace: bool = False,
        internal: bool = False,
        validate_only: bool = False,
        timeout_s: float = AGREEMENT_S,
    ) -> Topic:
        """Set some of a topic's settings; None resets a setting to the node's default, `replace` all others."""
        if name == AUDIT and not internal:
            raise PolicyViolation(f"topic {name!r} is append-only; set how long it is kept with audit-retention-ms")

        def altered(topic: Topic) -> Topic:
            overrides = {} if replace else dict(topic.overrides)
            for setting_name, text in changes.items():
                if text is None:
                    overrides.pop(setting_name, None)
                else:
                    overrides[setting_name] = text
            if topic.is_internal and overrides.get(_CLEANUP) != topic.overrides.get(_CLEANUP):
                raise PolicyViolation(f"topic {name!r} holds the broker's own state; its {_CLEANUP} cannot be changed")
            TopicSettings.from_strings(overrides, base=self._defaults)
            return dataclasses.replace(topic, overrides=overrides)

        return await self._change(name, altered, validate_only=validate_only, timeout_s=timeout_s)

    async def set_mirror(self, name: str, mirror: str, *, is_draining: bool = False) -> Topic:
        """Allow only a mirror to write a topic, which has the same id at its source; without a name, allow clients."""

        def changed(topic: Topic) -> Topic:
            original_id = topic.topic_id if mirror else None
            return dataclasses.replace(topic, mirror=mirror, is_draining=is_draining, original_id=original_id)

        return await self._change(name, changed)

    async def declared(self) -> list[Topic]:
        """Return every topic as the catalog has it; this node may not know of the last changes yet."""
        return await self._declarations.call(Catalog.topics)

    async def set_origins(self, name: str, origins: tuple[str, ...], original_id: UUID | None) -> Topic:
        """Record the clusters from which the records of a copy came, and the original topic."""
        changed = partial(dataclasses.replace, origins=origins, original_id=original_id)
        return await self._change(name, changed)

    async def await_revision(self, revision: int, timeout_s: float = AGREEMENT_S) -> None:
        """Wait until this node knows the cluster's state as of a revision."""
        await self._view.until_revision(revision, timeout_s, what=f"revision {revision}")

    async def await_mirror(self, topic_ids: Collection[UUID], mirror: str) -> None:
        """Wait until this node knows that a mirror writes topics."""

        def known() -> bool:
            topics = (self._by_id.get(topic_id) for topic_id in topic_ids)
            return all(topic is None or topic.mirror == mirror for topic in topics)

        await self._view.until(known, AGREEMENT_S, what=f"mirror {mirror!r}")

    async def _change(
        self,
        name: str,
        change: Callable[[Topic], Topic],
        placement: Placement | None = None,
        *,
        validate_only: bool = False,
        timeout_s: float = AGREEMENT_S,
    ) -> Topic:
        async with self._changing:
            before = self._require(name)
            after = change(before)
            if validate_only:
                return after
            await self._store_placement(before.topic_id, placement)
            changed = await self._declarations.change(Catalog.alter_topic, before.topic_id, change)
            self._notify_declared(changed)
        await self._await_agreement(changed, before=before, timeout_s=timeout_s)
        return changed

    def metrics(self) -> Iterable[Metric]:
        return topic_metrics(self, self._clock.now_ms())

    def without_leader(self) -> int:
        return sum(not versioned.state.has_leader for versioned in self._view.states.values())

    def under_min_in_sync(self) -> int:
        """Return the number of partitions led by this node that refuse `acks=all`."""
        return sum(partition.is_under_min_in_sync for partition in self.led())

    def close(self) -> None:
        """Close every partition; waiting producers get an error."""
        for partition in self.hosted():
            partition.close()

    # -- waiting for the cluster to agree on a declaration --------------------------------------------------

    @property
    def _creation_terms(self) -> CreationContext:
        return CreationContext(
            names=self._by_name,
            metric_names=self._by_metric_name,
            config=self._config,
            defaults=self._defaults,
            failure_domains=count_domains(self._view.live.values()),
            new_id=self._new_id,
            now_ms=self._clock.now_ms(),
        )

    async def _store_placement(self, topic_id: UUID, placement: Placement | None) -> None:
        if placement:
            await self._coordination.change([Put(keys.placement_key(topic_id), encode_value(placement))])

    async def _await_agreement(self, topic: Topic, *, before: Topic, timeout_s: float) -> None:
        def agreed() -> bool:
            now = self._by_id.get(topic.topic_id)
            # It may have been changed again meanwhile, or deleted.
            return now == topic or now != before

        await self._view.until(agreed, timeout_s, what=f"topic {topic.name!r}")

    def _remove_leftovers(self, topic_id: UUID, only: int | None = None) -> None:
        """Complete the deletion of a topic or of one partition that a crash interrupted."""
        for stored_id, index in tuple(self._store.stored()):
            if stored_id == topic_id and only in (None, index):
                log = self._store.open_log(topic_id, TopicPartition(f"deleted-{topic_id}", index), self._defaults)
                self._store.delete_log(log, topic_remains=only is not None)

    def _require(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise UnknownTopic(f"topic {name!r} does not exist")
        return topic

    def _check_index(self, topic: Topic, index: int) -> None:
        if not 0 <= index < topic.partitions:
            raise UnknownTopic(f"topic {topic.name!r} has {topic.partitions} partitions, but no partition {index}")

    def _missing_error(self, name: str, index: int) -> MillstreamError:
        """Return why this node has no such partition."""
        try:
            self._check_index(self._require(name), index)
        except UnknownTopic as error:
            return error
        return NotLeader(f"this node does not host partition {index} of topic {name!r}")

    def _warn_of_unknown_partitions(self, known: Iterable[UUID]) -> None:
        unknown = {topic_id for topic_id, _ in self._store.stored()} - set(known)
        if unknown:
            _logger.warning(
                "the data folder holds partitions that the catalog does not know; they are left unchanged",
                extra={"topic_ids": ", ".join(sorted(map(str, unknown))[:_NAMES_SHOWN_MAX]), "count": len(unknown)},
            )

    # -- hosted partitions ----------------------------------------------------------------------------------

    def _register(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._by_id[topic.topic_id] = topic
        self._by_metric_name[metric_name(topic.name)] = topic.name
        if topic.has_schema_rule:
            self.with_schema_rules.add(topic.topic_id)
        else:
            self.with_schema_rules.discard(topic.topic_id)

    def _apply_topic(self, topic: Topic) -> None:
        """Apply a topic that is new, has grown or has other settings."""
        before = self._by_id.get(topic.topic_id)
        settings = self.settings_of(topic)
        partitions = self._partitions.setdefault(topic.name, [])
        self._register(topic)
        if before is None or before.partitions != topic.partitions:
            self._version += 1
        for partition in partitions:
            if partition is not None:
                partition.change_settings(topic, settings)
                if before is not None and before.mirror != topic.mirror:
                    self._notify_leadership(partition)
        # A partition begins with the first state that names this node.
        partitions += [None] * (topic.partitions - len(partitions))

    def _try_apply_topic(self, topic: Topic) -> list[Partition | None]:
        try:
            self._apply_topic(topic)
        except MillstreamError as error:
            # The disk fails, or a newer version wrote the settings: other topics continue.
            _logger.error("a topic cannot be hosted", extra={"topic": topic.name, "error": str(error)})
            return []
        return [self._apply_state(topic, PartitionIndex(number)) for number in range(topic.partitions)]

    def _apply_state(self, topic: Topic, index: PartitionIndex) -> Partition | None:
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
        # Also if nothing changes: a change of the in-sync set may already have given the partition its role.
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
                self._schedule_reopen(topic, index, error)
                continue
            self._open_failures.pop((topic_id, index), None)
            changed.append(self._apply_state(topic, index))
        self._notify_roles(changed)
        if self._unopened:
            self._unopened_some.set()

    def _schedule_reopen(self, topic: Topic, index: PartitionIndex, error: MillstreamError) -> None:
        """Retry to open a log after a while, longer each time; the disk may be full, for example."""
        key = topic.topic_id, index
        failures = self._open_failures.get(key, 0)
        self._open_failures[key] = failures + 1
        _logger.log(
            logging.DEBUG if failures else logging.ERROR,
            "a partition cannot be opened; it is retried",
            extra={"topic": topic.name, "partition": index, "error": str(error)},
        )
        pause_s = delay_after(failures, first_s=REOPEN_S, max_s=REOPEN_S_MAX)
        asyncio.get_running_loop().call_later(pause_s, self._reopen, key)

    def _reopen(self, key: PartitionKey) -> None:
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

    def _drop_topic(self, topic: Topic) -> None:
        """Drop a topic that is no longer agreed on. Its files are removed only by its deletion record."""
        if topic.topic_id in self._view.deleted:
            self._delete_hosted(topic)
        else:
            _logger.error(
                "a topic disappeared without a deletion record; its files are kept", extra={"topic": topic.name}
            )
            for partition in self._close_topic(topic):
                self._store.close_log(partition.log)
        self._notify_deleted(topic)

    def _remove_files(self, topic_id: UUID) -> None:
        deletion = self._view.deleted.get(topic_id)
        if deletion is None or self._me not in deletion.replicas or self._me in self._view.done.get(topic_id, ()):
            return
        try:
            self._remove_leftovers(topic_id)
        except MillstreamError as error:
            _logger.error(
                "the files of a deleted topic could not be removed", extra={"topic": deletion.name, "error": str(error)}
            )
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
                self._store.delete_log(partition.log, topic_remains=True)
            else:
                self._remove_leftovers(key[0], key[1])
        except MillstreamError as error:
            _logger.error(
                "the files of a partition could not be removed", extra={"topic_id": str(key[0]), "error": str(error)}
            )
            return
        self._removed_replicas.add(key)
        self._removed_some.set()

    def _delete_hosted(self, topic: Topic) -> None:
        """Close and delete what this node hosts of a deleted topic."""
        for partition in self._close_topic(topic):
            self._store.delete_log(partition.log)

    def _close_topic(self, topic: Topic) -> list[Partition]:
        """Close what this node hosts of a topic and forget it; return the partitions."""
        hosted = self.partitions_of(topic)
        del self._by_id[topic.topic_id]
        self.with_schema_rules.discard(topic.topic_id)
        del self._by_name[topic.name]
        del self._by_metric_name[metric_name(topic.name)]
        del self._partitions[topic.name]
        self._version += 1
        for partition in hosted:
            partition.close()
            self._notify_leadership(partition)
        for listener in self._drop_listeners:
            listener(hosted)
        return hosted

    def _notify_deleted(self, topic: Topic) -> None:
        for listener in self._deletion_listeners:
            listener(topic)

    def _notify_leadership(self, partition: Partition) -> None:
        for listener in self._leadership_listeners.get(partition.topic.name, ()):
            listener(partition.index, partition if partition.is_leader else None)
