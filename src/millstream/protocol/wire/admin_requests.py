"""Settings of topics and access rules, over Kafka's APIs, so that they can be read from any Kafka."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from millstream.core.acl import Acl, AclFilter, Operation, PatternType, Permission, ResourceType
from millstream.core.ids import NodeId
from millstream.protocol.messages.codec import build_request
from millstream.protocol.wire.client import Client
from millstream.protocol.wire.error_codes import error_from_code

TOPIC_RESOURCE: Final = 2
NODE_RESOURCE: Final = 4
_SOURCE_TOPIC: Final = 1


@dataclass(frozen=True, slots=True)
class TopicConfig:
    """The effective value of a setting, and whether the topic's owner set it."""

    value: str | None
    is_override: bool


async def describe_configs(
    client: Client, kind: int, names: Iterable[str], keys: Sequence[str] | None = None, *, node: NodeId | None = None
) -> Any:
    """Return the settings of resources of one kind, or those that are named in `keys`: a result for each resource."""
    resources = [{"resource_type": kind, "resource_name": name, "configuration_keys": keys} for name in names]
    return (await client.send(node, build_request("describe_configs", 4, resources=resources))).results


async def topic_configs(client: Client, name: str) -> dict[str, TopicConfig]:
    (described,) = await describe_configs(client, TOPIC_RESOURCE, [name])
    if described.error_code:
        raise error_from_code(described.error_code, described.error_message, about=f"settings of topic {name!r}")
    return {
        config.name: TopicConfig(config.value, config.config_source == _SOURCE_TOPIC) for config in described.configs
    }


async def describe_acls(client: Client, selected: AclFilter) -> list[Acl]:
    response = await client.send(None, build_request("describe_acls", 3, **filter_fields(selected)))
    if response.error_code:
        raise error_from_code(response.error_code, response.error_message, about="list access rules")
    return [
        Acl(
            resource_type=ResourceType(resource.resource_type),
            resource_name=resource.resource_name,
            pattern=PatternType(resource.pattern_type),
            principal=acl.principal,
            host=acl.host,
            operation=Operation(acl.operation),
            permission=Permission(acl.permission_type),
        )
        for resource in response.resources
        for acl in resource.acls
    ]


def filter_fields(selected: AclFilter) -> dict[str, Any]:
    """Return a filter as the fields of DescribeAcls and DeleteAcls."""
    return {
        "resource_type_filter": selected.resource_type,
        "resource_name_filter": selected.resource_name,
        "pattern_type_filter": selected.pattern,
        "principal_filter": selected.principal,
        "host_filter": selected.host,
        "operation": selected.operation,
        "permission_type": selected.permission,
    }
