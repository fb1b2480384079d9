"""SubscriptionReceive (key 32030), version 0: leases messages of a subscription to a worker.

    [subscription, worker, max records, max bytes, wait ms, [[topic, partition], …] or nil for all that are led here,
    whether the first batch may exceed max bytes, address of the worker or "" for that of the connection]
    response: [error, message, [[topic, topic id, partition, [[start, end, attempt, deadline ms], …], batches], …],
    throttle ms, waited ms]

Messages are leased to the worker until the deadline, and to its principal if it has authenticated: another principal's
worker of the same name cannot settle them. The worker's clock may differ from the broker's, so the response
says how long the request waited before they were leased. Leases of a response that cannot be sent are returned at once.
The batches hold the leased messages, and others that are not this worker's. If none are available, the response waits
up to `wait ms`. A client over its `consumer_byte_rate` gets no messages until it is within it again; if the wait ends
earlier, `throttle ms` is the remaining time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.broker.kafka.api import ClientInfo, Need, PrivateApi, check_needs, encode_private, with_owned_worker
from millstream.broker.kafka.quota_meter import QuotaMeter
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.net.response import Buffers, Promise
from millstream.broker.replication.partition import Partition
from millstream.broker.security.rights import SubscribedTopic
from millstream.broker.subscriptions.lease import Origin
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.subscription import AT_LEAST_ONCE, Subscription
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.private.subscription_messages import (
    LeasedRange,
    PartitionMessages,
    ReceiveRequest,
    ReceiveResponse,
)

if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Demand
    from millstream.broker.subscriptions.engine import Engine
    from millstream.broker.subscriptions.receiving import Grant

RECORDS_MAX = 100_000
BYTES_MAX = 64 * 1024 * 1024
WAIT_MS_MAX = 300_000
WORKER_LENGTH_MAX = 249


class SubscriptionReceive(PrivateApi[ReceiveRequest, ReceiveResponse]):
    changes = None
    waits_for_others = True

    def __init__(self, service: SubscriptionService, quota: QuotaMeter) -> None:
        self._service = service
        self._quota = quota
        self._subscriptions = service.declared
        self._topics = service.topics

    def starts_at_once(self, request: ReceiveRequest) -> bool:
        return self._service.is_loaded(request.subscription)

    def first_needs(self, request: ReceiveRequest) -> Sequence[Need]:
        """Require READ on the subscription and on the topics that are named: whether others exist is not revealed."""
        return [*_needed_rights(request.subscription, ()), *_named_needs(request)]

    async def needs(self, request: ReceiveRequest) -> Sequence[Need]:
        """Require READ on the subscription and on its topics: responses carry whole batches."""
        return _needed_rights(request.subscription, await self._service.topics_of(request.subscription))

    def respond_at_once(
        self, request: ReceiveRequest, header: RequestHeader, client: ClientInfo
    ) -> Buffers | Promise | None:
        """Respond without a task where nothing has to be looked up and leases need not be durable.

        Nearly every request is of this kind, and most of them wait for a message.
        """
        service = self._service
        engine, subscription = service.loaded, service.declared.get(request.subscription)
        if engine is None or subscription is None or not subscription.topics or self._quota.is_limiting:
            return None
        if not request.wait_ms:
            return None
        if client.rights is not None:
            needs = _needed_rights(subscription.name, subscription.topics)
            check_needs((*needs, *_named_needs(request)), client.rights)
        _check(request)
        deliveries = engine.ready(subscription, self._partitions(subscription.topics, request.partitions))
        if not deliveries or any(delivery.settings.delivery != AT_LEAST_ONCE for delivery in deliveries):
            return None
        from millstream.broker.subscriptions.receiving import ParkedLease

        arrived = monotonic()
        client.fetch_requests += 1
        demand = _build_demand(with_owned_worker(request, client), client)
        wait_s = min(request.wait_ms, WAIT_MS_MAX) / 1000
        opening = engine.next_opening(subscription)

        def respond(grants: list[Grant], error: Exception | None) -> Buffers | Coroutine[Any, Any, Buffers]:
            if error is not None:
                raise error
            remaining_ms = int((arrived + wait_s - monotonic()) * 1000)
            if not grants and remaining_ms > 0 and opening.done():
                # Another queue has opened here.
                return self.respond_later(msgspec.structs.replace(request, wait_ms=remaining_ms), header, client)
            _check_readable(request.subscription, grants, client)
            return encode_private(header, self._build_for(client, grants, arrived))

        parked = ParkedLease(
            service.budget, demand.worker, client.presence, respond, lambda error: self.refuse(error, header, client)
        )
        return parked.begin(deliveries, demand, wait_s=wait_s, interrupt=opening)

    async def handle_from(self, client: ClientInfo, request: ReceiveRequest) -> ReceiveResponse:
        """Lease messages, or wait for some, once the client's quota allows it."""
        arrived = monotonic()
        client.fetch_requests += 1
        _check(request)
        request = with_owned_worker(request, client)
        if not self._quota.is_limiting:
            grants = await self._lease(request, client)
        else:
            remaining_ms = min(request.wait_ms, WAIT_MS_MAX)
            while owed_ms := self._quota.owed_ms(client):
                if owed_ms > remaining_ms:
                    await asyncio.sleep(remaining_ms / 1000)
                    return ReceiveResponse(0, None, [], owed_ms - remaining_ms)
                await asyncio.sleep(owed_ms / 1000)
                remaining_ms -= owed_ms
            bytes_max = self._quota.allowance(client, request.max_bytes)
            paid = msgspec.structs.replace(request, wait_ms=remaining_ms, max_bytes=max(1, bytes_max))
            grants = await self._lease(paid, client)
        try:
            _check_readable(request.subscription, grants, client)
        except MillstreamError:
            _give_back(grants, request.worker)
            raise
        if grants:
            client.presence.on_undelivered(partial(_give_back, grants, request.worker))
        return self._build_for(client, grants, arrived)

    def _build_for(self, client: ClientInfo, grants: list[Grant], arrived: float) -> ReceiveResponse:
        """Build the response to a client, which counts towards its quota."""
        response = build_response(grants, arrived)
        size = sum(len(partition.batches) for partition in response.partitions)
        client.fetched_bytes += size
        if self._quota.is_limiting:
            self._quota.take(client, size)
        return response

    async def handle(self, request: ReceiveRequest) -> ReceiveResponse:
        arrived = monotonic()
        _check(request)
        return build_response(await self._lease(request, None), arrived)

    async def _lease(self, request: ReceiveRequest, client: ClientInfo | None) -> list[Grant]:
        subscription = await self._subscriptions.find(request.subscription)
        engine = await self._service.engine()
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(request.wait_ms, WAIT_MS_MAX) / 1000
        while True:
            # Partitions may come to this node while a worker waits here.
            opening = engine.next_opening(subscription)
            grants = await self._receive(engine, subscription, request, client, deadline - loop.time(), opening)
            if grants or not opening.done() or loop.time() >= deadline:
                return grants
            subscription = await self._subscriptions.find(request.subscription)

    async def _receive(
        self,
        engine: Engine,
        subscription: Subscription,
        request: ReceiveRequest,
        client: ClientInfo | None,
        wait_s: float,
        opening: asyncio.Future[None],
    ) -> list[Grant]:
        # Imported with the first worker, together with the queues.
        from millstream.broker.subscriptions.receiving import receive

        topics = () if request.partitions is not None else await self._service.share_topics.of(subscription)
        partitions = self._partitions(topics, request.partitions)
        deliveries = await engine.deliveries_of(subscription, partitions)
        return await receive(
            deliveries,
            _build_demand(request, client),
            self._service.budget,
            wait_s=max(0.0, wait_s),
            interrupt=opening,
        )

    def _partitions(self, topics: tuple[str, ...], requested: list[tuple[str, int]] | None) -> list[Partition]:
        if requested is not None:
            return [self._topics.partition(name, index) for name, index in requested]
        return self._topics.led_of(topics)


def _give_back(grants: list[Grant], worker: str) -> None:
    from millstream.broker.subscriptions.receiving import return_leases

    return_leases(grants, worker)


def _check_readable(subscription: str, grants: list[Grant], client: ClientInfo) -> None:
    """Raise if the client may not read its messages any more: it may have waited for minutes."""
    if grants and client.rights is not None:
        check_needs(
            _needed_rights(subscription, {grant.delivery.partition.topic.name for grant in grants}), client.rights
        )


def _needed_rights(subscription: str, topics: Iterable[str]) -> list[Need]:
    return [
        (Operation.READ, ResourceType.GROUP, subscription),
        *((Operation.READ, ResourceType.TOPIC, SubscribedTopic(topic)) for topic in topics),
    ]


def _named_needs(request: ReceiveRequest) -> list[Need]:
    return [
        (Operation.READ, ResourceType.TOPIC, topic)
        for topic in sorted({topic for topic, _ in request.partitions or ()})
    ]


def _build_demand(request: ReceiveRequest, client: ClientInfo | None) -> Demand:
    # Imported with the first worker, together with the queues.
    from millstream.broker.subscriptions.delivery import Demand

    return Demand(
        request.worker,
        min(request.max_records, RECORDS_MAX),
        min(request.max_bytes, BYTES_MAX),
        at_least_one=request.at_least_one,
        origin=Origin() if client is None else Origin(client.client_id, request.address or client.address),
    )


def _check(request: ReceiveRequest) -> None:
    if not 0 < len(request.worker) <= WORKER_LENGTH_MAX:
        raise InvalidRequest(f"a worker has a name of at most {WORKER_LENGTH_MAX} characters")
    if len(request.address) > WORKER_LENGTH_MAX:
        raise InvalidRequest(f"the address of a worker has at most {WORKER_LENGTH_MAX} characters")
    if request.max_records < 1 or request.max_bytes < 1 or request.wait_ms < 0:
        raise InvalidRequest("max records and max bytes must be at least 1, and the wait not negative")


def build_response(grants: list[Grant], arrived: float) -> ReceiveResponse:
    """Build the response to a request that arrived at this monotonic time."""
    waited_s = min((grant.granted_at for grant in grants), default=arrived) - arrived
    return ReceiveResponse(
        0, None, [_partition_messages(grant) for grant in grants], waited_ms=max(0, int(waited_s * 1000))
    )


def _partition_messages(grants: Grant) -> PartitionMessages:
    partition = grants.delivery.partition
    return PartitionMessages(
        partition.topic.name,
        partition.topic.topic_id.bytes,
        partition.index,
        [
            LeasedRange(lease.first, lease.last + 1, lease.attempt, lease.deadline_ms)
            for lease in grants.received.leases
        ],
        b"".join(grants.received.batches),
        grants.lease_ms,
    )
