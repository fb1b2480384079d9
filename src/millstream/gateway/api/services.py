"""The services that every route uses: clients of the cluster, one publisher, and their limits."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from http import HTTPStatus
from typing import Final

from millstream.client.publisher import Publisher
from millstream.gateway.api.leasing import Leasing
from millstream.gateway.api.problem import RETRY_S, Refused
from millstream.gateway.api.record_reader import RecordReader
from millstream.gateway.api.route import Lane
from millstream.gateway.pressure import REQUESTS_MAX, Pressure
from millstream.protocol.private.subscriptions import SubscriptionClient
from millstream.protocol.wire.client import Client

CLIENT_ID: Final = "millstream-gateway"
TIMEOUT_S: Final = 15.0
PUBLISH_S: Final = 30.0
"""Few HTTP clients wait longer for an answer."""


class Services:
    """The gateway's shared services; created on the loop, closed in reverse order."""

    def __init__(
        self,
        kafka_address: str,
        *,
        starting: Callable[[], str | None] = lambda: None,
        pressure: Pressure | None = None,
    ) -> None:
        self._starting = starting
        self.client = _connect(kafka_address)
        # The broker throttles a client as a whole, so publishers and readers have one each.
        self.publishing = _connect(kafka_address)
        self.reading = _connect(kafka_address)
        self.publisher = Publisher(self.publishing, timeout_s=PUBLISH_S)
        self.subscriptions = SubscriptionClient(self.client)
        self.reader = RecordReader()
        self.leasing = Leasing(self.client, self.reader)
        self.pressure = pressure or Pressure()
        self.stopping: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def check_started(self) -> None:
        """Refuse requests while the broker starts."""
        reason = self._starting()
        if reason is not None:
            raise Refused(
                HTTPStatus.SERVICE_UNAVAILABLE,
                f"the broker is starting: {reason}",
                headers={"retry-after": str(RETRY_S)},
                reasons=[reason],
            )

    def new_worker(self, name: str | None) -> str:
        """Return the name of a worker: the client's own, or a unique one."""
        return f"http/{name}" if name else f"http/{secrets.token_hex(8)}"

    def stop(self) -> None:
        """Release the requests that wait for messages."""
        if not self.stopping.done():
            self.stopping.set_result(None)

    async def close(self) -> None:
        """Wait until published messages are acknowledged, then close all connections."""
        self.stop()
        self.reader.close()
        await self.publisher.close()
        await self.leasing.close()
        for client in (self.publishing, self.reading, self.client):
            await client.close()


def _connect(kafka_address: str) -> Client:
    return Client.connect(kafka_address, client_id=CLIENT_ID, timeout_s=TIMEOUT_S, waiting_max=REQUESTS_MAX[Lane.WAIT])
