"""DeleteGroups (key 42), versions 0 to 2: deletes groups without members, and their offsets.

A group that has members gets NON_EMPTY_GROUP, and so does a share group with open dead letters; one that does not exist
gets GROUP_ID_NOT_FOUND. Each group succeeds or fails independently.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import suppress

from kio.schema.delete_groups.v2.request import DeleteGroupsRequest
from kio.schema.delete_groups.v2.response import DeletableGroupResult, DeleteGroupsResponse
from kio.schema.errors import ErrorCode
from kio.schema.types import GroupId

from millstream.broker.groups.coordinator import GroupCoordinator
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code
from millstream.broker.kafka.subscription_service import SubscriptionService
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import DELETE, Users, carried_out, change_of
from millstream.core.errors import GroupNotEmpty, MillstreamError, UnknownSubscription

_logger = logging.getLogger(__name__)


class DeleteGroups(Api[DeleteGroupsRequest, DeleteGroupsResponse]):
    key = 42
    versions = (0, 2)

    def __init__(self, groups: GroupCoordinator, service: SubscriptionService | None = None) -> None:
        self._groups = groups
        self._service = service

    async def handle(self, request: DeleteGroupsRequest, client: ClientInfo) -> DeleteGroupsResponse:
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
        """Delete a share group with its delivery state; a subscription that was declared with topics stays."""
        service = self._service
        declared = None if service is None else service.declared.get(group_id)
        has_queues = service is not None and declared is not None and not declared.topics
        try:
            if service is not None and has_queues:
                await service.check_no_letters(group_id)
            await self._groups.delete(group_id)
            if service is not None and has_queues:
                with suppress(UnknownSubscription):
                    await service.delete(group_id, force=True)
        except GroupNotEmpty as error:
            _logger.info("a group was not deleted", extra={"group": group_id, "reason": str(error)})
            return error_code(error)
        except MillstreamError as error:
            return error_code(error)
        return ErrorCode.none

    @staticmethod
    def changes(_request: DeleteGroupsRequest, response: DeleteGroupsResponse, _users: Users) -> Iterator[Change]:
        for group in carried_out(response.results):
            yield change_of(group, DELETE, "group", group.group_id)
