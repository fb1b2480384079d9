"""How clients of the simulation send requests to nodes: they find the right node, and retry."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import TypeVar

from millstream.broker.replication.partition import CommittedRead
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
from millstream.core.topic import TopicPartition
from millstream.protocol.records.batch import iterate_headers
from millstream.protocol.records.control import read_marker
from millstream.protocol.records.record import decode_batch
from millstream_testing.simulation.loop import SimulatedLoop
from millstream_testing.simulation.network import LinkDown, Network
from millstream_testing.transaction_simulation.model import Model, Visible
from millstream_testing.transaction_simulation.node import GROUP, LEADER, RequestTarget, TransactionNode
from millstream_testing.transaction_simulation.plan import TransactionPlan

T = TypeVar("T")

Operation = Callable[[TransactionNode], Awaitable[T]]

TIMEOUT_S = 3.0
LONG_TIMEOUT_S = 15.0
"""The timeout of a client that must not retry: longer than any request takes."""
PAUSE_S = 0.25

TRANSIENT_ERRORS = (
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


class RetriesExhausted(Exception):
    """The retries are exhausted; whether the request was executed is unknown."""


@dataclass(frozen=True, slots=True)
class ClientContext:
    plan: TransactionPlan
    loop: SimulatedLoop
    network: Network
    nodes: Sequence[TransactionNode]
    model: Model
    clock: Clock
    record: Callable[[str, str], None]


class Caller:
    """A client. With `may_be_late`, its requests may be executed after it has timed out, and twice."""

    def __init__(self, name: str, context: ClientContext, *, may_be_late: bool = True) -> None:
        self.name = name
        self.context = context
        self.rng: Random = context.plan.rng(name)
        self.sends = 0
        """The number of sent requests, including those that the network has duplicated."""
        self._may_be_late = may_be_late
        self._known: dict[RequestTarget, TransactionNode] = {}
        self._duplicates: set[asyncio.Task[None]] = set()

    async def send(self, target: RequestTarget, operation: Operation[T], *, attempts_max: int | None = None) -> T:
        """Retry until the response is final."""
        attempts = 0
        while True:
            try:
                return await self._send_once(await self._find(target), operation)
            except TRANSIENT_ERRORS as error:
                self.context.record(self.name, f"{target.kind}: {type(error).__name__}: {error}")
                self._known.pop(target, None)
            attempts += 1
            if attempts == attempts_max:
                raise RetriesExhausted(f"{target.kind} {target.name}")
            await self.pause()

    async def pause(self) -> None:
        await asyncio.sleep(self.rng.uniform(0.2, 1.0) * PAUSE_S)

    async def _find(self, target: RequestTarget) -> TransactionNode:
        nodes = self.context.nodes
        while target not in self._known:
            chosen = self.rng.choice(nodes)
            try:
                found = await self.context.network.call(chosen.name, partial(chosen.find, target), timeout_s=TIMEOUT_S)
            except (MillstreamError, LinkDown):
                found = None
            if found is not None:
                self._known[target] = nodes[NodeId(found - 1)]
                break
            await self.pause()
        return self._known[target]

    async def _send_once(self, node: TransactionNode, operation: Operation[T]) -> T:
        given_up = False

        async def serve() -> T:
            if given_up and not self._may_be_late:
                raise LinkDown("the connection was closed before")
            return await operation(node)

        network = self.context.network
        self.sends += 1
        if self._may_be_late and self.rng.random() < self.context.plan.duplicate_chance:
            self.sends += 1
            task = asyncio.get_running_loop().create_task(self._send_again(node, operation))
            self._duplicates.add(task)
            task.add_done_callback(self._duplicates.discard)
        try:
            timeout_s = TIMEOUT_S if self._may_be_late else LONG_TIMEOUT_S
            return await network.call(node.name, serve, timeout_s=timeout_s)
        finally:
            given_up = True

    async def _send_again(self, node: TransactionNode, operation: Operation[T]) -> None:
        await asyncio.sleep(self.rng.expovariate(1 / 0.5))
        try:
            await self.context.network.call(node.name, lambda: operation(node), timeout_s=TIMEOUT_S)
        except (LinkDown, MillstreamError):
            return


class CommittedConsumer(Caller):
    """Reads one partition from its beginning, and skips aborted records, as clients do."""

    def __init__(self, context: ClientContext, visible: Visible) -> None:
        partition = visible.partition
        super().__init__(f"reader-{partition.partition}", context)
        self.position = 0
        self._visible = visible
        self._target = RequestTarget(LEADER, partition.topic, partition.partition)

    async def run(self) -> None:
        while True:
            read = await self.send(self._target, self._read)
            if read.records:
                self._take(read)
            await asyncio.sleep(self.rng.expovariate(1 / self.context.plan.fetch_pause_s))

    async def _read(self, node: TransactionNode) -> CommittedRead:
        return await node.read_committed(self._target, self.position)

    def _take(self, read: CommittedRead) -> None:
        values, next_offset = delivered(read, self.position)
        self._visible.check_read(values, self.position, next_offset)
        self.position = next_offset


def delivered(read: CommittedRead, position: int) -> tuple[dict[int, str], int]:
    """Return what a client delivers of a response, by offset, and where it reads next."""
    waiting = sorted(read.aborted, key=lambda pair: pair[1])
    aborted: set[int] = set()
    values: dict[int, str] = {}
    next_offset = position
    for header in iterate_headers(read.records):
        next_offset = header.next_offset
        while waiting and waiting[0][1] <= header.last_offset:
            aborted.add(waiting.pop(0)[0])
        if header.is_control:
            marker = read_marker(read.records, header)
            if marker is not None and not marker.commit:
                aborted.discard(header.producer_id)
        elif header.producer_id not in aborted:
            for record in decode_batch(read.records, header):
                if record.offset >= position:
                    values[record.offset] = (record.value or b"").decode()
    return values, next_offset


class OffsetReader(Caller):
    """Reads the offset that a transactional id commits for its group."""

    def __init__(self, context: ClientContext, transactional_id: str) -> None:
        super().__init__(f"offsets-{transactional_id}", context)
        self._id = transactional_id
        self._seen = -1
        self._partition: TopicPartition = context.plan.data[0]

    async def run(self) -> None:
        """Check forever."""
        while True:
            await self.look()
            await asyncio.sleep(self.rng.expovariate(1 / (2 * self.context.plan.fetch_pause_s)))

    async def look(self) -> int:
        """Read the offset, and check it."""
        group = self._id
        try:
            offset = await self.send(
                RequestTarget(GROUP, group), lambda node: node.committed_offset(group, self._partition)
            )
        except MillstreamError as error:
            self.context.record(self.name, f"{type(error).__name__}: {error}")
            return self._seen
        self.context.model.offset_seen(self._id, self._seen, offset)
        self._seen = offset
        return offset
