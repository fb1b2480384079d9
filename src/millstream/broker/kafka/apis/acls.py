"""The APIs of access rules.

A node without authentication returns SECURITY_DISABLED, as Kafka does without an authorizer: a rule that is not
enforced would be worse than none, and tools find out whether rules apply.

Version notes: 2 is flexible, 3 adds resources of the type user.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby
from typing import Any

from kio.schema.create_acls.v3.request import AclCreation, CreateAclsRequest
from kio.schema.create_acls.v3.response import AclCreationResult, CreateAclsResponse
from kio.schema.delete_acls.v3.request import DeleteAclsFilter, DeleteAclsRequest
from kio.schema.delete_acls.v3.response import DeleteAclsFilterResult, DeleteAclsMatchingAcl, DeleteAclsResponse
from kio.schema.describe_acls.v3.request import DescribeAclsRequest
from kio.schema.describe_acls.v3.response import AclDescription, DescribeAclsResource, DescribeAclsResponse
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8

from millstream.broker.kafka.api import NO_THROTTLE, SECURITY_DISABLED, Api, ClientInfo, error_code, error_message
from millstream.broker.security.audit import Change
from millstream.broker.security.changes import CREATE, DELETE, TIMED_OUT, Users, acl_change, carried_out, parse_acl
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Acl, AclFilter, Operation, PatternType, Permission, ResourceType
from millstream.core.errors import InvalidRequest, MillstreamError


class DescribeAcls(Api[DescribeAclsRequest, DescribeAclsResponse]):
    """DescribeAcls (key 29), versions 1 to 3: returns the access rules that a filter selects."""

    key = 29
    versions = (1, 3)
    changes = None

    def __init__(self, security: SecurityState | None) -> None:
        self._security = security

    async def handle(self, request: DescribeAclsRequest, client: ClientInfo) -> DescribeAclsResponse:
        if self._security is None:
            return self.refusal(ErrorCode.security_disabled, SECURITY_DISABLED)
        selected = _read_filter(request)
        acls = sorted(acl for acl in self._security.snapshot.acls if selected.matches(acl))
        resources = tuple(_resource(resource, list(rules)) for resource, rules in groupby(acls, key=_resource_of))
        return DescribeAclsResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, error_message=None, resources=resources
        )


def _read_filter(request: Any) -> AclFilter:
    """Read the fields that the filters of DescribeAcls and DeleteAcls share, or raise `InvalidRequest`."""
    try:
        return AclFilter(
            resource_type=ResourceType(request.resource_type_filter),
            resource_name=request.resource_name_filter,
            pattern=PatternType(request.pattern_type_filter),
            principal=request.principal_filter,
            host=request.host_filter,
            operation=Operation(request.operation),
            permission=Permission(request.permission_type),
        )
    except ValueError as error:
        raise InvalidRequest(f"the filter cannot be read: {error}") from None


def _resource_of(acl: Acl) -> tuple[ResourceType, str, PatternType]:
    return acl.resource_type, acl.resource_name, acl.pattern


def _resource(resource: tuple[ResourceType, str, PatternType], acls: list[Acl]) -> DescribeAclsResource:
    return DescribeAclsResource(
        resource_type=i8(resource[0]),
        resource_name=resource[1],
        pattern_type=i8(resource[2]),
        acls=tuple(
            AclDescription(
                principal=acl.principal,
                host=acl.host,
                operation=i8(acl.operation),
                permission_type=i8(acl.permission),
            )
            for acl in acls
        ),
    )


class CreateAcls(Api[CreateAclsRequest, CreateAclsResponse]):
    """CreateAcls (key 30), versions 1 to 3: adds access rules; existing ones are left unchanged.

    Each rule succeeds or fails independently.
    """

    key = 30
    versions = (1, 3)

    def __init__(self, security: SecurityState | None) -> None:
        self._security = security

    async def handle(self, request: CreateAclsRequest, client: ClientInfo) -> CreateAclsResponse:
        if self._security is None:
            return _creations([(ErrorCode.security_disabled, SECURITY_DISABLED)] * len(request.creations))
        results: list[tuple[ErrorCode, str | None]] = []
        valid: set[Acl] = set()
        for creation in request.creations:
            try:
                valid.add(_parse_acl(creation).check())
                results.append((ErrorCode.none, None))
            except InvalidRequest as error:
                results.append((error_code(error), error_message(error)))
        await self._security.add_acls(valid)
        return _creations(results)

    def failure(self, error: MillstreamError, request: CreateAclsRequest) -> CreateAclsResponse:
        return _creations([(error_code(error), error_message(error))] * len(request.creations))

    @staticmethod
    def changes(request: CreateAclsRequest, response: CreateAclsResponse, _users: Users) -> Iterator[Change]:
        for creation, result in zip(request.creations, response.results, strict=True):
            if result.error_code in (0, TIMED_OUT):
                yield acl_change(CREATE, creation, creation.resource_pattern_type, result)


def _parse_acl(creation: AclCreation) -> Acl:
    try:
        return parse_acl(creation, creation.resource_pattern_type)
    except ValueError as error:
        raise InvalidRequest(f"the rule cannot be read: {error}") from None


def _creations(results: list[tuple[ErrorCode, str | None]]) -> CreateAclsResponse:
    return CreateAclsResponse(
        throttle_time=NO_THROTTLE,
        results=tuple(AclCreationResult(error_code=code, error_message=message) for code, message in results),
    )


class DeleteAcls(Api[DeleteAclsRequest, DeleteAclsResponse]):
    """DeleteAcls (key 31), versions 1 to 3: removes the access rules that each filter selects, and returns them."""

    key = 31
    versions = (1, 3)

    def __init__(self, security: SecurityState | None) -> None:
        self._security = security

    async def handle(self, request: DeleteAclsRequest, client: ClientInfo) -> DeleteAclsResponse:
        if self._security is None:
            return _deletions([_error_result(ErrorCode.security_disabled, SECURITY_DISABLED)] * len(request.filters))
        return _deletions([await self._delete(self._security, requested) for requested in request.filters])

    def failure(self, error: MillstreamError, request: DeleteAclsRequest) -> DeleteAclsResponse:
        return _deletions([_error_result(error_code(error), error_message(error))] * len(request.filters))

    async def _delete(self, security: SecurityState, requested: DeleteAclsFilter) -> DeleteAclsFilterResult:
        try:
            deleted = await security.delete_acls(_read_filter(requested))
        except MillstreamError as error:
            return _error_result(error_code(error), error_message(error))
        return DeleteAclsFilterResult(
            error_code=ErrorCode.none, error_message=None, matching_acls=tuple(map(_matching_acl, sorted(deleted)))
        )

    @staticmethod
    def changes(_request: DeleteAclsRequest, response: DeleteAclsResponse, _users: Users) -> Iterator[Change]:
        for result in carried_out(response.filter_results):
            for acl in carried_out(result.matching_acls):
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


def _deletions(results: list[DeleteAclsFilterResult]) -> DeleteAclsResponse:
    return DeleteAclsResponse(throttle_time=NO_THROTTLE, filter_results=tuple(results))
