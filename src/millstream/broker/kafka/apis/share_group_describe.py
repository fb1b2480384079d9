"""ShareGroupDescribe (key 77), version 1: describes share groups, their members and assignments (KIP-932).

A group that does not exist, or is of another kind, is GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

from functools import partial

from kio.schema.share_group_describe.v1.request import ShareGroupDescribeRequest
from kio.schema.share_group_describe.v1.response import (
    Assignment,
    DescribedGroup,
    Member,
    ShareGroupDescribeResponse,
    TopicPartitions,
)
from kio.schema.types import TopicName
from kio.static.primitive import i32

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import ConsumerMemberDescription
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.kafka.group_responses import describe_groups, named_partitions, refused_group


class ShareGroupDescribe(Api[ShareGroupDescribeRequest, ShareGroupDescribeResponse]):
    key = 77
    versions = (1, 1)
    changes = None
    refused = staticmethod(partial(refused_group, DescribedGroup))

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: ShareGroupDescribeRequest, client: ClientInfo) -> ShareGroupDescribeResponse:
        groups = await describe_groups(DescribedGroup, _build_member, self._groups.describe_share_group, request)
        return ShareGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=groups)


def _build_member(member: ConsumerMemberDescription) -> Member:
    return Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=i32(member.epoch),
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=tuple(map(TopicName, sorted(member.topics))),
        assignment=Assignment(topic_partitions=named_partitions(TopicPartitions, member.assigned)),
    )
