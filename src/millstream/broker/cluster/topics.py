"""The topics of a node: the declared topics, joined with the partitions that it hosts.

This is the single node, where a declaration takes effect as soon as the catalog has it; `cluster_topics` is the node of
a cluster, which waits until all nodes have agreed.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import uuid
from collections.abc import Callable, Iterable, Mapping, Sequence
from uuid import UUID

from millstream.broker.cluster.broker_settings import ALL_NODES, BrokerSettings, check_changes
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.cluster.reassignment import Reassignment
from millstream.broker.cluster.store_values import Placement
from millstream.broker.log.retention import DeliveryFloor, LandedFloor, held_bytes
from millstream.broker.log.store import LogStore
from millstream.broker.replication.partition import Partition
from millstream.core.clock import Clock
from millstream.core.config import Config
from millstream.core.errors import (
    ElectionNotNeeded,
    InvalidPartitions,
    InvalidReplication,
    InvalidRequest,
    InvalidTopicName,
    MillstreamError,
    NoReassignment,
    NotLeader,
    PolicyViolation,
    TopicExists,
    UnknownTopic,
    UnknownTopicId,
)
from millstream.core.ids import Epoch, NodeId, PartitionIndex
from millstream.core.metric import Metric, Sample, gauge
from millstream.core.partition_state import PartitionState, sole
from millstream.core.tasks import finish
from millstream.core.topic import AUDIT, INTERNAL_TOPICS, Topic, TopicPartition, TopicSettings, check_topic_name

_logger = logging.getLogger(__name__)

PARTITIONS_MAX = 10_000
AGREEMENT_S = 30.0
"""How long a change waits by default until the cluster has agreed on it."""

_NAMES_SHOWN_MAX = 5
_CLEANUP = "cleanup.policy"
_MIN_IN_SYNC = "min.insync.replicas"
_SAFE_REPLICATION = 3
_SAFE_IN_SYNC = 2
"""With three replicas, two must have a record unless the topic says otherwise: one may be lost, and one down."""

LeadershipListener = Callable[[PartitionIndex, Partition | None], None]
"""Called with the partition while this node leads it, and with None when it no longer does."""


class Topics:
    """Every topic, by name and by id, and the partitions that this node hosts."""

    def __init__(
        self,
        declarations: Declarations,
        store: LogStore,
        config: Config,
        clock: Clock,
        *,
        new_id: Callable[[], UUID] = uuid.uuid4,
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
        self._sole: dict[Epoch, PartitionState] = {}
        self._version = 0
        self._deletion_listeners: list[Callable[[Topic], None]] = []
        self._leadership_listeners: dict[str, list[LeadershipListener]] = {}
        # One change of the catalog at a time; readers never wait for it.
        self._changing = asyncio.Lock()

    async def load(self) -> None:
        """Finish interrupted deletions, then open every partition that the catalog declares."""
        self.broker_settings.show(await self._declarations.broker_settings())
        declared = await self._declarations.topics()
        for topic_id in await self._declarations.deleted_topic_ids():
            self._remove_leftovers(topic_id)
            await self._declarations.forget_deleted(topic_id)
        for topic in declared:
            self._apply_topic(topic)
        self._warn_of_unknown_partitions(topic.topic_id for topic in declared)

    @property
    def version(self) -> int:
        """A number that changes whenever a topic is created, grown or deleted; it does not outlive the process."""
        return self._version

    def use_delivery_floor(self, floor: DeliveryFloor) -> None:
        """Let retention ask `floor` how far subscriptions have progressed, where a topic wants that."""
        self._store.floors.delivery = floor

    def use_landed_floor(self, floor: LandedFloor) -> None:
        """Let retention ask `floor` how far pipelines have landed a topic, where it wants that."""
        self._store.floors.landed = floor

    def get(self, name: str) -> Topic | None:
        """Return the topic with this name, if it exists."""
        return self._by_name.get(name)

    def by_id(self, topic_id: UUID) -> Topic | None:
        """Return the topic with this id, if it exists."""
        return self._by_id.get(topic_id)

    def all(self) -> list[Topic]:
        """Return every topic, by name."""
        return [self._by_name[name] for name in sorted(self._by_name)]

    def partition(self, name: str, index: int) -> Partition:
        """Return a partition that this node hosts, by the topic's name."""
        partitions = self._partitions.get(name)
        if partitions is not None and 0 <= index < len(partitions):
            partition = partitions[index]
            if partition is not None:
                return partition
        raise self._missing_error(name, index)

    def partition_by_id(self, topic_id: UUID, index: int) -> Partition:
        """Return a partition that this node hosts, by the topic's id."""
        topic = self._by_id.get(topic_id)
        if topic is None:
            raise UnknownTopicId(f"no topic has the id {topic_id}")
        return self.partition(topic.name, index)

    def may_follow(self, _node: NodeId, _registration: int) -> bool:
        """Whether a fetch may be that of a follower: a single node has none."""
        return False

    def high_watermark(self, name: str, index: int) -> int | None:
        """Return the high watermark of a partition; None if this node does not host it."""
        partitions = self._partitions.get(name, ())
        partition = partitions[index] if 0 <= index < len(partitions) else None
        return None if partition is None else partition.high_watermark

    def partitions_of(self, topic: Topic) -> list[Partition]:
        """Return the partitions of a topic that this node hosts, in order."""
        return [partition for partition in self._partitions[topic.name] if partition is not None]

    def hosted(self) -> Iterable[Partition]:
        """Yield every partition that this node hosts."""
        for partitions in self._partitions.values():
            for partition in partitions:
                if partition is not None:
                    yield partition

    def states_of(self, topic: Topic) -> Sequence[PartitionState | None]:
        """Return the state of each partition of a topic, in order; None where it is not agreed on yet."""
        return [None if one is None else self._sole_state(one.leader_epoch) for one in self._partitions[topic.name]]

    def state_of(self, topic: Topic, index: int) -> PartitionState | None:
        """Return the state of one partition; None if it is not agreed on yet."""
        self._check_index(topic, index)
        return self.states_of(topic)[index]

    async def elect(self, topic: Topic, index: int, *, unclean: bool = False) -> None:
        """Let the preferred replica lead or, with `unclean`, any replica if no other can."""
        self._check_index(topic, index)
        raise ElectionNotNeeded("the partition is led by its preferred replica")

    async def reassign(self, topic: Topic, index: int, target: tuple[NodeId, ...] | None) -> None:
        """Move a partition to other nodes; None cancels a move under way."""
        self._check_index(topic, index)
        if target is None:
            raise NoReassignment("the partition is not being moved")

    def reassignments(self) -> Mapping[PartitionKey, Reassignment]:
        """Return every move under way."""
        return {}

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
        """Return the settings of a topic with this number of replicas and no settings of its own."""
        return self._defaults if self._is_minimum_set else _safe(self._defaults, replication)

    def static_defaults_for(self, replication: int) -> TopicSettings:
        """Return the same from the node's configuration alone."""
        return _safe(self._static_defaults, replication)

    def _defaults_changed(self) -> None:
        """Apply changed settings of nodes to every topic."""
        changed = self.broker_settings.topic_defaults
        self._defaults = TopicSettings.from_strings(changed, base=self._static_defaults)
        self._is_minimum_set = _MIN_IN_SYNC in changed
        known: dict[tuple[object, ...], TopicSettings] = {}
        for topic in self._by_name.values():
            alike = (topic.is_internal, topic.replication, *sorted(topic.overrides.items()))
            if alike not in known:
                known[alike] = self.settings_of(topic)
            for partition in self.partitions_of(topic):
                partition.change_settings(topic, known[alike])

    async def alter_broker(
        self,
        scope: str,
        changes: Mapping[str, str | None],
        *,
        replace: bool = False,
        validate_only: bool = False,
        timeout_s: float = AGREEMENT_S,
    ) -> None:
        """Set some settings of a node, or of all (`ALL_NODES`), durably; None, and `replace` all others, unset them."""
        nodes = sorted(map(str, self._node_ids()))
        if scope != ALL_NODES and scope not in nodes:
            raise InvalidRequest(f"no node has the id {scope!r}; the nodes are {', '.join(nodes)}")
        check_changes(scope, changes)
        if validate_only:
            return
        async with self._changing:
            overrides = await self._declarations.change_broker_settings(scope, changes, replace=replace)
            await self._broker_declared()
        await self._broker_agreed(scope, overrides, timeout_s)
        _logger.info("node settings changed", extra={"node": scope or "all", "settings": str(overrides)})

    def _node_ids(self) -> Iterable[NodeId]:
        return (self._me,)

    async def _broker_declared(self) -> None:
        """Apply the declared settings of nodes."""
        self.broker_settings.show(await self._declarations.broker_settings())

    async def _broker_agreed(self, scope: str, overrides: Mapping[str, str], timeout_s: float) -> None:
        """Wait until every node has heard of it: a node on its own has."""

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
        mirror: str = "",
        topic_id: UUID | None = None,
    ) -> Topic:
        """Declare a topic durably, then open its partitions. `placement` chooses the replicas.

        `mirror` is the mirror that writes it, with the id that it has on the source.
        """
        if validate_only:
            return self._declare(name, partitions, replication, overrides or {}, internal=internal)

        if topic_id is not None and topic_id in await self._declarations.deleted_topic_ids():
            raise TopicExists(f"topic {name!r} was deleted, and its files are still being removed; try again")

        async def add() -> Topic:
            async with self._changing:
                topic = self._declare(name, partitions, replication, overrides or {}, internal=internal)
                topic = dataclasses.replace(topic, mirror=mirror, topic_id=topic_id or topic.topic_id)
                await self._place(topic.topic_id, placement)
                await self._declarations.add_topic(topic)
                self._declared(topic)
            return topic

        # A client that leaves meanwhile must not leave a topic behind that only the catalog knows.
        topic = await finish(add())
        await self._await_agreement(topic, before=None, timeout_s=timeout_s)
        _logger.info("topic created", extra={"topic": name, "partitions": topic.partitions})
        return topic

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
            return await self._await_topic(name)

    async def delete(self, name: str, *, timeout_s: float = AGREEMENT_S) -> None:
        """Delete a topic and its data. The deletion record comes first, so that a crash cannot bring it back."""
        async with self._changing:
            topic = self._require(name)
            if topic.is_internal:
                raise PolicyViolation(f"topic {name!r} holds the broker's own state and cannot be deleted")
            await self._declarations.delete_topic(topic, now_ms=self._clock.now_ms())
            await self._deleted(topic)
        await self._await_deletion(topic, timeout_s)
        _logger.info("topic deleted", extra={"topic": name})

    def on_deletion(self, listener: Callable[[Topic], None]) -> None:
        """Call `listener` after each deletion of a topic."""
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
            self._check_partitions(total)
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
                raise PolicyViolation(f"topic {name!r} holds the broker's own state; its {_CLEANUP} stays as it is")
            TopicSettings.from_strings(overrides, base=self._defaults)
            return dataclasses.replace(topic, overrides=overrides)

        return await self._change(name, altered, None, validate_only=validate_only, timeout_s=timeout_s)

    async def set_mirror(
        self, name: str, mirror: str, *, is_draining: bool = False, timeout_s: float = AGREEMENT_S
    ) -> Topic:
        """Let a mirror write a topic, and nobody else; without a name, clients write it again."""

        def changed(topic: Topic) -> Topic:
            return dataclasses.replace(topic, mirror=mirror, is_draining=is_draining)

        return await self._change(name, changed, None, validate_only=False, timeout_s=timeout_s)

    async def raise_epoch(self, topic: Topic, index: int, epoch: Epoch) -> None:
        """Let the leader of a partition lead in this epoch, unless it is in a later one already."""
        self.partition(topic.name, index).raise_own_epoch(epoch)

    async def _change(
        self,
        name: str,
        change: Callable[[Topic], Topic],
        placement: Placement | None,
        *,
        validate_only: bool,
        timeout_s: float,
    ) -> Topic:
        async with self._changing:
            before = self._require(name)
            wanted = change(before)
            if validate_only:
                return wanted
            await self._place(before.topic_id, placement)
            changed = await self._declarations.alter_topic(before.topic_id, change)
            self._declared(changed)
        await self._await_agreement(changed, before=before, timeout_s=timeout_s)
        return changed

    def metrics(self) -> Iterable[Metric]:
        """Return what is stored and the traffic, by topic and by partition."""
        yield gauge("millstream_topics", "Topics.", len(self._by_name))
        yield gauge("millstream_partitions", "Partitions that this node hosts.", sum(1 for _ in self.hosted()))
        totals = (
            ("millstream_topic_records_in_total", "Records appended.", "records_in"),
            ("millstream_topic_bytes_in_total", "Bytes appended.", "bytes_in"),
            ("millstream_topic_bytes_out_total", "Bytes read.", "bytes_out"),
        )
        for name, text, attribute in totals:
            yield Metric(name, "counter", text, self._by_topic(attribute))
        yield Metric("millstream_log_start_offset", "gauge", "First offset kept.", self._by_partition("log_start"))
        yield Metric(
            "millstream_high_watermark",
            "gauge",
            "The high watermark: the end of the acknowledged records.",
            self._by_partition("high_watermark"),
        )
        yield Metric("millstream_log_bytes", "gauge", "Bytes on disk.", self._by_partition("size_bytes"))
        text = "Bytes past their retention that are kept because they are not delivered or not landed yet."
        yield Metric("millstream_log_held_bytes", "gauge", text, self._held_samples())

    def _by_topic(self, attribute: str) -> Iterable[Sample]:
        for topic in self._by_name.values():
            partitions = self.partitions_of(topic)
            yield Sample(sum(getattr(partition, attribute) for partition in partitions), (("topic", topic.name),))

    def _by_partition(self, attribute: str) -> Iterable[Sample]:
        for one in self.hosted():
            yield Sample(getattr(one, attribute), (("topic", one.topic.name), ("partition", str(one.index))))

    def _held_samples(self) -> Iterable[Sample]:
        now_ms = self._clock.now_ms()
        for one in self.hosted():
            held = held_bytes(one.log, now_ms)
            if held:
                yield Sample(held, (("topic", one.topic.name), ("partition", str(one.index))))

    def close(self) -> None:
        """Close every partition; waiting producers get an error."""
        for partition in self.hosted():
            partition.close()

    # -- when a declaration takes effect: at once on a single node ------------------------------------------

    def _replication_max(self) -> int:
        """Return how many nodes can host replicas."""
        return 1

    async def _place(self, topic_id: UUID, placement: Placement | None) -> None:
        """Record where partitions are placed; a single node has only one place."""

    def _declared(self, topic: Topic) -> None:
        """Apply a topic that the catalog has, new or changed."""
        self._apply_topic(topic)

    async def _await_agreement(self, topic: Topic, *, before: Topic | None, timeout_s: float) -> None:
        """Wait until all nodes know."""

    async def _await_topic(self, name: str) -> Topic:
        """Return the topic with this name, which another caller has just declared."""
        return self._by_name[name]

    async def _deleted(self, topic: Topic) -> None:
        """Apply a deletion that the catalog has recorded."""
        self._forget(topic)
        await self._declarations.forget_deleted(topic.topic_id)
        self._notify_deleted(topic)

    async def _await_deletion(self, topic: Topic, timeout_s: float) -> None:
        """Wait until all nodes know that a topic is deleted."""

    def _declare(
        self, name: str, partitions: int, replication: int, overrides: Mapping[str, str], *, internal: bool
    ) -> Topic:
        check_topic_name(name)
        if name in self._by_name:
            raise TopicExists(f"topic {name!r} already exists")
        twin = self._by_metric_name.get(_metric_name(name))
        if twin is not None:
            raise InvalidTopicName(
                f"topic {name!r} differs from topic {twin!r} only in '.' and '_', which metrics cannot distinguish"
            )
        if name in INTERNAL_TOPICS and not internal:
            raise PolicyViolation(f"the name {name!r} is kept for the broker's own state")
        wanted = self._config.default_partitions if partitions == -1 else partitions
        self._check_partitions(wanted)
        nodes = self._replication_max()
        copies = max(1, min(self._config.default_replication, nodes)) if replication == -1 else replication
        if not 1 <= copies <= max(1, nodes):
            raise InvalidReplication(f"replication factor {copies} needs as many nodes, this cluster has {nodes}")
        TopicSettings.from_strings(overrides, base=self._defaults)
        return Topic(
            name=name,
            topic_id=self._new_id(),
            partitions=wanted,
            replication=copies,
            overrides=dict(overrides),
            created_ms=self._clock.now_ms(),
        )

    def _remove_leftovers(self, topic_id: UUID, only: int | None = None) -> None:
        """Complete the deletion of a topic or of one partition that a crash interrupted."""
        for stored_id, index in tuple(self._store.stored()):
            if stored_id == topic_id and only in (None, index):
                log = self._store.open_log(topic_id, TopicPartition(f"deleted-{topic_id}", index), self._defaults)
                self._store.delete_log(log)

    def _check_partitions(self, wanted: int) -> None:
        if not 1 <= wanted <= PARTITIONS_MAX:
            raise InvalidPartitions(f"a topic has 1 to {PARTITIONS_MAX} partitions, not {wanted}")

    def _require(self, name: str) -> Topic:
        topic = self._by_name.get(name)
        if topic is None:
            raise UnknownTopic(f"topic {name!r} does not exist")
        return topic

    def _check_index(self, topic: Topic, index: int) -> None:
        if not 0 <= index < topic.partitions:
            raise UnknownTopic(f"topic {topic.name!r} has {topic.partitions} partitions, not number {index}")

    def _missing_error(self, name: str, index: int) -> MillstreamError:
        """Return why this node has no such partition."""
        try:
            self._check_index(self._require(name), index)
        except UnknownTopic as error:
            return error
        return NotLeader(f"this node does not host partition {index} of topic {name!r}")

    def _sole_state(self, epoch: Epoch) -> PartitionState:
        state = self._sole.get(epoch)
        if state is None:
            state = self._sole[epoch] = sole(self._me, epoch)
        return state

    def _warn_of_unknown_partitions(self, known: Iterable[UUID]) -> None:
        unknown = {topic_id for topic_id, _ in self._store.stored()} - set(known)
        if unknown:
            _logger.warning(
                "the data folder holds partitions that the catalog does not know; they are left alone",
                extra={"topic_ids": ", ".join(sorted(map(str, unknown))[:_NAMES_SHOWN_MAX]), "count": len(unknown)},
            )

    # -- what is hosted here --------------------------------------------------------------------------------

    def _register(self, topic: Topic) -> None:
        self._by_name[topic.name] = topic
        self._by_id[topic.topic_id] = topic
        self._by_metric_name[_metric_name(topic.name)] = topic.name
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
        for number in range(len(partitions), topic.partitions):
            partitions.append(None)
            self._open_partition(topic, PartitionIndex(number), settings)

    def _open_partition(self, topic: Topic, index: PartitionIndex, settings: TopicSettings) -> None:
        """Open a partition that this node hosts."""
        log = self._store.open_log(topic.topic_id, TopicPartition(topic.name, index), settings)
        partition = Partition(topic, index, log, self._store)
        self._partitions[topic.name][index] = partition
        self._notify_leadership(partition)

    def _forget(self, topic: Topic) -> None:
        """Close and delete what this node hosts of a deleted topic."""
        for partition in self._close(topic):
            self._store.delete_log(partition.log)

    def _close(self, topic: Topic) -> list[Partition]:
        """Close what this node hosts of a topic and forget it; return the partitions."""
        hosted = self.partitions_of(topic)
        del self._by_id[topic.topic_id]
        self.with_schema_rules.discard(topic.topic_id)
        del self._by_name[topic.name]
        del self._by_metric_name[_metric_name(topic.name)]
        del self._partitions[topic.name]
        self._version += 1
        for partition in hosted:
            partition.close()
            self._notify_leadership(partition)
        return hosted

    def _notify_deleted(self, topic: Topic) -> None:
        for listener in self._deletion_listeners:
            listener(topic)

    def _notify_leadership(self, partition: Partition) -> None:
        for listener in self._leadership_listeners.get(partition.topic.name, ()):
            listener(partition.index, partition if partition.is_leader else None)


def _safe(defaults: TopicSettings, replication: int) -> TopicSettings:
    if replication < _SAFE_REPLICATION:
        return defaults
    return dataclasses.replace(defaults, min_insync_replicas=_SAFE_IN_SYNC)


def _metric_name(name: str) -> str:
    return name.replace(".", "_")
