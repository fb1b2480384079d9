"""IncrementalAlterConfigs (key 44), versions 0 and 1: changes some settings of topics, nodes or groups, and keeps the
others.

The operations are set, delete (reset to the node's default), and, for settings that take a list, append and subtract.
All changes of one topic are made together or not at all. Settings of a consumer group
(`consumer.session.timeout.ms`, `consumer.heartbeat.interval.ms`) belong to its name, whether it exists or not; settings
of a share group are those of the subscription with that name. For a node, or all nodes (the empty name), the defaults
of topics and the number of connections can be changed at run time, under Kafka's names. All other settings of a node
need a restart: changing them gets INVALID_REQUEST, with an error that says where they are set. The settings of a
mirror's copy are changed at its source.

Version notes: 1 is flexible.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Final

from kio.schema.incremental_alter_configs.v1.request import (
    AlterableConfig,
    AlterConfigsResource,
    IncrementalAlterConfigsRequest,
)
from kio.schema.incremental_alter_configs.v1.response import (
    AlterConfigsResourceResponse,
    IncrementalAlterConfigsResponse,
)

from millstream.broker.cluster.broker_settings import DECLARED as DYNAMIC
from millstream.broker.cluster.declared_state import DeclaredGroups
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import (
    NO_THROTTLE,
    Api,
    ClientInfo,
    check_needs,
    error_code,
    error_message,
    error_of,
    topic_named,
)
from millstream.broker.kafka.apis.describe_configs import (
    GROUP_RESOURCE,
    NODE_RESOURCE,
    TOPIC_RESOURCE,
    check_group_name,
)
from millstream.broker.kafka.setting_view import how_to_change, is_list
from millstream.broker.kafka.subscription_service import SubscriptionService, letter_needs
from millstream.broker.security.changes import settings_changed
from millstream.broker.security.rights import Rights
from millstream.core.acl import Operation, ResourceType
from millstream.core.errors import InvalidRequest, InvalidSetting, MillstreamError, MirroredTopic
from millstream.core.group import DECLARED
from millstream.core.setting import Setting, with_changes
from millstream.core.topic import Topic, TopicSettings, check_topic_name

SET: Final = 0
DELETE: Final = 1
APPEND: Final = 2
SUBTRACT: Final = 3
_NAMES_SHOWN_MAX: Final = 5


class IncrementalAlterConfigs(Api[IncrementalAlterConfigsRequest, IncrementalAlterConfigsResponse]):
    key = 44
    versions = (0, 1)
    changes = staticmethod(settings_changed)

    def __init__(self, topics: Topics, groups: DeclaredGroups, service: SubscriptionService | None = None) -> None:
        self._topics = topics
        self._groups = groups
        self._service = service

    async def handle(
        self, request: IncrementalAlterConfigsRequest, client: ClientInfo
    ) -> IncrementalAlterConfigsResponse:
        named = Counter((resource.resource_type, resource.resource_name) for resource in request.resources)
        responses = []
        for resource in request.resources:
            if named[resource.resource_type, resource.resource_name] > 1:
                error: MillstreamError | None = repeated_error(resource.resource_name)
            else:
                error = await error_of(self._alter(resource, client.rights, validate_only=request.validate_only))
            responses.append(
                AlterConfigsResourceResponse(
                    error_code=error_code(error),
                    error_message=error_message(error),
                    resource_type=resource.resource_type,
                    resource_name=resource.resource_name,
                )
            )
        return IncrementalAlterConfigsResponse(throttle_time=NO_THROTTLE, responses=tuple(responses))

    async def _alter(self, resource: AlterConfigsResource, rights: Rights | None, *, validate_only: bool) -> None:
        if resource.resource_type == GROUP_RESOURCE and self._service is not None:
            await self._alter_group(self._service, resource, rights, validate_only=validate_only)
            return
        # Deleting a setting that a node does not have is not an error, as in Kafka: kafka-reassign-partitions clears
        # throttles whether or not there are any.
        changed = (config.name for config in resource.configs if config.config_operation != DELETE)
        check_alterable(resource.resource_type, changed)
        if resource.resource_type == NODE_RESOURCE:
            await self._alter_broker(resource, validate_only=validate_only)
            return
        check_topic_name(resource.resource_name)
        topic = topic_named(self._topics, resource.resource_name)
        check_not_mirrored(topic)
        changes = self._changes(topic, resource.configs)
        await self._topics.alter(topic.name, changes, validate_only=validate_only)

    async def _alter_broker(self, resource: AlterConfigsResource, *, validate_only: bool) -> None:
        scope = resource.resource_name
        now = self._topics.broker_settings.of(scope)
        changes: dict[str, str | None] = {}
        for config in resource.configs:
            if config.name in changes:
                raise InvalidRequest(f"{config.name} is named more than once for {scope or 'all nodes'}")
            if config.name not in DYNAMIC:
                changes[config.name] = None
                continue
            declared = DYNAMIC[config.name]
            value = now.get(config.name, str(declared.default))
            changes[config.name] = _new_value(config, declared, value)
        try:
            await self._topics.alter_broker(scope, changes, validate_only=validate_only)
        except InvalidSetting as error:
            # Kafka's code for a bad value of a node, unlike that of a topic.
            raise InvalidRequest(str(error)) from error

    async def _alter_group(
        self,
        service: SubscriptionService,
        resource: AlterConfigsResource,
        rights: Rights | None,
        *,
        validate_only: bool,
    ) -> None:
        """Change a group's settings; one that does not exist yet will have them.

        A consumer group's are its own; all others are those of a share group, which is a subscription.
        """
        name = resource.resource_name
        check_group_name(name)
        changes: dict[str, str | None] = {}
        for config in resource.configs:
            if config.name in changes:
                raise InvalidRequest(f"{config.name} is named more than once for group {name!r}")
            if config.config_operation not in (SET, DELETE):
                raise InvalidSetting(f"{config.name} takes one value; set it")
            if config.config_operation == SET and config.value is None:
                raise InvalidRequest(f"{config.name} has no value; the operation DELETE resets it")
            changes[config.name] = config.value if config.config_operation == SET else None
        own = {key: value for key, value in changes.items() if key in DECLARED}
        shared = {key: value for key, value in changes.items() if key not in DECLARED}
        # Both are checked before either is changed.
        if own:
            await self._groups.alter(name, own, validate_only=True)
        if shared:
            await self._alter_share_group(service, name, shared, rights, validate_only=validate_only)
        if own:
            await self._groups.alter(name, own, validate_only=validate_only)

    async def _alter_share_group(
        self,
        service: SubscriptionService,
        name: str,
        changes: dict[str, str | None],
        rights: Rights | None,
        *,
        validate_only: bool,
    ) -> None:
        values = with_changes({}, changes)
        subscription = service.declared.get(name)
        owner = None
        if rights is not None and not all(key.startswith("share.") for key in changes):
            # Other settings than Kafka's may push messages elsewhere, so this needs what SubscriptionAlter does.
            topics = () if subscription is None else await service.topics_of(name)
            rights.require_all(Operation.READ, ResourceType.TOPIC, topics)
            check_needs(letter_needs(name, values), rights)
            owner = rights.owner
        if subscription is not None:
            await service.alter(name, changes, validate_only=validate_only, owner=owner)
        elif values:
            await service.declared.create(name, (), values, validate_only=validate_only, owner=owner)

    def _changes(self, topic: Topic, configs: tuple[AlterableConfig, ...]) -> dict[str, str | None]:
        changes: dict[str, str | None] = {}
        for config in configs:
            if config.name in changes:
                raise InvalidRequest(f"{config.name} is named more than once for topic {topic.name!r}")
            # Deleting an unknown setting is not an error, as in Kafka: tools clean up settings of other versions.
            if config.config_operation != DELETE and config.name not in TopicSettings.declared():
                raise TopicSettings.unknown(config.name)
            if config.config_operation == DELETE:
                changes[config.name] = None
                continue
            declared = TopicSettings.declared()[config.name]
            changes[config.name] = _new_value(
                config, declared, self._topics.settings_of(topic).as_strings()[config.name]
            )
        return changes


def _new_value(config: AlterableConfig, declared: Setting, now: str) -> str | None:
    """Return the new value of one setting; None takes it back to the default."""
    if config.config_operation == DELETE:
        return None
    if config.value is None:
        raise InvalidRequest(f"{config.name} has no value; the operation DELETE resets it")
    if config.config_operation == SET:
        return config.value
    if config.config_operation not in (APPEND, SUBTRACT):
        raise InvalidRequest(f"operation {config.config_operation} is unknown")
    if not is_list(declared):
        verb = "appended to" if config.config_operation == APPEND else "subtracted from"
        raise InvalidSetting(f"{config.name} takes one value and cannot be {verb}; set it")
    values, items = now.split(","), [part.strip() for part in config.value.split(",")]
    if config.config_operation == SUBTRACT:
        return ",".join(value for value in values if value not in items)
    return ",".join(dict.fromkeys([*values, *items]))


def check_alterable(resource_type: int, names: Iterable[str]) -> None:
    """Raise `InvalidRequest` for what has no settings, and for settings of a node that need a restart to change."""
    if resource_type == NODE_RESOURCE:
        ways = [how_to_change(name) for name in names if name not in DYNAMIC]
        if ways:
            reason = "these settings of a node cannot be changed while it runs"
            raise InvalidRequest("; ".join([reason, *ways[:_NAMES_SHOWN_MAX]]))
    elif resource_type != TOPIC_RESOURCE:
        raise InvalidRequest(f"resource type {resource_type} has no settings; only topics, nodes and groups do")


def check_not_mirrored(topic: Topic) -> None:
    """Raise `MirroredTopic` for a copy, whose settings are those of its original."""
    if topic.mirror and not topic.is_draining:
        raise MirroredTopic(
            f"topic {topic.name!r} is a copy of mirror {topic.mirror!r}; change its settings at the source"
        )


def repeated_error(name: str) -> InvalidRequest:
    return InvalidRequest(f"{name!r} is named more than once in the request")
