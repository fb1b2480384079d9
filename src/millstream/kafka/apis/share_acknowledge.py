"""ShareAcknowledge (key 79), versions 1 to 2: a share consumer acknowledges messages without asking for more (KIP-932).

Acknowledgements are 1 accept, 2 release, 3 reject and, from version 2 on, 4 renew; 0 stands for an offset without a
message. It is answered once it is durable. It goes on with the session that ShareFetch opened; epoch -1 closes it.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta
from uuid import UUID

from kio.schema.errors import ErrorCode
from kio.schema.share_acknowledge.v2.request import ShareAcknowledgeRequest
from kio.schema.share_acknowledge.v2.response import (
    LeaderIdAndEpoch,
    PartitionData,
    ShareAcknowledgeResponse,
    ShareAcknowledgeTopicResponse,
)
from kio.static.primitive import i32, i32Timedelta

from millstream.kafka.api import Api, ClientInfo
from millstream.kafka.errors import error_code, error_message
from millstream.kafka.share_door import Acknowledgements, ShareDoor
from millstream.kafka.share_session import CLOSES, OPENS, SharePartition
from millstream.kafka.throttle import NO_THROTTLE
from millstream.model.errors import InvalidRequest, MillstreamError

_NO_LEADER = LeaderIdAndEpoch(leader_id=i32(-1), leader_epoch=i32(-1))


class ShareAcknowledge(Api[ShareAcknowledgeRequest, ShareAcknowledgeResponse]):
    """Settles leases of share consumers."""

    key = 79
    versions = (1, 2)

    def __init__(self, door: ShareDoor) -> None:
        self._door = door

    async def handle(self, request: ShareAcknowledgeRequest, client: ClientInfo) -> ShareAcknowledgeResponse:
        """Settle each partition on its own."""
        member_id = request.member_id or ""
        if not request.group_id or not member_id:
            raise InvalidRequest("a share consumer tells its group and its member id")
        if request.share_session_epoch == OPENS:
            return _refused(ErrorCode.invalid_share_session_epoch)
        session = self._door.session(
            request.group_id, member_id, request.share_session_epoch, wanted=(), forgotten=(), acknowledges=True
        )
        if isinstance(session, ErrorCode):
            return _refused(session)
        subscription = await self._door.subscription(request.group_id)
        asked: Acknowledgements = {
            (topic.topic_id, partition.partition_index): partition.acknowledgement_batches
            for topic in request.topics
            if topic.topic_id is not None
            for partition in topic.partitions
        }
        results = await self._door.acknowledge(subscription, member_id, asked)
        if request.share_session_epoch == CLOSES:
            await self._door.release(subscription, member_id, session.partitions)
        lease_ms = self._door.service.declared.settings_of(subscription).lease_ms
        return _answer(results, lease_ms)

    def failure(self, error: MillstreamError, request: ShareAcknowledgeRequest) -> ShareAcknowledgeResponse:
        """Say why nothing is settled."""
        return _refused(error_code(error), error_message(error))


def _answer(results: Mapping[SharePartition, MillstreamError | None], lease_ms: int) -> ShareAcknowledgeResponse:
    by_topic: dict[UUID, list[PartitionData]] = {}
    for (topic_id, index), error in results.items():
        by_topic.setdefault(topic_id, []).append(
            PartitionData(
                partition_index=i32(index),
                error_code=ErrorCode.none if error is None else error_code(error),
                error_message=None if error is None else error_message(error),
                current_leader=_NO_LEADER,
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
        node_endpoints=(),
    )


def _refused(code: ErrorCode, message: str | None = None) -> ShareAcknowledgeResponse:
    return ShareAcknowledgeResponse(
        throttle_time=NO_THROTTLE,
        error_code=code,
        error_message=message,
        acquisition_lock_timeout=i32Timedelta.parse(timedelta(0)),
        responses=(),
        node_endpoints=(),
    )
