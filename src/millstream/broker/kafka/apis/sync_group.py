"""SyncGroup (key 14), versions 0 to 5: receives the assignments from the leader, and returns each member its own.

A follower's response waits for the leader, and all responses wait until the generation is durable. Version 3 adds
static members; from 5 on the client must name protocol type and name, and gets INCONSISTENT_GROUP_PROTOCOL if it does
not.
"""

from __future__ import annotations

from typing import Final

from kio.schema.errors import ErrorCode
from kio.schema.sync_group.v5.request import SyncGroupRequest
from kio.schema.sync_group.v5.response import SyncGroupResponse

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.groups.requests import MemberRef, SyncRequest
from millstream.broker.kafka.api import NO_THROTTLE, ClientInfo, Versioned, VersionedApi
from millstream.core.errors import InconsistentProtocol

_FIRST_WITH_PROTOCOL: Final = 5


class SyncGroup(VersionedApi[SyncGroupRequest, SyncGroupResponse]):
    """Distributes assignments."""

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
                member=MemberRef(
                    group_id=message.group_id,
                    member_id=message.member_id,
                    instance_id=message.group_instance_id,
                    generation=message.generation_id,
                ),
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
