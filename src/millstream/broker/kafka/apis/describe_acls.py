"""DescribeAcls (key 29), versions 1 to 3: returns the access rules that a filter selects.

A node without authentication returns SECURITY_DISABLED, as Kafka does without an authorizer; tools use this to find out
whether access rules apply.

Version notes: 2 is flexible, 3 adds resources of the type user.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

from kio.schema.describe_acls.v3.request import DescribeAclsRequest
from kio.schema.describe_acls.v3.response import AclDescription, DescribeAclsResource, DescribeAclsResponse
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8

from millstream.broker.kafka.api import NO_THROTTLE, SECURITY_DISABLED, Api, ClientInfo
from millstream.broker.security.state import SecurityState
from millstream.core.acl import Acl, AclFilter, Operation, PatternType, Permission, ResourceType
from millstream.core.errors import InvalidRequest


class DescribeAcls(Api[DescribeAclsRequest, DescribeAclsResponse]):
    """Lists access rules."""

    key = 29
    versions = (1, 3)
    changes = None

    def __init__(self, security: SecurityState | None) -> None:
        self._security = security

    async def handle(self, request: DescribeAclsRequest, client: ClientInfo) -> DescribeAclsResponse:
        if self._security is None:
            return self.refusal(ErrorCode.security_disabled, SECURITY_DISABLED)
        selected = read_filter(request)
        acls = sorted(acl for acl in self._security.snapshot.acls if selected.matches(acl))
        resources = tuple(_resource(resource, list(found)) for resource, found in groupby(acls, key=_resource_of))
        return DescribeAclsResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, error_message=None, resources=resources
        )


def read_filter(request: Any) -> AclFilter:
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
