"""Clients of a simulation: producers that retry until they succeed, and consumers of committed data."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from random import Random
from typing import Protocol

from millstream.broker.cluster.keys import PartitionKey
from millstream.broker.log.log import AppendedRange
from millstream.core.clock import Clock
from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream.protocol.records.batch import HEADER_BYTES, TRANSACTIONAL_FLAG, seal_batch
from millstream_testing.simulation.network import LinkDown, Network
from millstream_testing.simulation.rules import Rules


def make_batch(
    values: list[bytes],
    *,
    now_ms: int,
    producer_id: int = -1,
    producer_epoch: int = -1,
    base_sequence: int = -1,
    transactional: bool = False,
) -> bytes:
    """Build a small batch without compiled code, so that a simulation starts quickly."""
    records = b"".join(_record(delta, value) for delta, value in enumerate(values))
    batch = bytearray(HEADER_BYTES) + records
    seal_batch(
        batch,
        base_offset=0,
        attributes=TRANSACTIONAL_FLAG if transactional else 0,
        last_offset_delta=len(values) - 1,
        base_timestamp_ms=now_ms,
        max_timestamp_ms=now_ms,
        producer_id=producer_id,
        producer_epoch=producer_epoch,
        base_sequence=base_sequence,
        record_count=len(values),
    )
    return bytes(batch)


def _record(delta: int, value: bytes) -> bytes:
    """Lengths are below 32 and deltas below 64, so every number takes one byte."""
    body = bytes((0, 0, 2 * delta, 1, 2 * len(value))) + value + b"\0"
    return bytes((2 * len(body),)) + body


ACKS_ALL = -1
RECORDS_MAX = 3
CALL_TIMEOUT_S = 3.0
PAUSE_S = 0.25
FETCH_BYTES = 2000


class Server(Protocol):
    """The requests of clients to a node. Each call runs in the node's process."""

    name: str
    node_id: NodeId

    async def produce(self, key: PartitionKey, batch: bytes, acks: int) -> AppendedRange:
        """Append a batch."""

    async def fetch(self, key: PartitionKey, offset: int, max_bytes: int) -> bytes:
        """Read committed batches."""

    async def leader_of(self, key: PartitionKey) -> NodeId | None:
        """Return the leader of a partition according to this node."""


class Client:
    """Finds the leader of a partition, and retries there."""

    def __init__(self, name: str, key: PartitionKey, servers: Sequence[Server], network: Network, rng: Random) -> None:
        self.name = name
        self.key = key
        self._servers = {server.node_id: server for server in servers}
        self._network = network
        self._rng = rng
        self._leader: Server | None = None

    async def _find_leader(self) -> Server:
        while self._leader is None:
            asked = self._rng.choice(list(self._servers.values()))
            try:
                leader = await self._network.call(
                    asked.name, partial(asked.leader_of, self.key), timeout_s=CALL_TIMEOUT_S
                )
                if leader is not None:
                    self._leader = self._servers[leader]
                    break
            except (MillstreamError, LinkDown):
                pass
            await self._pause()
        return self._leader

    async def _pause(self) -> None:
        self._leader = None
        await asyncio.sleep(self._rng.uniform(0.2, 1.0) * PAUSE_S)


class Producer(Client):
    """Sends batches one after the other, each until it is acknowledged."""

    def __init__(
        self,
        name: str,
        key: PartitionKey,
        servers: Sequence[Server],
        network: Network,
        rng: Random,
        *,
        clock: Clock,
        rules: Rules,
        producer_id: int,
        acks: int,
        record: Callable[[str, str], None],
    ) -> None:
        super().__init__(name, key, servers, network, rng)
        self.sent = 0
        self._clock = clock
        self._rules = rules
        self._producer_id = producer_id
        self._acks = acks
        self._sequence = 0
        self._record = record
        self._stopping = False

    def stop(self) -> None:
        self._stopping = True

    async def run(self, pause_s: float) -> None:
        while not self._stopping:
            await self._send(self._next_batch())
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))

    def _next_batch(self) -> bytes:
        count = self._rng.randint(1, RECORDS_MAX)
        values = [f"{self._producer_id}:{self._sequence + at}".encode() for at in range(count)]
        idempotent = self._producer_id >= 0
        batch = make_batch(
            values,
            now_ms=self._clock.now_ms(),
            producer_id=self._producer_id,
            producer_epoch=0 if idempotent else -1,
            base_sequence=self._sequence if idempotent else -1,
        )
        self._sequence += count
        return batch

    async def _send(self, batch: bytes) -> None:
        while True:
            leader = await self._find_leader()
            try:
                appended = await self._network.call(
                    leader.name, partial(leader.produce, self.key, batch, self._acks), timeout_s=CALL_TIMEOUT_S
                )
            except (MillstreamError, LinkDown) as error:
                self._record(self.name, f"node {leader.node_id}: {type(error).__name__}: {error}")
                await self._pause()
                continue
            self.sent += 1
            self._record(self.name, f"acknowledged at {appended.base_offset} by node {leader.node_id}")
            if self._acks == ACKS_ALL:
                self._rules.acknowledged(self.key, batch, appended.base_offset, appended.next_offset, self.name)
            return


class Consumer(Client):
    """Reads a partition from its beginning."""

    def __init__(
        self,
        name: str,
        key: PartitionKey,
        servers: Sequence[Server],
        network: Network,
        rng: Random,
        *,
        rules: Rules,
        record: Callable[[str, str], None],
    ) -> None:
        super().__init__(name, key, servers, network, rng)
        self.position = 0
        self._rules = rules
        self._record = record

    async def run(self, pause_s: float) -> None:
        while True:
            leader = await self._find_leader()
            try:
                records = await self._network.call(
                    leader.name,
                    partial(leader.fetch, self.key, self.position, FETCH_BYTES),
                    timeout_s=CALL_TIMEOUT_S,
                )
            except (MillstreamError, LinkDown) as error:
                self._record(self.name, f"node {leader.node_id}: {type(error).__name__}: {error}")
                await self._pause()
                continue
            if records:
                self.position = self._rules.consumed(self.key, records, self.name)
            await asyncio.sleep(self._rng.expovariate(1 / pause_s))
