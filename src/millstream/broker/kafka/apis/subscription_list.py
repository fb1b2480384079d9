"""SubscriptionList (key 32035), version 0: lists subscriptions and their queues.

    {"names": ["billing"], "open": [["orders", 0]], "leases": 0}, or null for all
    answer: {"error": 0, "message": null, "subscriptions": [{"name": …, "subscription_id": …, "topics": […],
    "settings": {…}, "overrides": {…}, "created_ms": …, "queues": [{"topic": …, "partition": …, "backlog": …, …}],
    "kept": [["orders", 0], …], "push": [{"node": 1, "state": "up", "concurrency": 8, …}],
    "leases": [{"topic": …, "partition": …, "start": …, "end": …, "attempt": …, "deadline_ms": …, "left_ms": …,
    "worker": …, "client_id": …, "address": …}]}]}

Every node knows all subscriptions; of the queues it lists those that it leads and has open, so a client asks all nodes.
`kept` are those whose states it keeps, for subscriptions that are named; of those in `open` it opens and lists the ones
that it leads. The topics of a share group for which none are declared are those of `kept`, and those that members
subscribe to, if the node coordinates the group. `push` is how the node's push process does with the subscription's
endpoint, if its messages are pushed. `leases` holds the oldest ranges that workers hold, at most as many as requested;
client id and address are those of the last connection that acted for the worker, empty if the node has not heard of it
since it began to lead the queue. Values of secret settings are never returned.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Any
from uuid import UUID

import msgspec

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.security.rights import Rights
from millstream.broker.subscriptions.delta import DeltaKind
from millstream.broker.subscriptions.lease import HeldRange
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import NotLeader
from millstream.core.subscription import Subscription
from millstream.protocol.private.subscription_messages import (
    LIST_KEY,
    ListSubscriptionsRequest,
    ListSubscriptionsResponse,
)

if TYPE_CHECKING:
    from millstream.broker.subscriptions.delivery import Delivery

LEASES_MAX = 10_000

_COUNTERS = {
    "accepted": DeltaKind.ACCEPTED,
    "released": DeltaKind.RELEASED,
    "expired": DeltaKind.EXPIRED,
    "rejected": DeltaKind.REJECTING,
    "dead_lettered": DeltaKind.DEAD_LETTERED,
    "dropped": DeltaKind.DROPPED,
    "filtered": DeltaKind.FILTERED,
}


class SubscriptionList(PrivateApi[ListSubscriptionsRequest, ListSubscriptionsResponse]):
    """Lists subscriptions."""

    key = LIST_KEY
    request_type = ListSubscriptionsRequest
    response_type = ListSubscriptionsResponse

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service
        self._subscriptions = service.declared

    async def needs(self, request: ListSubscriptionsRequest) -> Sequence[Need]:
        """DESCRIBE on the subscriptions that are named; a list of all contains those the client may describe."""
        return [(Operation.DESCRIBE, ResourceType.GROUP, name) for name in request.names or ()]

    def redact(self, response: ListSubscriptionsResponse, rights: Rights) -> ListSubscriptionsResponse:
        """Leave out the subscriptions that the client may not describe."""
        visible = [one for one in response.subscriptions if rights.group(Operation.DESCRIBE, one["name"])]
        return msgspec.structs.replace(response, subscriptions=visible)

    async def handle(self, request: ListSubscriptionsRequest) -> ListSubscriptionsResponse:
        """Describe some or all subscriptions."""
        if request.names is None:
            wanted = self._subscriptions.all()
        else:
            wanted = [await self._subscriptions.find(name) for name in request.names]
            await self._open(wanted, request.open)
        begun = self._service.share_topics.kept()
        queues: dict[UUID, list[Delivery]] = {}
        engine = self._service.loaded
        for delivery in () if engine is None else engine.deliveries:
            queues.setdefault(delivery.key.subscription_id, []).append(delivery)
        described = [self._describe(one, queues, begun.get(one.subscription_id, [])) for one in wanted]
        if request.names is None:
            described = [{**one, "kept": []} for one in described]
        if leases_max := max(0, min(request.leases, LEASES_MAX)):
            for one, document in zip(wanted, described, strict=True):
                document["leases"] = self._leases(queues.get(one.subscription_id, ()), leases_max)
        return ListSubscriptionsResponse(subscriptions=described)

    async def _open(self, subscriptions: Iterable[Subscription], places: Iterable[tuple[str, int]]) -> None:
        for topic, index in places:
            # A node without a replica has no such partition, and leadership may move meanwhile.
            with suppress(NotLeader):
                partition = self._service.topics.partition(topic, index)
                if partition.is_leader:
                    engine = await self._service.engine()
                    for subscription in subscriptions:
                        await engine.delivery(subscription, partition)

    def _push_status(self, subscription: Subscription) -> list[dict[str, Any]]:
        """Return the push status on this node; a client combines those of all nodes."""
        status = self._service.push.describe(subscription.name)
        return [] if status is None else [{"node": self._service.node_id, **status}]

    def _leases(self, queues: Iterable[Delivery], leases_max: int) -> list[dict[str, Any]]:
        now_ms = self._service.clock.now_ms()
        listed: list[dict[str, Any]] = []
        for delivery in queues:
            listed += [_lease(delivery, held, now_ms) for held in delivery.held_ranges()[:leases_max]]
        return sorted(listed, key=lambda lease: (lease["topic"], lease["partition"], lease["start"]))[:leases_max]

    def _describe(
        self,
        subscription: Subscription,
        queues: Mapping[UUID, Iterable[Delivery]],
        kept: Sequence[tuple[str, int]],
    ) -> dict[str, Any]:
        known = self._service.share_topics.members(subscription.name) | {topic for topic, _ in kept}
        return {
            "name": subscription.name,
            "subscription_id": str(subscription.subscription_id),
            "topics": subscription.topics or sorted(known),
            "settings": self._subscriptions.settings_of(subscription).as_strings(),
            "overrides": subscription.shown_overrides(),
            "created_ms": subscription.created_ms,
            "queues": [_queue(delivery) for delivery in queues.get(subscription.subscription_id, ())],
            "kept": kept,
            "push": self._push_status(subscription),
        }


def _lease(delivery: Delivery, held: HeldRange, now_ms: int) -> dict[str, Any]:
    return {
        "topic": delivery.partition.topic.name,
        "partition": delivery.partition.index,
        "start": held.first,
        "end": held.last + 1,
        "attempt": held.attempt,
        "deadline_ms": held.deadline_ms,
        "left_ms": max(0, held.deadline_ms - now_ms),
        "worker": held.worker,
        **held.origin._asdict(),
    }


def _queue(delivery: Delivery) -> dict[str, Any]:
    queue = delivery.queue
    return {
        "topic": delivery.partition.topic.name,
        "partition": delivery.partition.index,
        "oldest": queue.oldest,
        "backlog": delivery.backlog,
        "waiting_workers": delivery.waiting,
        **queue.counts._asdict(),
        **{name: queue.counter(kind) for name, kind in _COUNTERS.items()},
        "redelivered": queue.redelivered,
        "refused_letters": len(delivery.refused_letters),
        "letter_refusal": delivery.letter_refusal if delivery.refused_letters else "",
    }
