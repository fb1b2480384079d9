"""SubscriptionRevive (key 32040), version 0: redelivers the messages of dead letters.

    {"name": "billing", "topic": "orders", "topic_id": "…", "partition": 0, "letter_topic_id": "…",
    "letters": [[offset, letter partition, letter offset], …], "closed": [[…], …]}
    answer, when it is durable: {"error": 0, "message": null, "missing": [offset, …]}

The messages at these offsets are available again in this one subscription, as if they had never been delivered, in
the order of their offsets; in an ordered subscription before all later messages of their keys. Asking again with the
same letters does nothing, until the letters are named in `closed`. `missing` are messages that the log no longer has;
they are all that are asked for when the topic is another one by now. The leader of the partition answers. While the
queue does not know yet that one of the letters is written, the answer is COORDINATOR_NOT_AVAILABLE, nothing is revived,
and the client asks again.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Final

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidSubscription
from millstream.core.ids import Offset
from millstream.protocol.private.subscription_messages import REVIVE_KEY, ReviveMessagesRequest, ReviveMessagesResponse

_PLACE: Final = struct.Struct(">iq")


class SubscriptionRevive(PrivateApi[ReviveMessagesRequest, ReviveMessagesResponse]):
    """Revives dead letters."""

    key = REVIVE_KEY
    request_type = ReviveMessagesRequest
    response_type = ReviveMessagesResponse

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service

    async def needs(self, request: ReviveMessagesRequest) -> Sequence[Need]:
        """READ on the subscription and on the topic."""
        return [
            (Operation.READ, ResourceType.GROUP, request.name),
            (Operation.READ, ResourceType.TOPIC, request.topic),
        ]

    async def handle(self, request: ReviveMessagesRequest) -> ReviveMessagesResponse:
        """Revive all that can be; answered once it is durable."""
        subscription = await self._service.declared.find(request.name)
        if request.topic not in await self._service.share_topics.of(subscription):
            raise InvalidSubscription(f"subscription {request.name!r} no longer delivers topic {request.topic!r}")
        partition = self._service.topics.partition(request.topic, request.partition)
        if partition.topic.topic_id != request.topic_id:
            return ReviveMessagesResponse(missing=[offset for offset, _, _ in request.letters])
        engine = await self._service.engine()
        delivery = await engine.delivery(subscription, partition)
        letters, closed = (
            {Offset(offset): request.letter_topic_id.bytes + _PLACE.pack(*place) for offset, *place in listed}
            for listed in (request.letters, request.closed)
        )
        return ReviveMessagesResponse(missing=await delivery.revive(letters, closed))
