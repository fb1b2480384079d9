"""The services that every route uses for its caller: clients of the cluster, a publisher, and shared limits."""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, suppress
from http import HTTPStatus
from itertools import chain
from random import randrange
from typing import Final

import msgspec

from millstream.client.publisher import Publisher
from millstream.client.schemas import forget_codecs, use_codecs
from millstream.core.errors import MillstreamError, NotFound, QuotaExceeded, RequestTimedOut
from millstream.core.ids import NodeId
from millstream.core.subscription import Verb
from millstream.gateway.api.problem import RETRY_S, Refused
from millstream.gateway.api.record_reader import ReadRecords, RecordReader
from millstream.gateway.api.route import Lane
from millstream.gateway.pressure import REQUESTS_MAX, Pressure
from millstream.gateway.schema_worker import IsolatedCodecs, SchemaWorker
from millstream.protocol.private.leasing import LeaseRequests
from millstream.protocol.private.subscription_messages import ReceiveRequest, ReceiveResponse
from millstream.protocol.private.subscriptions import LeasedMessage, SubscriptionClient, remaining
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.credentials import Credentials
from millstream.protocol.wire.error_codes import TRANSIENT, error_from_code
from millstream.protocol.wire.node_status import BrokerStatus

_logger = logging.getLogger(__name__)

NODES_S: Final = 1.0
"""How long the list of nodes is cached."""

PAUSE_S: Final = 0.1
RESPONSE_S: Final = 15.0
GIVE_BACK_S: Final = 5.0
HUNG_S: Final = 10.0
"""How long a node that did not respond in time is tried only after all others."""
_PASSING: Final = (*TRANSIENT, RequestTimedOut)


class Leasing:
    """Leases messages of subscriptions from the nodes that lead their partitions; returns those no client received.

    A node responds once it has messages, so while a client waits all nodes are asked at once, each on a connection of
    its own. As soon as one has responded, the requests to the others are cancelled, and what they have leased by then
    is returned.
    """

    def __init__(self, client: Client, reader: RecordReader) -> None:
        self._client = client
        self._reader = reader
        self._subscriptions = SubscriptionClient(client)
        self._requests = LeaseRequests()
        self._nodes: list[NodeId] = []
        self._known_until = 0.0
        self._hung_until: dict[NodeId, float] = {}

    async def receive(self, request: ReceiveRequest) -> list[LeasedMessage]:
        """Lease messages, waiting for some if there are none now; raise if no node could be asked."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + request.wait_ms / 1000
        nodes = await self._all_nodes()
        messages: list[LeasedMessage] = []
        refused: list[MillstreamError] = []
        if len(nodes) > 1 or not request.wait_ms:
            nodes, at_once = self._receive_from_any(nodes), msgspec.structs.replace(request, wait_ms=0)
            messages = await self._confirm_leases(request, await self._receive_available(nodes, at_once, refused))
        while not messages and (left_s := deadline - loop.time()) > 0:
            asked_at = loop.time()
            waiting = msgspec.structs.replace(request, wait_ms=int(left_s * 1000) + 1)
            nodes = await self._all_nodes()
            refused.clear()
            messages = await self._confirm_leases(request, await self._receive_first(nodes, waiting, refused))
            if not messages and loop.time() - asked_at < PAUSE_S:
                # Leaders may have moved: the nodes reported at once that they have nothing.
                self._nodes = []
                await asyncio.sleep(min(PAUSE_S, left_s))
        if not messages and refused:
            throttled = next((error for error in refused if isinstance(error, QuotaExceeded)), None)
            if throttled is not None or len(refused) == len(nodes):
                self._nodes = []
                raise throttled or refused[0]
        return messages

    async def close(self) -> None:
        """Return messages that arrive late, for requests whose clients have gone."""
        await self._requests.close()

    async def return_messages(self, subscription: str, worker: str, messages: Sequence[LeasedMessage]) -> None:
        """Return messages that never reached the client they were leased for; that does not count as a delivery.

        Leases that cannot be returned expire.
        """
        if messages:
            with suppress(MillstreamError, TimeoutError):
                async with asyncio.timeout(GIVE_BACK_S):
                    await self._subscriptions.settle(subscription, worker, messages, Verb.RETURN, delay_ms=0)

    async def _confirm_leases(self, request: ReceiveRequest, messages: list[LeasedMessage]) -> list[LeasedMessage]:
        """Keep the messages whose leases are still valid, regardless of the duration of the responses."""
        try:
            return await self._subscriptions.confirmed(request.subscription, request.worker, messages)
        except asyncio.CancelledError:
            await self.return_messages(request.subscription, request.worker, messages)
            raise

    async def _receive_available(
        self, nodes: Sequence[NodeId], request: ReceiveRequest, refused: list[MillstreamError]
    ) -> list[LeasedMessage]:
        """Ask one node after the other for messages that are available, up to the limits of the request."""
        messages: list[LeasedMessage] = []
        fitting = 0
        try:
            for node in nodes:
                rest = remaining(request, messages)
                if rest is None:
                    break
                try:
                    messages += await self._receive_from(node, rest)
                except (QuotaExceeded, *_PASSING) as error:
                    refused.append(error)
            fitting = _count_fitting(messages, request)
        finally:
            # Surplus messages, or all of them if the client has gone or another node refuses.
            await self.return_messages(request.subscription, request.worker, messages[fitting:])
        return messages[:fitting]

    def _receive_from_any(self, nodes: Sequence[NodeId]) -> list[NodeId]:
        """Rotate the nodes at random, leaving out those that hang unless all do.

        In turn, requests for several subscriptions that alternate would each begin with the same node.
        """
        now = asyncio.get_running_loop().time()
        self._hung_until = {node: until for node, until in self._hung_until.items() if now < until}
        first = randrange(len(nodes))
        turned = [*nodes[first:], *nodes[:first]]
        return [node for node in turned if node not in self._hung_until] or turned

    async def _receive_first(
        self, nodes: Sequence[NodeId], request: ReceiveRequest, refused: list[MillstreamError]
    ) -> list[LeasedMessage]:
        """Ask all nodes at once and return the first messages; nothing if none has any."""
        receiving = [asyncio.ensure_future(self._receive_from(node, request)) for node in nodes]
        is_complete = False
        messages: list[LeasedMessage] = []
        try:
            for response in asyncio.as_completed(receiving):
                try:
                    if await response:
                        break
                except (QuotaExceeded, *_PASSING) as error:
                    refused.append(error)
            is_complete = True
        finally:
            for task in receiving:
                task.cancel()
            await asyncio.wait(receiving)
            received = [task.result() for task in receiving if not task.cancelled() and task.exception() is None]
            messages += chain.from_iterable(received)
            fitting = _count_fitting(messages, request) if is_complete else 0
            # Surplus messages, or all of them if the client has gone.
            await self.return_messages(request.subscription, request.worker, messages[fitting:])
        return messages[:fitting]

    async def _receive_from(self, node: NodeId, request: ReceiveRequest) -> list[LeasedMessage]:
        pool = await self._client.pool_for(node)
        try:
            leased = await self._requests.receive(pool, request, timeout_s=RESPONSE_S + request.wait_ms / 1000)
        except RequestTimedOut:
            self._hung_until[node] = asyncio.get_running_loop().time() + HUNG_S
            raise
        response = leased.response
        if response.error:
            raise _refusal_error(response, request.subscription)
        if (error := response.quota_error) is not None:
            raise error
        try:
            unpacked = await self._reader.read_leased(node, leased, request.max_bytes)
        except BaseException:
            self._requests.return_leases(pool, request, response.partitions)
            raise
        await self._settle_rest(request, unpacked)
        return unpacked.messages

    async def _settle_rest(self, request: ReceiveRequest, unpacked: ReadRecords) -> None:
        """Return messages leased beyond the requested bytes, and release those that cannot be read."""
        name, worker = request.subscription, request.worker
        try:
            await self.return_messages(name, worker, unpacked.surplus)
            for message, reason in unpacked.unreadable:
                extra = {"subscription": name, "partition": f"{message.topic}-{message.partition}"}
                _logger.warning(
                    "message cannot be delivered: %s", reason, extra={**extra, "offset": message.record.offset}
                )
                with suppress(MillstreamError):
                    await self._subscriptions.settle(name, worker, [message], Verb.RELEASE, reason=reason)
        except BaseException:
            await self.return_messages(name, worker, unpacked.messages)
            raise

    async def _all_nodes(self) -> list[NodeId]:
        now = asyncio.get_running_loop().time()
        if not self._nodes or now >= self._known_until:
            self._nodes = sorted((await self._client.metadata(())).nodes)
            self._known_until = now + NODES_S
        return self._nodes


def _count_fitting(messages: Sequence[LeasedMessage], request: ReceiveRequest) -> int:
    """Count the messages within the request's limits, at least one; compressed batches hold more than their size."""
    left_bytes = request.max_bytes
    for count, message in enumerate(messages[: request.max_records]):
        left_bytes -= message.size
        if left_bytes < 0 and count:
            return count
    return min(len(messages), request.max_records)


def _refusal_error(response: ReceiveResponse, subscription: str) -> MillstreamError:
    error = error_from_code(response.error, response.message)
    return (
        error if response.message or not isinstance(error, NotFound) else NotFound(f"no subscription {subscription!r}")
    )


CLIENT_ID: Final = "millstream-gateway"
TIMEOUT_S: Final = 15.0
PUBLISH_S: Final = 30.0
"""Few HTTP clients wait longer for a response."""


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
        principal: str = "",
    ) -> None:
        self.kafka_address = kafka_address
        self.principal = principal
        """Whose rights they have; empty for the node's own, and where everyone may do everything."""
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
        self.schema_worker: SchemaWorker = SchemaWorker() if gateway is None else gateway.schema_worker
        for client in (self.client, self.publishing):
            use_codecs(client, IsolatedCodecs(client, self.schema_worker, principal))
        self.leasing = Leasing(self.client, self.reader)
        self.pressure = pressure or Pressure()
        self.stopping: asyncio.Future[None] = (
            asyncio.get_running_loop().create_future() if gateway is None else gateway.stopping
        )

    def acting_for(self, principal: str, credentials: Credentials) -> Services:
        """Return services with the rights of a caller; limits and memory are shared."""
        return Services(
            self.kafka_address,
            starting=self._starting,
            pressure=self.pressure,
            gateway=self,
            credentials=credentials,
            principal=principal,
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
        """Wait until published messages are acknowledged, then close all connections, even if something fails."""
        async with AsyncExitStack() as closing:
            if self._gateway is None:
                self.stop()
                self.reader.close()
                closing.push_async_callback(self.schema_worker.close)
            for client in (self.client, self.reading, self.publishing):
                closing.push_async_callback(client.close)
                closing.callback(forget_codecs, client)
            for part in (self.status, self.leasing, self.publisher):
                closing.push_async_callback(part.close)


def _connect(kafka_address: str, credentials: Credentials | None) -> Client:
    return Client.connect(
        kafka_address,
        client_id=CLIENT_ID,
        timeout_s=TIMEOUT_S,
        waiting_max=REQUESTS_MAX[Lane.WAIT],
        credentials=credentials,
    )
