"""ConsumerGroupHeartbeat (key 68), versions 0 to 1: keeps a consumer in its group; consumers also join and leave with
it (KIP-848).

Epoch 0 joins, with all metadata of the member; a positive epoch renews the session and carries only changes; -1 leaves,
-2 leaves a static member's place for its next process. The response holds the epoch, the heartbeat interval, and the
assignment if the member may not know it; the coordinator assigns partitions by `uniform` (the default) or `range`. A
member revokes partitions before others get them, within its rebalance timeout.

Refused are: an epoch that is not the member's (FENCED_MEMBER_EPOCH: revoke everything and join again), an unknown
member (UNKNOWN_MEMBER_ID), an instance id that another process has not left (UNRELEASED_INSTANCE_ID) or has taken
(FENCED_INSTANCE_ID), an unknown assignor (UNSUPPORTED_ASSIGNOR), a full group (GROUP_MAX_SIZE_REACHED), and a group
that does not exist, or is a classic one that cannot become a consumer group (GROUP_ID_NOT_FOUND).

Version 1 adds subscriptions by regular expression, in RE2's syntax (INVALID_REGULAR_EXPRESSION), which match only
topics that the member may describe, and lets the member choose its id.
"""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Final

from kio.schema.consumer_group_heartbeat.v1.request import ConsumerGroupHeartbeatRequest
from kio.schema.consumer_group_heartbeat.v1.response import Assignment, ConsumerGroupHeartbeatResponse, TopicPartitions

from millstream.broker.groups.consumer.assignor import ASSIGNORS
from millstream.broker.groups.consumer.member import AWAY_EPOCH, LEFT_EPOCH, assignment_of
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import ConsumerHeartbeat
from millstream.broker.kafka.api import ClientInfo, Versioned, VersionedApi
from millstream.broker.kafka.group_responses import check_text, heartbeat_response
from millstream.core.acl import Operation
from millstream.core.errors import InvalidRequest, UnsupportedAssignor

_MILLISECOND: Final = timedelta(milliseconds=1)
_FIRST_WITH_OWN_MEMBER_ID: Final = 1
_AS_BEFORE: Final = -1


class ConsumerGroupHeartbeat(VersionedApi[ConsumerGroupHeartbeatRequest, ConsumerGroupHeartbeatResponse]):
    """Keeps members of consumer groups alive and returns their assignments."""

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
        _check(message, version)
        result = await self._groups.consumer_heartbeat(_as_heartbeat(message, client))
        return heartbeat_response(ConsumerGroupHeartbeatResponse, Assignment, TopicPartitions, result)


def _check(message: ConsumerGroupHeartbeatRequest, version: int) -> None:
    """Check what does not depend on the group, in Kafka's order."""
    epoch = message.member_epoch
    needs_member_id = version >= _FIRST_WITH_OWN_MEMBER_ID or epoch > 0 or epoch == LEFT_EPOCH
    check_text("member id", message.member_id if needs_member_id else message.member_id or None)
    check_text("group id", message.group_id)
    check_text("instance id", message.instance_id)
    check_text("rack id", message.rack_id)
    if epoch == 0:
        _check_join(message)
    elif epoch == AWAY_EPOCH and message.instance_id is None:
        raise InvalidRequest("only a member with an instance id can leave for a while")
    elif epoch < AWAY_EPOCH:
        raise InvalidRequest(f"there is no member epoch {epoch}")
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
