"""LeaveGroup (key 13), versions 0 to 5: removes members from a group; an operator can remove static members.

From version 3 on several members can leave at once, each with its own error; before, the error of the one member is
that of the response. Version 5 adds a reason.
"""

from __future__ import annotations

from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.leave_group.v2.response import LeaveGroupResponse as SingleResponse
from kio.schema.leave_group.v5.request import LeaveGroupRequest, MemberIdentity
from kio.schema.leave_group.v5.response import LeaveGroupResponse, MemberResponse

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import LeaveResult, LeavingMember
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.protocol.messages.codec import load_response_class
from millstream.protocol.messages.shape import reshape

_FIRST_WITH_MANY: Final = 3


class LeaveGroup(Api[LeaveGroupRequest, LeaveGroupResponse]):
    key = 13
    versions = (0, 5)
    changes = None
    starts_at_once = True

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: LeaveGroupRequest, client: ClientInfo) -> LeaveGroupResponse:
        leavers = [
            LeavingMember(member.member_id, member.group_instance_id, member.reason) for member in request.members
        ]
        results = await self._groups.leave(request.group_id, leavers)
        return LeaveGroupResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            members=tuple(_member_response(left) for left in results),
        )

    def upgrade(self, version: int, request: Any) -> LeaveGroupRequest:
        """Convert the single member of older versions to a list."""
        if version >= _FIRST_WITH_MANY:
            return super().upgrade(version, request)
        return LeaveGroupRequest(group_id=request.group_id, members=(MemberIdentity(member_id=request.member_id),))

    def downgrade(self, version: int, response: LeaveGroupResponse) -> Any:
        """Take the one response out for older versions."""
        if version >= _FIRST_WITH_MANY:
            return super().downgrade(version, response)
        code = response.error_code
        if code is ErrorCode.none and response.members:
            code = response.members[0].error_code
        single = SingleResponse(throttle_time=response.throttle_time, error_code=code)
        return reshape(single, load_response_class(self.key, version))


def _member_response(left: LeaveResult) -> MemberResponse:
    return MemberResponse(
        member_id=left.leaver.member_id,
        group_instance_id=left.leaver.instance_id,
        error_code=ErrorCode.none if left.error is None else error_code(left.error),
    )
