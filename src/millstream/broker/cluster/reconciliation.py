"""Applies the catalog, which users change, to the coordination store, which nodes follow.

Topics are created, grown and changed as they are declared. A topic is deleted only by its deletion record, never
because a row is missing, and its record stays until every node that may have files of it has removed them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from uuid import UUID

from millstream.broker.catalog.catalog import Catalog
from millstream.broker.cluster import keys
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.election import Proposal, Term
from millstream.broker.cluster.keys import (
    Deletion,
    Placement,
    deleted_key,
    done_key,
    parse_partition,
    partition_key,
    placement_from_json,
    placement_key,
    settings_key,
    topic_key,
)
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.store import CHANGES_MAX, Change, Delete, Entry, Expect, Put
from millstream.broker.cluster.view import ClusterView
from millstream.core.backoff import Backoff
from millstream.core.errors import CatalogUnavailable, InvalidReplication, MillstreamError, StoreUnavailable
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import FIRST_EPOCH, NO_LEADER, PartitionState, encode_value
from millstream.core.topic import Topic

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Load:
    leaders: Counter[NodeId] = field(default_factory=Counter)
    """Partitions that prefer this node as their leader."""
    replicas: Counter[NodeId] = field(default_factory=Counter)

    @classmethod
    def of(cls, states: Iterable[PartitionState]) -> Load:
        load = cls()
        for state in states:
            load.add(state.replicas)
        return load

    def add(self, replicas: tuple[NodeId, ...]) -> None:
        self.leaders[replicas[0]] += 1
        self.replicas.update(replicas)


def place(partitions: int, replication: int, nodes: Iterable[Node], load: Load) -> list[tuple[NodeId, ...]]:
    """Choose the replicas of new partitions, the preferred leader first; `load` is updated.

    A node without a rack is its own rack. No two replicas of a partition are on one machine, nor in one rack while
    there is another.
    """
    candidates = {node.node_id: node for node in nodes}
    machines = count_domains(candidates.values())
    if replication > machines:
        raise InvalidReplication(
            f"replication factor {replication} needs as many machines, but this cluster has {machines} now"
        )
    placed = []
    for _ in range(partitions):
        replicas = _choose_replicas(replication, candidates, load)
        load.add(replicas)
        placed.append(replicas)
    return placed


def count_domains(nodes: Iterable[Node]) -> int:
    """Return how many machines these nodes are on, and so how many replicas a partition can have."""
    return len({node.failure_domain for node in nodes})


def first_state(replicas: tuple[NodeId, ...], alive: Iterable[NodeId]) -> PartitionState:
    """Return the state of a new partition: it is empty, so every live replica has everything."""
    living = set(alive)
    in_sync = tuple(node for node in replicas if node in living)
    leader = in_sync[0] if in_sync else NO_LEADER
    return PartitionState(replicas=replicas, leader=leader, leader_epoch=FIRST_EPOCH, in_sync=in_sync or replicas)


def _choose_replicas(replication: int, nodes: Mapping[NodeId, Node], load: Load) -> tuple[NodeId, ...]:
    leader = min(nodes, key=lambda node: (load.leaders[node], load.replicas[node], node))
    chosen = [leader]
    used = Counter([_rack(nodes[leader])])
    domains = {nodes[leader].failure_domain}
    while len(chosen) < replication:
        node = min(
            (node for node in nodes if nodes[node].failure_domain not in domains),
            # On a tie, nodes after the leader come first, so that followers vary between partitions.
            key=lambda node: (used[_rack(nodes[node])], load.replicas[node], node < leader, node),
        )
        chosen.append(node)
        used[_rack(nodes[node])] += 1
        domains.add(nodes[node].failure_domain)
    return tuple(chosen)


def _rack(node: Node) -> str | tuple[NodeId]:
    # A tuple never equals the name of a rack.
    return node.rack or (node.failure_domain,)


Declared = Topic | UUID | None
"""Declarations of this process: a topic, the deletion of a topic, or settings of nodes."""

_CHANGES_OF_TOPIC = 2
"""Further changes when a topic is published."""
_CHANGES_OF_DELETION = 3


@dataclass(frozen=True, slots=True)
class _Publication:
    """A topic as all nodes are to see it, with those of its partitions that are not stored yet."""

    topic: Topic
    proposals: Sequence[Proposal]
    new_partitions: int
    is_placed_by_hand: bool

    def __len__(self) -> int:
        return len(self.proposals) + _CHANGES_OF_TOPIC

    def changes(self) -> Iterator[Change]:
        """Yield the changes that publish it, which also remove the placement chosen by the user."""
        for proposal in self.proposals:
            yield Put(partition_key(proposal.partition), encode_value(proposal.state))
        yield Put(topic_key(self.topic.topic_id), encode_value(self.topic))
        if self.new_partitions or self.is_placed_by_hand:
            yield Delete(placement_key(self.topic.topic_id))


class Reconciliation:
    """Applies the catalog for the duration of one controller term."""

    def __init__(
        self,
        term: Term,
        view: ClusterView,
        declarations: Declarations,
        backoff: Backoff,
        *,
        on_placed: Callable[[], None],
        is_single: bool = False,
    ) -> None:
        """`is_single` says that only this node changes the catalog."""
        self._is_single = is_single
        self._term = term
        self._view = view
        self._declarations = declarations
        self._backoff = backoff
        self._on_placed = on_placed
        self._wake = asyncio.Event()
        self._wake.set()
        self._reads_catalog = True
        self.attempted = asyncio.Event()
        """Set once the catalog was applied for the first time, successfully or not."""
        self._declared: dict[UUID, Topic | None] = {}
        """Topics that this process declared; None if it deleted them."""

    def wake(self) -> None:
        """Read the catalog again soon."""
        self._reads_catalog = True
        self._wake.set()

    def wake_for(self, declared: Declared) -> None:
        """Apply a declaration of this process soon."""
        if declared is None:
            self.wake()
        elif isinstance(declared, Topic):
            self._declared[declared.topic_id] = declared
        else:
            self._declared[declared] = None
        self._wake.set()

    def wake_for_deletions(self) -> None:
        """Forget deleted topics whose files are gone."""
        self._wake.set()

    async def run(self) -> None:
        """Reconcile at once, and again whenever it is requested; runs forever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            reads_catalog, self._reads_catalog = self._reads_catalog, False
            declared, self._declared = self._declared, {}
            try:
                await self._view.until_revision(self._term.last_revision, 60.0, what="earlier changes")
                if reads_catalog:
                    await self.reconcile()
                else:
                    await self._apply_declared(declared)
                await self._forget_removed()
                self._backoff.reset()
            except MillstreamError as error:
                # The catalog or the store may be unavailable, which is reported elsewhere; elections continue.
                level = logging.DEBUG if isinstance(error, CatalogUnavailable | StoreUnavailable) else logging.WARNING
                _logger.log(level, "topics could not be reconciled; retrying", extra={"error": str(error)})
                self.wake()
                self.attempted.set()
                await self._backoff.pause()
            self.attempted.set()

    async def reconcile(self) -> None:
        """Bring the coordination store in line with the catalog, once."""
        await self._apply_settings()
        declared = await self._declarations.call(Catalog.topics)
        # Read after the topics, so that a topic deleted meanwhile is not created again.
        deleted = await self._declarations.call(Catalog.deleted_topic_ids)
        known = self._view.deleted.keys() - self._view.topics.keys()
        await self._delete([topic_id for topic_id in deleted if topic_id not in known])
        await self._apply_topics(topic for topic in declared if topic.topic_id not in deleted)
        for topic in declared:
            await self._count_replicas(topic)

    async def _apply_declared(self, declared: Mapping[UUID, Topic | None]) -> None:
        await self._delete([topic_id for topic_id, topic in declared.items() if topic is None])
        topics = [topic for topic in declared.values() if topic is not None]
        if topics and not self._is_single:
            # Another node may have changed them since.
            current = await self._declarations.call(Catalog.topics_with, [topic.topic_id for topic in topics])
            if len(current) < len(topics):
                self.wake()
            topics = current
        await self._apply_topics(topics)

    async def _apply_settings(self) -> None:
        """Publish the settings of nodes before the topics that they affect; keys missing in the catalog stay."""
        for scope, overrides in (await self._declarations.call(Catalog.broker_settings)).items():
            if overrides != self._view.settings.get(scope):
                await self._term.change([Put(settings_key(scope), encode_value(overrides))])
                _logger.info("node settings are in effect", extra={"node": scope or "all", "settings": str(overrides)})

    # -- new and growing topics ----------------------------------------------------------------------------

    async def _apply_topics(self, declared: Iterable[Topic]) -> None:
        """Publish declared topics that the cluster does not know yet, several with each change."""
        changed = [topic for topic in declared if topic != self._view.topics.get(topic.topic_id)]
        if not changed:
            return
        load = Load.of(versioned.state for versioned in self._view.states.values())
        chosen = (await self._term.store.read(keys.PLACEMENTS)).entries
        batch: list[_Publication] = []
        for topic in changed:
            missing = [index for index in range(topic.partitions) if self._state_of(topic, index) is None]
            entry = chosen.get(placement_key(topic.topic_id))
            by_hand = {} if entry is None else placement_from_json(entry.value)
            try:
                proposals = self._place_partitions(topic, missing, by_hand, load)
            except InvalidReplication as error:
                _logger.warning(
                    "a topic cannot be placed until more nodes are running",
                    extra={"topic": topic.name, "error": str(error)},
                )
                continue
            # The partitions come first or with it, so that a node that sees the topic sees all of them.
            if len(proposals) > CHANGES_MAX - _CHANGES_OF_TOPIC:
                if await self._term.propose(proposals):
                    # An earlier attempt is ahead of the view; the next attempt sees its changes.
                    self.wake()
                    continue
                proposals = []
            publication = _Publication(topic, proposals, len(missing), entry is not None)
            if sum(map(len, batch)) + len(publication) > CHANGES_MAX:
                await self._publish(batch)
                batch = []
            batch.append(publication)
        if batch:
            await self._publish(batch)

    async def _publish(self, batch: list[_Publication]) -> None:
        proposals = [proposal for publication in batch for proposal in publication.proposals]
        changes = [change for publication in batch for change in publication.changes()]
        if await self._term.change(
            changes, [Expect(partition_key(proposal.partition), proposal.revision) for proposal in proposals]
        ):
            for publication in batch:
                extra = {"topic": publication.topic.name, "new_partitions": publication.new_partitions}
                _logger.info("topic is published", extra=extra)
            self._on_placed()
        elif len(batch) > 1:
            # One that lost a race must not delay the others.
            for publication in batch:
                await self._publish([publication])
        elif proposals:
            self.wake()

    def _place_partitions(self, topic: Topic, missing: list[int], by_hand: Placement, load: Load) -> list[Proposal]:
        live = self._view.live
        free = [index for index in missing if index not in by_hand]
        staying = [node for node_id, node in live.items() if node_id not in self._view.avoided]
        if count_domains(staying) < topic.replication:
            staying = [node for node_id, node in live.items() if node_id not in self._view.drained]
        if count_domains(staying) < topic.replication:
            staying = list(live.values())
        placed = place(len(free), topic.replication, staying, load) if free else []
        drained = sorted({node for replicas in placed for node in replicas} & self._view.drained)
        if drained:
            extra = {"topic": topic.name, "nodes": str(drained)}
            _logger.warning("drained nodes get replicas of a topic, because there are too few other nodes", extra=extra)
        chosen = {**by_hand, **dict(zip(free, placed, strict=True))}
        return [
            Proposal((topic.topic_id, PartitionIndex(index)), first_state(chosen[index], live), 0) for index in missing
        ]

    def _state_of(self, topic: Topic, index: int) -> PartitionState | None:
        versioned = self._view.states.get((topic.topic_id, PartitionIndex(index)))
        return None if versioned is None else versioned.state

    async def _count_replicas(self, topic: Topic) -> None:
        """Declare another replication factor when all partitions of a topic have moved to that many nodes."""
        if topic != self._view.topics.get(topic.topic_id):
            return
        states = [self._state_of(topic, index) for index in range(topic.partitions)]
        counts = {0 if state is None else len(state.replicas) for state in states}
        moving = any(key[0] == topic.topic_id for key in self._view.reassignments)
        if moving or counts == {topic.replication} or len(counts) != 1:
            return
        changed = await self._declarations.change(
            Catalog.alter_topic, topic.topic_id, lambda current: replace(current, replication=max(counts))
        )
        await self._apply_topics([changed])

    # -- deleted topics -------------------------------------------------------------------------------------

    async def _delete(self, topic_ids: Sequence[UUID]) -> None:
        prefix = f"{keys.PARTITIONS}{topic_ids[0]}/" if len(topic_ids) == 1 else keys.PARTITIONS
        stored: dict[UUID, list[Entry]] = {topic_id: [] for topic_id in topic_ids}
        for entry in (await self._term.store.read(prefix)).entries.values() if topic_ids else ():
            topic_id, _ = parse_partition(entry.key.removeprefix(keys.PARTITIONS))
            if topic_id in stored:
                stored[topic_id].append(entry)
        rest = iter(topic_ids)
        while batch := list(islice(rest, CHANGES_MAX // _CHANGES_OF_DELETION)):
            deletions = {topic_id: self._deletion(topic_id, stored[topic_id]) for topic_id in batch}
            records: list[Change] = []
            for topic_id, deletion in deletions.items():
                records.append(Put(deleted_key(topic_id), encode_value(deletion)))
                records += [Delete(topic_key(topic_id)), Delete(placement_key(topic_id))]
            if not await self._term.change(records):
                return
            await self._delete_keys(entry.key for topic_id in batch for entry in stored[topic_id])
            for deletion in deletions.values():
                _logger.info("topic deleted", extra={"topic": deletion.name})

    def _deletion(self, topic_id: UUID, entries: Iterable[Entry]) -> Deletion:
        replicas = {node for entry in entries for node in PartitionState.from_json(entry.value).replicas}
        known, topic = self._view.deleted.get(topic_id), self._view.topics.get(topic_id)
        if known is not None:
            replicas |= set(known.replicas)
        name = topic.name if topic is not None else known.name if known is not None else ""
        return Deletion(name=name, replicas=tuple(sorted(replicas)))

    async def _forget_removed(self) -> None:
        """Drop the records of topics whose files are all gone; the catalog's first, so that a crash repeats this."""
        view = self._view
        gone = {
            topic_id: record
            for topic_id, record in view.deleted.items()
            if set(record.replicas) <= view.done.get(topic_id, set())
        }
        if not gone:
            return
        await self._declarations.call(Catalog.forget_deleted, tuple(gone))
        await self._delete_keys(partition_key(key) for key in tuple(view.states) if key[0] in gone)
        await self._delete_keys(keys.reassignment_key(key) for key in tuple(view.reassignments) if key[0] in gone)
        await self._delete_keys(
            done_key(topic_id, node) for topic_id, record in gone.items() for node in record.replicas
        )
        await self._delete_keys(map(deleted_key, gone))

    async def _delete_keys(self, keys_to_delete: Iterable[str]) -> None:
        rest = iter(keys_to_delete)
        while batch := [Delete(key) for key in islice(rest, CHANGES_MAX)]:
            await self._term.change(batch)
