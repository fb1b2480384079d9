"""How followers reach their leaders: one connection to each, over the Kafka protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from millstream.cluster.membership import Node
from millstream.model.errors import BrokerUnreachable
from millstream.model.ids import NodeId
from millstream.wire.channel import Channel
from millstream.wire.replica_fetching import (
    FETCH_KEY,
    VERSION,
    ReplicaAnswers,
    ReplicaFetch,
    read_replica_answers,
    write_replica_fetch,
)

CONNECT_S = 3.0
ANSWER_S = 10.0
"""How long an answer may take beyond the time for which the leader was asked to wait."""


class ReplicaLink(Protocol):
    """A follower's way to one leader. It carries one fetch at a time."""

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaAnswers:
        """Ask the leader; a `MillstreamError` when no answer came. The next call tries to reach it anew."""

    async def close(self) -> None:
        """Let go of the connection."""


class ReplicaLinks(Protocol):
    """Opens links."""

    def open(self, node: NodeId) -> ReplicaLink:
        """A link to a node, which need not be reachable yet."""


class WireLink:
    """A link over a connection of its own, opened when it is first needed and again when it was lost."""

    def __init__(self, find: Callable[[], Node | None], *, client_id: str) -> None:
        self._find = find
        self._client_id = client_id
        self._channel: Channel | None = None

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaAnswers:
        """Ask the leader."""
        channel = self._channel
        if channel is None or not channel.is_open:
            channel = self._channel = await self._connect()
        timeout_s = fetch.max_wait_ms / 1000 + ANSWER_S
        try:
            body = write_replica_fetch(fetch)
            return read_replica_answers(await channel.exchange(FETCH_KEY, VERSION, [body], timeout_s=timeout_s))
        except BaseException:
            # Whatever went wrong, an answer that comes later must not be taken for that to the next request.
            await self.close()
            raise

    async def close(self) -> None:
        """Let go of the connection."""
        channel, self._channel = self._channel, None
        if channel is not None:
            await asyncio.shield(channel.close())

    async def _connect(self) -> Channel:
        node = self._find()
        if node is None:
            raise BrokerUnreachable("the leader is not registered")
        channel = await Channel.open(node.host, node.port, client_id=self._client_id, timeout_s=CONNECT_S)
        channel.version_for(FETCH_KEY, newest=VERSION, oldest=VERSION)
        return channel


class WireLinks:
    """Links to nodes at the addresses that they registered."""

    def __init__(self, find: Callable[[NodeId], Node | None], *, me: NodeId) -> None:
        self._find = find
        self._client_id = f"replica-{me}"

    def open(self, node: NodeId) -> WireLink:
        """A link to a node."""
        return WireLink(lambda: self._find(node), client_id=self._client_id)
