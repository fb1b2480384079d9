"""Links of followers in a simulation: the bytes of real requests and responses, over the simulated network."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from millstream.broker.cluster.replica_fetcher import RESPONSE_S
from millstream.broker.kafka.follower_fetch import FollowerFetch
from millstream.core.errors import BrokerUnreachable
from millstream.core.ids import NodeId
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.wire.replica_fetch import (
    FETCH_KEY,
    VERSION,
    ReplicaFetch,
    ReplicaResponses,
    read_replica_responses,
    write_replica_fetch,
)
from millstream_testing.simulation.network import LinkDown, Network

_SIZE_BYTES = 4
_HEADER = RequestHeader(FETCH_KEY, VERSION, 0, "replica", 0, True)

FindServer = Callable[[NodeId], FollowerFetch]
"""Returns what responds to the fetches of followers on a node; raises `BrokerUnreachable` if it does not run yet."""


class SimulatedLink:
    """A follower's link to one leader."""

    def __init__(self, name: str, node: NodeId, find: FindServer, network: Network) -> None:
        self._name = name
        self._node = node
        self._find = find
        self._network = network

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaResponses:
        frame = bytes(write_replica_fetch(fetch))

        async def serve() -> bytes:
            response = self._find(self._node).handle_frame(memoryview(frame), _HEADER)
            if inspect.isawaitable(response):
                response = await response
            return b"".join(response)  # type: ignore[arg-type]

        try:
            encoded = await self._network.call(self._name, serve, timeout_s=fetch.max_wait_ms / 1000 + RESPONSE_S)
        except LinkDown as error:
            raise BrokerUnreachable(str(error)) from error
        return read_replica_responses(memoryview(encoded)[_SIZE_BYTES:])

    async def close(self) -> None:
        """Do nothing: no resources are held."""


class SimulatedLinks:
    """Opens links to the nodes of a simulation."""

    def __init__(self, find: FindServer, network: Network) -> None:
        self._find = find
        self._network = network

    def open(self, node: NodeId) -> SimulatedLink:
        return SimulatedLink(node_name(node), node, self._find, self._network)


def node_name(node: NodeId) -> str:
    return f"node-{node}"
