"""A cluster with transactional producers, batches and consumers in one seed, against a model of what may happen.

`simulate_transactions(seed)` runs one. It includes everything of `simulation`: replicas, elections, faults and rules.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import cast
from unittest import mock

from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.replication.partition import Partition
from millstream.broker.transactions import shard, transaction
from millstream.core.ids import NodeId, PartitionIndex
from millstream_testing.simulation.loop import SimulatedClock
from millstream_testing.simulation.node import SimulatedNode
from millstream_testing.simulation.rules import Violation
from millstream_testing.simulation.world import FINISH_S, Outcome, World, run_world
from millstream_testing.transaction_simulation.batch_driver import BatchDriver
from millstream_testing.transaction_simulation.caller import ClientContext, CommittedConsumer, OffsetReader
from millstream_testing.transaction_simulation.model import Decisions, Model, Visible
from millstream_testing.transaction_simulation.node import TransactionNode
from millstream_testing.transaction_simulation.plan import TransactionPlan
from millstream_testing.transaction_simulation.producer import Supervisor


def simulate_transactions(seed: int, *, tracing: bool = False, faults: Sequence[str] = ()) -> Outcome:
    """Run one seed, with some kinds of faults only if they are named."""
    plan = TransactionPlan.draw(seed, faults)
    with ExitStack() as stack:
        for module in (transaction, shard):
            stack.enter_context(mock.patch.object(module, "EPOCH_MAX", plan.epoch_max))
        return run_world(seed, lambda: TransactionWorld(plan), tracing=tracing)


@dataclass(slots=True)
class _Stable:
    """The last known last stable offset of a replica, while it leads."""

    partition: Partition
    visible: Visible
    epoch: int = -1
    offset: int = -1


class TransactionWorld(World):
    """Everything that a seed simulates."""

    def __init__(self, plan: TransactionPlan) -> None:
        super().__init__(plan)
        self.model = Model()
        self._transaction_plan = plan
        data, state = plan.topics[:2]
        self._decisions = Decisions()
        self._state = [self.rules.of((state.topic_id, PartitionIndex(index))) for index in range(state.partitions)]
        self._state_processed = [0] * state.partitions
        self._visible: dict[PartitionKey, Visible] = {
            (data.topic_id, partition.partition): Visible(partition, self.model, self._decisions)
            for partition in plan.data
        }
        self._committed = [(self.rules.of(key), visible) for key, visible in self._visible.items()]
        self._watched: dict[NodeId, tuple[Mapping[PartitionKey, Partition], list[_Stable]]] = {}
        nodes = cast("list[TransactionNode]", self.nodes)
        clock = SimulatedClock(self.loop)
        self.context = ClientContext(plan, self.loop, self.network, nodes, self.model, clock, self.trace.record)

    def make_node(self, node_id: NodeId) -> SimulatedNode:
        return TransactionNode(node_id, self)

    # -- after every step -------------------------------------------------------------------------------------

    def check_after_step(self, node: SimulatedNode) -> None:
        """Check what is committed, and how far consumers may read, after something ran on a node."""
        super().check_after_step(node)
        self._process_committed()
        replicas = node.replicas()
        watched = self._watched.get(node.node_id)
        if watched is None or watched[0] is not replicas:
            seen = [_Stable(replicas[key], visible) for key, visible in self._visible.items() if key in replicas]
            watched = self._watched[node.node_id] = (replicas, seen)
        for stable in watched[1]:
            if stable.partition.is_leader:
                _check_stable(node, stable)

    def _process_committed(self) -> None:
        for index, committed in enumerate(self._state):
            if len(committed) > self._state_processed[index]:
                for batch in committed.since(self._state_processed[index]):
                    self._decisions.add(batch)
                self._state_processed[index] = len(committed)
        for committed, visible in self._committed:
            if len(committed) > visible.batches:
                for batch in committed.since(visible.batches):
                    visible.add(batch)

    # -- the run ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, work under faults, heal, and check everything."""
        await self.start()
        plan = self._transaction_plan
        supervisors = [
            Supervisor(self.context, f"id-{number}", version) for number, version in enumerate(plan.producers)
        ]
        drivers = [BatchDriver(self.context, f"query-{number}") for number in range(plan.queries)]
        readers = [CommittedConsumer(self.context, visible) for visible in self._visible.values()]
        for supervisor in supervisors:
            self.spawn(self.loop.world, supervisor.run(), supervisor.transactional_id)
            offsets = OffsetReader(self.context, supervisor.transactional_id)
            self.spawn(self.loop.start_process(offsets.name), offsets.run(), offsets.name)
        for reader in readers:
            self.spawn(self.loop.start_process(reader.name), reader.run(), reader.name)
        driving = [self._drive(driver) for driver in drivers]
        await self.run_faults()
        for supervisor in supervisors:
            supervisor.stop()
        for driver in drivers:
            driver.stop()
        await self.until("the producers are done", lambda: _unfinished_clients(supervisors, drivers, driving), FINISH_S)
        await self._finish(supervisors, readers)

    def _drive(self, driver: BatchDriver) -> asyncio.Task[None]:
        task = self.loop.spawn(self.loop.start_process(driver.name), driver.run(), name=driver.name)
        task.add_done_callback(self._ended)
        return task

    async def _finish(self, supervisors: list[Supervisor], readers: list[CommittedConsumer]) -> None:
        await self.until("every transaction has ended", self._unfinished_transactions, FINISH_S)
        await self.until("the replicas are the same", self.replica_differences, FINISH_S)
        await self.until("the consumers are done", lambda: self._unread_partitions(readers), FINISH_S)
        self.model.check_all()
        for supervisor in supervisors:
            await self._check_offset(supervisor.transactional_id)
        begun = self.model.transactions
        self.trace.record(
            "world",
            f"well; {sum(transaction.committed for transaction in begun)} of {len(begun)} transactions committed",
        )

    async def _check_offset(self, transactional_id: str) -> None:
        found = await OffsetReader(self.context, transactional_id).look()
        expected = self.model.offset_of(transactional_id)
        if found != expected:
            raise Violation(f"the offset of {transactional_id} is {found} in the end, it should be {expected}")

    def _unfinished_transactions(self) -> str | None:
        for node in cast("list[TransactionNode]", self.nodes):
            left = node.unfinished()
            if left is not None:
                return f"{node.name}: {left}"
            for key, visible in self._visible.items():
                partition = node.replicas().get(key)
                if partition is not None and partition.is_leader and partition.open_transactions():
                    return f"{node.name}: {visible.partition} has {partition.open_transactions()[0]}"
        return None

    def _unread_partitions(self, readers: list[CommittedConsumer]) -> str | None:
        for reader, visible in zip(readers, self._visible.values(), strict=True):
            if reader.position != visible.end:
                return f"{reader.name} is at {reader.position} of {visible.end}"
        return None


def _check_stable(node: SimulatedNode, seen: _Stable) -> None:
    """Check that the last stable offset only grows within an epoch, and never passes an open transaction."""
    partition, visible = seen.partition, seen.visible
    offset, epoch = partition.last_stable_offset, partition.leader_epoch
    if epoch == seen.epoch and offset == seen.offset:
        return
    if epoch == seen.epoch and offset < seen.offset:
        raise Violation(
            f"{visible.partition}: the last stable offset of {node.name} went from {seen.offset} back to {offset}"
        )
    seen.epoch, seen.offset = epoch, offset
    first_open = visible.first_open
    if offset > partition.high_watermark or (first_open is not None and offset > first_open):
        raise Violation(
            f"{visible.partition}: the last stable offset of {node.name} is {offset}, the high watermark "
            f"{partition.high_watermark}, and a transaction is open from {first_open} on"
        )


def _unfinished_clients(
    supervisors: list[Supervisor], drivers: list[BatchDriver], driving: list[asyncio.Task[None]]
) -> str | None:
    failures = [*(supervisor.failure() for supervisor in supervisors), *(driver.failure() for driver in drivers)]
    for error in failures:
        if error is not None:
            raise error
    for supervisor in supervisors:
        if not supervisor.is_done:
            return supervisor.transactional_id
    for driver, task in zip(drivers, driving, strict=True):
        if not task.done() or not driver.is_idle:
            return driver.name
    return None
