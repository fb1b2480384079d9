"""SubscriptionForget (key 32037), version 0: discards the delivery state of a topic.

    {"name": "billing", "topic": "orders", "only_close": true}     answer: {"error": 0, "message": null}

Sent to every node twice: with `only_close` the queues of the topic are closed, and without it their states go. When
they are next used they begin where the subscription's `share.auto.offset.reset` says.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import UnknownTopic
from millstream.protocol.private.message import Response
from millstream.protocol.private.subscription_messages import FORGET_KEY, ForgetSubscriptionRequest


class SubscriptionForget(PrivateApi[ForgetSubscriptionRequest, Response]):
    """Discards the delivery state of subscriptions."""

    key = FORGET_KEY
    request_type = ForgetSubscriptionRequest
    response_type = Response

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service

    async def needs(self, request: ForgetSubscriptionRequest) -> Sequence[Need]:
        """READ on the subscription and on the topic."""
        return [
            (Operation.READ, ResourceType.GROUP, request.name),
            (Operation.READ, ResourceType.TOPIC, request.topic),
        ]

    async def handle(self, request: ForgetSubscriptionRequest) -> Response:
        """Close the queues, or drop their states."""
        subscription = await self._service.declared.find(request.name)
        topic = self._service.topics.get(request.topic)
        if topic is None:
            raise UnknownTopic(f"there is no topic {request.topic!r}")
        if request.only_close:
            engine = self._service.loaded
            if engine is not None:
                engine.close_queues(subscription.subscription_id, topic.topic_id)
        else:
            await self._service.states.forget(
                lambda key: key.subscription_id == subscription.subscription_id and key.topic_id == topic.topic_id
            )
        return Response()
