"""Requests about transactions between the nodes of a simulation: real messages over simulated links."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from random import Random
from typing import Any

from kio.schema.write_txn_markers.v2.request import WriteTxnMarkersRequest

from millstream.broker.coordination.peers import RESPONSE_S
from millstream.broker.transactions.marker_sender import MarkerRoutes, PartitionErrors
from millstream.broker.transactions.transaction import EPOCH_PER_TRANSACTION
from millstream.core.errors import BrokerUnreachable, MillstreamError
from millstream.core.ids import NodeId
from millstream.core.topic import TopicPartition
from millstream.protocol.records.control import Marker
from millstream_testing.simulation.links import node_name
from millstream_testing.simulation.network import LinkDown, Network

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
        return await self._routes.write(marker, sorted(partitions, key=lambda one: (one.topic, one.partition)))
