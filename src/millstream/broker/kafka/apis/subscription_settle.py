"""SubscriptionSettle (key 32031), version 0: settles the leases of a worker.

    [subscription, worker, [[topic, partition, [[start, end, verb, delay ms or nil, reason, attempt or nil], …]], …]]
    response, when it is durable: [error, message, for each partition [[error, message], …]]

Verbs: 1 accept, 2 release (after `delay ms`, else the declared backoff), 3 reject (dead letter now), 4 extend (for
`delay ms`, else the declared lease), 5 return (unseen: available at once, and the delivery does not count). A lease
that has expired, belongs to another worker or principal, or is of another attempt than the one named, gets
INVALID_RECORD_STATE. Messages of a topic that the client may not read (any more) get TOPIC_AUTHORIZATION_FAILED.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

from millstream.broker.kafka.api import (
    ClientInfo,
    Need,
    PrivateApi,
    encode_private,
    error_code,
    error_message,
    with_owned_worker,
)
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.net.response import Buffers, Promise
from millstream.broker.subscriptions.lease import Origin, Settlement
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.ids import Offset
from millstream.core.subscription import Subscription, Verb
from millstream.protocol.messages.codec import RequestHeader
from millstream.protocol.private.subscription_messages import (
    PartitionSettles,
    SettledRange,
    SettleRequest,
    SettleResponse,
)

Results = list[tuple[int, str | None]]

REASON_LENGTH_MAX = 1000
DELAY_MS_MAX = 366 * 24 * 3600 * 1000
OFFSET_MAX = 2**63 - 1
_VERBS = frozenset(Verb)


class SubscriptionSettle(PrivateApi[SettleRequest, SettleResponse]):
    changes = None

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service
        self._subscriptions = service.declared
        self._topics = service.topics

    def starts_at_once(self, request: SettleRequest) -> bool:
        return self._service.is_loaded(request.subscription)

    async def needs(self, request: SettleRequest) -> Sequence[Need]:
        return [(Operation.READ, ResourceType.GROUP, request.subscription)]

    def respond_at_once(
        self, request: SettleRequest, header: RequestHeader, client: ClientInfo
    ) -> Buffers | Promise | None:
        """Settle in one queue that is open, without a task; requests behind it on the connection share its sync."""
        service = self._service
        engine, subscription = service.loaded, service.declared.get(request.subscription)
        if engine is None or subscription is None or len(request.partitions) != 1:
            return None
        if client.rights is not None:
            client.rights.require(Operation.READ, ResourceType.GROUP, request.subscription)
        settles = request.partitions[0]
        try:
            _check_readable(client, settles)
            verbs = [_parse_settlement(verb) for verb in settles.verbs]
            ready = engine.ready(subscription, [self._topics.partition(settles.topic, settles.partition)])
            if ready is None:
                return None
            (delivery,) = ready
            worker = with_owned_worker(request, client).worker
            delivery.record_origin(worker, Origin(client.client_id, client.address), replaces=False)
            results = _to_results(delivery.settle_now(worker, verbs))
            written = delivery.pending_write()
        except MillstreamError as error:
            return _encode_results(header, _error_results(error, settles))
        if written is None:
            return _encode_results(header, results)
        promise = Promise()
        written.listen(
            lambda error: promise.resolve(
                _encode_results(header, results if error is None else _error_results(error, settles))
            )
        )
        return promise

    async def handle(self, request: SettleRequest) -> SettleResponse:
        return await self._settle_all(request, None)

    async def handle_from(self, client: ClientInfo, request: SettleRequest) -> SettleResponse:
        """Settle, and remember which client speaks for the worker if this node did not lease to it."""
        return await self._settle_all(with_owned_worker(request, client), client)

    async def _settle_all(self, request: SettleRequest, client: ClientInfo | None) -> SettleResponse:
        subscription = await self._subscriptions.find(request.subscription)
        settles = [self._settle(subscription, request.worker, client, partition) for partition in request.partitions]
        if len(settles) == 1:
            # Nearly every request: without its own task.
            return SettleResponse(0, None, [await settles[0]])
        return SettleResponse(0, None, await asyncio.gather(*settles))

    async def _settle(
        self, subscription: Subscription, worker: str, client: ClientInfo | None, settles: PartitionSettles
    ) -> Results:
        origin = Origin() if client is None else Origin(client.client_id, client.address)
        try:
            _check_readable(client, settles)
            verbs = [_parse_settlement(verb) for verb in settles.verbs]
            partition = self._topics.partition(settles.topic, settles.partition)
            delivery = await self._service.delivery(subscription, partition)
            delivery.record_origin(worker, origin, replaces=False)
            results = await delivery.settle(worker, verbs)
        except MillstreamError as error:
            return _error_results(error, settles)
        return _to_results(results)


def _check_readable(client: ClientInfo | None, settles: PartitionSettles) -> None:
    """Require READ on the topic, too: a rejected message goes to a topic that the client may be able to read."""
    if client is not None and client.rights is not None:
        client.rights.require(Operation.READ, ResourceType.TOPIC, settles.topic)


def _to_results(errors: Iterable[MillstreamError | None]) -> Results:
    return [(int(error_code(error)), error_message(error)) for error in errors]


def _error_results(error: MillstreamError, settles: PartitionSettles) -> Results:
    return [(int(error_code(error)), error_message(error))] * len(settles.verbs)


def _encode_results(header: RequestHeader, results: Results) -> Buffers:
    return encode_private(header, SettleResponse(0, None, [results]))


def _parse_settlement(settled_range: SettledRange) -> Settlement:
    if settled_range.verb not in _VERBS:
        known = "1 accept, 2 release, 3 reject, 4 extend, 5 return"
        raise InvalidRequest(f"verb {settled_range.verb} is unknown; use {known}")
    if not 0 <= settled_range.start < settled_range.end <= OFFSET_MAX:
        raise InvalidRequest(
            f"offsets {settled_range.start} to {settled_range.end}, end exclusive, are not a valid range"
        )
    if settled_range.delay_ms is not None and not 0 <= settled_range.delay_ms <= DELAY_MS_MAX:
        raise InvalidRequest(f"a delay must be 0 to {DELAY_MS_MAX} ms, not {settled_range.delay_ms}")
    return Settlement(
        Offset(settled_range.start),
        Offset(settled_range.end - 1),
        Verb(settled_range.verb),
        settled_range.delay_ms,
        settled_range.reason[:REASON_LENGTH_MAX],
        settled_range.attempt,
    )
