"""The way to a dead letter topic: made when it is missing, on this node or another."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Final

from millstream.broker.cluster.topics import Topics
from millstream.core.errors import NotLeader, TopicExists, UnknownTopic
from millstream.core.ids import Offset
from millstream.protocol.wire.client import Client

_KEPT_MS_MAX: Final = 365 * 24 * 3600 * 1000
_TOPIC_SETTINGS: Final = {
    # A dead letter is larger than its message: it carries why it died.
    "max.message.bytes": str(32 * 1024 * 1024),
    # Open letters are kept, however old they are.
    "retention.until.delivered": "true",
    "retention.until.max.ms": str(_KEPT_MS_MAX),
}
_CLIENT_ID: Final = "dead-letters"
_TIMEOUT_S: Final = 30.0


class LetterBox:
    """Appends to topics of the cluster."""

    def __init__(self, topics: Topics, addresses: Callable[[], str]) -> None:
        self._topics = topics
        self._addresses = addresses
        self._client: Client | None = None

    async def close(self) -> None:
        """Let go of connections to other nodes."""
        if self._client is not None:
            await self._client.close()

    async def partitions(self, topic: str) -> int:
        """How many partitions a topic has; it is made if it does not exist."""
        found = self._topics.get(topic)
        if found is None:
            with suppress(TopicExists):
                await self._topics.create(topic, overrides=_TOPIC_SETTINGS)
            found = self._topics.get(topic)
        if found is None:
            raise UnknownTopic(f"the dead letter topic {topic!r} is being made")
        return found.partitions

    async def append(self, topic: str, index: int, batch: bytearray) -> Offset:
        """Append a batch of an idempotent producer; the offset that it has, also if it was there already."""
        try:
            partition = self._topics.partition(topic, index)
            if partition.is_leader:
                return (await partition.append(batch)).base_offset
        except (NotLeader, UnknownTopic):
            # Another node leads it, or will soon; the client finds out.
            pass
        if self._client is None:
            self._client = Client.connect(self._addresses(), client_id=_CLIENT_ID, timeout_s=_TIMEOUT_S)
        return Offset((await self._client.produce(topic, index, batch)).base_offset)
