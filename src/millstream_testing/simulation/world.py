"""A whole cluster from one seed: nodes, store, clients and faults; at the end everything must be healthy again.

`simulate(seed)` runs one and returns the outcome. The same seed always runs the same way, so that a failure found among
thousands can be examined step by step.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock
from zlib import crc32

from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream.core.topic import FLUSH_ALWAYS
from millstream_testing.simulation.faults import Faults, Machine
from millstream_testing.simulation.loop import PROCESS, Process, SimulatedClock, SimulatedLoop
from millstream_testing.simulation.network import (
    CATALOG,
    STORE,
    LinkDown,
    Network,
    ObservedService,
    SimulatedDeclarations,
)
from millstream_testing.simulation.node import SimulatedNode
from millstream_testing.simulation.plan import CRASH, Plan
from millstream_testing.simulation.rules import Rules, Violation
from millstream_testing.simulation.workload import Consumer, Producer


@contextmanager
def seeded_entropy(seed: int) -> Iterator[None]:
    """Make `uuid`, `secrets` and the module `random` use a seed, and restore them afterwards."""
    source = random.Random(seed)
    state = random.getstate()
    random.seed(seed)
    try:
        with (
            mock.patch.object(os, "urandom", source.randbytes),
            mock.patch.object(random, "_urandom", source.randbytes),
        ):
            yield
    finally:
        random.setstate(state)


class Trace:
    """Lines with their virtual time."""

    def __init__(self, loop: SimulatedLoop) -> None:
        self._loop = loop
        self._began = loop.time()
        self._lines: list[tuple[float, str, str]] = []
        self._notes: list[tuple[int, float, str, str]] = []

    def record(self, source: str, event: str) -> None:
        self._lines.append((self.elapsed_s, source, event))

    @property
    def elapsed_s(self) -> float:
        """Return how long the simulation has run, in virtual time."""
        return self._loop.time() - self._began

    def note(self, source: str, event: str) -> None:
        """Add a line that is printed only on request and is not part of the digest."""
        self._notes.append((len(self._lines), self.elapsed_s, source, event))

    def lines(self) -> list[str]:
        """Return every line as text, including notes."""
        numbered = [(number, 1, *line) for number, line in enumerate(self._lines)]
        every = sorted([*numbered, *((number, 0, *rest) for number, *rest in self._notes)], key=lambda line: line[:2])
        return [f"{when:10.4f}  {source:<10}  {event}" for _, _, when, source, event in every]

    def digest(self) -> int:
        """Return a number that, very likely, differs if anything happened differently."""
        return crc32(repr((self._lines, self._loop.steps)).encode())


START_S = 60.0
SETTING_S = 5.0
FINISH_S = 120.0
POLL_S = 0.25


class NotRecovered(Exception):
    """The cluster did not recover in time after all faults had ended."""


@dataclass(slots=True)
class Outcome:
    seed: int
    failure: str | None = None
    digest: int = 0
    """The same for the same seed and the same code."""
    steps: int = 0
    virtual_s: float = 0.0
    batches: int = 0
    trace: list[str] = field(default_factory=list)


def simulate(seed: int, *, tracing: bool = False, faults: Sequence[str] = ()) -> Outcome:
    """Run one seed, with some kinds of faults only if they are named."""
    return run_world(seed, lambda: World(Plan.draw(seed, faults)), tracing=tracing)


def run_world(seed: int, make: Callable[[], World], *, tracing: bool) -> Outcome:
    outcome = Outcome(seed)
    with seeded_entropy(seed), _logging(tracing=tracing) as handler:
        world = make()
        handler.world = world
        try:
            world.loop.run_until_complete(world.run())
        except Exception as error:
            outcome.failure = _describe(error)
            world.trace.record("world", outcome.failure)
        outcome.digest = world.trace.digest()
        outcome.steps = world.loop.steps
        outcome.virtual_s = world.trace.elapsed_s
        outcome.batches = sum(map(len, world.rules.committed.values()))
        outcome.trace = world.trace.lines() if tracing or outcome.failure else []
        handler.world = None
        world.loop.shut_down()
        world.declarations.close()
    return outcome


def _describe(error: BaseException) -> str:
    if isinstance(error, BaseExceptionGroup):
        return "; ".join(map(_describe, error.exceptions))
    return f"{type(error).__name__}: {error}"


class World:
    """The simulated world of one seed."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.loop = SimulatedLoop(plan.rng("loop"))
        self.trace = Trace(self.loop)
        self.network = Network(self.loop, plan.rng("network"))
        self.rules = Rules(self.trace.record)
        clock = SimulatedClock(self.loop)
        self.service = ObservedService(clock, on_changed=self._store_changed)
        self.declarations = SimulatedDeclarations(self.network)
        for name in (STORE, CATALOG):
            self.network.endpoints[name] = self.loop.start_process(name)
        self.nodes = [self.make_node(NodeId(number)) for number in range(1, plan.nodes + 1)]
        self.machines: Sequence[Machine] = self.nodes
        self._node_of: dict[Process, SimulatedNode] = {}
        self._clients_clock = clock
        self._control_rng = plan.rng("steering")
        self._failure: Exception | None = None
        self.loop.after_step = self._after_step

    def make_node(self, node_id: NodeId) -> SimulatedNode:
        return SimulatedNode(node_id, self)

    # -- the interface of the components -----------------------------------------------------------------------

    def record(self, source: str, event: str) -> None:
        self.trace.record(source, event)

    def node(self, node_id: NodeId) -> SimulatedNode:
        return self.nodes[node_id - 1]

    def process_started(self, node: SimulatedNode, process: Process) -> None:
        self._node_of[process] = node
        self.network.endpoints[node.name] = process

    def fail(self, error: BaseException) -> None:
        if self._failure is None:
            self._failure = error if isinstance(error, Exception) else Violation(repr(error))

    def may_crash(self, machine: Machine) -> bool:
        """Whether acknowledged data survives a crash: it is synced, or no other node has lost its memory."""
        others = [node for node in self.nodes if node is not machine]
        if all(topic.overrides["flush"] == FLUSH_ALWAYS for topic in self.plan.topics):
            return True
        return not any(node.suspect for node in others) and all(
            any(self.rules.has_everything(node, key) for node in others) for key in self.rules.states
        )

    def leading(self) -> Machine | None:
        """Return a node that leads a partition, if any."""
        leaders = sorted({state.leader for state in self.rules.states.values() if state.has_leader})
        return self.node(self._control_rng.choice(leaders)) if leaders else None

    async def change_min_in_sync(self, minimum: int) -> None:
        """Set the number of replicas of a topic that must be in sync, through any node."""
        node = self._control_rng.choice(self.nodes)
        topic_id = self._control_rng.choice(self.plan.topics).topic_id
        minimum = max(2, minimum) if CRASH in self.plan.faults else minimum
        ask = partial(node.change_setting, topic_id, "min.insync.replicas", str(minimum))
        try:
            await self.network.call(node.name, ask, timeout_s=SETTING_S)
        except (MillstreamError, LinkDown) as error:
            self.trace.record("world", f"the setting was refused: {error}")

    def pause_store(self) -> None:
        """Stop the coordination store from responding."""
        self.loop.pause(self.network.endpoints[STORE])

    def resume_store(self) -> None:
        self.loop.resume(self.network.endpoints[STORE])

    def spawn(self, process: Process, work: Coroutine[Any, Any, None], name: str) -> None:
        """Run a task in a process; its failure fails the simulation."""
        self.loop.spawn(process, work, name=name).add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self.trace.record("world", f"{task.get_name()} failed: {error!r}")
            self.fail(error)

    def _store_changed(self) -> None:
        try:
            entries = self.service.read("").entries
            for node in self.nodes:
                node.update_admission(entries)
            self.rules.store_changed(entries.values())
        except Violation as violation:
            self.fail(violation)

    def check_after_step(self, node: SimulatedNode) -> None:
        self.rules.check_after_step(node)

    def _after_step(self, process: Process) -> None:
        node = self._node_of.get(process)
        if node is not None:
            self.check_after_step(node)
        if self._failure is not None:
            raise self._failure
        if self.loop.unhandled_errors:
            unhandled = self.loop.unhandled_errors[0]
            raise Violation(f"{unhandled.get('message')}: {unhandled.get('exception')!r}")

    # -- the run ----------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Start, work under faults, heal, and check everything."""
        await self.start()
        producers, consumers = self._start_clients()
        await self.run_faults()
        for producer, _ in producers:
            producer.stop()
        await self.until("the producers are done", lambda: _pending(producers), FINISH_S)
        await self.until("the replicas are the same", self.replica_differences, FINISH_S)
        await self.until("the consumers are done", lambda: self._unread(consumers), FINISH_S)
        self.trace.record("world", f"well; {sum(producer.sent for producer, _ in producers)} batches sent")

    async def start(self) -> None:
        """Start the nodes and wait until they have the topics."""
        for node in self.nodes:
            self.rules.watch(node)
            node.start()
        for topic in self.plan.topics:
            self.declarations.declare(topic)
        await self.until("the topics are there", self.replica_differences, START_S)

    async def run_faults(self) -> None:
        """Run all faults, and heal everything."""
        await Faults(self, self.plan.rng("faults"), self.plan.faults).run()
        self._heal()

    def _start_clients(self) -> tuple[list[tuple[Producer, asyncio.Task[None]]], list[Consumer]]:
        producers: list[tuple[Producer, asyncio.Task[None]]] = []
        consumers: list[Consumer] = []
        number = 0
        for key in self.rules.states:
            for acks in self.plan.producer_acks:
                number += 1
                producer = self._producer(number, key, acks)
                process = self.loop.start_process(producer.name)
                task = self.loop.spawn(process, producer.run(self.plan.produce_pause_s), name=producer.name)
                task.add_done_callback(self._ended)
                producers.append((producer, task))
            consumer = Consumer(
                f"consumer-{key[1]}",
                key,
                self.nodes,
                self.network,
                self.plan.rng(f"consumer {number}"),
                rules=self.rules,
                record=self.trace.record,
            )
            self.spawn(self.loop.start_process(consumer.name), consumer.run(self.plan.fetch_pause_s), consumer.name)
            consumers.append(consumer)
        return producers, consumers

    def _producer(self, number: int, key: Any, acks: int) -> Producer:
        return Producer(
            f"producer-{number}",
            key,
            self.nodes,
            self.network,
            self.plan.rng(f"producer {number}"),
            clock=self._clients_clock,
            rules=self.rules,
            producer_id=number if acks == -1 else -1,
            acks=acks,
            record=self.trace.record,
        )

    def _heal(self) -> None:
        self.trace.record("world", "heal everything")
        self.network.heal_all()
        self.resume_store()
        for node in self.nodes:
            node.resume()
            node.start()

    async def until(self, condition: str, pending: Callable[[], str | None], timeout_s: float) -> None:
        """Wait until nothing is pending; raise `NotRecovered` after a timeout."""
        deadline = self.loop.time() + timeout_s
        while (left := pending()) is not None:
            if self.loop.time() > deadline:
                raise NotRecovered(f"{condition}: not after {timeout_s:g} s: {left}")
            await asyncio.sleep(POLL_S)

    def replica_differences(self) -> str | None:
        """Return how the replicas differ, if they do."""
        expected = sum(topic.partitions for topic in self.plan.topics)
        if len(self.rules.states) < expected:
            return f"{len(self.rules.states)} of {expected} partitions"
        return self.rules.replica_differences(self.nodes)

    def _unread(self, consumers: list[Consumer]) -> str | None:
        for consumer in consumers:
            end = self.rules.of(consumer.key).end
            if consumer.position != end:
                return f"{consumer.name} is at {consumer.position} of {end}"
        return None


def _pending(producers: list[tuple[Producer, asyncio.Task[None]]]) -> str | None:
    return next((producer.name for producer, task in producers if not task.done()), None)


class _LogHandler(logging.Handler):
    """Adds what nodes log to the trace; unexpected errors end the simulation."""

    def __init__(self, *, tracing: bool) -> None:
        super().__init__(logging.INFO if tracing else logging.ERROR)
        self.world: World | None = None

    def emit(self, record: logging.LogRecord) -> None:
        world = self.world
        if world is None:
            return
        process = PROCESS.get(None)
        given = {name: value for name, value in vars(record).items() if name not in _STANDARD_ATTRIBUTES}
        world.trace.note(process.name if process else "world", f"{record.getMessage()} {given or ''}")
        if record.exc_info is not None and record.exc_info[1] is not None:
            world.fail(record.exc_info[1])


_STANDARD_ATTRIBUTES = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


@contextmanager
def _logging(*, tracing: bool) -> Iterator[_LogHandler]:
    """Capture the nodes' log lines; without tracing only errors, which is faster."""
    logger = logging.getLogger("millstream")
    before = logger.level, logger.propagate, list(logger.handlers)
    handler = _LogHandler(tracing=tracing)
    logger.handlers = [handler]
    logger.propagate = False
    logger.setLevel(handler.level)
    try:
        yield handler
    finally:
        handler.world = None
        logger.setLevel(before[0])
        logger.propagate, logger.handlers = before[1], before[2]
