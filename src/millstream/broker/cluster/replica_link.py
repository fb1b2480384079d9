"""How followers reach their leaders: one connection to each, over the Kafka protocol."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from millstream.broker.cluster.membership import Node
from millstream.core.errors import BrokerUnreachable
from millstream.core.ids import NodeId
from millstream.protocol.wire.channel import Channel
from millstream.protocol.wire.replica_fetch import (
    FETCH_KEY,
    VERSION,
    ReplicaAnswers,
    ReplicaFetch,
    read_replica_answers,
    write_replica_fetch,
)

CONNECT_S = 3.0
ANSWER_S = 10.0
"""How long a response may take beyond the time for which the leader was asked to wait."""

ROOM_BYTES_MAX = 12 * 1024 * 1024
"""The largest response whose memory is kept for the next one."""

SMALL_ANSWERS_MAX = 8
"""After this many responses in a row that need none, the memory is released."""


class ReplicaLink(Protocol):
    """A follower's link to one leader. It carries one fetch at a time."""

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaAnswers:
        """Send a fetch to the leader; raise a `MillstreamError` if there is no response. The next call reconnects.

        The records of the response are valid until the next call.
        """

    async def close(self) -> None:
        """Close the connection."""


class ReplicaLinks(Protocol):
    """Opens links."""

    def open(self, node: NodeId) -> ReplicaLink:
        """Return a link to a node, which need not be reachable yet."""


class WireLink:
    """A link over its own connection, opened when it is first needed and again after it was lost.

    Responses are received into the same memory again and again, because fresh memory costs more than the work on it.
    The records of a response are therefore valid until the next fetch.
    """

    def __init__(self, find: Callable[[], Node | None], *, client_id: str) -> None:
        self._find = find
        self._client_id = client_id
        self._channel: Channel | None = None
        self._room: bytearray | None = None
        self._small_answers = 0
        """How many responses in a row did not need the memory."""
        self._due = 0.0
        """When the response to the current fetch is due; 0 for none."""
        self._watch: asyncio.TimerHandle | None = None

    async def fetch(self, fetch: ReplicaFetch) -> ReplicaAnswers:
        """Send a fetch to the leader."""
        channel = self._channel
        if channel is None or not channel.is_open:
            channel = self._channel = await self._connect()
        self._small_answers += 1
        if self._small_answers > SMALL_ANSWERS_MAX:
            # Little comes this way, so nothing is kept for it.
            self._room = None
        self._expect_answer(fetch.max_wait_ms / 1000 + ANSWER_S)
        try:
            return read_replica_answers(await channel.ask(FETCH_KEY, VERSION, [write_replica_fetch(fetch)]))
        except BaseException:
            # A late response must not be mistaken for the response to the next request.
            await self.close()
            raise
        finally:
            self._due = 0.0

    async def close(self) -> None:
        """Close the connection."""
        if self._watch is not None:
            self._watch.cancel()
            self._watch = None
        channel, self._channel = self._channel, None
        if channel is not None:
            await asyncio.shield(channel.close())

    def _expect_answer(self, within_s: float) -> None:
        """Start the timeout. One timer serves many fetches, because each would be cancelled by its response."""
        loop = asyncio.get_running_loop()
        self._due = loop.time() + within_s
        if self._watch is None:
            self._watch = loop.call_at(self._due, self._look_at_clock)

    def _look_at_clock(self) -> None:
        self._watch = None
        if not self._due:
            return
        loop = asyncio.get_running_loop()
        if self._due > loop.time():
            self._watch = loop.call_at(self._due, self._look_at_clock)
        elif self._channel is not None:
            self._channel.abort("a fetch was not answered in time")

    def _room_for(self, size: int) -> memoryview:
        if size > ROOM_BYTES_MAX:
            return memoryview(bytearray(size))
        self._small_answers = 0
        if self._room is None or len(self._room) < size:
            self._room = bytearray(min(max(size, 2 * len(self._room or b"")), ROOM_BYTES_MAX))
        return memoryview(self._room)[:size]

    async def _connect(self) -> Channel:
        node = self._find()
        if node is None:
            raise BrokerUnreachable("the leader is not registered")
        channel = await Channel.open(node.host, node.port, client_id=self._client_id, timeout_s=CONNECT_S)
        channel.version_for(FETCH_KEY, newest=VERSION, oldest=VERSION)
        channel.room_for = self._room_for
        return channel


class WireLinks:
    """Links to nodes at the addresses that they registered."""

    def __init__(self, find: Callable[[NodeId], Node | None], *, me: NodeId) -> None:
        self._find = find
        self._client_id = f"replica-{me}"

    def open(self, node: NodeId) -> WireLink:
        return WireLink(lambda: self._find(node), client_id=self._client_id)
