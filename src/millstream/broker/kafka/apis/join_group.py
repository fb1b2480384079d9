"""JoinGroup (key 11), versions 0 to 9: adds a consumer to its group, or to the next generation of it.

The response waits until the generation is complete. Version notes: 0 has no rebalance timeout and uses the session
timeout for both; from 4 on a new member first gets an id (MEMBER_ID_REQUIRED) and joins again with it; 5 adds static
members; 7 adds the protocol type, and a null protocol name if there is none; 8 adds a reason; 9 can inform a returning
static leader that the assignment is unchanged.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.join_group.v9.request import JoinGroupRequest
from kio.schema.join_group.v9.response import JoinGroupResponse, JoinGroupResponseMember
from kio.static.primitive import i32

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import Joined, JoinRequest
from millstream.broker.kafka.api import NO_THROTTLE, ClientInfo, Versioned, VersionedApi, error_code
from millstream.core.errors import GroupFull, GroupNotAuthorized, InvalidRequest, MemberIdRequired, MillstreamError

_MILLISECOND: Final = timedelta(milliseconds=1)
_FIRST_WITH_MEMBER_ID_REQUIRED: Final = 4
_FIRST_WITH_SKIP_ASSIGNMENT: Final = 9


class JoinGroup(VersionedApi[JoinGroupRequest, JoinGroupResponse]):
    key = 11
    versions = (0, 9)
    changes = None
    waits_for_others = True

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: Versioned[JoinGroupRequest], client: ClientInfo) -> JoinGroupResponse:
        return _build_response(await self._groups.join(_as_join(request, client)))

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
        knows_member_id_required=version >= _FIRST_WITH_MEMBER_ID_REQUIRED,
        knows_skip_assignment=version >= _FIRST_WITH_SKIP_ASSIGNMENT,
    )


def _build_response(joined: Joined) -> JoinGroupResponse:
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
