"""AlterConfigs (key 33), versions 0 to 2: replaces all settings of topics or nodes.

Settings that a request does not name are reset to the node's default, which is why Kafka recommends
IncrementalAlterConfigs instead; old tools know only this API. For a node, or all nodes (the empty name), the settings
that can be changed at run time are replaced; all others are part of its configuration and need a restart.

Version notes: 2 is flexible.
"""

from __future__ import annotations

from collections import Counter

from kio.schema.alter_configs.v2.request import AlterConfigsRequest, AlterConfigsResource
from kio.schema.alter_configs.v2.response import AlterConfigsResourceResponse, AlterConfigsResponse

from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message, error_of, topic_named
from millstream.broker.kafka.apis.describe_configs import NODE_RESOURCE
from millstream.broker.kafka.apis.incremental_alter_configs import check_alterable, check_not_mirrored, repeated_error
from millstream.broker.security.changes import settings_changed
from millstream.core.errors import InvalidRequest, InvalidSetting, MillstreamError
from millstream.core.topic import check_topic_name


class AlterConfigs(Api[AlterConfigsRequest, AlterConfigsResponse]):
    key = 33
    versions = (0, 2)
    changes = staticmethod(settings_changed)

    def __init__(self, topics: Topics) -> None:
        self._topics = topics

    async def handle(self, request: AlterConfigsRequest, client: ClientInfo) -> AlterConfigsResponse:
        named = Counter((resource.resource_type, resource.resource_name) for resource in request.resources)
        responses = []
        for resource in request.resources:
            if named[resource.resource_type, resource.resource_name] > 1:
                error: MillstreamError | None = repeated_error(resource.resource_name)
            else:
                error = await error_of(self._alter(resource, validate_only=request.validate_only))
            responses.append(
                AlterConfigsResourceResponse(
                    error_code=error_code(error),
                    error_message=error_message(error),
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
            )
        return AlterConfigsResponse(throttle_time=NO_THROTTLE, responses=tuple(responses))

    async def _alter(self, resource: AlterConfigsResource, *, validate_only: bool) -> None:
        check_alterable(resource.resource_type, (config.name for config in resource.configs))
        is_topic = resource.resource_type != NODE_RESOURCE
        name = resource.resource_name
        if is_topic:
            check_topic_name(name)
            check_not_mirrored(topic_named(self._topics, name))
        settings: dict[str, str | None] = {}
        for config in resource.configs:
            if config.name in settings:
                raise InvalidRequest(f"{config.name} is named more than once for {name!r}")
            if config.value is None:
                raise InvalidSetting(f"{config.name} has no value; leave it out to reset it")
            settings[config.name] = config.value
        alter = self._topics.alter if is_topic else self._topics.alter_broker
        await alter(name, settings, replace=True, validate_only=validate_only)
