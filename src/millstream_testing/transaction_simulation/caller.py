"""How clients of the simulation send requests to nodes: they find the right node, and retry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

from millstream.core.clock import Clock
from millstream.core.errors import (
    BrokerUnreachable,
    CatalogUnavailable,
    ConcurrentTransactions,
    CoordinatorUnavailable,
    LogUnavailable,
    MillstreamError,
    NotEnoughReplicas,
    NotLeader,
    RequestTimedOut,
    UnknownTopic,
)
from millstream.core.ids import NodeId
from millstream_testing.simulation.loop import SimulatedLoop
from millstream_testing.simulation.network import LinkDown, Network
from millstream_testing.transaction_simulation.model import Model
from millstream_testing.transaction_simulation.node import TransactionNode, Where
from millstream_testing.transaction_simulation.plan import TransactionPlan

T = TypeVar("T")

Operation = Callable[[TransactionNode], Awaitable[T]]

TIMEOUT_S = 3.0
PATIENT_TIMEOUT_S = 15.0
"""A client that must not send a request twice waits longer than any request takes."""
PAUSE_S = 0.25

AGAIN = (
    LinkDown,
    BrokerUnreachable,
    CatalogUnavailable,
    ConcurrentTransactions,
    CoordinatorUnavailable,
    LogUnavailable,
    NotEnoughReplicas,
    NotLeader,
    RequestTimedOut,
    UnknownTopic,
)
"""Transient errors, which a retry resolves."""


class GaveUp(Exception):
    """It was retried often enough; whether it was carried out is unknown."""


@dataclass(frozen=True, slots=True)
class Stage:
    """What every client needs."""

    plan: TransactionPlan
    loop: SimulatedLoop
    network: Network
    nodes: Sequence[TransactionNode]
    model: Model
    clock: Clock
    record: Callable[[str, str], None]


class Caller:
    """One client. `may_be_late` says whether its requests may be carried out after it has given up, and twice."""

    def __init__(self, name: str, stage: Stage, *, may_be_late: bool = True) -> None:
        self.name = name
        self.stage = stage
        self.chance: Random = stage.plan.chance(name)
        self.sends = 0
        """The number of sent requests, including those that the network has duplicated."""
        self._may_be_late = may_be_late
        self._known: dict[Where, TransactionNode] = {}
        self._again: set[asyncio.Task[None]] = set()

    async def ask(self, where: Where, operation: Operation[T], *, tries: int | None = None) -> T:
        """Retry until the response is final."""
        tried = 0
        while True:
            try:
                return await self._ask_once(await self._find(where), operation)
            except AGAIN as error:
                self.stage.record(self.name, f"{where.kind}: {type(error).__name__}: {error}")
                self._known.pop(where, None)
            tried += 1
            if tried == tries:
                raise GaveUp(f"{where.kind} {where.name}")
            await self.pause()

    async def pause(self) -> None:
        """Wait a moment."""
        await asyncio.sleep(self.chance.uniform(0.2, 1.0) * PAUSE_S)

    async def _find(self, where: Where) -> TransactionNode:
        nodes = self.stage.nodes
        while where not in self._known:
            asked = self.chance.choice(nodes)
            try:
                found = await self.stage.network.call(asked.name, partial(asked.find, where), timeout_s=TIMEOUT_S)
            except (MillstreamError, LinkDown):
                found = None
            if found is not None:
                self._known[where] = nodes[NodeId(found - 1)]
                break
            await self.pause()
        return self._known[where]

    async def _ask_once(self, node: TransactionNode, operation: Operation[T]) -> T:
        given_up = False

        async def serve() -> T:
            if given_up and not self._may_be_late:
                raise LinkDown("the connection was closed before")
            return await operation(node)

        network = self.stage.network
        self.sends += 1
        if self._may_be_late and self.chance.random() < self.stage.plan.duplicate_chance:
            self.sends += 1
            task = asyncio.get_running_loop().create_task(self._ask_again(node, operation))
            self._again.add(task)
            task.add_done_callback(self._again.discard)
        try:
            timeout_s = TIMEOUT_S if self._may_be_late else PATIENT_TIMEOUT_S
            return await network.call(node.name, serve, timeout_s=timeout_s)
        finally:
            given_up = True

    async def _ask_again(self, node: TransactionNode, operation: Operation[T]) -> None:
        await asyncio.sleep(self.chance.expovariate(1 / 0.5))
        try:
            await self.stage.network.call(node.name, lambda: operation(node), timeout_s=TIMEOUT_S)
        except (LinkDown, MillstreamError):
            return
