"""SubscriptionList (key 32035), version 0: Millstream's private request for subscriptions and their queues.

    {"names": ["billing"]}, or null for all
    answer: {"error": 0, "message": null, "subscriptions": [{"name": …, "subscription_id": …, "topics": […],
    "settings": {…}, "overrides": {…}, "created_ms": …, "queues": [{"topic": …, "partition": …, "backlog": …, …}]}]}

Every node knows all subscriptions; of the queues it tells those that it leads, so a client asks all nodes.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import msgspec

from millstream.kafka.private import PrivateApi
from millstream.kafka.subscription_service import SubscriptionService
from millstream.model.subscription import Subscription
from millstream.subscriptions.delta import DeltaKind

if TYPE_CHECKING:
    from millstream.subscriptions.delivery import Delivery

_COUNTERS = {
    "accepted": DeltaKind.ACCEPTED,
    "released": DeltaKind.RELEASED,
    "expired": DeltaKind.EXPIRED,
    "rejected": DeltaKind.REJECTING,
    "dead_lettered": DeltaKind.DEAD_LETTERED,
    "dropped": DeltaKind.DROPPED,
    "filtered": DeltaKind.FILTERED,
}


class WantedSubscriptions(msgspec.Struct, frozen=True):
    """Which ones."""

    names: list[str] | None = None


class SubscriptionList(PrivateApi[WantedSubscriptions]):
    """Tells of subscriptions."""

    key = 32035
    asks = WantedSubscriptions

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service
        self._subscriptions = service.declared

    async def handle(self, request: WantedSubscriptions) -> dict[str, Any]:
        """Tell of some, or of all."""
        if request.names is None:
            wanted = self._subscriptions.all()
        else:
            wanted = [self._subscriptions.existing(name) for name in request.names]
        queues: dict[object, list[Delivery]] = {}
        engine = self._service.loaded
        for delivery in () if engine is None else engine.deliveries:
            queues.setdefault(delivery.key.subscription_id, []).append(delivery)
        return {"subscriptions": [self._told(one, queues.get(one.subscription_id, ())) for one in wanted]}

    def _told(self, subscription: Subscription, deliveries: Iterable[Delivery]) -> dict[str, Any]:
        return {
            "name": subscription.name,
            "subscription_id": str(subscription.subscription_id),
            "topics": subscription.topics,
            "settings": self._subscriptions.settings_of(subscription).as_strings(),
            "overrides": dict(subscription.overrides),
            "created_ms": subscription.created_ms,
            "queues": [_queue(delivery) for delivery in deliveries],
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
    }
