"""SubscriptionDelete (key 32034), version 0: deletes a subscription.

    {"name": "billing", "force": false}     answer: {"error": 0, "message": null}

What its queues hold goes with it; the messages stay in their topics. An unknown name is GROUP_ID_NOT_FOUND. One with
open dead letters is NON_EMPTY_GROUP unless it is forced; the letters stay in their topic then.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.acl import Operation, ResourceType
from millstream.protocol.private.message import Response
from millstream.protocol.private.subscription_messages import DELETE_KEY, DeleteSubscriptionRequest


class SubscriptionDelete(PrivateApi[DeleteSubscriptionRequest, Response]):
    """Deletes subscriptions."""

    key = DELETE_KEY
    request_type = DeleteSubscriptionRequest
    response_type = Response

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service

    async def needs(self, request: DeleteSubscriptionRequest) -> Sequence[Need]:
        """DELETE on the subscription."""
        return [(Operation.DELETE, ResourceType.GROUP, request.name)]

    async def handle(self, request: DeleteSubscriptionRequest) -> Response:
        """Take it out durably."""
        await self._service.delete(request.name, force=request.force)
        return Response()
