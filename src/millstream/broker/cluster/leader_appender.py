"""Appends batches of a node's own to a partition, wherever it is led."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from millstream.broker.cluster.topics import Topics
from millstream.core.errors import NotLeader, UnknownTopic
from millstream.core.ids import Offset
from millstream.protocol.wire.client import Client

_TIMEOUT_S: Final = 30.0


class LeaderAppender:
    """Appends here if this node leads the partition, and through a client otherwise."""

    def __init__(self, topics: Topics, addresses: Callable[[], str], *, client_id: str) -> None:
        self._topics = topics
        self._addresses = addresses
        self._client_id = client_id
        self._client: Client | None = None

    async def close(self) -> None:
        """Close the connections to other nodes."""
        if self._client is not None:
            await self._client.close()

    async def append(self, topic: str, index: int, batch: bytearray) -> Offset:
        """Append a batch; return its offset, also if it is an idempotent producer's and was stored before."""
        try:
            partition = self._topics.partition(topic, index)
            if partition.is_leader:
                return (await partition.append(batch)).base_offset
        except (NotLeader, UnknownTopic):
            # Another node leads the partition, or will soon; the client finds out.
            pass
        if self._client is None:
            self._client = Client.connect(self._addresses(), client_id=self._client_id, timeout_s=_TIMEOUT_S)
        return await self._send(self._client, topic, index, batch)

    async def _send(self, client: Client, topic: str, index: int, batch: bytearray) -> Offset:
        """Have the leader of the partition append a batch."""
        return Offset((await client.produce(topic, index, batch)).base_offset)
