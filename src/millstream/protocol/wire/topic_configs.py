"""The settings of a topic, over Kafka's API, so that they can be read from any Kafka."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

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
    answer = await client.send(None, messages.DescribeConfigsRequest(resources=(resource,)))
    described = answer.results[0]
    if described.error_code:
        raise error_from_code(described.error_code, described.error_message, about=f"settings of topic {name!r}")
    return {one.name: TopicConfig(one.value, one.config_source == _SOURCE_TOPIC) for one in described.configs}
