"""DescribeAcls as a client sends it: the access rules that a filter selects."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from millstream.core.acl import Acl, AclFilter, Operation, PatternType, Permission, ResourceType
from millstream.protocol.wire.error_codes import error_from_code

if TYPE_CHECKING:
    from millstream.protocol.wire.client import Client


async def describe_acls(client: Client, selected: AclFilter) -> list[Acl]:
    """Return the access rules that a filter selects."""
    from kio.schema.describe_acls.v3.request import DescribeAclsRequest

    answer = await client.send(None, DescribeAclsRequest(**filter_fields(selected)))
    if answer.error_code:
        raise error_from_code(answer.error_code, answer.error_message, about="list access rules")
    return [
        Acl(
            resource_type=ResourceType(resource.resource_type),
            resource_name=resource.resource_name,
            pattern=PatternType(resource.pattern_type),
            principal=one.principal,
            host=one.host,
            operation=Operation(one.operation),
            permission=Permission(one.permission_type),
        )
        for resource in answer.resources
        for one in resource.acls
    ]


def filter_fields(selected: AclFilter) -> dict[str, Any]:
    """Return a filter as the fields of DescribeAcls and DeleteAcls."""
    from kio.static.primitive import i8

    return {
        "resource_type_filter": i8(selected.resource_type),
        "resource_name_filter": selected.resource_name,
        "pattern_type_filter": i8(selected.pattern),
        "principal_filter": selected.principal,
        "host_filter": selected.host,
        "operation": i8(selected.operation),
        "permission_type": i8(selected.permission),
    }
