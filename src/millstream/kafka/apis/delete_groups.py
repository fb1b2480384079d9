"""DeleteGroups (key 42), versions 0 to 2: groups without members go, and their offsets with them.

A group that has members gets NON_EMPTY_GROUP, one that does not exist GROUP_ID_NOT_FOUND; each group is answered by
itself.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress

from kio.schema.delete_groups.v2.request import DeleteGroupsRequest
from kio.schema.delete_groups.v2.response import DeletableGroupResult, DeleteGroupsResponse
from kio.schema.errors import ErrorCode
from kio.schema.types import GroupId

from millstream.cluster.subscriptions import Subscriptions
from millstream.groups.coordinator import GroupCoordinator
from millstream.kafka.api import Api, ClientInfo
from millstream.kafka.errors import error_code
from millstream.kafka.throttle import NO_THROTTLE
from millstream.model.errors import MillstreamError, UnknownSubscription


class DeleteGroups(Api[DeleteGroupsRequest, DeleteGroupsResponse]):
    """Deletes groups."""

    key = 42
    versions = (0, 2)

    def __init__(self, groups: GroupCoordinator, subscriptions: Subscriptions | None = None) -> None:
        self._groups = groups
        self._subscriptions = subscriptions

    async def handle(self, request: DeleteGroupsRequest, client: ClientInfo) -> DeleteGroupsResponse:
        """Delete each group."""
        names = tuple(dict.fromkeys(request.groups_names))
        codes = await asyncio.gather(*(self._delete(name) for name in names))
        return DeleteGroupsResponse(
            throttle_time=NO_THROTTLE,
            results=tuple(
                DeletableGroupResult(group_id=GroupId(name), error_code=code)
                for name, code in zip(names, codes, strict=True)
            ),
        )

    async def _delete(self, group_id: str) -> ErrorCode:
        try:
            await self._groups.delete(group_id)
            await self._delete_queues(group_id)
        except MillstreamError as error:
            return error_code(error)
        return ErrorCode.none

    async def _delete_queues(self, group_id: str) -> None:
        """What a share group has delivered goes with it; a subscription that somebody declared with topics stays."""
        declared = None if self._subscriptions is None else self._subscriptions.get(group_id)
        if self._subscriptions is not None and declared is not None and not declared.topics:
            with suppress(UnknownSubscription):
                await self._subscriptions.delete(group_id)
