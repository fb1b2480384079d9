"""The heartbeats of consumer groups and share groups, with which their members also join and leave."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any, Final, TypeVar

from kio.schema.consumer_group_heartbeat.v1 import response as consumer
from kio.schema.consumer_group_heartbeat.v1.request import ConsumerGroupHeartbeatRequest
from kio.schema.consumer_group_heartbeat.v1.response import ConsumerGroupHeartbeatResponse
from kio.schema.errors import ErrorCode
from kio.schema.share_group_heartbeat.v1 import response as share
from kio.schema.share_group_heartbeat.v1.request import ShareGroupHeartbeatRequest
from kio.schema.share_group_heartbeat.v1.response import ShareGroupHeartbeatResponse
from kio.static.primitive import i32, i32Timedelta

from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.groups.consumer.assignor import ASSIGNORS
from millstream.broker.groups.consumer.member import AWAY_EPOCH, LEFT_EPOCH, assignment_of
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import ConsumerHeartbeat, HeartbeatResult
from millstream.broker.groups.share.group import JOIN_EPOCH, ShareHeartbeat
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, Versioned, VersionedApi
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import CREATE
from millstream.core.acl import Operation
from millstream.core.errors import InvalidRequest, UnsupportedAssignor
from millstream.core.subscription import SubscriptionSettings
from millstream.core.tasks import finish

_MILLISECOND: Final = timedelta(milliseconds=1)
_FIRST_WITH_OWN_MEMBER_ID: Final = 1
_AS_BEFORE: Final = -1
_NAME_LENGTH_MAX: Final = 1024

T = TypeVar("T")


class ConsumerGroupHeartbeat(VersionedApi[ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse]):
    """ConsumerGroupHeartbeat (key 68), versions 0 to 1: keeps a consumer in its group; consumers also join and leave
    with it (KIP-848).

    Epoch 0 joins, with all metadata of the member; a positive epoch renews the session and carries only changes; -1
    leaves, -2 leaves a static member's place for its next process. The response holds the epoch, the heartbeat
    interval, and the assignment if the member may not know it; the coordinator assigns partitions by `uniform` (the
    default) or `range`. A member revokes partitions before others get them, within its rebalance timeout. The following
    are refused: an epoch that is not the member's (FENCED_MEMBER_EPOCH: revoke everything and join again), an unknown
    member (UNKNOWN_MEMBER_ID), an instance id that another process has not left (UNRELEASED_INSTANCE_ID) or has taken
    (FENCED_INSTANCE_ID), an unknown assignor (UNSUPPORTED_ASSIGNOR), a full group (GROUP_MAX_SIZE_REACHED), and a group
    that does not exist, or is a classic one that cannot become a consumer group (GROUP_ID_NOT_FOUND).

    Version 1 adds subscriptions by regular expression, in RE2's syntax (INVALID_REGULAR_EXPRESSION), which match only
    topics that the member may describe, and lets the member choose its id.
    """

    key = 68
    versions = (0, 1)
    changes = None
    starts_at_once = True

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(
        self, request: Versioned[ConsumerGroupHeartbeatRequest], client: ClientInfo
    ) -> ConsumerGroupHeartbeatResponse:
        version, message = request
        _check_consumer(message, version)
        result = await self._groups.consumer_heartbeat(_as_heartbeat(message, client))
        return _response(ConsumerGroupHeartbeatResponse, consumer, result)


def _check_consumer(message: ConsumerGroupHeartbeatRequest, version: int) -> None:
    """Check the fields that do not depend on the group, in Kafka's order."""
    epoch = message.member_epoch
    needs_member_id = version >= _FIRST_WITH_OWN_MEMBER_ID or epoch > 0 or epoch == LEFT_EPOCH
    _check_text("member id", message.member_id if needs_member_id else message.member_id or None)
    _check_text("group id", message.group_id)
    _check_text("instance id", message.instance_id)
    _check_text("rack id", message.rack_id)
    if epoch == 0:
        _check_join(message)
    elif epoch == AWAY_EPOCH and message.instance_id is None:
        raise InvalidRequest("only a member with an instance id can leave temporarily")
    elif epoch < AWAY_EPOCH:
        raise InvalidRequest(f"invalid member epoch {epoch}")
    if message.server_assignor is not None and message.server_assignor not in ASSIGNORS:
        raise UnsupportedAssignor(
            f"assignor {message.server_assignor!r} is unknown; the assignors are {', '.join(ASSIGNORS)}"
        )


def _check_join(message: ConsumerGroupHeartbeatRequest) -> None:
    if message.rebalance_timeout // _MILLISECOND == _AS_BEFORE:
        raise InvalidRequest("a member that joins must send its rebalance timeout")
    if message.topic_partitions is None or message.topic_partitions:
        raise InvalidRequest("a member that joins must send an empty list of partitions")
    if message.subscribed_topic_names is None and message.subscribed_topic_regex is None:
        raise InvalidRequest("a member that joins must send its topics, by name or by regular expression")


def _as_heartbeat(message: ConsumerGroupHeartbeatRequest, client: ClientInfo) -> ConsumerHeartbeat:
    rebalance_timeout_ms = message.rebalance_timeout // _MILLISECOND
    names, owned = message.subscribed_topic_names, message.topic_partitions
    return ConsumerHeartbeat(
        group_id=message.group_id,
        member_id=message.member_id,
        epoch=message.member_epoch,
        instance_id=message.instance_id,
        rack_id=message.rack_id,
        rebalance_timeout_ms=None if rebalance_timeout_ms == _AS_BEFORE else rebalance_timeout_ms,
        topics=None if names is None else frozenset(names),
        expression=message.subscribed_topic_regex,
        assignor=message.server_assignor,
        owned=None
        if owned is None
        else assignment_of((topic.topic_id, topic.partitions) for topic in owned if topic.topic_id is not None),
        client_id=client.client_id,
        # Kafka shows the address of a member in the form that Java prints.
        client_host=f"/{client.host}",
        may_describe=None if client.rights is None else partial(client.rights.topic, Operation.DESCRIBE),
    )


class ShareGroupHeartbeat(Api[ShareGroupHeartbeatRequest, ShareGroupHeartbeatResponse]):
    """ShareGroupHeartbeat (key 76), version 1: keeps a share consumer in its group; consumers also join and leave with
    it (KIP-932).

    Epoch 0 joins, with the topics of the member; a positive epoch renews the session and carries only changes; -1
    leaves. The response holds the epoch, the heartbeat interval, and the assignment if the member may not know it.
    Several members may have the same partition: each message goes to one of them.

    A share group is a subscription of the same name. It is declared when the first member joins, unless it exists;
    `share.session.timeout.ms`, `share.heartbeat.interval.ms` and the other settings are the subscription's. The
    following are refused: an epoch that is not the member's (FENCED_MEMBER_EPOCH), an unknown member
    (UNKNOWN_MEMBER_ID), a full group (GROUP_MAX_SIZE_REACHED), and a group that does not exist or is of another kind
    (GROUP_ID_NOT_FOUND).
    """

    key = 76
    versions = (1, 1)
    changes = None

    def __init__(self, groups: GroupCoordinator, subscriptions: Subscriptions) -> None:
        self._groups = groups
        self._subscriptions = subscriptions

    async def handle(self, request: ShareGroupHeartbeatRequest, client: ClientInfo) -> ShareGroupHeartbeatResponse:
        _check_share(request)
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
            await finish(self._declare(request.group_id, client))
        return _response(ShareGroupHeartbeatResponse, share, response)

    async def _declare(self, group_id: str, client: ClientInfo) -> None:
        is_new = self._subscriptions.get(group_id) is None
        await self._subscriptions.ensure(group_id)
        if is_new and client.rights is not None:
            change = Change(activity=CREATE, kind="subscription", name=group_id)
            client.rights.record(type(self).__name__, change)

    def _settings(self, group_id: str) -> SubscriptionSettings:
        declared = self._subscriptions.get(group_id)
        return SubscriptionSettings() if declared is None else self._subscriptions.settings_of(declared)


def _check_share(message: ShareGroupHeartbeatRequest) -> None:
    _check_text("member id", message.member_id)
    _check_text("group id", message.group_id)
    _check_text("rack id", message.rack_id)
    if message.member_epoch < LEFT_EPOCH:
        raise InvalidRequest(f"invalid member epoch {message.member_epoch}")
    if message.member_epoch == JOIN_EPOCH and not message.subscribed_topic_names:
        raise InvalidRequest("a member that joins must send its topics")


def _check_text(name: str, text: str | None) -> None:
    """Raise `InvalidRequest` for an invalid name or id; None is valid."""
    if text is None:
        return
    if not text.strip():
        raise InvalidRequest(f"the {name} cannot be empty")
    if len(text) > _NAME_LENGTH_MAX:
        raise InvalidRequest(f"the {name} has at most {_NAME_LENGTH_MAX} characters, not {len(text)}")


def _response(response: Callable[..., T], messages: Any, result: HeartbeatResult) -> T:
    """Build a response, whose assignment both kinds of groups have under the same names."""
    assignment = None
    if result.assignment is not None:
        partitions = (
            messages.TopicPartitions(topic_id=topic_id, partitions=tuple(map(i32, sorted(indexes))))
            for topic_id, indexes in sorted(result.assignment.items())
        )
        assignment = messages.Assignment(topic_partitions=tuple(partitions))
    return response(
        throttle_time=NO_THROTTLE,
        error_code=ErrorCode.none,
        member_id=result.member_id,
        member_epoch=i32(result.epoch),
        heartbeat_interval=i32Timedelta.parse(timedelta(milliseconds=result.heartbeat_ms)),
        assignment=assignment,
    )
