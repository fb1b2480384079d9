"""CreateAcls (key 30), versions 1 to 3: adds access rules; existing ones are left unchanged.

Each rule succeeds or fails independently. A node without authentication returns SECURITY_DISABLED, as Kafka does
without an authorizer: a rule that is not enforced would be worse than none.

Version notes: 2 is flexible, 3 adds resources of the type user.
"""

from __future__ import annotations

from collections.abc import Iterator

from kio.schema.create_acls.v3.request import AclCreation, CreateAclsRequest
from kio.schema.create_acls.v3.response import AclCreationResult, CreateAclsResponse
from kio.schema.errors import ErrorCode

from millstream.broker.kafka.api import NO_THROTTLE, SECURITY_DISABLED, Api, ClientInfo, error_code, error_message
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import CREATE, TIMED_OUT, Users, acl_change
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Acl, Operation, PatternType, Permission, ResourceType
from millstream.core.errors import InvalidRequest, MillstreamError


class CreateAcls(Api[CreateAclsRequest, CreateAclsResponse]):
    """Adds access rules."""

    key = 30
    versions = (1, 3)

    def __init__(self, security: SecurityState | None) -> None:
        self._security = security

    async def handle(self, request: CreateAclsRequest, client: ClientInfo) -> CreateAclsResponse:
        if self._security is None:
            return _response([(ErrorCode.security_disabled, SECURITY_DISABLED)] * len(request.creations))
        results: list[tuple[ErrorCode, str | None]] = []
        valid: set[Acl] = set()
        for creation in request.creations:
            try:
                valid.add(_parse_acl(creation).check())
                results.append((ErrorCode.none, None))
            except InvalidRequest as error:
                results.append((error_code(error), error_message(error)))
        await self._security.add_acls(valid)
        return _response(results)

    def failure(self, error: MillstreamError, request: CreateAclsRequest) -> CreateAclsResponse:
        return _response([(error_code(error), error_message(error))] * len(request.creations))

    @staticmethod
    def changes(request: CreateAclsRequest, response: CreateAclsResponse, _users: Users) -> Iterator[Change]:
        for creation, result in zip(request.creations, response.results, strict=True):
            if result.error_code in (0, TIMED_OUT):
                yield acl_change(CREATE, creation, creation.resource_pattern_type, result)


def _parse_acl(creation: AclCreation) -> Acl:
    try:
        return Acl(
            resource_type=ResourceType(creation.resource_type),
            resource_name=creation.resource_name,
            pattern=PatternType(creation.resource_pattern_type),
            principal=creation.principal,
            host=creation.host,
            operation=Operation(creation.operation),
            permission=Permission(creation.permission_type),
        )
    except ValueError as error:
        raise InvalidRequest(f"the rule cannot be read: {error}") from None


def _response(results: list[tuple[ErrorCode, str | None]]) -> CreateAclsResponse:
    return CreateAclsResponse(
        throttle_time=NO_THROTTLE,
        results=tuple(AclCreationResult(error_code=code, error_message=message) for code, message in results),
    )
