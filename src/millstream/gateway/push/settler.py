"""Settles what a push worker holds, at its own node or wherever the partitions are led by then."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from time import monotonic
from typing import Final

from millstream.client import settling
from millstream.client.lease import Lease
from millstream.core.errors import MillstreamError
from millstream.core.ids import NodeId
from millstream.protocol.private.subscriptions import LeasedMessage
from millstream.protocol.wire.client import Client

_logger = logging.getLogger(__name__)

RETRY_S: Final = 5.0
SETTLE_S: Final = 10.0
"""How long settling is retried at new leaders, and how long it may take in all; after that, the lease expires."""

Ask = Callable[[int, bytes], Awaitable[memoryview]]
"""Sends a private request to this node."""


class Settler:
    """Settles the messages that one worker holds."""

    def __init__(self, subscription: str, worker: str, ask: Ask, client: Client) -> None:
        self._ask = ask
        self._client = client
        self._settler = settling.Settler(client, subscription, worker, send=self._send)

    async def settle(self, message: LeasedMessage, verb: int, *, delay_ms: int | None = None, reason: str = "") -> bool:
        """Settle a message; return whether that is durable."""
        lease = Lease(
            message.topic,
            message.topic_id.bytes,
            message.partition,
            node=message.node,
            received=monotonic(),
            lease_s=RETRY_S,
            attempt=message.attempt,
        )
        try:
            async with asyncio.timeout(SETTLE_S):
                await self._settler.settle(lease, message.record.offset, verb, delay_ms=delay_ms, reason=reason)
        except (MillstreamError, TimeoutError) as error:
            extra = {"topic": message.topic, "partition": message.partition, "error": str(error) or "no answer in time"}
            _logger.debug("a lease could not be settled", extra=extra)
            return False
        return True

    async def _send(self, node: NodeId | None, key: int, body: bytes) -> memoryview:
        return await (self._ask(key, body) if node is None else self._client.private(node, key, body))
