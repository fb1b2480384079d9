"""SubscriptionCreate (key 32032), version 0: creates a subscription.

    {"name": "billing", "topics": ["orders"], "settings": {"millstream.filter": "…"}, "validate_only": false}
    answer: {"error": 0, "message": null, "subscription_id": "…"}

A name that is taken is DUPLICATE_RESOURCE, and the group of a pipeline is refused. Settings are those of
docs/configuration.md.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService, letter_needs
from millstream.broker.pipelines.declared import Pipelines
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidSubscription
from millstream.core.subscription import check_subscription
from millstream.protocol.private.subscription_messages import (
    CREATE_KEY,
    CreateSubscriptionRequest,
    CreateSubscriptionResponse,
)


class SubscriptionCreate(PrivateApi[CreateSubscriptionRequest, CreateSubscriptionResponse]):
    """Declares subscriptions."""

    key = CREATE_KEY
    request_type = CreateSubscriptionRequest
    response_type = CreateSubscriptionResponse

    def __init__(self, service: SubscriptionService, pipelines: Pipelines) -> None:
        self._service = service
        self._pipelines = pipelines
        self._subscriptions = service.declared

    async def needs(self, request: CreateSubscriptionRequest) -> Sequence[Need]:
        """READ on the subscription and on its topics, WRITE on the dead letter topic that it names."""
        return [
            (Operation.READ, ResourceType.GROUP, request.name),
            *((Operation.READ, ResourceType.TOPIC, topic) for topic in request.topics),
            *letter_needs(request.settings),
        ]

    async def handle(self, request: CreateSubscriptionRequest) -> CreateSubscriptionResponse:
        """Declare it durably."""
        settings = check_subscription(request.name, request.topics, request.settings)
        pipeline = self._pipelines.of_group(request.name)
        if pipeline is not None:
            raise InvalidSubscription(f"{request.name!r} is the group of pipeline {pipeline!r}; choose another name")
        made = await self._subscriptions.create(
            request.name,
            request.topics,
            request.settings,
            starts=await self._service.starts(request.topics, settings),
            validate_only=request.validate_only,
        )
        return CreateSubscriptionResponse(subscription_id=str(made.subscription_id))
