"""ShareGroupHeartbeat (key 76), version 1: keeps a share consumer in its group; consumers also join and leave with it
(KIP-932).

Epoch 0 joins, with the topics of the member; a positive epoch renews the session and carries
only changes; -1 leaves. The response holds the epoch, the heartbeat interval, and the assignment if the member may not
know it. Several members may have the same partition: each message goes to one of them.

A share group is a subscription of the same name. It is declared when the first member joins, unless it exists;
`share.session.timeout.ms`, `share.heartbeat.interval.ms` and the other settings are the subscription's.

Refused are: an epoch that is not the member's (FENCED_MEMBER_EPOCH), an unknown member (UNKNOWN_MEMBER_ID), a full
group (GROUP_MAX_SIZE_REACHED), and a group that does not exist or is of another kind (GROUP_ID_NOT_FOUND).
"""

from __future__ import annotations

from kio.schema.share_group_heartbeat.v1.request import ShareGroupHeartbeatRequest
from kio.schema.share_group_heartbeat.v1.response import Assignment, ShareGroupHeartbeatResponse, TopicPartitions

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.share.group import JOIN_EPOCH, LEFT_EPOCH, ShareHeartbeat
from millstream.broker.kafka.api import Api, ClientInfo
from millstream.broker.kafka.group_responses import check_text, heartbeat_response
from millstream.core.errors import InvalidRequest
from millstream.core.subscription import SubscriptionSettings


class ShareGroupHeartbeat(Api[ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse]):
    """Keeps members of share groups alive and returns their assignments."""

    key = 76
    versions = (1, 1)
    changes = None

    def __init__(self, groups: GroupCoordinator, subscriptions: Subscriptions) -> None:
        self._groups = groups
        self._subscriptions = subscriptions

    async def handle(self, request: ShareGroupHeartbeatRequest, client: ClientInfo) -> ShareGroupHeartbeatResponse:
        _check(request)
        settings = self._settings(request.group_id)
        names = request.subscribed_topic_names
        heartbeat = ShareHeartbeat(
            group_id=request.group_id,
            member_id=request.member_id,
            epoch=request.member_epoch,
            rack_id=request.rack_id,
            topics=None if names is None else frozenset(names),
            client_id=client.client_id,
            # Kafka shows the address of a member in the form that Java prints.
            client_host=f"/{client.host}",
            session_ms=settings.session_ms,
            heartbeat_ms=settings.heartbeat_ms,
        )
        response = await self._groups.share_heartbeat(heartbeat)
        if request.member_epoch == JOIN_EPOCH:
            await self._subscriptions.ensure(request.group_id)
        return heartbeat_response(ShareGroupHeartbeatResponse, Assignment, TopicPartitions, response)

    def _settings(self, group_id: str) -> SubscriptionSettings:
        declared = self._subscriptions.get(group_id)
        return SubscriptionSettings() if declared is None else self._subscriptions.settings_of(declared)


def _check(message: ShareGroupHeartbeatRequest) -> None:
    check_text("member id", message.member_id)
    check_text("group id", message.group_id)
    if message.rack_id is not None:
        check_text("rack id", message.rack_id)
    if message.member_epoch < LEFT_EPOCH:
        raise InvalidRequest(f"there is no member epoch {message.member_epoch}")
    if message.member_epoch == JOIN_EPOCH and not message.subscribed_topic_names:
        raise InvalidRequest("a member that joins must send its topics")
