"""A simulated node: the real log, view, controller, topics and replicas, on a disk in memory, in its own process.

A process that is killed leaves its files as they are; a machine that crashes loses what was not synced, and starts
under another boot id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from pathlib import Path
from random import Random
from typing import Any, Protocol, TypeVar
from uuid import UUID

from millstream.broker.cluster import keys
from millstream.broker.cluster.cluster_node import ClusterDependencies, ClusterNode
from millstream.broker.cluster.keys import NodeRegistration, PartitionKey
from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.plans import Plans
from millstream.broker.cluster.store import Entry
from millstream.broker.kafka.follower_fetch import FollowerFetch
from millstream.broker.log.log import AppendedRange
from millstream.broker.log.store import LogStore
from millstream.broker.net.budget import Budget
from millstream.broker.replication.partition import Partition
from millstream.core.errors import BrokerUnreachable, NodeIdTaken, RequestTimedOut, UnknownTopic
from millstream.core.ids import NodeId, Offset
from millstream_testing.files import MemoryFiles
from millstream_testing.simulation.loop import Process, SimulatedClock, SimulatedLoop
from millstream_testing.simulation.network import (
    Network,
    ObservedService,
    SimulatedDeclarations,
    SimulatedLinks,
    SimulatedStore,
    node_name,
)
from millstream_testing.simulation.plan import Plan
from millstream_testing.simulation.rules import Rules

FOLDER = Path("/data")
JOURNAL_BYTES = 64 * 1024
PRODUCE_TIMEOUT_S = 2.0
FETCH_BYTES = 2000
STOP_S = 20.0

T = TypeVar("T")


class NodeEnvironment(Protocol):
    plan: Plan
    loop: SimulatedLoop
    network: Network
    rules: Rules
    service: ObservedService
    declarations: SimulatedDeclarations

    def node(self, node_id: NodeId) -> SimulatedNode:
        """Return another node."""

    def record(self, source: str, event: str) -> None:
        """Add a line to the trace."""

    def process_started(self, node: SimulatedNode, process: Process) -> None:
        """Called when a node has started a new process."""

    def fail(self, error: BaseException) -> None:
        """Called when an error must end the simulation."""


class NodeProcess:
    """A process of a node: what the broker builds, without its sockets."""

    def __init__(self, node: SimulatedNode, process: Process) -> None:
        environment = node.environment
        rng = Random(f"{environment.plan.seed} {node.name} {node.starts}")
        self._node = node
        self._process = process
        config = node.config
        self.log_store = LogStore.open(
            FOLDER,
            files=node.files,
            clock=node.clock,
            journal_bytes=JOURNAL_BYTES,
            producer_expiry_ms=config.producer_expiry_ms,
        )
        self.cluster = ClusterNode(
            ClusterDependencies(
                config=config,
                clock=node.clock,
                random=rng,
                files=node.files,
                data=str(FOLDER),
                log_store=self.log_store,
                coordination=SimulatedStore(environment.service, node.clock, environment.network),
                declarations=environment.declarations,
                links=lambda _find: SimulatedLinks(_server_of(environment), environment.network),
                boot_id=f"boot {node.boots}",
                supervise=self._supervise,
            )
        )
        self.follower_fetch = FollowerFetch(
            self.cluster.topics,
            Budget(2**20),
            bytes_max=FETCH_BYTES,
            new_id=lambda: rng.randrange(1, 2**31),
            may_follow=self.cluster.topics.may_follow,
        )

    async def start(self) -> None:
        """Start the components as the broker does."""
        self._supervise("log store", self.log_store.run())
        await self.cluster.open()
        await self.serve()
        await self.cluster.join(
            Node(node_id=self._node.node_id, host=self._node.name, port=9092), str(self._node.starts)
        )

    async def stop(self) -> None:
        """Stop the components as the broker does."""
        await self.cluster.leave()
        self.follower_fetch.stop()
        await self.close_served()
        await self.cluster.close()
        self.cluster.topics.close()
        await self.log_store.close()

    async def serve(self) -> None:
        """Start what clients need beyond Produce and Fetch, if anything."""

    async def close_served(self) -> None:
        """Stop what `serve` has started."""

    def _supervise(self, name: str, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work, name=f"{self._node.name} {name}")
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._node.component_failed(task.get_name(), error)


class SimulatedNode:
    def __init__(self, node_id: NodeId, environment: NodeEnvironment) -> None:
        self.node_id = node_id
        self.name = node_name(node_id)
        self.environment = environment
        self.clock = SimulatedClock(environment.loop)
        self.files = MemoryFiles(environment.plan.rng(self.name).getrandbits(32))
        self.config = environment.plan.config(node_id)
        self.starts = 0
        self.boots = 0
        self.suspect = False
        self.is_running = False
        self._node_process: NodeProcess | None = None
        self._process: Process | None = None
        self._replicas: dict[PartitionKey, Partition] = {}
        self._carried: list[Partition] = []

    # -- lifecycle --------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start a process, unless one is running."""
        if self.is_running:
            return
        self.starts += 1
        self.is_running = True
        self._node_process = None
        process = self._process = self.environment.loop.start_process(self.name)
        self.environment.process_started(self, process)
        starting = self.environment.loop.spawn(process, self._start(process), name=f"{self.name} start")
        starting.add_done_callback(self._started)

    async def _start(self, process: Process) -> None:
        run = self._node_process = self.make_process(process)
        await run.start()

    def make_process(self, process: Process) -> NodeProcess:
        return NodeProcess(self, process)

    def _started(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.component_failed("start", error)

    def component_failed(self, name: str, error: BaseException) -> None:
        self.environment.record(self.name, f"{name} failed: {error!r}")
        if isinstance(error, NodeIdTaken):
            # The registration of the previous process has outlived the node's timeout; its supervisor restarts it.
            self.kill()
            self.environment.loop.call_later(1.0, self.start, context=self.environment.loop.world.context)
        else:
            self.environment.fail(error)

    def kill(self) -> None:
        if self._end():
            self.files.kill()

    def crash(self) -> None:
        """Cut the power of the machine."""
        if self._end():
            self.files.crash()
            self.boots += 1
            self.suspect = True

    async def stop(self) -> None:
        """Stop cleanly; kill it if that takes too long."""
        run, process = self._node_process, self._process
        if run is None or process is None or not self.is_running or process.paused:
            self.kill()
            return
        stopping = self.environment.loop.spawn(process, run.stop(), name=f"{self.name} stop")
        await asyncio.wait([stopping], timeout=STOP_S)
        if self._process is not process or not process.alive:
            return
        if stopping.done() and (error := stopping.exception()) is not None:
            self.component_failed("stop", error)
        self.environment.record(self.name, "stopped" if stopping.done() else "killed, since it did not stop")
        self.kill()

    def pause(self) -> None:
        if self._process is not None:
            self.environment.loop.pause(self._process)

    def resume(self) -> None:
        if self._process is not None:
            self.environment.loop.resume(self._process)

    def step_clock(self, milliseconds: int) -> None:
        self.clock.jump_ms(milliseconds)

    def fail_disk(self) -> None:
        """Fail the next sync of a segment, but not while the log is opened, which would keep it closed."""
        if self.is_running:
            self.files.fail_next_syncs(".log")

    def _end(self) -> bool:
        process = self._process
        if not self.is_running or process is None:
            return False
        self.environment.rules.stopping(self)
        self.is_running = False
        self.environment.loop.kill(process)
        self.environment.network.disconnect(process)
        return True

    # -- requests ---------------------------------------------------------------------------------------------

    def replicas(self) -> Mapping[PartitionKey, Partition]:
        """Return its partitions, or the last ones while it is down. The mapping is replaced when they change."""
        if self._node_process is not None and self.is_running:
            hosted = list(self._node_process.cluster.topics.hosted())
            if hosted != self._carried:
                self._carried = hosted
                now = {(partition.topic.topic_id, partition.index): partition for partition in hosted}
                self._replicas = {**self._replicas, **now}
        return self._replicas

    def update_admission(self, entries: Mapping[str, Entry]) -> None:
        """Clear `suspect` when the controller has admitted a crashed machine again."""
        if not self.suspect or not self.is_running:
            return
        admitted, registered = entries.get(keys.admitted_key(self.node_id)), entries.get(keys.node_key(self.node_id))
        if admitted is None or registered is None or self.name not in registered.value:
            return
        now = NodeRegistration.from_json(registered.value, registered.revision)
        if admitted.value == now.incarnation and now.http == str(self.starts):
            self.suspect = False

    def server(self) -> FollowerFetch:
        if self._node_process is None:
            raise BrokerUnreachable(f"{self.name} starts")
        return self._node_process.follower_fetch

    async def produce(self, key: PartitionKey, batch: bytes, acks: int) -> AppendedRange:
        """Append a batch, as a producer does."""
        partition = self._partition(key)
        try:
            async with asyncio.timeout(PRODUCE_TIMEOUT_S):
                return await partition.append(bytearray(batch), acks=acks)
        except TimeoutError:
            raise RequestTimedOut("not acknowledged in time") from None

    async def fetch(self, key: PartitionKey, offset: int, max_bytes: int) -> bytes:
        """Read committed batches, as a consumer does."""
        return bytes(self._partition(key).read(Offset(offset), max_bytes=max_bytes))

    async def change_setting(self, topic_id: UUID, name: str, value: str) -> None:
        """Change a setting of a topic, as an administrator does."""
        if self._node_process is None:
            raise UnknownTopic(f"{self.name} starts")
        topics = self._node_process.cluster.topics
        topic = topics.by_id(topic_id)
        if topic is not None:
            await topics.alter(topic.name, {name: value}, timeout_s=PRODUCE_TIMEOUT_S)

    async def plan(self, work: Callable[[Plans], Awaitable[T]]) -> T:
        """Run an operation on the cluster's plans, as an operator does."""
        if self._node_process is None:
            raise BrokerUnreachable(f"{self.name} starts")
        return await work(self._node_process.cluster.plans)

    async def leader_of(self, key: PartitionKey) -> NodeId | None:
        run = self._node_process
        versioned = None if run is None else run.cluster.view.states.get(key)
        return versioned.state.leader if versioned is not None and versioned.state.has_leader else None

    def _partition(self, key: PartitionKey) -> Partition:
        if self._node_process is None:
            raise UnknownTopic(f"{self.name} starts")
        return self._node_process.cluster.topics.partition_by_id(*key)


def _server_of(environment: NodeEnvironment) -> Callable[[NodeId], FollowerFetch]:
    return lambda node_id: environment.node(node_id).server()
