"""One node's view of the cluster: everything in the coordination store, read once and then followed.

One task feeds it. While the store is unavailable, the last view stays in effect.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import TypeVar
from uuid import UUID

from millstream.broker.cluster import keys
from millstream.broker.cluster.election import Reassignment
from millstream.broker.cluster.keys import (
    Deletion,
    NodeRegistration,
    PartitionKey,
    Placement,
    parse_partition,
    placement_from_json,
    settings_from_json,
    topic_from_json,
)
from millstream.broker.cluster.membership import Location, Node
from millstream.broker.cluster.plans import PlanHeader, moves_from_json
from millstream.broker.cluster.store import CoordinationStore, Event, Snapshot
from millstream.core.backoff import Backoff
from millstream.core.cluster_plan import Move
from millstream.core.config import DEFAULT_LISTENER
from millstream.core.errors import CorruptState, RequestTimedOut, StoreUnavailable, WatchLost
from millstream.core.ids import NodeId, PartitionIndex
from millstream.core.partition_state import PartitionState, Versioned, decode_value
from millstream.core.tasks import within
from millstream.core.topic import Topic

_logger = logging.getLogger(__name__)


@dataclass(slots=True)
class ViewChange:
    """The changes of one batch of events."""

    nodes: set[NodeId] = field(default_factory=set)
    """Nodes that joined, left, were admitted, or are leaving."""
    topics: set[UUID] = field(default_factory=set)
    partitions: set[PartitionKey] = field(default_factory=set)
    deleted: set[UUID] = field(default_factory=set)
    moved: set[PartitionKey] = field(default_factory=set)
    """Partitions whose move begins or ends, or of which a node may remove its files."""
    placements: bool = False
    settings: bool = False
    controller: bool = False
    catalog: set[str] = field(default_factory=set)
    """The authors of catalog changes; an empty name means unknown."""
    plan: bool = False
    """The plan, or the moves of it."""


Listener = Callable[[ViewChange], None]

K = TypeVar("K")
V = TypeVar("V")


class ClusterView:
    """The cluster as this node last saw it."""

    def __init__(self, store: CoordinationStore, backoff: Backoff, *, node_listener: str = DEFAULT_LISTENER) -> None:
        self._store = store
        self._node_listener = node_listener
        self._backoff = backoff
        self._revisions: dict[str, int] = {}
        self._listeners: list[Listener] = []
        self._ready = asyncio.Event()
        self._live: dict[NodeId, Node] | None = None
        self.revision = 0
        self.nodes: dict[NodeId, NodeRegistration] = {}
        self.registrations: dict[NodeId, int] = {}
        """The revision of each node's last registration, even if it is gone."""
        self.admitted: dict[NodeId, str] = {}
        self.locations: dict[NodeId, Location] = {}
        """The machine and rack of each node, even if it is gone."""
        self.leaving: set[NodeId] = set()
        self.drained: set[NodeId] = set()
        self.plan: PlanHeader | None = None
        self.plan_revision = 0
        self.plan_moves: dict[tuple[str, int], tuple[Move, ...]] = {}
        """The moves of plans, in pieces, each by the plan's id and a number."""
        self.controller: NodeId | None = None
        self.controller_revision = 0
        self.pipelines_owner: NodeId | None = None
        self.pipelines_owner_revision = 0
        self.topics: dict[UUID, Topic] = {}
        self.states: dict[PartitionKey, Versioned] = {}
        self.reassignments: dict[PartitionKey, Reassignment] = {}
        self.removed: dict[PartitionKey, set[NodeId]] = {}
        self.placements: dict[UUID, Placement] = {}
        self.settings: dict[str, dict[str, str]] = {}
        """Settings of all nodes, under an empty name, and of each node."""
        self.deleted: dict[UUID, Deletion] = {}
        self.done: dict[UUID, set[NodeId]] = {}
        self.cluster_id: str | None = None
        self._readers: tuple[tuple[str, Callable[[str, str | None, int, ViewChange], None]], ...] = (
            (keys.PARTITIONS, self._read_partition),
            (keys.NODES, self._read_node),
            (keys.ADMITTED, self._read_admitted),
            (keys.LOCATIONS, self._read_location),
            (keys.LEAVING, self._read_leaving),
            (keys.DRAINED, self._read_drained),
            (keys.PLAN_MOVES, self._read_plan_moves),
            (keys.PLAN, self._read_plan),
            (keys.TOPICS, self._read_topic),
            (keys.DELETED, self._read_deleted),
            (keys.REASSIGNMENTS, self._read_reassignment),
            (keys.REMOVED, self._read_removed),
            (keys.PLACEMENTS, self._read_placement),
            (keys.SETTINGS, self._read_settings),
            (keys.CONTROLLER, self._read_controller),
            (keys.PIPELINES_OWNER, self._read_pipelines_owner),
            (keys.CATALOG_VERSION, self._read_catalog),
            (keys.CLUSTER_ID, self._read_cluster_id),
        )

    @property
    def live(self) -> Mapping[NodeId, Node]:
        """Every node that runs and was admitted by the controller."""
        if self._live is None:
            self._live = {node_id: node.node for node_id, node in self.nodes.items() if self.is_live(node_id)}
        return self._live

    def is_live(self, node: NodeId) -> bool:
        """Whether a node runs and was admitted in its current incarnation."""
        registered = self.nodes.get(node)
        return registered is not None and self.admitted.get(node) == registered.incarnation

    @property
    def avoided(self) -> set[NodeId]:
        """Nodes that should lead nothing: they are about to stop, or drained."""
        return self.leaving | self.drained

    def listen(self, listener: Listener) -> None:
        self._listeners.append(listener)

    def forget(self, listener: Listener) -> None:
        self._listeners.remove(listener)

    async def ready(self) -> None:
        await self._ready.wait()

    async def until(self, condition: Callable[[], bool], timeout_s: float, *, what: str) -> None:
        """Wait until a condition holds, or raise `RequestTimedOut`."""
        if condition():
            return
        seen: asyncio.Future[None] = asyncio.get_running_loop().create_future()

        def check(_change: ViewChange) -> None:
            if not seen.done() and condition():
                seen.set_result(None)

        self.listen(check)
        try:
            await within(timeout_s, seen)
        except TimeoutError:
            raise RequestTimedOut(f"{what}: not agreed on in the cluster within {timeout_s:g} s") from None
        finally:
            self.forget(check)

    async def until_revision(self, revision: int, timeout_s: float, *, what: str) -> None:
        """Wait until the view has the changes of a revision, or raise `RequestTimedOut`."""
        await self.until(lambda: self.revision >= revision, timeout_s, what=what)

    async def run(self) -> None:
        """Read everything, then follow; runs forever."""
        while True:
            try:
                snapshot = await self._store.read("")
                self.apply_snapshot(snapshot)
                self._backoff.reset()
                async with aclosing(self._store.watch("", after=snapshot.revision)) as batches:
                    async for events in batches:
                        self.apply(events)
            except WatchLost as error:
                _logger.warning("the coordination store has compacted its history; reading everything again: %s", error)
            except StoreUnavailable as error:
                _logger.warning("the coordination store cannot be read; retrying", extra={"error": str(error)})
                await self._backoff.pause()

    def apply_snapshot(self, snapshot: Snapshot) -> None:
        """Apply a complete read, treating each difference as an event."""
        entries = snapshot.entries
        deletions = [Event(key, None, snapshot.revision) for key in self._revisions if key not in entries]
        new = [
            Event(key, entry.value, entry.revision)
            for key, entry in entries.items()
            if self._revisions.get(key) != entry.revision
        ]
        if self._revisions:
            # A read shows only the last of several announcements.
            new = [event._replace(value="") if event.key == keys.CATALOG_VERSION else event for event in new]
        self.apply([*deletions, *new])
        self.revision = max(self.revision, snapshot.revision)
        self._ready.set()

    def apply(self, events: Sequence[Event]) -> None:
        """Apply the events of a watch, then call the listeners."""
        change = ViewChange()
        for event in events:
            self._apply_event(event, change)
        if change.nodes:
            self._live = None
        for listener in tuple(self._listeners):
            listener(change)

    def states_of(self, topic: Topic) -> list[Versioned | None]:
        """Return the states of a topic's partitions, in order; None for those without one yet."""
        get = self.states.get
        return [get((topic.topic_id, index)) for index in map(PartitionIndex, range(topic.partitions))]

    def _apply_event(self, event: Event, change: ViewChange) -> None:
        if event.value is None:
            self._revisions.pop(event.key, None)
        else:
            self._revisions[event.key] = event.revision
        self.revision = max(self.revision, event.revision)
        for prefix, read in self._readers:
            if event.key.startswith(prefix):
                try:
                    read(event.key.removeprefix(prefix), event.value, event.revision, change)
                except (CorruptState, ValueError) as error:
                    _logger.error("a key cannot be read", extra={"key": event.key, "error": str(error)})
                return

    # -- one reader for each kind of key --------------------------------------------------------------------

    def _read_partition(self, rest: str, value: str | None, revision: int, change: ViewChange) -> None:
        key = parse_partition(rest)
        _put(self.states, key, value, lambda text: Versioned(PartitionState.from_json(text), revision))
        change.partitions.add(key)

    def _read_node(self, rest: str, value: str | None, revision: int, change: ViewChange) -> None:
        node = NodeId(int(rest))
        if value is None:
            self.nodes.pop(node, None)
        else:
            registered = NodeRegistration.from_json(value, revision)
            self.nodes[node] = replace(registered, node=registered.node.reached_at(self._node_listener))
            self.registrations[node] = revision
        change.nodes.add(node)

    def _read_admitted(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        node = NodeId(int(rest))
        _put(self.admitted, node, value, str)
        change.nodes.add(node)

    def _read_location(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        node = NodeId(int(rest))
        _put(self.locations, node, value, lambda text: decode_value(text, Location, "the location of a node"))
        change.nodes.add(node)

    def _read_leaving(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        _mark(self.leaving, NodeId(int(rest)), value)
        change.nodes.add(NodeId(int(rest)))

    def _read_drained(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        _mark(self.drained, NodeId(int(rest)), value)
        change.nodes.add(NodeId(int(rest)))

    def _read_plan(self, _rest: str, value: str | None, revision: int, change: ViewChange) -> None:
        self.plan = None if value is None else PlanHeader.from_json(value)
        self.plan_revision = 0 if value is None else revision
        change.plan = True

    def _read_plan_moves(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        plan_id, _, number = rest.rpartition("/")
        _put(self.plan_moves, (plan_id, int(number)), value, moves_from_json)
        change.plan = True

    def _read_topic(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        topic_id = UUID(rest)
        _put(self.topics, topic_id, value, topic_from_json)
        change.topics.add(topic_id)

    def _read_deleted(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        text, separator, node = rest.partition(keys.DONE)
        topic_id = UUID(text)
        change.deleted.add(topic_id)
        if separator:
            _mark(self.done.setdefault(topic_id, set()), NodeId(int(node)), value)
            return
        _put(self.deleted, topic_id, value, Deletion.from_json)
        if value is None:
            self.done.pop(topic_id, None)

    def _read_reassignment(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        key = parse_partition(rest)
        _put(self.reassignments, key, value, Reassignment.from_json)
        change.moved.add(key)

    def _read_removed(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        partition, _, node = rest.rpartition("/")
        key = parse_partition(partition)
        _mark(self.removed.setdefault(key, set()), NodeId(int(node)), value)
        change.moved.add(key)

    def _read_placement(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        _put(self.placements, UUID(rest), value, placement_from_json)
        change.placements = True

    def _read_settings(self, rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        _put(self.settings, keys.parse_scope(rest), value, settings_from_json)
        change.settings = True

    def _read_controller(self, _rest: str, value: str | None, revision: int, change: ViewChange) -> None:
        self.controller = None if value is None else NodeId(int(value))
        self.controller_revision = 0 if value is None else revision
        change.controller = True

    def _read_pipelines_owner(self, _rest: str, value: str | None, revision: int, _change: ViewChange) -> None:
        self.pipelines_owner = None if value is None else NodeId(int(value))
        self.pipelines_owner_revision = 0 if value is None else revision

    def _read_catalog(self, _rest: str, value: str | None, _revision: int, change: ViewChange) -> None:
        change.catalog.add((value or "").partition(" ")[0])

    def _read_cluster_id(self, _rest: str, value: str | None, _revision: int, _change: ViewChange) -> None:
        self.cluster_id = value


def _put(known: dict[K, V], key: K, value: str | None, read: Callable[[str], V]) -> None:
    """Follow a key: its value, or None where it was deleted."""
    if value is None:
        known.pop(key, None)
    else:
        known[key] = read(value)


def _mark(marked: set[NodeId], node: NodeId, value: str | None) -> None:
    """Follow a key whose presence marks a node."""
    if value is None:
        marked.discard(node)
    else:
        marked.add(node)
