"""ShareAcknowledge (key 79), versions 1 to 2: acknowledges messages of a share consumer without fetching more
(KIP-932).

Acknowledgements are 1 accept, 2 release, 3 reject and, with `is_renew_ack`, 4 renew; 0 means an offset without a
message. Responds when they are durable; in each partition, all are carried out or none. The request continues the
session that ShareFetch opened; epoch -1 closes it.

Epoch 0 gets INVALID_SHARE_SESSION_EPOCH, an invalid acknowledgement INVALID_REQUEST, and an acknowledgement of a
message that the member does not hold (any more) INVALID_RECORD_STATE. NOT_LEADER_OR_FOLLOWER includes the current
leader.

Version notes: 2 adds renewals.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.share_acknowledge.v2.request import ShareAcknowledgeRequest
from kio.schema.share_acknowledge.v2.response import (
    LeaderIdAndEpoch,
    NodeEndpoint,
    PartitionData,
    ShareAcknowledgeResponse,
    ShareAcknowledgeTopicResponse,
)
from kio.schema.types import BrokerId
from kio.static.primitive import i32, i32Timedelta

from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message, owned_name
from millstream.broker.kafka.share_consumers import (
    CLOSES,
    OPENS,
    Acknowledgements,
    ShareConsumers,
    SharePartition,
    check_member_id,
    session_key,
)
from millstream.core.errors import MillstreamError


class ShareAcknowledge(Api[ShareAcknowledgeRequest, ShareAcknowledgeResponse]):
    key = 79
    versions = (1, 2)
    changes = None

    def __init__(self, consumers: ShareConsumers) -> None:
        self._consumers = consumers

    async def handle(self, request: ShareAcknowledgeRequest, client: ClientInfo) -> ShareAcknowledgeResponse:
        member_id = owned_name(check_member_id(request.member_id), client)
        group_id, epoch = request.group_id or "", request.share_session_epoch
        if epoch == OPENS:
            return self.refusal(ErrorCode.invalid_share_session_epoch)
        session = self._consumers.session(session_key(group_id, member_id, client), epoch, client.presence)
        if isinstance(session, ErrorCode):
            return self.refusal(session)
        try:
            subscription = await self._consumers.service.declared.find(group_id)
            results = await self._consumers.acknowledge(
                subscription, member_id, _acknowledgements(request), renews=request.is_renew_ack
            )
        finally:
            if epoch == CLOSES:
                self._consumers.release(session)
        return self._build_response(
            results, self._consumers.service.declared.settings_of(subscription).lease_ms, client
        )

    def _build_response(
        self, results: Mapping[SharePartition, MillstreamError | None], lease_ms: int, client: ClientInfo
    ) -> ShareAcknowledgeResponse:
        by_topic: dict[UUID, list[PartitionData]] = {}
        for place, error in results.items():
            leader = self._consumers.leader(place, error)
            by_topic.setdefault(place[0], []).append(
                PartitionData(
                    partition_index=i32(place[1]),
                    error_code=error_code(error),
                    error_message=error_message(error),
                    current_leader=LeaderIdAndEpoch(leader_id=i32(leader.node_id), leader_epoch=i32(leader.epoch)),
                )
            )
        return ShareAcknowledgeResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            acquisition_lock_timeout=i32Timedelta.parse(timedelta(milliseconds=lease_ms)),
            responses=tuple(
                ShareAcknowledgeTopicResponse(topic_id=topic_id, partitions=tuple(partitions))
                for topic_id, partitions in by_topic.items()
            ),
            node_endpoints=tuple(
                NodeEndpoint(node_id=BrokerId(node.node_id), host=host, port=i32(port), rack=node.rack)
                for node, host, port in self._consumers.leaders(results, client)
            ),
        )


def _acknowledgements(request: ShareAcknowledgeRequest) -> Acknowledgements:
    return {
        (topic.topic_id, partition.partition_index): partition.acknowledgement_batches
        for topic in request.topics
        if topic.topic_id is not None
        for partition in topic.partitions
    }
