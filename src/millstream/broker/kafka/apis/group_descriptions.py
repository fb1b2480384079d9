"""The APIs that describe consumer groups and share groups.

A group that does not exist, or is of another kind, gets GROUP_ID_NOT_FOUND. Kafka has separate messages for both kinds,
with the same fields; so the functions here take the class to build.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, Final, TypeVar

from kio.schema.consumer_group_describe.v1 import response as consumer
from kio.schema.consumer_group_describe.v1.request import ConsumerGroupDescribeRequest
from kio.schema.consumer_group_describe.v1.response import ConsumerGroupDescribeResponse
from kio.schema.errors import ErrorCode
from kio.schema.share_group_describe.v1 import response as share
from kio.schema.share_group_describe.v1.request import ShareGroupDescribeRequest
from kio.schema.share_group_describe.v1.response import ShareGroupDescribeResponse
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i8, i32

from millstream.broker.groups.consumer.member import NamedPartitions
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import ConsumerGroupDescription, ConsumerMemberDescription
from millstream.broker.kafka.api import (
    GROUP_OPERATIONS,
    NO_THROTTLE,
    NOT_REQUESTED,
    Api,
    ClientInfo,
    error_code,
    error_message,
)
from millstream.core.errors import MillstreamError

_CLASSIC_MEMBER: Final = i8(0)
_CONSUMER_MEMBER: Final = i8(1)

T = TypeVar("T")


def _refused_group(group: Callable[..., T], group_id: GroupId, code: ErrorCode, message: str | None) -> T:
    return group(
        error_code=code,
        error_message=message,
        group_id=group_id,
        group_state="",
        group_epoch=i32(0),
        assignment_epoch=i32(0),
        assignor_name="",
        members=(),
    )


class ConsumerGroupDescribe(Api[ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse]):
    """ConsumerGroupDescribe (key 69), versions 0 to 1: describes consumer groups, their members and assignments
    (KIP-848).

    DescribeGroups has classic groups. Each member has its current and its target assignment. Version 1 adds whether a
    member uses the classic protocol.
    """

    key = 69
    versions = (0, 1)
    changes = None
    refused = staticmethod(partial(_refused_group, consumer.DescribedGroup))

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: ConsumerGroupDescribeRequest, client: ClientInfo) -> ConsumerGroupDescribeResponse:
        described = await _describe_groups(
            consumer.DescribedGroup, _consumer_member, self._groups.describe_consumer_group, request
        )
        return ConsumerGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=described)


class ShareGroupDescribe(Api[ShareGroupDescribeRequest, ShareGroupDescribeResponse]):
    """ShareGroupDescribe (key 77), version 1: describes share groups, their members and assignments (KIP-932)."""

    key = 77
    versions = (1, 1)
    changes = None
    refused = staticmethod(partial(_refused_group, share.DescribedGroup))

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: ShareGroupDescribeRequest, client: ClientInfo) -> ShareGroupDescribeResponse:
        described = await _describe_groups(
            share.DescribedGroup, _share_member, self._groups.describe_share_group, request
        )
        return ShareGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=described)


async def _describe_groups(
    group: Callable[..., T],
    member: Callable[[ConsumerMemberDescription], Any],
    describe: Callable[[GroupId], Awaitable[ConsumerGroupDescription]],
    request: ConsumerGroupDescribeRequest | ShareGroupDescribeRequest,
) -> tuple[T, ...]:
    """Describe groups, or say for each why it cannot be described."""
    operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_REQUESTED

    async def describe_one(group_id: GroupId) -> T:
        try:
            description = await describe(group_id)
        except MillstreamError as error:
            return _refused_group(group, group_id, error_code(error), error_message(error))
        return group(
            error_code=ErrorCode.none,
            group_id=group_id,
            group_state=description.state,
            group_epoch=i32(description.epoch),
            assignment_epoch=i32(description.target_epoch),
            assignor_name=description.assignor,
            members=tuple(map(member, description.members)),
            authorized_operations=operations,
        )

    return tuple(await asyncio.gather(*map(describe_one, request.group_ids)))


def _consumer_member(member: ConsumerMemberDescription) -> consumer.Member:
    return consumer.Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=i32(member.epoch),
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=tuple(map(TopicName, sorted(member.topics))),
        subscribed_topic_regex=member.expression,
        assignment=_consumer_assignment(member.assigned),
        target_assignment=_consumer_assignment(member.target),
        member_type=_CLASSIC_MEMBER if member.speaks_classic else _CONSUMER_MEMBER,
    )


def _consumer_assignment(partitions: NamedPartitions) -> consumer.Assignment:
    return consumer.Assignment(topic_partitions=_named_partitions(consumer.TopicPartitions, partitions))


def _share_member(member: ConsumerMemberDescription) -> share.Member:
    return share.Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=i32(member.epoch),
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=tuple(map(TopicName, sorted(member.topics))),
        assignment=share.Assignment(topic_partitions=_named_partitions(share.TopicPartitions, member.assigned)),
    )


def _named_partitions(part: Callable[..., T], named: NamedPartitions) -> tuple[T, ...]:
    return tuple(
        part(topic_id=topic_id, topic_name=TopicName(name), partitions=tuple(map(i32, numbers)))
        for topic_id, name, numbers in named
    )
