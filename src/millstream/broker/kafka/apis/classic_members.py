"""The APIs of the members of classic groups."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.heartbeat.v4.request import HeartbeatRequest
from kio.schema.heartbeat.v4.response import HeartbeatResponse
from kio.schema.join_group.v9.request import JoinGroupRequest
from kio.schema.join_group.v9.response import JoinGroupResponse, JoinGroupResponseMember
from kio.schema.leave_group.v2.response import LeaveGroupResponse as SingleResponse
from kio.schema.leave_group.v5.request import LeaveGroupRequest, MemberIdentity
from kio.schema.leave_group.v5.response import LeaveGroupResponse, MemberResponse
from kio.schema.sync_group.v5.request import SyncGroupRequest
from kio.schema.sync_group.v5.response import SyncGroupResponse
from kio.static.primitive import i32

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import (
    JoinRequest,
    JoinResponse,
    LeaveResult,
    LeavingMember,
    MemberRef,
    SyncRequest,
)
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, Versioned, VersionedApi, error_code
from millstream.core.acl import Operation
from millstream.core.errors import (
    CoordinatorLoading,
    GroupFull,
    GroupNotAuthorized,
    InconsistentProtocol,
    InvalidRequest,
    MemberIdRequired,
    MillstreamError,
)
from millstream.protocol.messages.codec import load_response_class
from millstream.protocol.messages.shape import reshape

_MILLISECOND: Final = timedelta(milliseconds=1)
_FIRST_WITH_MEMBER_ID_REQUIRED: Final = 4
_FIRST_WITH_SKIP_ASSIGNMENT: Final = 9
_FIRST_WITH_PROTOCOL: Final = 5
_FIRST_WITH_MANY: Final = 3


class JoinGroup(VersionedApi[JoinGroupRequest, JoinGroupResponse]):
    """JoinGroup (key 11), versions 0 to 9: adds a consumer to its group, or to its next generation.

    The response waits until the generation is complete. Version notes: 0 has no rebalance timeout and uses the session
    timeout for both; from 4 on a new member first gets an id (MEMBER_ID_REQUIRED) and joins again with it; 5 adds
    static members; 7 adds the protocol type, and a null protocol name if there is none; 8 adds a reason; 9 can inform a
    returning static leader that the assignment is unchanged.
    """

    key = 11
    versions = (0, 9)
    changes = None
    waits_for_others = True

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: Versioned[JoinGroupRequest], client: ClientInfo) -> JoinGroupResponse:
        return _joined_response(await self._groups.join(_as_join(request, client)))

    def failure(self, error: MillstreamError, request: Versioned[JoinGroupRequest]) -> JoinGroupResponse:
        """Refuse, with the member id that the client continues with."""
        member_id = request.message.member_id
        if isinstance(error, MemberIdRequired):
            member_id = error.member_id
        elif isinstance(error, GroupFull | InvalidRequest | GroupNotAuthorized):
            member_id = ""
        return JoinGroupResponse(
            throttle_time=NO_THROTTLE,
            error_code=error_code(error),
            protocol_name=None,
            leader="",
            member_id=member_id,
            members=(),
        )


def _as_join(request: Versioned[JoinGroupRequest], client: ClientInfo) -> JoinRequest:
    version, message = request
    session_timeout_ms = message.session_timeout // _MILLISECOND
    rebalance_timeout_ms = message.rebalance_timeout // _MILLISECOND
    return JoinRequest(
        group_id=message.group_id,
        member_id=message.member_id,
        instance_id=message.group_instance_id,
        client_id=client.client_id,
        # Kafka shows the address of a member in the form that Java prints.
        client_host=f"/{client.host}",
        session_timeout_ms=session_timeout_ms,
        rebalance_timeout_ms=session_timeout_ms if rebalance_timeout_ms < 0 else rebalance_timeout_ms,
        protocol_type=message.protocol_type,
        protocols=tuple((protocol.name, protocol.metadata) for protocol in message.protocols),
        reason=message.reason,
        supports_member_id_required=version >= _FIRST_WITH_MEMBER_ID_REQUIRED,
        supports_skip_assignment=version >= _FIRST_WITH_SKIP_ASSIGNMENT,
        may_describe=None if client.rights is None else partial(client.rights.topic, Operation.DESCRIBE),
    )


def _joined_response(joined: JoinResponse) -> JoinGroupResponse:
    return JoinGroupResponse(
        throttle_time=NO_THROTTLE,
        error_code=ErrorCode.none,
        generation_id=i32(joined.generation),
        protocol_type=joined.protocol_type,
        protocol_name=joined.protocol_name,
        leader=joined.leader_id,
        skip_assignment=joined.skip_assignment,
        member_id=joined.member_id,
        members=tuple(
            JoinGroupResponseMember(
                member_id=member.member_id, group_instance_id=member.instance_id, metadata=member.metadata
            )
            for member in joined.members
        ),
    )


class SyncGroup(VersionedApi[SyncGroupRequest, SyncGroupResponse]):
    """SyncGroup (key 14), versions 0 to 5: receives the assignments from the leader, and returns each member its own.

    A follower's response waits for the leader, and all responses wait until the generation is durable. Version 3 adds
    static members; from 5 on the client must name protocol type and name, and gets INCONSISTENT_GROUP_PROTOCOL if it
    does not.
    """

    key = 14
    versions = (0, 5)
    changes = None
    waits_for_others = True

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: Versioned[SyncGroupRequest], client: ClientInfo) -> SyncGroupResponse:
        version, message = request
        if version >= _FIRST_WITH_PROTOCOL and (message.protocol_type is None or message.protocol_name is None):
            raise InconsistentProtocol("protocol type and name are required")
        synced = await self._groups.sync(
            SyncRequest(
                member=_sender(message),
                protocol_type=message.protocol_type,
                protocol_name=message.protocol_name,
                assignments={share.member_id: share.assignment for share in message.assignments},
            )
        )
        return SyncGroupResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            protocol_type=synced.protocol_type,
            protocol_name=synced.protocol_name,
            assignment=synced.assignment,
        )


def _sender(request: SyncGroupRequest | HeartbeatRequest) -> MemberRef:
    return MemberRef(
        group_id=request.group_id,
        member_id=request.member_id,
        instance_id=request.group_instance_id,
        generation=request.generation_id,
    )


class Heartbeat(Api[HeartbeatRequest, HeartbeatResponse]):
    """Heartbeat (key 12), versions 0 to 4: renews a member's session, and reports whether it must rejoin.

    While the group is being read back from the log, heartbeats succeed, as in Kafka: the member's session restarts
    afterwards. Version 3 adds static members.
    """

    key = 12
    versions = (0, 4)
    changes = None
    starts_at_once = True

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: HeartbeatRequest, client: ClientInfo) -> HeartbeatResponse:
        await self._groups.heartbeat(_sender(request))
        return _heartbeat_response(ErrorCode.none)

    def failure(self, error: MillstreamError, request: HeartbeatRequest) -> HeartbeatResponse:
        """Report the error; a loading coordinator responds with success."""
        return _heartbeat_response(ErrorCode.none if isinstance(error, CoordinatorLoading) else error_code(error))


def _heartbeat_response(code: ErrorCode) -> HeartbeatResponse:
    return HeartbeatResponse(throttle_time=NO_THROTTLE, error_code=code)


class LeaveGroup(Api[LeaveGroupRequest, LeaveGroupResponse]):
    """LeaveGroup (key 13), versions 0 to 5: removes members from a group; an operator can remove static members.

    From version 3 on several members can leave at once, each with its own error; before, the error of the one member is
    that of the response. Version 5 adds a reason.
    """

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
            members=tuple(_member_response(result) for result in results),
        )

    def upgrade(self, version: int, request: Any) -> LeaveGroupRequest:
        """Convert the single member of older versions to a list."""
        if version >= _FIRST_WITH_MANY:
            return super().upgrade(version, request)
        return LeaveGroupRequest(group_id=request.group_id, members=(MemberIdentity(member_id=request.member_id),))

    def downgrade(self, version: int, response: LeaveGroupResponse) -> Any:
        """Unwrap the single response for older versions."""
        if version >= _FIRST_WITH_MANY:
            return super().downgrade(version, response)
        code = response.error_code
        if code is ErrorCode.none and response.members:
            code = response.members[0].error_code
        single = SingleResponse(throttle_time=response.throttle_time, error_code=code)
        return reshape(single, load_response_class(self.key, version))


def _member_response(result: LeaveResult) -> MemberResponse:
    return MemberResponse(
        member_id=result.leaver.member_id,
        group_instance_id=result.leaver.instance_id,
        error_code=ErrorCode.none if result.error is None else error_code(result.error),
    )
