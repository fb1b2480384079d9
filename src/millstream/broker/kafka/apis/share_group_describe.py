"""ShareGroupDescribe (key 77), version 1: describes share groups, their members and assignments (KIP-932).

A group that does not exist, or is of another kind, is GROUP_ID_NOT_FOUND.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.share_group_describe.v1.request import ShareGroupDescribeRequest
from kio.schema.share_group_describe.v1.response import (
    Assignment,
    DescribedGroup,
    Member,
    ShareGroupDescribeResponse,
    TopicPartitions,
)
from kio.schema.types import GroupId, TopicName
from kio.static.primitive import i32

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.share.group import ShareGroupDescription, ShareMemberDescription
from millstream.broker.kafka.api import GROUP_OPERATIONS, NO_THROTTLE, NOT_ASKED, Api, ClientInfo
from millstream.broker.kafka.group_responses import describe_failure, named_partitions
from millstream.core.errors import MillstreamError

ASSIGNOR: Final = "simple"


class ShareGroupDescribe(Api[ShareGroupDescribeRequest, ShareGroupDescribeResponse]):
    key = 77
    versions = (1, 1)
    changes = None

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: ShareGroupDescribeRequest, client: ClientInfo) -> ShareGroupDescribeResponse:
        operations = GROUP_OPERATIONS if request.include_authorized_operations else NOT_ASKED
        described = await asyncio.gather(*(self._describe(group_id, operations) for group_id in request.group_ids))
        return ShareGroupDescribeResponse(throttle_time=NO_THROTTLE, groups=tuple(described))

    async def _describe(self, group_id: GroupId, operations: i32) -> DescribedGroup:
        try:
            return _build_group(await self._groups.describe_share_group(group_id), operations)
        except MillstreamError as error:
            return describe_failure(DescribedGroup, group_id, error)


def _build_group(group: ShareGroupDescription, operations: i32) -> DescribedGroup:
    return DescribedGroup(
        error_code=ErrorCode.none,
        group_id=GroupId(group.group_id),
        group_state=group.state,
        group_epoch=i32(group.epoch),
        assignment_epoch=i32(group.epoch),
        assignor_name=ASSIGNOR,
        members=tuple(map(_build_member, group.members)),
        authorized_operations=operations,
    )


def _build_member(member: ShareMemberDescription) -> Member:
    return Member(
        member_id=member.member_id,
        rack_id=member.rack_id,
        member_epoch=i32(member.epoch),
        client_id=member.client_id,
        client_host=member.client_host,
        subscribed_topic_names=tuple(map(TopicName, sorted(member.topics))),
        assignment=Assignment(topic_partitions=named_partitions(TopicPartitions, member.assigned)),
    )
