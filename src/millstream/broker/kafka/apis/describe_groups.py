"""DescribeGroups (key 15), versions 0 to 6: describes classic groups and their members.

A group that does not exist, or is a consumer group (which ConsumerGroupDescribe has), gets GROUP_ID_NOT_FOUND from
version 6 on, which also adds error messages, and before that a response without an error and with the state "Dead".
Metadata and assignments are only returned while the group is stable. Version 3 adds what the client may do with the
group, 4 static members.
"""

from __future__ import annotations

import asyncio
from typing import Final

from kio.schema.describe_groups.v6.request import DescribeGroupsRequest
from kio.schema.describe_groups.v6.response import DescribedGroup, DescribedGroupMember, DescribeGroupsResponse
from kio.schema.errors import ErrorCode
from kio.schema.types import GroupId
from kio.static.primitive import i32

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import GroupDescription
from millstream.broker.kafka.api import (
    GROUP_OPERATIONS,
    NO_THROTTLE,
    NOT_REQUESTED,
    ClientInfo,
    Versioned,
    VersionedApi,
    error_code,
    error_message,
)
from millstream.core.errors import MillstreamError, UnknownGroup

_FIRST_WITH_UNKNOWN_GROUP: Final = 6


class DescribeGroups(VersionedApi[DescribeGroupsRequest, DescribeGroupsResponse]):
    key = 15
    versions = (0, 6)
    changes = None

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: Versioned[DescribeGroupsRequest], client: ClientInfo) -> DescribeGroupsResponse:
        operations = GROUP_OPERATIONS if request.message.include_authorized_operations else NOT_REQUESTED
        described = await asyncio.gather(
            *(self._describe(group_id, request.version, operations) for group_id in request.message.groups)
        )
        return DescribeGroupsResponse(throttle_time=NO_THROTTLE, groups=tuple(described))

    @staticmethod
    def refused(group_id: str, code: ErrorCode, _message: str) -> DescribedGroup:
        return _error_group(group_id, code, None, NOT_REQUESTED, state="")

    async def _describe(self, group_id: str, version: int, operations: i32) -> DescribedGroup:
        try:
            return _build_group(await self._groups.describe(group_id), operations)
        except UnknownGroup as error:
            if version < _FIRST_WITH_UNKNOWN_GROUP:
                return _error_group(group_id, ErrorCode.none, None, operations)
            return _error_group(group_id, error_code(error), error_message(error), operations)
        except MillstreamError as error:
            return _error_group(group_id, error_code(error), error_message(error), NOT_REQUESTED, state="")


def _build_group(group: GroupDescription, operations: i32) -> DescribedGroup:
    return DescribedGroup(
        error_code=ErrorCode.none,
        group_id=GroupId(group.group_id),
        group_state=group.state,
        protocol_type=group.protocol_type,
        protocol_data=group.protocol_name,
        members=tuple(
            DescribedGroupMember(
                member_id=member.member_id,
                group_instance_id=member.instance_id,
                client_id=member.client_id,
                client_host=member.client_host,
                member_metadata=member.metadata,
                member_assignment=member.assignment,
            )
            for member in group.members
        ),
        authorized_operations=operations,
    )


def _error_group(
    group_id: str, code: ErrorCode, message: str | None, operations: i32, *, state: str = "Dead"
) -> DescribedGroup:
    return DescribedGroup(
        error_code=code,
        error_message=message,
        group_id=GroupId(group_id),
        group_state=state,
        protocol_type="",
        protocol_data="",
        members=(),
        authorized_operations=operations,
    )
