"""Plans under faults, from a seed: four nodes, and an operator who drains, replicates, balances and cancels.

The cluster is that of `simulation/world.py`, with one node more than partitions have replicas, so that they can move.
All its rules hold at every step of a move, and a move is in progress until every replica that it added has been in
sync: until then it is throttled, can be cancelled, and its plan waits for it. At the end, plans have ended, and a
drained node leads nothing and has no replica that another node could have.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Final

from millstream.broker.cluster import keys
from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.cluster.plans import PlanHeader, Plans
from millstream.core.cluster_plan import (
    THROTTLE_BYTES,
    ClusterLoad,
    NodeLoad,
    PartitionLoad,
    Plan,
    plan_balance,
    plan_drain,
    plan_remove,
    plan_replicate,
)
from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream_testing.simulation.network import LinkDown
from millstream_testing.simulation.plan import Plan as Shape
from millstream_testing.simulation.rules import Violation
from millstream_testing.simulation.world import FINISH_S, NotRecovered, Outcome, World, run_world

NODES: Final = 4
ROUNDS: Final = (4, 10)
REQUEST_S: Final = 40.0
WAIT_S: Final = 30.0


def simulate_plans(seed: int, *, tracing: bool = False, faults: Sequence[str] = ()) -> Outcome:
    """Run one seed, with some kinds of faults only if they are named."""
    return run_world(seed, lambda: PlanWorld(replace(Shape.draw(seed, faults), nodes=NODES)), tracing=tracing)


class PlanWorld(World):
    """A cluster with an operator."""

    def __init__(self, shape: Shape) -> None:
        super().__init__(shape)
        self._drained: set[NodeId] = set()
        self._caught_up: dict[PartitionKey, set[NodeId]] = {}
        """The replicas of each partition that have been in sync since they were added."""

    async def run_faults(self) -> None:
        """Run faults while the operator works, then wait for everything to complete."""
        operating = asyncio.ensure_future(self._operate())
        await super().run_faults()
        await operating
        await self.until("the plan has ended", self._unfinished, FINISH_S)
        await self.until("drained nodes are empty", self._not_drained, FINISH_S)

    # -- the operator -----------------------------------------------------------------------------------------

    async def _operate(self) -> None:
        rng = self.plan.rng("operator")
        for _ in range(rng.randint(*ROUNDS)):
            await asyncio.sleep(rng.uniform(0.0, 2.0))
            node = NodeId(rng.randint(1, NODES))
            kind = rng.choice(("drain", "drain", "remove", "balance", "replicate", "undrain"))
            if kind == "undrain":
                await self._undrain(node)
                continue
            plan_id = await self._apply(kind, node, replicas=rng.randint(2, NODES))
            if plan_id is None:
                continue
            if rng.random() < 0.5:
                await asyncio.sleep(rng.expovariate(20.0))
                cancelled = await self._send_to_any("cancel", partial(_cancel, plan_id=plan_id))
                if cancelled is not None and cancelled.drains is not None:
                    self._drained.discard(cancelled.drains)
            with suppress(NotRecovered):
                await self.until("the plan has ended", self._unfinished, WAIT_S)

    async def _apply(self, kind: str, node: NodeId, *, replicas: int) -> str | None:
        load = self._load()
        try:
            if kind == "replicate":
                computed = plan_replicate(load, {topic.name for topic in self.plan.topics}, replicas)
            else:
                computed = plan_balance(load) if kind == "balance" else _VACATE[kind](load, node)
        except MillstreamError as error:
            self.record("operator", f"no plan to {kind} {node}: {error}")
            return None
        proposed = await self._send_to_any(f"propose to {kind} {node}", partial(_propose, plan=computed))
        if proposed is None:
            return None
        applied = await self._send_to_any("apply", lambda plans: plans.apply(proposed.plan_id))
        if applied is None:
            return None
        if applied.drains is not None:
            self._drained.add(applied.drains)
        return applied.plan_id

    async def _undrain(self, node: NodeId) -> None:
        async def undrain(plans: Plans) -> PlanHeader | None:
            await plans.undrain(node)
            return plans.current

        if await self._send_to_any(f"undrain {node}", undrain) is not None:
            self._drained.discard(node)

    async def _send_to_any(self, what: str, work: Callable[[Plans], Awaitable[PlanHeader | None]]) -> PlanHeader | None:
        """Send a request to any node; return None if it refused or did not respond (then it may have been executed)."""
        node = self._control_rng.choice(self.nodes)
        try:
            response = await self.network.call(node.name, lambda: node.plan(work), timeout_s=REQUEST_S)
        except (MillstreamError, LinkDown) as error:
            self.record("operator", f"{what}: {error}")
            # The store decides what is drained.
            self._drained = self._drained_by_store()
            return None
        self.record("operator", f"{what}: {'' if response is None else response.state}")
        return response

    def _load(self) -> ClusterLoad:
        """Return the load as an operator sees it; it may be out of date when the plan is applied."""
        nodes = {
            node.node_id: NodeLoad(
                node_id=node.node_id, is_live=node.is_running, is_drained=node.node_id in self._drained
            )
            for node in self.nodes
        }
        names = {topic.topic_id: topic.name for topic in self.plan.topics}
        partitions = [
            PartitionLoad(
                topic=names[key[0]],
                topic_id=key[0],
                index=key[1],
                replicas=state.replicas,
                in_sync=state.in_sync,
                size_bytes=self.rules.of(key).end,
            )
            for key, state in self.rules.states.items()
        ]
        return ClusterLoad(nodes=nodes, partitions=partitions)

    # -- invariants -------------------------------------------------------------------------------------------

    def _store_changed(self) -> None:
        super()._store_changed()
        moving = self.service.read(keys.REASSIGNMENTS).entries
        for key, state in self.rules.states.items():
            caught_up = self._caught_up.setdefault(key, set(state.replicas)) & set(state.replicas) | set(state.in_sync)
            self._caught_up[key] = caught_up
            behind = set(state.replicas) - caught_up
            if behind and keys.reassignment_key(key) not in moving:
                self.fail(Violation(f"{self.rules.of(key).name}: moved to {behind}, never in sync since"))

    def _drained_by_store(self) -> set[NodeId]:
        return {NodeId(int(key.removeprefix(keys.DRAINED))) for key in self.service.read(keys.DRAINED).entries}

    def _unfinished(self) -> str | None:
        entry = self.service.read(keys.PLAN).entries.get(keys.PLAN)
        header = None if entry is None else PlanHeader.from_json(entry.value)
        if header is not None and header.is_open:
            return f"plan {header.plan_id} is {header.state}"
        moving = self.service.read(keys.REASSIGNMENTS).entries
        return f"{list(moving)} are moving" if moving else None

    def _not_drained(self) -> str | None:
        drained = self._drained_by_store()
        for key, state in self.rules.states.items():
            if state.leader in drained and any(node not in drained for node in state.in_sync):
                return f"{key[1]} is led by {state.leader}, which is drained"
        return None


_VACATE: Final = {"drain": plan_drain, "remove": plan_remove}


async def _cancel(plans: Plans, *, plan_id: str) -> PlanHeader:
    return await plans.cancel(plan_id)


async def _propose(plans: Plans, *, plan: Plan) -> PlanHeader:
    return await plans.propose(plan.kind, plan.subject, plan.moves, THROTTLE_BYTES)
