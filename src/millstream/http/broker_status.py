"""Asks the broker how it is, over one connection that is kept."""

from __future__ import annotations

import asyncio
import json
from contextlib import AsyncExitStack
from typing import Any

from millstream.model.errors import RequestTimedOut
from millstream.wire.client import Client

NODE_STATUS_KEY = 32000
ANSWER_S = 3.0
"""A broker that takes longer than this to say how it is, is not well."""


class BrokerStatus:
    """The gateway's one wire client. Those who ask while a question is under way share its answer."""

    def __init__(self, kafka_address: str, *, answer_s: float = ANSWER_S) -> None:
        self._kafka_address = kafka_address
        self._answer_s = answer_s
        self._connection = AsyncExitStack()
        self._client: Client | None = None
        self._asking: asyncio.Task[dict[str, Any]] | None = None

    async def ask(self) -> dict[str, Any]:
        """The broker's answer, as `kafka/apis/node_status.py` describes it."""
        if self._asking is None:
            self._asking = asyncio.create_task(self._ask())
            self._asking.add_done_callback(self._answered)
        # Shielded, since others may wait for the same answer when one of them goes away.
        return await asyncio.shield(self._asking)

    async def close(self) -> None:
        """Close the connection."""
        if self._asking is not None:
            self._asking.cancel()
            await asyncio.wait([self._asking])
        await self._connection.aclose()

    def _answered(self, done: asyncio.Task[dict[str, Any]]) -> None:
        self._asking = None
        if not done.cancelled():
            # Taken note of, so that nobody is told about an error whose askers have all gone.
            done.exception()

    async def _ask(self) -> dict[str, Any]:
        try:
            async with asyncio.timeout(self._answer_s):
                answer = await (await self._connected()).private(None, NODE_STATUS_KEY, b"")
        except TimeoutError:
            raise RequestTimedOut(f"no answer from {self._kafka_address} within {self._answer_s:g} s") from None
        document: dict[str, Any] = json.loads(bytes(answer))
        return document

    async def _connected(self) -> Client:
        if self._client is None:
            connecting = Client.connect(self._kafka_address, client_id="millstream-gateway", timeout_s=self._answer_s)
            self._client = await self._connection.enter_async_context(connecting)
        return self._client
