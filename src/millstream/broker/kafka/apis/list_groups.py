"""ListGroups (key 16), versions 0 to 5: lists the groups that this node coordinates.

Version 4 adds the states and a filter by them, 5 the types ("classic", "consumer") and a filter by them; both without
regard to case.
"""

from __future__ import annotations

from kio.schema.errors import ErrorCode
from kio.schema.list_groups.v5.request import ListGroupsRequest
from kio.schema.list_groups.v5.response import ListedGroup, ListGroupsResponse
from kio.schema.types import GroupId

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo


class ListGroups(Api[ListGroupsRequest, ListGroupsResponse]):
    key = 16
    versions = (0, 5)
    changes = None

    def __init__(self, groups: GroupCoordinator) -> None:
        self._groups = groups

    async def handle(self, request: ListGroupsRequest, client: ClientInfo) -> ListGroupsResponse:
        states = {state.lower() for state in request.states_filter}
        types = {kind.lower() for kind in request.types_filter}
        listings = await self._groups.list_groups()
        return ListGroupsResponse(
            throttle_time=NO_THROTTLE,
            error_code=ErrorCode.none,
            groups=tuple(
                ListedGroup(
                    group_id=GroupId(listing.group_id),
                    protocol_type=listing.protocol_type,
                    group_state=listing.state,
                    group_type=listing.group_type,
                )
                for listing in listings
                if (not states or listing.state.lower() in states)
                and (not types or listing.group_type.lower() in types)
            ),
        )
