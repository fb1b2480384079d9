"""Settings of topics and access rules, over Kafka's APIs, so that they can be read from any Kafka."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from millstream.core.acl import Acl, AclFilter, Operation, PatternType, Permission, ResourceType
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

_TOPIC_RESOURCE: Final = 2
_SOURCE_TOPIC: Final = 1


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The effective value of a setting, and whether the topic's owner set it."""

    value: str | None
    is_override: bool


async def topic_configs(client: Client, name: str) -> dict[str, TopicConfig]:
    """Return every effective setting of a topic."""
    from kio.schema.describe_configs.v4 import request

    messages: Any = request
    resource = messages.DescribeConfigsResource(
        resource_type=_TOPIC_RESOURCE, resource_name=name, configuration_keys=None
    )
    response = await client.send(None, messages.DescribeConfigsRequest(resources=(resource,)))
    described = response.results[0]
    if described.error_code:
        raise error_from_code(described.error_code, described.error_message, about=f"settings of topic {name!r}")
    return {one.name: TopicConfig(one.value, one.config_source == _SOURCE_TOPIC) for one in described.configs}


async def describe_acls(client: Client, selected: AclFilter) -> list[Acl]:
    """Return the access rules that a filter selects."""
    from kio.schema.describe_acls.v3.request import DescribeAclsRequest

    response = await client.send(None, DescribeAclsRequest(**filter_fields(selected)))
    if response.error_code:
        raise error_from_code(response.error_code, response.error_message, about="list access rules")
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
        for resource in response.resources
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
