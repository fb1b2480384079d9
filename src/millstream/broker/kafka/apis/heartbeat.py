"""Heartbeat (key 12), versions 0 to 4: renews a member's session, and reports whether it must rejoin.

While the group is being read back from the log, heartbeats succeed, as in Kafka: the member's session restarts
afterwards. Version 3 adds static members.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from kio.schema.heartbeat.v4.request import HeartbeatRequest
from kio.schema.heartbeat.v4.response import HeartbeatResponse

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import MemberRef
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.core.errors import CoordinatorLoading, MillstreamError


class Heartbeat(Api[HeartbeatRequest, HeartbeatResponse]):
    """Keeps members alive."""

    key = 12
    versions = (0, 4)
    changes = None
    starts_at_once = True

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: HeartbeatRequest, client: ClientInfo) -> HeartbeatResponse:
        await self._groups.heartbeat(
            MemberRef(
                group_id=request.group_id,
                member_id=request.member_id,
                instance_id=request.group_instance_id,
                generation=request.generation_id,
            )
        )
        return _response(ErrorCode.none)

    def failure(self, error: MillstreamError, request: HeartbeatRequest) -> HeartbeatResponse:
        """Report the error; a loading coordinator responds with success."""
        return _response(ErrorCode.none if isinstance(error, CoordinatorLoading) else error_code(error))


def _response(code: ErrorCode) -> HeartbeatResponse:
    return HeartbeatResponse(throttle_time=NO_THROTTLE, error_code=code)
