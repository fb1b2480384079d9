"""Plans of a cluster: proposed by an operator, carried out by the controller, a few moves at a time.

The coordination store holds one plan: its header under `plan`, its moves in pieces under `plan-moves/`. The state of a
move is never stored. It follows from the state of its partition, so a plan survives the death of any node, and the next
controller continues where the last one stopped.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from millstream.broker.cluster import keys
from millstream.broker.cluster.election import (
    Proposal,
    Reassignment,
    Term,
    begin_changes,
    elect_preferred,
    end_changes,
    narrowed,
)
from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.cluster.store import Change, CoordinationStore, Delete, Expect, Put
from millstream.core.backoff import Backoff
from millstream.core.clock import Clock
from millstream.core.cluster_plan import DRAIN, REMOVE, Move
from millstream.core.errors import InvalidRequest, NotFound, PlanConflict, RequestTimedOut, StoreUnavailable
from millstream.core.ids import NodeId
from millstream.core.partition_state import decode_value, encode_value

if TYPE_CHECKING:
    from millstream.broker.cluster.view import ClusterView, ViewChange

_logger = logging.getLogger(__name__)

PROPOSED: Final = "proposed"
RUNNING: Final = "running"
CANCELLING: Final = "cancelling"
CANCELLED: Final = "cancelled"
DONE: Final = "done"

WAITING: Final = "waiting"
MOVING: Final = "moving"
MOVED: Final = "moved"
SUPERSEDED: Final = "superseded"
"""The partition was reassigned by other means since the plan was computed; its move is skipped."""

MOVES_MAX: Final = 100_000
_MOVES_PER_KEY: Final = 500
_AT_ONCE_PER_RECEIVER: Final = 4
"""Partitions that one node fetches for a plan at the same time."""

_CREDIT_S: Final = 1.0
"""How much of the throttle that was not used is made up for later."""

_AGREEMENT_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanHeader:
    """A plan without its moves."""

    plan_id: str
    kind: str
    subject: str
    state: str
    throttle_bytes: int
    """How many bytes per second each node may fetch for it."""
    moves: int
    created_ms: int
    finished_ms: int = 0
    was_drained: bool = False
    """Whether its node was drained already when it was applied, and stays so if it is cancelled."""

    @classmethod
    def from_json(cls, text: str) -> PlanHeader:
        return decode_value(text, cls, "a plan")

    @property
    def drains(self) -> NodeId | None:
        """The node that gets no new leaders and replicas from when the plan is applied."""
        return NodeId(int(self.subject)) if self.kind in (DRAIN, REMOVE) else None

    @property
    def is_open(self) -> bool:
        """Whether the controller works on it."""
        return self.state in (RUNNING, CANCELLING)


def moves_from_json(text: str) -> tuple[Move, ...]:
    return decode_value(text, tuple[Move, ...], "a part of a plan")


def state_of(move: Move, view: ClusterView) -> str:
    """Return the state of a move, which follows from the state of its partition."""
    key = (move.topic_id, move.index)
    versioned, under_way = view.states.get(key), view.reassignments.get(key)
    if versioned is None:
        return SUPERSEDED
    if under_way is not None:
        return MOVING if under_way.target == move.target else SUPERSEDED
    if versioned.state.replicas == move.target:
        return MOVED
    return WAITING if versioned.state.replicas == move.before else SUPERSEDED


class Plans:
    """The requests of operators about plans, which any node serves."""

    def __init__(
        self, store: CoordinationStore, view: ClusterView, clock: Clock, *, new_text: Callable[[], str]
    ) -> None:
        self._store = store
        self._view = view
        self._clock = clock
        self._new_text = new_text

    @property
    def current(self) -> PlanHeader | None:
        """The last plan, in any state."""
        return self._view.plan

    @property
    def drained(self) -> frozenset[NodeId]:
        """The nodes that get no new leaders and replicas, without those that have left the cluster."""
        hosts = {node for versioned in self._view.states.values() for node in versioned.state.replicas}
        return frozenset(self._view.drained & (hosts | self._view.nodes.keys()))

    @property
    def machines(self) -> dict[NodeId, NodeId]:
        """The machine of each node that shares it with others, by the first of its nodes, also while it is away."""
        locations = self._view.locations.items()
        return {node: location.machine for node, location in locations if location.machine is not None}

    @property
    def racks(self) -> dict[NodeId, str]:
        """The rack of each node that has one, also while it is away."""
        return {node: location.rack for node, location in self._view.locations.items() if location.rack is not None}

    def moves(self) -> list[tuple[Move, str]]:
        return [(move, state_of(move, self._view)) for move in planned_moves(self._view)]

    async def propose(self, kind: str, subject: str, moves: Sequence[Move], throttle_bytes: int) -> PlanHeader:
        """Store a plan in place of the last one, for review; nothing moves yet."""
        last, last_revision = self._view.plan, self._view.plan_revision
        if last is not None and last.is_open:
            raise PlanConflict(
                f"plan {last.plan_id} is being applied; wait for it, or end it with: millstream cluster cancel"
            )
        self._check(moves, throttle_bytes)
        header = PlanHeader(
            plan_id=self._new_text()[:8],
            kind=kind,
            subject=subject,
            state=PROPOSED,
            throttle_bytes=throttle_bytes,
            moves=len(moves),
            created_ms=self._clock.now_ms(),
        )
        if header.drains is not None and header.drains not in self._view.registrations:
            raise NotFound(f"the cluster has no node {header.drains}")
        # The moves come first, under the plan's own name, so that a header is never read with those of another plan.
        for number, at in enumerate(range(0, len(moves), _MOVES_PER_KEY)):
            piece = encode_value(moves[at : at + _MOVES_PER_KEY])
            await self._store.change([Put(keys.plan_moves_key(header.plan_id, number), piece)])
        await self._change([Put(keys.PLAN, encode_value(header))], "the plan", expect_revision=last_revision)
        for plan_id, number in tuple(self._view.plan_moves):
            if plan_id != header.plan_id:
                await self._store.change([Delete(keys.plan_moves_key(plan_id, number))])
        return header

    async def apply(self, plan_id: str, throttle_bytes: int | None = None) -> PlanHeader:
        """Apply a proposed plan, which the controller carries out; a running plan can only change its throttle."""
        header = self._find_plan(plan_id)
        if header.state not in (PROPOSED, RUNNING):
            raise PlanConflict(
                f"plan {header.plan_id} is {header.state}; compute another one with: millstream cluster plan"
            )
        if throttle_bytes is not None:
            _check_throttle(throttle_bytes)
            header = replace(header, throttle_bytes=throttle_bytes)
        if header.state == PROPOSED:
            header = replace(header, state=RUNNING, was_drained=header.drains in self._view.drained)
        changes: list[Change] = [Put(keys.PLAN, encode_value(header))]
        if header.drains is not None:
            changes.append(Put(keys.drained_key(header.drains), ""))
        await self._change(changes, f"plan {header.plan_id}", expect_revision=self._view.plan_revision)
        return header

    async def cancel(self, plan_id: str) -> PlanHeader:
        """Stop a plan: moves under way go back, and a node that it drains may get leaders and replicas again."""
        header = self._find_plan(plan_id)
        if header.state in (DONE, CANCELLED):
            raise PlanConflict(f"plan {header.plan_id} is {header.state} already")
        cancelled = replace(header, state=CANCELLED if header.state == PROPOSED else CANCELLING)
        changes: list[Change] = [Put(keys.PLAN, encode_value(cancelled))]
        if cancelled.drains is not None and cancelled.state == CANCELLING and not cancelled.was_drained:
            changes.append(Delete(keys.drained_key(cancelled.drains)))
        await self._change(changes, f"plan {cancelled.plan_id}", expect_revision=self._view.plan_revision)
        return cancelled

    async def undrain(self, node: NodeId) -> None:
        if node not in self._view.drained:
            raise NotFound(f"node {node} is not drained")
        plan = self._view.plan
        if plan is not None and plan.drains == node and plan.is_open:
            raise PlanConflict(f"plan {plan.plan_id} drains node {node} now; end it with: millstream cluster cancel")
        await self._change([Delete(keys.drained_key(node))], f"node {node}")

    def _find_plan(self, plan_id: str) -> PlanHeader:
        header = self._view.plan
        if header is None:
            raise NotFound("there is no plan; compute one with: millstream cluster plan drain|remove|balance")
        if plan_id not in ("", header.plan_id):
            raise NotFound(f"there is no plan {plan_id[:64]!r}; the last one is {header.plan_id}")
        return header

    def _check(self, moves: Sequence[Move], throttle_bytes: int) -> None:
        if len(moves) > MOVES_MAX:
            raise InvalidRequest(f"a plan has at most {MOVES_MAX} moves, not {len(moves)}")
        _check_throttle(throttle_bytes)
        seen: set[PartitionKey] = set()
        machines = self.machines
        for move in moves:
            key, where = (move.topic_id, move.index), f"{move.topic}-{move.index}"
            versioned = self._view.states.get(key)
            if versioned is None:
                raise NotFound(f"there is no partition {where}")
            if key in seen or not move.target or len(set(move.target)) != len(move.target):
                raise InvalidRequest(f"the move of {where} is not valid: each partition once, each node once")
            seen.add(key)
            if versioned.state.replicas != move.before or key in self._view.reassignments:
                raise PlanConflict(f"{where} was moved since the plan was computed; compute it again")
            unknown = [node for node in move.target if node not in self._view.live and node not in move.before]
            if unknown:
                raise InvalidRequest(f"{where} cannot move to node {unknown[0]}, which is not running")
            domains = {node: machines.get(node, node) for node in move.target}
            taken = Counter(domains.values())
            shared = [node for node in move.target if node not in move.before and taken[domains[node]] > 1]
            if shared:
                raise InvalidRequest(
                    f"{where} cannot move to node {shared[0]}, whose machine has another replica of it"
                )

    async def _change(self, changes: Sequence[Change], what: str, *, expect_revision: int | None = None) -> None:
        """Change the store, and wait until this node sees it."""
        expect = () if expect_revision is None else (Expect(keys.PLAN, expect_revision),)
        revision = await self._store.change(changes, expect)
        if revision is None:
            raise PlanConflict(f"{what} was changed concurrently; check it and try again")
        await self._view.until_revision(revision, _AGREEMENT_S, what=what)


def planned_moves(view: ClusterView) -> list[Move]:
    if view.plan is None:
        return []
    pieces = sorted(number for plan_id, number in view.plan_moves if plan_id == view.plan.plan_id)
    return [move for number in pieces for move in view.plan_moves[view.plan.plan_id, number]]


def _check_throttle(throttle_bytes: int) -> None:
    if throttle_bytes < 1024:
        raise InvalidRequest(f"the throttle must be at least 1024 bytes per second, not {throttle_bytes}")


class PlanExecution:
    """Carries out the plan, for the duration of one term of the controller."""

    def __init__(self, term: Term, view: ClusterView, clock: Clock, backoff: Backoff) -> None:
        self._term = term
        self._view = view
        self._clock = clock
        self._backoff = backoff
        self._wake = asyncio.Event()
        self._wake.set()

    def on_view_change(self, change: ViewChange) -> None:
        """Check the plan again if the change may concern it."""
        plan = self._view.plan
        if change.plan or (plan is not None and plan.is_open and (change.moved or change.partitions or change.nodes)):
            self._wake.set()

    async def run(self) -> None:
        """Work on the plan whenever there is something to do; runs forever."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._view.until_revision(self._term.last_revision, _AGREEMENT_S, what="earlier changes")
                plan = self._view.plan
                if plan is not None and plan.state == RUNNING:
                    await self._advance(plan)
                elif plan is not None and plan.state == CANCELLING:
                    await self._revert_moves(plan)
                self._backoff.reset()
            except (StoreUnavailable, RequestTimedOut) as error:
                _logger.warning("the plan waits for the coordination store", extra={"error": str(error)})
                self._wake.set()
                await self._backoff.pause()

    async def _advance(self, plan: PlanHeader) -> None:
        moves = planned_moves(self._view)
        states = [state_of(move, self._view) for move in moves]
        receiving = Counter(
            node for move, state in zip(moves, states, strict=True) if state == MOVING for node in move.receivers
        )
        for move in _startable_moves(moves, states, receiving, self._view):
            await self._begin_move(move)
        if all(state in (MOVED, SUPERSEDED) for state in states):
            moved = (move for move, state in zip(moves, states, strict=True) if state == MOVED)
            if await self._lead_as_planned(moved):
                await self._finish(plan, DONE)

    async def _lead_as_planned(self, moved: Iterable[Move]) -> bool:
        """Make the first replica of each partition its leader, without the usual delay of a preferred leader.

        Return False if a partition was changed meanwhile; the view shows it, and wakes this task.
        """
        staying = self._view.live.keys() - self._view.avoided
        proposals = []
        for move in moved:
            key = (move.topic_id, move.index)
            versioned = self._view.states.get(key)
            preferred = None if versioned is None else elect_preferred(versioned.state, staying)
            if versioned is not None and preferred is not None:
                proposals.append(Proposal(key, preferred, versioned.revision))
        return not await self._term.propose(proposals)

    async def _begin_move(self, move: Move) -> None:
        key = (move.topic_id, move.index)
        versioned = self._view.states.get(key)
        if versioned is None or state_of(move, self._view) != WAITING:
            return
        reassignment = Reassignment(target=move.target, before=move.before)
        removed = self._view.removed.get(key, ())
        changes = begin_changes(key, versioned.state, reassignment, removed)
        if not await self._term.change(changes, [Expect(keys.partition_key(key), versioned.revision)]):
            # The in-sync set changed meanwhile; the view shows it, and wakes this task.
            return
        _logger.info(
            "a planned move has started", extra={"partition": f"{move.topic}-{move.index}", "to": str(move.target)}
        )

    async def _revert_moves(self, plan: PlanHeader) -> None:
        for move in planned_moves(self._view):
            key = (move.topic_id, move.index)
            versioned = self._view.states.get(key)
            if versioned is None or state_of(move, self._view) != MOVING:
                continue
            back = narrowed(versioned.state, move.before, self._view.live)
            if back is None:
                # None of the replicas before can lead now: the move stays, and ends or is taken back later.
                return
            await self._term.change(
                end_changes(key, versioned.state, back), [Expect(keys.partition_key(key), versioned.revision)]
            )
        if not any(state_of(move, self._view) == MOVING for move in planned_moves(self._view)):
            await self._finish(plan, CANCELLED)

    async def _finish(self, plan: PlanHeader, state: str) -> None:
        ended = replace(plan, state=state, finished_ms=self._clock.now_ms())
        if await self._term.change(
            [Put(keys.PLAN, encode_value(ended))], [Expect(keys.PLAN, self._view.plan_revision)]
        ):
            _logger.info("plan ended", extra={"plan": plan.plan_id, "state": state})


def _startable_moves(
    moves: Iterable[Move], states: Iterable[str], receiving: Counter[NodeId], view: ClusterView
) -> Iterable[Move]:
    """Yield the moves that may begin now; those whose receivers are away or busy wait."""
    for move, state in zip(moves, states, strict=True):
        receivers = move.receivers
        if state != WAITING or any(
            receiving[node] >= _AT_ONCE_PER_RECEIVER or not view.is_live(node) for node in receivers
        ):
            continue
        receiving.update(receivers)
        yield move


class MoveThrottle:
    """Limits how fast this node fetches what a plan moves here.

    What was fetched beyond the limit is a debt in bytes, paid off at the current rate, so that another rate takes
    effect at once. All moves together owe at most one second of the rate, or one batch each if that is more. Fetches
    that are late, since the leader waits or a node is busy, leave a little credit. The debt ends with the plan.
    """

    def __init__(self, me: NodeId, view: ClusterView, clock: Clock) -> None:
        self._me = me
        self._view = view
        self._clock = clock
        self._plan_id = ""
        self._debt_bytes = 0.0
        self._paid_until = 0.0

    def bytes_max(self, key: PartitionKey, size: int) -> int:
        plan = self._plan_of(key)
        return size if plan is None else min(size, max(1, plan.throttle_bytes // _AT_ONCE_PER_RECEIVER))

    def pause_after(self, key: PartitionKey, size: int) -> float:
        plan = self._plan_of(key)
        if plan is None:
            return 0.0
        now, rate = self._clock.monotonic(), plan.throttle_bytes
        owed = 0.0
        if plan.plan_id == self._plan_id:
            owed = max(self._debt_bytes - (now - self._paid_until) * rate, -rate * _CREDIT_S)
        self._plan_id, self._debt_bytes, self._paid_until = plan.plan_id, owed + size, now
        return max(0.0, self._debt_bytes / rate)

    def _plan_of(self, key: PartitionKey) -> PlanHeader | None:
        """Return the running plan that moves a partition here, if one does."""
        plan, move = self._view.plan, self._view.reassignments.get(key)
        return None if plan is None or plan.state != RUNNING or move is None or self._me in move.before else plan
