"""From the catalog, which users change, to the coordination store, which nodes follow.

Topics are created, grown and changed as they are declared. A topic is deleted only by its deletion record, never
because a row is missing, and its record stays until every node that may have files of it has removed them.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
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
    partition_key,
    placement_from_json,
    placement_key,
    settings_key,
    settings_to_json,
    topic_key,
    topic_to_json,
)
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.store import CHANGES_MAX, Change, Delete, Expect, Put
from millstream.broker.cluster.view import ClusterView
from millstream.core.backoff import Backoff
from millstream.core.errors import CatalogUnavailable, InvalidReplication, MillstreamError, StoreUnavailable
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import FIRST_EPOCH, NO_LEADER, PartitionState
from millstream.core.topic import Topic


@dataclass(slots=True)
class Load:
    """How much each node hosts already."""

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
        """Count one more partition."""
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
            f"replication factor {replication} needs as many machines, this cluster has {machines} now"
        )
    placed = []
    for _ in range(partitions):
        replicas = _choose(replication, candidates, load)
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


def _choose(replication: int, nodes: Mapping[NodeId, Node], load: Load) -> tuple[NodeId, ...]:
    leader = min(nodes, key=lambda node: (load.leaders[node], load.replicas[node], node))
    chosen = [leader]
    used = Counter([_rack(nodes[leader])])
    domains = {nodes[leader].failure_domain}
    while len(chosen) < replication:
        node = min(
            (one for one in nodes if nodes[one].failure_domain not in domains),
            # Of equals, those behind the leader come first, so that its followers differ from partition to partition.
            key=lambda one: (used[_rack(nodes[one])], load.replicas[one], one < leader, one),
        )
        chosen.append(node)
        used[_rack(nodes[node])] += 1
        domains.add(nodes[node].failure_domain)
    return tuple(chosen)


def _rack(node: Node) -> str | tuple[NodeId]:
    # A tuple never equals the name of a rack.
    return node.rack or (node.failure_domain,)


_logger = logging.getLogger(__name__)


Declared = Topic | UUID | None
"""What this process has declared: a topic, the deletion of one, or settings of nodes."""


class Reconciliation:
    """Carries out what the catalog says, for the duration of one term."""

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
        self._wanted = asyncio.Event()
        self._wanted.set()
        self._reads_catalog = True
        self.attempted = asyncio.Event()
        """Set once the catalog was carried out for the first time, or that has failed."""
        self._declared: dict[UUID, Topic | None] = {}
        """Topics that this process declared; None if it deleted them."""

    def wake(self) -> None:
        """Read the catalog again before long."""
        self._reads_catalog = True
        self._wanted.set()

    def wake_for(self, declared: Declared) -> None:
        """Carry out what this process has declared before long."""
        if declared is None:
            self.wake()
        elif isinstance(declared, Topic):
            self._declared[declared.topic_id] = declared
        else:
            self._declared[declared] = None
        self._wanted.set()

    def wake_for_deletions(self) -> None:
        """Forget deleted topics whose files are gone."""
        self._wanted.set()

    async def run(self) -> None:
        """Reconcile at once, and again whenever it is requested; runs forever."""
        while True:
            await self._wanted.wait()
            self._wanted.clear()
            reads_catalog, self._reads_catalog = self._reads_catalog, False
            declared, self._declared = self._declared, {}
            try:
                await self._caught_up()
                if reads_catalog:
                    await self.reconcile()
                else:
                    for topic_id, topic in declared.items():
                        await (self._delete(topic_id) if topic is None else self._carry_out_declared(topic))
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
        await self._carry_out_settings()
        declared = await self._declarations.call(Catalog.topics)
        # Read after the topics, so that a topic deleted meanwhile is not created again.
        deleted = await self._declarations.call(Catalog.deleted_topic_ids)
        for topic_id in deleted:
            if topic_id not in self._view.deleted or topic_id in self._view.topics:
                await self._delete(topic_id)
        for topic in declared:
            if topic.topic_id not in deleted and topic != self._view.topics.get(topic.topic_id):
                await self._carry_out(topic)
        for topic in declared:
            await self._count_replicas(topic)

    async def _carry_out_declared(self, topic: Topic) -> None:
        # Another node may have changed it since.
        current = topic if self._is_single else await self._declarations.call(Catalog.topic, topic.topic_id)
        if current is None:
            self.wake()
        elif current != self._view.topics.get(topic.topic_id):
            await self._carry_out(current)

    async def _forget_removed(self) -> None:
        for topic_id, deletion in tuple(self._view.deleted.items()):
            if set(deletion.replicas) <= self._view.done.get(topic_id, set()):
                await self._forget(topic_id, deletion)

    async def _caught_up(self) -> None:
        """Wait until the view shows earlier writes of this node."""
        last = self._term.last_revision
        await self._view.until(lambda: self._view.revision >= last, 60.0, what="the changes of the controller")

    async def _carry_out_settings(self) -> None:
        """Publish the settings of nodes before the topics that they affect; what is missing in the catalog stays."""
        for scope, overrides in (await self._declarations.call(Catalog.broker_settings)).items():
            if overrides != self._view.settings.get(scope):
                await self._term.change([Put(settings_key(scope), settings_to_json(overrides))])
                _logger.info("settings of nodes agreed on", extra={"node": scope or "all", "settings": str(overrides)})

    # -- topics that come and grow --------------------------------------------------------------------------

    async def _carry_out(self, topic: Topic) -> None:
        missing = [index for index in range(topic.partitions) if self._state_of(topic, index) is None]
        proposals: list[Proposal] = []
        if missing:
            try:
                proposals = await self._placed(topic, missing)
            except InvalidReplication as error:
                _logger.warning("a topic waits for nodes", extra={"topic": topic.name, "error": str(error)})
                return
            # The partitions come first or with it, so that a node that sees the topic sees all of them.
            if len(proposals) > CHANGES_MAX - 2:
                if await self._term.propose(proposals):
                    # An earlier attempt got further than the view shows; the next one sees it.
                    self.wake()
                    return
                proposals = []
        changes: list[Change] = [Put(partition_key(one.partition), one.state.to_json()) for one in proposals]
        changes.append(Put(topic_key(topic.topic_id), topic_to_json(topic)))
        if topic.topic_id in self._view.placements or missing:
            changes.append(Delete(placement_key(topic.topic_id)))
        if await self._term.change(changes, [Expect(partition_key(one.partition), one.revision) for one in proposals]):
            _logger.info("topic agreed on", extra={"topic": topic.name, "new_partitions": len(missing)})
            self._on_placed()
        elif proposals:
            self.wake()

    async def _placed(self, topic: Topic, missing: list[int]) -> list[Proposal]:
        live = self._view.live
        load = Load.of(versioned.state for versioned in self._view.states.values())
        by_hand = await self._by_hand(topic.topic_id)
        free = [index for index in missing if index not in by_hand]
        staying = [node for node_id, node in live.items() if node_id not in self._view.avoided]
        if count_domains(staying) < topic.replication:
            staying = [node for node_id, node in live.items() if node_id not in self._view.drained]
        if count_domains(staying) < topic.replication:
            staying = list(live.values())
        placed = place(len(free), topic.replication, staying, load)
        chosen = {**by_hand, **dict(zip(free, placed, strict=True))}
        return [
            Proposal((topic.topic_id, PartitionIndex(index)), first_state(chosen[index], live), 0) for index in missing
        ]

    async def _by_hand(self, topic_id: UUID) -> Placement:
        key = placement_key(topic_id)
        entry = (await self._term.store.read(key)).entries.get(key)
        return {} if entry is None else placement_from_json(entry.value)

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
        await self._carry_out(changed)

    # -- topics that go -------------------------------------------------------------------------------------

    async def _delete(self, topic_id: UUID) -> None:
        prefix = f"{keys.PARTITIONS}{topic_id}/"
        entries = (await self._term.store.read(prefix)).entries
        replicas = {node for entry in entries.values() for node in PartitionState.from_json(entry.value).replicas}
        known = self._view.deleted.get(topic_id)
        if known is not None:
            replicas |= set(known.replicas)
        topic = self._view.topics.get(topic_id)
        name = topic.name if topic is not None else known.name if known is not None else ""
        deletion = Deletion(name=name, replicas=_sorted(replicas))
        record = [Put(deleted_key(topic_id), deletion.to_json())]
        if await self._term.change([*record, Delete(topic_key(topic_id)), Delete(placement_key(topic_id))]):
            await self._remove(entries)
            _logger.info("topic deleted", extra={"topic": name})

    async def _forget(self, topic_id: UUID, deletion: Deletion) -> None:
        """Drop the record of a topic whose files are all gone; the catalog's first, so that a crash repeats this."""
        await self._declarations.call(Catalog.forget_deleted, topic_id)
        await self._remove(partition_key(key) for key in tuple(self._view.states) if key[0] == topic_id)
        moves = tuple(self._view.reassignments)
        await self._remove(keys.reassignment_key(key) for key in moves if key[0] == topic_id)
        await self._remove(done_key(topic_id, node) for node in deletion.replicas)
        await self._remove([deleted_key(topic_id)])

    async def _remove(self, gone: Iterable[str]) -> None:
        rest = iter(gone)
        while batch := [Delete(key) for key in islice(rest, CHANGES_MAX)]:
            await self._term.change(batch)


def _sorted(nodes: Iterable[NodeId]) -> tuple[NodeId, ...]:
    return tuple(sorted(nodes))
