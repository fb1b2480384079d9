"""SubscriptionSeek (key 32036), version 0: moves a subscription to another position.

    {"name": "billing", "topic": null, "partition": null, "to": "earliest" | "latest" | "at:<ms>" | "offset:<n>"}
    answer: {"error": 0, "message": null, "queues": [{"topic": …, "partition": …, "offset": …}]}

It moves the queues that this node leads, of one topic or partition or of all, so a client asks all nodes. Outstanding
leases become void; what was delivered before is delivered again where the new place lies before it.

Version notes: version 0 is the only one. It is not advertised by ApiVersions, since it is no part of Kafka.
"""

from __future__ import annotations

from collections.abc import Sequence

from millstream.broker.kafka.api import Need, PrivateApi
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.replication.partition import Partition
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest
from millstream.core.ids import Offset
from millstream.core.subscription import READ_COMMITTED
from millstream.protocol.private.subscription_messages import (
    SEEK_KEY,
    SeekSubscriptionRequest,
    SeekSubscriptionResponse,
)

AT_OFFSET = "offset:"
AT_TIME = "at:"
_DIGITS_MAX = 18


class SubscriptionSeek(PrivateApi[SeekSubscriptionRequest, SeekSubscriptionResponse]):
    """Moves queues."""

    key = SEEK_KEY
    request_type = SeekSubscriptionRequest
    response_type = SeekSubscriptionResponse

    def __init__(self, service: SubscriptionService) -> None:
        self._service = service
        self._subscriptions = service.declared
        self._topics = service.topics

    async def needs(self, request: SeekSubscriptionRequest) -> Sequence[Need]:
        """READ on the subscription and on its topics."""
        topics = await self._service.topics_of(request.name)
        return [
            (Operation.READ, ResourceType.GROUP, request.name),
            *((Operation.READ, ResourceType.TOPIC, topic) for topic in topics),
        ]

    async def handle(self, request: SeekSubscriptionRequest) -> SeekSubscriptionResponse:
        """Move each queue; return once that is durable."""
        subscription = await self._subscriptions.find(request.name)
        _check(request.to)
        engine = await self._service.engine()
        moved = []
        topics = await self._service.share_topics.of(subscription) if request.topic is None else (request.topic,)
        for partition in self._partitions(topics, request.partition):
            delivery = await engine.delivery(subscription, partition)
            offset = await _place(partition, delivery.settings.isolation, request.to)
            delivery.seek(offset)
            await delivery.durable()
            moved.append({"topic": partition.topic.name, "partition": partition.index, "offset": offset})
        return SeekSubscriptionResponse(queues=moved)

    def _partitions(self, topics: tuple[str, ...], index: int | None) -> list[Partition]:
        found = [topic for name in topics if (topic := self._topics.get(name)) is not None]
        return [
            one
            for topic in found
            for one in self._topics.partitions_of(topic)
            if one.is_leader and index in (None, one.index)
        ]


def _check(to: str) -> None:
    number = to.removeprefix(AT_OFFSET).removeprefix(AT_TIME)
    is_number = number.isascii() and number.isdigit() and len(number) <= _DIGITS_MAX
    if to not in ("earliest", "latest") and not (is_number and to.startswith((AT_OFFSET, AT_TIME))):
        raise InvalidRequest(f"a position is earliest, latest, at:<milliseconds since 1970> or offset:<n>, not {to!r}")


async def _place(partition: Partition, isolation: str, to: str) -> Offset:
    end = partition.last_stable_offset if isolation == READ_COMMITTED else partition.high_watermark
    if to == "earliest":
        return partition.log_start
    if to == "latest":
        return end
    if to.startswith(AT_OFFSET):
        return Offset(max(partition.log_start, min(end, int(to.removeprefix(AT_OFFSET)))))
    found = await partition.log.find_time(int(to.removeprefix(AT_TIME)), up_to=end)
    return end if found is None else Offset(max(partition.log_start, found[0]))
