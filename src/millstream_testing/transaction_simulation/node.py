"""A simulated node with everything that serves transactions: coordinators, markers, Produce, offsets of groups."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Iterable
from contextlib import suppress
from random import Random
from typing import Any, NamedTuple, cast

from kio.schema.txn_offset_commit.v5.request import (
    TxnOffsetCommitRequest,
    TxnOffsetCommitRequestPartition,
    TxnOffsetCommitRequestTopic,
)
from kio.schema.types import GroupId, TopicName, TransactionalId
from kio.schema.types import ProducerId as WireProducerId
from kio.schema.write_txn_markers.v2.request import WriteTxnMarkersRequest
from kio.static.primitive import i16, i32, i64

from millstream.broker.cluster.declarations import ProducerIds
from millstream.broker.coordination.peers import RESPONSE_S
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import ClientInfo, Versioned
from millstream.broker.kafka.apis.add_partitions_to_txn import AddPartitionsCall, AddPartitionsToTxn
from millstream.broker.kafka.apis.produce import Produce
from millstream.broker.kafka.apis.txn_offset_commit import TxnOffsetCommit
from millstream.broker.kafka.apis.write_txn_markers import WriteTxnMarkers
from millstream.broker.kafka.quota_meter import QuotaMeters
from millstream.broker.kafka.transaction_service import CoordinatorGate, PartitionMarkers
from millstream.broker.replication.partition import CommittedRead
from millstream.broker.transactions.coordinator import TransactionCoordinator
from millstream.broker.transactions.marker_sender import MarkerRoutes, MarkerSender, PartitionErrors
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION, InitRequest, InitResponse, ProducerRef
from millstream.core.errors import BrokerUnreachable, CoordinatorUnavailable, MillstreamError
from millstream.core.ids import NodeId, Offset
from millstream.core.topic import CONSUMER_OFFSETS, TopicPartition
from millstream.protocol.messages.codec import RequestHeader, is_flexible
from millstream.protocol.records.control import Marker
from millstream.protocol.wire.error_codes import error_from_code
from millstream.protocol.wire.produce import PRODUCE_KEY, Produced, read_produce_response, write_produce
from millstream_testing.simulation.loop import Process
from millstream_testing.simulation.network import LinkDown, Network, node_name
from millstream_testing.simulation.node import PRODUCE_TIMEOUT_S, NodeProcess, SimulatedNode
from millstream_testing.transaction_simulation.plan import TransactionPlan

Respond = Callable[[NodeId, Any], Awaitable[Any]]
"""Delivers a message to a node, and returns its response."""


class SimulatedPeers:
    """Sends requests to other nodes; some arrive twice."""

    def __init__(self, network: Network, respond: Respond, rng: Random, *, duplicate_chance: float) -> None:
        self._network = network
        self._respond = respond
        self._rng = rng
        self._duplicate_chance = duplicate_chance
        self._duplicates: set[asyncio.Task[None]] = set()

    async def send(self, node: NodeId, request: Any) -> Any:
        if self._rng.random() < self._duplicate_chance and _may_come_twice(request):
            task = asyncio.get_running_loop().create_task(self._send_again(node, request))
            self._duplicates.add(task)
            task.add_done_callback(self._duplicates.discard)
        try:
            return await self._call(node, request)
        except LinkDown as error:
            raise BrokerUnreachable(str(error)) from error

    async def send_private(self, node: NodeId, api_key: int, body: bytes) -> memoryview:
        """Queues are not part of this simulation."""
        raise BrokerUnreachable(f"node {node} cannot respond to request {api_key}")

    async def _call(self, node: NodeId, request: Any) -> Any:
        return await self._network.call(node_name(node), lambda: self._respond(node, request), timeout_s=RESPONSE_S)

    async def _send_again(self, node: NodeId, request: Any) -> None:
        with suppress(LinkDown, MillstreamError):
            await asyncio.sleep(self._rng.expovariate(1.0))
            await self._call(node, request)


def _may_come_twice(request: Any) -> bool:
    """Whether a duplicate is harmless: a late marker of the first version would end the next transaction."""
    return not isinstance(request, WriteTxnMarkersRequest) or all(
        marker.transaction_version >= EPOCH_PER_TRANSACTION for marker in request.markers
    )


class OrderedRoutes:
    """The routes of markers, in an order that does not depend on memory addresses."""

    def __init__(self, routes: MarkerRoutes) -> None:
        self._routes = routes

    async def write(self, marker: Marker, partitions: Iterable[TopicPartition]) -> PartitionErrors:
        return await self._routes.write(
            marker, sorted(partitions, key=lambda partition: (partition.topic, partition.partition))
        )


READ_BYTES = 2000
_SIZE_BYTES = 4
_NEWEST_ADD = 5
_CLIENT = ClientInfo(connection_id=0, host="simulated")

LEADER, COORDINATOR, GROUP = "leader", "coordinator", "group"


class RequestTarget(NamedTuple):
    """The receiver of a request: the leader of a partition, or the coordinator of a transaction or of a group."""

    kind: str
    name: str
    number: int = 0
    """Of the partition."""


class TransactionNodeProcess(NodeProcess):
    """A process of a node with transactions, assembled as in `TransactionService`."""

    def __init__(self, node: TransactionNode, process: Process) -> None:
        super().__init__(node, process)
        environment = node.environment
        plan = cast("TransactionPlan", environment.plan)
        rng = Random(f"{plan.seed} {node.name} {node.starts} transactions")
        topics, clock = self.cluster.topics, node.clock
        self.groups = GroupCoordinator(topics, node.config, clock)
        self.coordinator = TransactionCoordinator(topics, node.config, clock, ProducerIds(environment.declarations))
        latest_epoch = self.coordinator.latest_epoch
        markers = PartitionMarkers(topics, self.groups, latest_epoch)
        peers = SimulatedPeers(environment.network, node.respond_elsewhere, rng, duplicate_chance=plan.duplicate_chance)
        self._routes = MarkerRoutes(topics, markers, peers, me=node.node_id)
        routes = OrderedRoutes(self._routes)
        self.sender = MarkerSender(lambda: self.coordinator.shards, routes, rng, latest_epoch=latest_epoch)
        self.coordinator.on_transaction_ending(self.sender.wake)
        gate = CoordinatorGate(self.coordinator, peers, me=node.node_id)
        self.produce = Produce(topics, QuotaMeters(self.cluster.declared.quotas).produce, gate)
        self.offset_commit = TxnOffsetCommit(self.groups, topics, gate)
        self._write_markers = WriteTxnMarkers(markers)
        self._add_partitions = AddPartitionsToTxn(self.coordinator, topics)

    async def serve(self) -> None:
        """Start to load what the coordinators keep in the log."""
        await self.groups.start()
        await self.coordinator.start()

    async def close_served(self) -> None:
        """Acknowledge what was appended."""
        await self.sender.close()
        await self._routes.close()
        await self.coordinator.close()
        await self.groups.close()

    async def respond(self, request: Any) -> Any:
        if isinstance(request, WriteTxnMarkersRequest):
            return await self._write_markers.handle(request, _CLIENT)
        return await self._add_partitions.handle(AddPartitionsCall(_NEWEST_ADD, request.transactions), _CLIENT)


class TransactionNode(SimulatedNode):
    """A node and its machine, and what producers and consumers ask of it."""

    def make_process(self, process: Process) -> NodeProcess:
        return TransactionNodeProcess(self, process)

    async def respond_elsewhere(self, node_id: NodeId, request: Any) -> Any:
        """Send a message to another node, and return its response."""
        return await cast("TransactionNode", self.environment.node(node_id)).serving().respond(request)

    def serving(self) -> TransactionNodeProcess:
        if self._node_process is None:
            raise BrokerUnreachable(f"{self.name} starts")
        return cast("TransactionNodeProcess", self._node_process)

    async def find(self, target: RequestTarget) -> NodeId | None:
        """Return the node that responds to requests of a kind, according to this node."""
        run = self.serving()
        if target.kind == COORDINATOR:
            return run.coordinator.leader_of(target.name)
        if target.kind == GROUP:
            return run.groups.leader_of(target.name)
        topic = run.cluster.topics.get(target.name)
        state = None if topic is None else run.cluster.topics.state_of(topic, target.number)
        return state.leader if state is not None and state.has_leader else None

    # -- producers --------------------------------------------------------------------------------------------

    async def init(self, request: InitRequest) -> InitResponse:
        return await self.serving().coordinator.init(request)

    async def add_partitions(self, who: ProducerRef, partitions: Collection[TopicPartition]) -> None:
        await self.serving().coordinator.add_partitions(who, partitions, version=0)

    async def add_offsets(self, who: ProducerRef, group: str) -> None:
        """Add the offsets of a group to a transaction of the first version."""
        run = self.serving()
        partition = TopicPartition(CONSUMER_OFFSETS, run.groups.partition_of(group))
        await run.coordinator.add_partitions(who, (partition,), version=0)

    async def end(self, who: ProducerRef, *, commit: bool, version: int) -> InitResponse:
        return await self.serving().coordinator.end(who, commit=commit, version=version)

    async def write(self, version: int, transactional_id: str, target: RequestTarget, batch: bytes) -> Produced:
        """Append a batch of a transaction, by the bytes of a real request."""
        timeout_ms = int(PRODUCE_TIMEOUT_S * 1000)
        frame = b"".join(
            write_produce(
                version,
                target.name,
                target.number,
                batch,
                acks=-1,
                timeout_ms=timeout_ms,
                transactional_id=transactional_id,
            )
        )
        header = RequestHeader(PRODUCE_KEY, version, 0, "simulated", 0, is_flexible(PRODUCE_KEY, version))
        response = self.serving().produce.handle_frame(memoryview(bytearray(frame)), header, _CLIENT)
        if inspect.isawaitable(response):
            response = await response
        transaction = memoryview(b"".join(cast("list[bytes]", response)))[_SIZE_BYTES:]
        produced, _ = read_produce_response(version, transaction, about=f"{target.name}-{target.number}")
        if isinstance(produced, MillstreamError):
            raise produced
        return produced

    async def commit_offset(
        self, version: int, who: ProducerRef, group: str, partition: TopicPartition, offset: int
    ) -> None:
        """Commit an offset in a transaction, by a real request."""
        request = TxnOffsetCommitRequest(
            transactional_id=TransactionalId(who.transactional_id),
            group_id=GroupId(group),
            producer_id=WireProducerId(who.producer_id),
            producer_epoch=i16(who.epoch),
            topics=(
                TxnOffsetCommitRequestTopic(
                    name=TopicName(partition.topic),
                    partitions=(
                        TxnOffsetCommitRequestPartition(
                            partition_index=i32(partition.partition),
                            committed_offset=i64(offset),
                            committed_metadata=None,
                        ),
                    ),
                ),
            ),
        )
        response = await self.serving().offset_commit.handle(Versioned(version, request), _CLIENT)
        code = response.topics[0].partitions[0].error_code
        if code:
            raise error_from_code(code, None, about=f"offsets of {group}")

    # -- batches ----------------------------------------------------------------------------------------------

    async def last_batch(self, query: str) -> int:
        return await self.serving().coordinator.last_batch(query)

    async def prepare(self, who: ProducerRef) -> None:
        """Prepare a part of a batch."""
        await self.serving().coordinator.prepare(who)

    async def complete_batch(self, query: str, batch: int, members: tuple[ProducerRef, ...]) -> bool:
        return await self.serving().coordinator.complete_batch(query, batch, members)

    async def abort_batch(self, query: str, batch: int) -> int:
        return await self.serving().coordinator.abort_batch(query, batch)

    # -- consumers --------------------------------------------------------------------------------------------

    async def read_committed(self, target: RequestTarget, offset: int) -> CommittedRead:
        """Read as a consumer of committed data does."""
        partition = self.serving().cluster.topics.partition(target.name, target.number)
        records, aborted = partition.read_committed(Offset(offset), max_bytes=READ_BYTES)
        return CommittedRead(bytes(records), aborted)

    async def committed_offset(self, group: str, partition: TopicPartition) -> int:
        """Return the committed offset of a group; -1 if there is none."""
        requested = {partition.topic: (partition.partition,)}
        fetched = await self.serving().groups.fetch(group, requested)
        return fetched[partition.topic][partition.partition].offset

    # -- for the checks ---------------------------------------------------------------------------------------

    def unfinished(self) -> str | None:
        """Return what this node still has to do, if anything."""
        if self._node_process is None:
            return f"{self.name} starts"
        run = self.serving()
        try:
            for shard in run.coordinator.shards:
                if shard.state is None:
                    return f"{shard.name} is loading"
                left = [transaction for transaction in shard.state if transaction.state.value in _UNFINISHED]
                if left:
                    return f"{left[0].transactional_id} is {left[0].state.value}"
            return _pending_offsets(run.groups)
        except CoordinatorUnavailable as error:
            return str(error)


_UNFINISHED = frozenset({"Ongoing", "Prepared", "PrepareCommit", "PrepareAbort"})


def _pending_offsets(groups: GroupCoordinator) -> str | None:
    for shard in groups._runtime.shards:
        if shard.state is None:
            return f"{shard.name} is loading"
        if len(shard.state.transactional.pending):
            return f"{shard.name} has pending offsets"
    return None
