"""The services that every route uses for its caller: clients of the cluster, a publisher, and shared limits."""

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
from millstream.protocol.wire.credentials import Credentials
from millstream.protocol.wire.node_status import BrokerStatus

CLIENT_ID: Final = "millstream-gateway"
TIMEOUT_S: Final = 15.0
PUBLISH_S: Final = 30.0
"""Few HTTP clients wait longer for an answer."""


class Services:
    """Services with the rights of the node, or of one caller; created on the loop, closed in reverse order."""

    def __init__(
        self,
        kafka_address: str,
        *,
        starting: Callable[[], str | None] = lambda: None,
        pressure: Pressure | None = None,
        gateway: Services | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        self.kafka_address = kafka_address
        self._gateway = gateway
        self._starting = starting
        self.client = _connect(kafka_address, credentials)
        # The broker throttles a client as a whole, so publishers and readers have one each.
        self.publishing = _connect(kafka_address, credentials)
        self.reading = _connect(kafka_address, credentials)
        self.status = BrokerStatus(kafka_address, credentials=credentials)
        self.publisher = Publisher(self.publishing, timeout_s=PUBLISH_S)
        self.subscriptions = SubscriptionClient(self.client)
        self.reader: RecordReader = RecordReader() if gateway is None else gateway.reader
        self.leasing = Leasing(self.client, self.reader)
        self.pressure = pressure or Pressure()
        self.stopping: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future() if gateway is None else gateway.stopping
        )

    def acting_for(self, credentials: Credentials) -> Services:
        """Return services with the rights of a caller; limits and memory are shared."""
        return Services(
            self.kafka_address,
            starting=self._starting,
            pressure=self.pressure,
            gateway=self,
            credentials=credentials,
        )

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
        if self._gateway is None:
            self.stop()
            self.reader.close()
        await self.publisher.close()
        await self.leasing.close()
        await self.status.close()
        for client in (self.publishing, self.reading, self.client):
            await client.close()


def _connect(kafka_address: str, credentials: Credentials | None) -> Client:
    return Client.connect(
        kafka_address,
        client_id=CLIENT_ID,
        timeout_s=TIMEOUT_S,
        waiting_max=REQUESTS_MAX[Lane.WAIT],
        credentials=credentials,
    )
