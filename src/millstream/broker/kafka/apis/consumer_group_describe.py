"""ConsumerGroupDescribe (key 69), versions 0 to 1: describes consumer groups, their members and assignments (KIP-848).

A group that does not exist, or is a classic one, is GROUP_ID_NOT_FOUND; DescribeGroups has those. Each member has its
current and its target assignment. Version 1 adds whether a member uses the classic protocol.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from kio.schema.consumer_group_describe.v1.request import ConsumerGroupDescribeRequest
from kio.schema.consumer_group_describe.v1.response import (
    Assignment,
    ConsumerGroupDescribeResponse,
    DescribedGroup,
    Member,
    TopicPartitions,
)
from kio.schema.types import TopicName
from kio.static.primitive import i8, i32

from millstream.broker.groups.consumer.member import NamedPartitions
from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import ConsumerMemberDescription
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.kafka.group_responses import describe_groups, named_partitions, refused_group

_CLASSIC_MEMBER: Final = i8(0)
_CONSUMER_MEMBER: Final = i8(1)


class ConsumerGroupDescribe(Api[ConsumerGroupDescribeRequest, ConsumerGroupDescribeResponse]):
    key = 69
    versions = (0, 1)
    changes = None
    refused = staticmethod(partial(refused_group, DescribedGroup))

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: ConsumerGroupDescribeRequest, client: ClientInfo) -> ConsumerGroupDescribeResponse:
        groups = await describe_groups(DescribedGroup, _build_member, self._groups.describe_consumer_group, request)
        return ConsumerGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=groups)


def _build_member(member: ConsumerMemberDescription) -> Member:
    return Member(
        member_id=member.member_id,
        instance_id=member.instance_id,
        rack_id=member.rack_id,
        member_epoch=i32(member.epoch),
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=tuple(map(TopicName, sorted(member.topics))),
        subscribed_topic_regex=member.expression,
        assignment=_build_assignment(member.assigned),
        target_assignment=_build_assignment(member.target),
        member_type=_CLASSIC_MEMBER if member.speaks_classic else _CONSUMER_MEMBER,
    )


def _build_assignment(partitions: NamedPartitions) -> Assignment:
    return Assignment(topic_partitions=named_partitions(TopicPartitions, partitions))
