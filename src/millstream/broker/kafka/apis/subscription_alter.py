"""SubscriptionAlter (key 32033), version 0: changes a subscription.

    {"name": "billing", "settings": {"millstream.paused": "true", "millstream.filter": null}, "topics": null}
    answer: {"error": 0, "message": null}

A setting of null goes back to its default; topics of null stay as they are.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService, letter_needs
from millstream.core.acl import Operation, ResourceType
from millstream.protocol.private.message import Response
from millstream.protocol.private.subscription_messages import ALTER_KEY, AlterSubscriptionRequest


class SubscriptionAlter(PrivateApi[AlterSubscriptionRequest, Response]):
    """Changes subscriptions."""

    key = ALTER_KEY
    request_type = AlterSubscriptionRequest
    response_type = Response

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service
        self._subscriptions = service.declared

    async def needs(self, request: AlterSubscriptionRequest) -> Sequence[Need]:
        """ALTER_CONFIGS on the subscription, READ on all its topics: settings may push their messages."""
        topics = {*await self._service.topics_of(request.name), *(request.topics or ())}
        return [
            (Operation.ALTER_CONFIGS, ResourceType.GROUP, request.name),
            *((Operation.READ, ResourceType.TOPIC, topic) for topic in sorted(topics)),
            *letter_needs(request.settings),
        ]

    async def handle(self, request: AlterSubscriptionRequest) -> Response:
        """Change it durably."""
        found = await self._subscriptions.find(request.name)
        further = [topic for topic in request.topics or () if topic not in found.topics]
        await self._subscriptions.alter(
            request.name,
            request.settings,
            topics=request.topics,
            starts=await self._service.starts(further, found.settings) if further else None,
            validate_only=request.validate_only,
        )
        return Response()
