"""DeleteAcls (key 31), versions 1 to 3: removes the access rules that each filter selects, and returns them.

A node without authentication returns SECURITY_DISABLED, as Kafka does without an authorizer.

Version notes: 2 is flexible, 3 adds resources of the type user.
"""

from __future__ import annotations

from collections.abc import Iterator

from kio.schema.delete_acls.v3.request import DeleteAclsFilter, DeleteAclsRequest
from kio.schema.delete_acls.v3.response import DeleteAclsFilterResult, DeleteAclsMatchingAcl, DeleteAclsResponse
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8

from millstream.broker.kafka.api import NO_THROTTLE, SECURITY_DISABLED, Api, ClientInfo, error_code, error_message
from millstream.broker.kafka.apis.describe_acls import read_filter
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import DELETE, Users, acl_change, carried_out
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Acl
from millstream.core.errors import MillstreamError


class DeleteAcls(Api[DeleteAclsRequest, DeleteAclsResponse]):
    """Removes access rules."""

    key = 31
    versions = (1, 3)

    def __init__(self, security: SecurityState | None) -> None:
        self._security = security

    async def handle(self, request: DeleteAclsRequest, client: ClientInfo) -> DeleteAclsResponse:
        if self._security is None:
            return _response([_error_result(ErrorCode.security_disabled, SECURITY_DISABLED)] * len(request.filters))
        return _response([await self._delete(self._security, wanted) for wanted in request.filters])

    def failure(self, error: MillstreamError, request: DeleteAclsRequest) -> DeleteAclsResponse:
        return _response([_error_result(error_code(error), error_message(error))] * len(request.filters))

    async def _delete(self, security: SecurityState, wanted: DeleteAclsFilter) -> DeleteAclsFilterResult:
        try:
            gone = await security.delete_acls(read_filter(wanted))
        except MillstreamError as error:
            return _error_result(error_code(error), error_message(error))
        return DeleteAclsFilterResult(
            error_code=ErrorCode.none, error_message=None, matching_acls=tuple(map(_matching_acl, sorted(gone)))
        )

    @staticmethod
    def changes(_request: DeleteAclsRequest, response: DeleteAclsResponse, _users: Users) -> Iterator[Change]:
        for found in carried_out(response.filter_results):
            for acl in carried_out(found.matching_acls):
                yield acl_change(DELETE, acl, acl.pattern_type, acl)


def _matching_acl(acl: Acl) -> DeleteAclsMatchingAcl:
    return DeleteAclsMatchingAcl(
        error_code=ErrorCode.none,
        error_message=None,
        resource_type=i8(acl.resource_type),
        resource_name=acl.resource_name,
        pattern_type=i8(acl.pattern),
        principal=acl.principal,
        host=acl.host,
        operation=i8(acl.operation),
        permission_type=i8(acl.permission),
    )


def _error_result(code: ErrorCode, message: str) -> DeleteAclsFilterResult:
    return DeleteAclsFilterResult(error_code=code, error_message=message, matching_acls=())


def _response(results: list[DeleteAclsFilterResult]) -> DeleteAclsResponse:
    return DeleteAclsResponse(throttle_time=NO_THROTTLE, filter_results=tuple(results))
