"""The other nodes of the cluster: one connection to each, opened when needed, and appends to partitions they lead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final, Protocol

from millstream.broker.cluster.membership import Node
from millstream.broker.cluster.topics import Topics
from millstream.broker.replication.partition import Partition
from millstream.core.errors import BatchRejected, BrokerUnreachable, NotLeader, ProducerRejected, UnknownTopic
from millstream.core.ids import NodeId, Offset
from millstream.protocol.messages.codec import load_request_class, load_response_class, response_body_at
from millstream.protocol.messages.shape import reshape
from millstream.protocol.private.message import R, Request, decode_response, encode, response_type
from millstream.protocol.wire.channel import Channel
from millstream.protocol.wire.client import Client

_TIMEOUT_S: Final = 30.0


async def append_here(topics: Topics, partition: Partition, batch: bytes | bytearray) -> Offset:
    """Append a copy of a batch, whose offsets are set in place, to a partition that this node leads.

    A refusal is final: it is raised only if no other leader can have stored the batch.
    """
    epoch = partition.leader_epoch
    try:
        return (await partition.append(bytearray(batch))).base_offset
    except (BatchRejected, ProducerRejected):
        await topics.confirm_leader(partition, epoch)
        raise


class LeaderAppender:
    """Appends here if this node leads the partition, and through a client otherwise."""

    def __init__(self, topics: Topics, addresses: Callable[[], str], *, client_id: str) -> None:
        self._topics = topics
        self._addresses = addresses
        self._client_id = client_id
        self._client: Client | None = None

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()

    async def append(self, topic: str, index: int, batch: bytearray) -> Offset:
        """Append a batch; return its offset, or that of the stored copy for a duplicate of an idempotent producer."""
        try:
            partition = self._topics.partition(topic, index)
            if partition.is_leader:
                return await append_here(self._topics, partition, batch)
        except (NotLeader, UnknownTopic):
            # Another node leads the partition, or will soon; the client finds out.
            pass
        if self._client is None:
            self._client = Client.connect(self._addresses(), client_id=self._client_id, timeout_s=_TIMEOUT_S)
        return Offset((await self._client.produce(topic, index, batch)).base_offset)


CONNECT_S: Final = 3.0
RESPONSE_S: Final = 30.0
_PRIVATE_VERSION: Final = 0


class Peers(Protocol):
    """Calls other nodes."""

    async def send(self, node: NodeId, request: Any) -> Any:
        """Send a message to a node; return the response, in the message's version. Raise a `MillstreamError` if there
        is none.
        """

    async def send_private(self, node: NodeId, api_key: int, body: bytes) -> memoryview:
        """Send a private request; return the body of the response. Raise a `MillstreamError` if there is none."""


async def ask_peer(peers: Peers, node: NodeId, request: Request[R], *, about: str = "") -> R:
    """Send a private request to a node; return its response, or raise the error in it."""
    body = await peers.send_private(node, request.KEY, encode(request))
    return decode_response(body, response_type(request), about=about)


class WirePeers:
    """Connections to other nodes, opened when first needed and reopened when lost."""

    def __init__(self, find: Callable[[NodeId], Node | None], *, me: NodeId) -> None:
        self._find = find
        self._client_id = f"coordinator-{me}"
        self._channels: dict[NodeId, Channel] = {}
        self._opening: dict[NodeId, asyncio.Lock] = {}
        self._closed = False

    async def send(self, node: NodeId, request: Any) -> Any:
        key, newest = request.__api_key__, request.__version__
        channel = await self._channel(node)
        version = channel.version_for(key, newest=newest)
        response = await channel.call(reshape(request, load_request_class(key, version)), timeout_s=RESPONSE_S)
        return reshape(response, load_response_class(key, newest))

    async def send_private(self, node: NodeId, api_key: int, body: bytes) -> memoryview:
        channel = await self._channel(node)
        frame = await channel.exchange(api_key, _PRIVATE_VERSION, [body], timeout_s=RESPONSE_S)
        return frame[response_body_at(api_key, _PRIVATE_VERSION, frame) :]

    async def close(self) -> None:
        self._closed = True
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    async def _channel(self, node: NodeId) -> Channel:
        async with self._opening.setdefault(node, asyncio.Lock()):
            known = self._channels.get(node)
            if known is not None and known.is_open:
                return known
            address = self._find(node)
            if address is None or self._closed:
                raise BrokerUnreachable(f"node {node} is not registered")
            channel = await Channel.open(address.host, address.port, client_id=self._client_id, timeout_s=CONNECT_S)
            self._channels[node] = channel
            return channel
