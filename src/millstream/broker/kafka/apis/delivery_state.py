"""DeliveryState (key 32039), version 0: returns the delivery state of a message.

    [subscription, topic, partition, offset, wait ms]
    answer: [error, message, state, attempt, next ms, is final]

With a wait, it is answered when the state is final: accepted, dead-lettered, dropped, filtered, skipped, absent, or
done where it is not remembered how. Before that it is waiting, blocked, delayed, leased or rejected, and `next ms` is
the time that it waits for. A queue has 256 such waits at most; more are POLICY_VIOLATION.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest, OffsetOutOfRange, UnknownTopic
from millstream.protocol.private.delivery_state import (
    DELIVERY_STATE_KEY,
    WAIT_MS_MAX,
    DeliveryStateAnswer,
    DeliveryStateRequest,
)


class DeliveryState(PrivateApi[DeliveryStateRequest, DeliveryStateAnswer]):
    """Returns the delivery states of messages."""

    key = DELIVERY_STATE_KEY
    request_type = DeliveryStateRequest
    response_type = DeliveryStateAnswer
    waits_for_others = True

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service

    async def needs(self, request: DeliveryStateRequest) -> Sequence[Need]:
        """DESCRIBE on the subscription and on the topic."""
        return [
            (Operation.DESCRIBE, ResourceType.GROUP, request.subscription),
            (Operation.DESCRIBE, ResourceType.TOPIC, request.topic),
        ]

    async def handle(self, request: DeliveryStateRequest) -> DeliveryStateAnswer:
        """Look up the state, waiting until it is final."""
        subscription = await self._service.declared.find(request.subscription)
        if subscription.topics and request.topic not in subscription.topics:
            raise UnknownTopic(f"subscription {subscription.name!r} does not deliver topic {request.topic!r}")
        if request.wait_ms < 0:
            raise InvalidRequest("the wait must not be negative")
        partition = self._service.topics.partition(request.topic, request.partition)
        engine = await self._service.engine()
        delivery = await engine.delivery(subscription, partition)
        end = partition.log.end_offset
        if not 0 <= request.offset < end:
            raise OffsetOutOfRange(
                f"{partition.log.partition} ends at {end}, there is no message at {request.offset}",
                start=partition.log_start,
                end=end,
            )
        # Imported on first use, together with the queues.
        from millstream.broker.subscriptions.outcomes import message_state

        start = subscription.start_on(partition.topic.name, partition.topic.topic_id, partition.index)
        wait_s = min(request.wait_ms, WAIT_MS_MAX) / 1000
        current = await message_state(delivery, request.offset, start=start, wait_s=wait_s)
        return DeliveryStateAnswer(0, None, current.state, current.attempt, current.next_ms, current.is_final)
