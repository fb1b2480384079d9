"""The controller: decides which nodes are admitted, which replica leads, and which topics exist.

Every node runs a candidate; the one that creates the key `controller` is active. Every decision is computed from the
view of the cluster, compared before it is written, and fenced by the election, so it can be interrupted and repeated at
any point.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from random import Random
from uuid import UUID

from millstream.broker.cluster import keys
from millstream.broker.cluster.declarations import Declarations
from millstream.broker.cluster.election import (
    UNKNOWN_MINIMUM,
    Proposal,
    Term,
    elect,
    elect_preferred,
    end_changes,
    exclude_untrusted,
    finished,
    move_from_leaving,
)
from millstream.broker.cluster.keys import NodeRegistration, PartitionKey, parse_partition
from millstream.broker.cluster.plans import PlanExecution
from millstream.broker.cluster.reconciliation import Declared, Reconciliation
from millstream.broker.cluster.store import ABSENT, CoordinationStore, Delete, Expect, Put
from millstream.broker.cluster.view import ClusterView, ViewChange
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.errors import CorruptState, MillstreamError, StoreRefused, StoreUnavailable
from millstream.core.ids import NodeId
from millstream.core.metric import Metric, counter, gauge
from millstream.core.partition_state import PartitionState, encode_value
from millstream.core.tasks import run_until_first
from millstream.core.topic import Topic, TopicSettings

_logger = logging.getLogger(__name__)

MinInSync = Callable[[UUID], int]
"""Returns how many replicas of a topic's partitions must be in sync."""


async def admit(
    joining: Sequence[NodeRegistration], term: Term, alive: Collection[NodeId], min_in_sync: MinInSync
) -> None:
    """Admit nodes, except those that have registered again meanwhile."""
    rewritten: set[PartitionKey] = set()
    while proposals := await _needed_proposals(joining, term, alive, rewritten, min_in_sync):
        superseded = {proposal.partition for proposal in await term.propose(proposals)}
        rewritten |= {proposal.partition for proposal in proposals} - superseded
    for registered in joining:
        node = registered.node.node_id
        changes = [
            Put(keys.admitted_key(node), registered.incarnation),
            Put(keys.location_key(node), encode_value(registered.node.location)),
        ]
        admitted = await term.change(changes, [Expect(keys.node_key(node), registered.revision)])
        if admitted:
            extra = {"node": node, "unclean": registered.unclean, "rewritten": len(rewritten)}
            _logger.info("node admitted", extra=extra)


async def _needed_proposals(
    joining: Sequence[NodeRegistration],
    term: Term,
    alive: Collection[NodeId],
    rewritten: Collection[PartitionKey],
    min_in_sync: MinInSync,
) -> list[Proposal]:
    snapshot = await term.store.read(keys.PARTITIONS)
    proposals = []
    for key, entry in snapshot.entries.items():
        try:
            partition = parse_partition(key.removeprefix(keys.PARTITIONS))
            before = PartitionState.from_json(entry.value)
        except (CorruptState, ValueError) as error:
            # No node leads by a state that cannot be read.
            _logger.error("a key cannot be read", extra={"key": key, "error": str(error)})
            continue
        state, is_needed = before, False
        for registered in joining:
            if registered.node.node_id in state.replicas:
                changed = _without_node(state, registered, alive, min_in_sync(partition[0]))
                is_needed |= changed is not None or (registered.unclean and partition not in rewritten)
                state = changed or state
        if is_needed:
            proposals.append(Proposal(partition, state, entry.revision))
    return proposals


def _without_node(
    state: PartitionState, registered: NodeRegistration, alive: Collection[NodeId], min_in_sync: int
) -> PartitionState | None:
    """Return the state without the node as leader and, if it is untrusted, as a candidate; None if nothing changes."""
    node = registered.node.node_id
    if state.replicas == (node,) and not registered.unclean:
        # Nothing was lost, and no other node could have led meanwhile.
        return None
    trusted = exclude_untrusted(state, node) if registered.unclean else None
    if (trusted or state).leader != node:
        return trusted
    return elect(trusted or state, [candidate for candidate in alive if candidate != node], min_in_sync=min_in_sync)


class Balance:
    """Partitions whose preferred replica could lead but does not, each with the time to move it; none if that is 0."""

    def __init__(self, after_s: float) -> None:
        self._after_s = after_s
        self._due: dict[PartitionKey, float] = {}

    @property
    def next_due(self) -> float | None:
        """When the first of them is due."""
        return min(self._due.values(), default=None)

    def track(self, partition: PartitionKey, *, preferred_can_lead: bool, now: float) -> None:
        """Record a partition; its delay starts when the preferred replica can lead, and restarts when it cannot."""
        if not preferred_can_lead:
            self._due.pop(partition, None)
        elif self._after_s > 0:
            self._due.setdefault(partition, now + self._after_s)

    def take_due(self, now: float) -> list[PartitionKey]:
        due = [partition for partition, at in self._due.items() if at <= now]
        for partition in due:
            del self._due[partition]
        return due

    def clear(self) -> None:
        self._due.clear()


_WORKED_OUT_AT_ONCE = 1000
"""How many partitions are checked before other tasks get their turn."""


class _Deposed(Exception):
    """Another node is the controller now."""


class Controller:
    """A node's candidate for the controller."""

    def __init__(
        self,
        me: NodeId,
        store: CoordinationStore,
        view: ClusterView,
        declarations: Declarations,
        *,
        registered: Callable[[], NodeRegistration | None],
        settings_of: Callable[[Topic], TopicSettings],
        balance_s: float,
        random: Random,
        clock: Clock,
        author: str = "",
        is_single: bool = False,
    ) -> None:
        """`registered` returns this process's registration; without one it neither decides nor interferes.

        `author` is the name of this process in its announcements: its own changes come through `apply_declaration`.
        """
        self._me = me
        self._registered = registered
        self._store = store
        self._view = view
        self._declarations = declarations
        self._settings_of = settings_of
        self._random = random
        self._clock = clock
        self._author = author
        self._is_single = is_single
        self._changed = asyncio.Event()
        self._wake = asyncio.Event()
        self._dirty: set[PartitionKey] = set()
        self._unbalanced = Balance(balance_s)
        self._balance_timer: asyncio.TimerHandle | None = None
        self._reconciliation: Reconciliation | None = None
        self._execution: PlanExecution | None = None
        self._term: Term | None = None
        self.elections = 0
        view.listen(self._on_view_change)

    @property
    def is_active(self) -> bool:
        """Return whether this node believes that it is the controller."""
        return self._term is not None

    async def carried_out(self) -> None:
        """Wait until this node is the controller and has applied the catalog once, successfully or not."""
        while self._reconciliation is None or self._term is None:
            self._changed.clear()
            await self._changed.wait()
        await self._reconciliation.attempted.wait()
        await self._await_revision(self._term.last_revision)

    def apply_declaration(self, declared: Declared) -> None:
        """Apply a declaration of this process, if it is the controller."""
        if self._reconciliation is not None:
            self._reconciliation.wake_for(declared)

    def metrics(self) -> Iterable[Metric]:
        yield gauge("millstream_active_controller", "1 on the node that is the controller.", int(self.is_active))
        yield counter("millstream_elections_total", "Changes of leader that this node decided.", self.elections)

    async def run(self) -> None:
        """Become the controller whenever there is none; runs forever."""
        backoff = Backoff(self._random)
        while True:
            try:
                await self._serve(await self._await_election())
                backoff.reset()
            except _Deposed:
                _logger.info("this node is no longer the controller")
            except StoreUnavailable as error:
                # The store has responded: usually this node has no session, which is reported elsewhere.
                level = logging.INFO if isinstance(error, StoreRefused) else logging.WARNING
                _logger.log(level, "the controller waits for the coordination store", extra={"error": str(error)})
                await backoff.pause()
            except Exception:
                # Retry after any error: the cluster needs a controller.
                _logger.exception("the controller failed; restarting it")
                await backoff.pause()
            finally:
                self._stop_term()

    # -- becoming and ceasing to be the controller ----------------------------------------------------------

    async def _await_election(self) -> Term:
        """Wait until the key is free, and create it."""
        view, me = self._view, self._me
        while True:
            self._changed.clear()
            registered = self._registered()
            if registered is not None and view.controller == me:
                # Left over from an earlier run of this node, or from an attempt whose response was lost.
                await self._store.change([Delete(keys.CONTROLLER)], [Expect(keys.CONTROLLER, view.controller_revision)])
            elif view.controller is None and registered is not None and me not in view.leaving:
                revision = await self._store.change(
                    [Put(keys.CONTROLLER, str(me), leased=True)],
                    [Expect(keys.CONTROLLER, ABSENT), Expect(keys.node_key(me), registered.revision)],
                )
                if revision is not None:
                    return Term(self._store, revision)
            await self._changed.wait()

    async def _serve(self, term: Term) -> None:
        while self._view.revision < term.revision:
            self._changed.clear()
            await self._changed.wait()
        _logger.info("this node is the controller", extra={"term": term.revision})
        self._term = term
        self._reconciliation = Reconciliation(
            term,
            self._view,
            self._declarations,
            Backoff(self._random),
            on_placed=self._wake.set,
            is_single=self._is_single,
        )
        self._execution = PlanExecution(term, self._view, self._clock, Backoff(self._random))
        self._dirty = set(self._view.states)
        self._wake.set()
        self._changed.set()
        work = (
            self._await_deposed(term),
            self._maintain_leaders(term),
            self._reconciliation.run(),
            self._execution.run(),
        )
        await run_until_first(work)

    async def _await_deposed(self, term: Term) -> None:
        while self._view.controller_revision == term.revision:
            self._changed.clear()
            await self._changed.wait()
        raise _Deposed

    def _stop_term(self) -> None:
        self._term = None
        self._reconciliation = None
        self._execution = None
        self._unbalanced.clear()
        self._set_balance_timer()

    def _on_view_change(self, change: ViewChange) -> None:
        self._changed.set()
        if self._term is None or self._reconciliation is None or self._execution is None:
            return
        self._execution.on_view_change(change)
        if change.nodes:
            self._dirty.update(self._view.states)
        self._dirty |= change.partitions
        if change.settings:
            self._dirty.update(self._view.states)
        if change.topics:
            # Settings about elections may have changed.
            self._dirty.update(key for key in self._view.states if key[0] in change.topics)
        if self._dirty or change.nodes or change.moved:
            self._wake.set()
        if change.catalog - {self._author or None} or change.nodes or change.placements or change.moved:
            self._reconciliation.wake()
        elif change.deleted:
            self._reconciliation.wake_for_deletions()

    # -- leaders --------------------------------------------------------------------------------------------

    async def _maintain_leaders(self, term: Term) -> None:
        backoff = Backoff(self._random)
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                joining = [node for node in self._view.nodes.values() if not self._view.is_live(node.node.node_id)]
                if joining:
                    await admit(joining, term, self._view.live, self._min_in_sync)
                    # Otherwise partitions would lose their leaders to nodes that are admitted but not seen yet.
                    await self._await_revision(term.last_revision)
                if not self._view.live.keys() <= self._view.leaving:
                    # If every live node is leaving, the nodes that start next take over their partitions.
                    await self._elect(term)
                await self._finish_moves(term)
                await self._balance(term)
                backoff.reset()
            except StoreUnavailable as error:
                _logger.warning("elections wait for the coordination store", extra={"error": str(error)})
                self._dirty.update(self._view.states)
                self._wake.set()
                await backoff.pause()

    async def _await_revision(self, revision: int) -> None:
        while self._view.revision < revision:
            self._changed.clear()
            await self._changed.wait()

    async def _elect(self, term: Term) -> None:
        dirty, self._dirty = list(self._dirty), set()
        now, staying = asyncio.get_running_loop().time(), self._remaining_nodes()
        settings: dict[UUID, TopicSettings | None] = {}
        proposals: list[Proposal] = []
        for number, partition in enumerate(dirty, 1):
            versioned, decided = self._view.states.get(partition), None
            if versioned is not None:
                topic_id = partition[0]
                if topic_id not in settings:
                    settings[topic_id] = self._topic_settings(topic_id)
                decided = self._elect_leader(versioned.state, settings[topic_id])
                if decided is not None:
                    proposals.append(Proposal(partition, decided, versioned.revision))
            preferred_can_lead = (
                versioned is not None and decided is None and elect_preferred(versioned.state, staying) is not None
            )
            self._unbalanced.track(partition, preferred_can_lead=preferred_can_lead, now=now)
            if number % _WORKED_OUT_AT_ONCE == 0:
                await asyncio.sleep(0)
        await self._propose(term, proposals)

    def _elect_leader(self, state: PartitionState, settings: TopicSettings | None) -> PartitionState | None:
        live = self._view.live
        if settings is None:
            elected = elect(state, live)
        else:
            elected = elect(
                state,
                live,
                min_in_sync=settings.min_insync_replicas,
                unclean=settings.unclean_leader_election_enable,
            )
        return move_from_leaving(elected or state, live, self._view.avoided) or elected

    def _topic_settings(self, topic_id: UUID) -> TopicSettings | None:
        topic = self._view.topics.get(topic_id)
        try:
            return None if topic is None else self._settings_of(topic)
        except MillstreamError as error:
            # Written by a newer version: elections go by the strictest rules then.
            _logger.warning("the settings of a topic cannot be read", extra={"error": str(error)})
            return None

    def _min_in_sync(self, topic_id: UUID) -> int:
        settings = self._topic_settings(topic_id)
        return UNKNOWN_MINIMUM if settings is None else settings.min_insync_replicas

    def _remaining_nodes(self) -> set[NodeId]:
        return set(self._view.live) - self._view.avoided

    def _set_balance_timer(self) -> None:
        if self._balance_timer is not None:
            self._balance_timer.cancel()
        due = self._unbalanced.next_due
        self._balance_timer = None if due is None else asyncio.get_running_loop().call_at(due, self._wake.set)

    async def _balance(self, term: Term) -> None:
        """Move leaderships back to preferred replicas that have been in sync for long enough."""
        unbalanced = self._unbalanced.take_due(asyncio.get_running_loop().time())
        self._set_balance_timer()
        staying = self._remaining_nodes()
        proposals = []
        for partition in unbalanced:
            versioned = self._view.states.get(partition)
            preferred = None if versioned is None else elect_preferred(versioned.state, staying)
            if versioned is not None and preferred is not None:
                proposals.append(Proposal(partition, preferred, versioned.revision))
        await self._propose(term, proposals)

    async def _finish_moves(self, term: Term) -> None:
        """Remove the old replicas of partitions whose new ones are in sync."""
        for partition, move in tuple(self._view.reassignments.items()):
            versioned = self._view.states.get(partition)
            if versioned is None:
                continue
            after = finished(versioned.state, move, self._view.live)
            if after is not None and await term.change(
                end_changes(partition, versioned.state, after),
                [Expect(keys.partition_key(partition), versioned.revision)],
            ):
                _logger.info("partition moved", extra={"partition": partition[1], "replicas": str(after.replicas)})

    async def _propose(self, term: Term, proposals: list[Proposal]) -> None:
        if not proposals:
            return
        # Proposals that lost a race are checked again when the view shows the other change.
        superseded = await term.propose(proposals)
        self.elections += len(proposals) - len(superseded)
        _logger.info("leaders elected", extra={"partitions": len(proposals), "superseded": len(superseded)})
