"""DescribeConfigs (key 32), versions 1 to 4: returns the settings of topics, of this node, and of groups.

Each setting has its value, its source (the topic, this node or all nodes at run time, this node's configuration, or the
built-in default), and on request the values that it overrides (synonyms) and its documentation. Settings of a node that
need a restart are marked read-only; settings that Kafka's brokers have too are also shown under Kafka's names. The
empty name means the settings of all nodes.

Version notes: 1 adds synonyms and sources, 3 the type and the documentation, 4 is flexible.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from typing import Final

from kio.schema.describe_configs.v4.request import DescribeConfigsRequest, DescribeConfigsResource
from kio.schema.describe_configs.v4.response import (
    DescribeConfigsResourceResult,
    DescribeConfigsResponse,
    DescribeConfigsResult,
    DescribeConfigsSynonym,
)
from kio.schema.errors import ErrorCode
from kio.static.primitive import i8

from millstream.broker.cluster.declared_state import DeclaredGroups
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo, error_code, error_message, topic_named
from millstream.broker.kafka.setting_view import (
    SettingView,
    cluster_settings,
    consumer_group_settings,
    node_settings,
    share_group_settings,
    topic_settings,
)
from millstream.core.config import Config
from millstream.core.errors import InvalidRequest, MillstreamError
from millstream.core.topic import check_topic_name

TOPIC_RESOURCE: Final = 2
NODE_RESOURCE: Final = 4
GROUP_RESOURCE: Final = 32


class DescribeConfigs(Api[DescribeConfigsRequest, DescribeConfigsResponse]):
    key = 32
    versions = (1, 4)
    changes = None

    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        config: Config,
        groups: DeclaredGroups,
        subscriptions: Subscriptions | None = None,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._subscriptions = subscriptions
        self._membership = membership
        self._config = config

    async def handle(self, request: DescribeConfigsRequest, client: ClientInfo) -> DescribeConfigsResponse:
        results = tuple(self._resource_result(resource, request) for resource in request.resources)
        return DescribeConfigsResponse(throttle_time=NO_THROTTLE, results=results)

    def _resource_result(
        self, resource: DescribeConfigsResource, request: DescribeConfigsRequest
    ) -> DescribeConfigsResult:
        code, message = ErrorCode.none, None
        views: Iterable[SettingView] = ()
        try:
            views = self._settings(resource)
        except MillstreamError as error:
            code, message = error_code(error), error_message(error)
        # An empty list of names also requests all settings, as in Kafka.
        requested = set(resource.configuration_keys or ())
        return DescribeConfigsResult(
            error_code=code,
            error_message=message,
            resource_type=resource.resource_type,
            resource_name=resource.resource_name,
            configs=tuple(
                _build_result(view, request) for view in views if not requested or view.declared.name in requested
            ),
        )

    def _settings(self, resource: DescribeConfigsResource) -> Iterable[SettingView]:
        name = resource.resource_name
        if resource.resource_type == TOPIC_RESOURCE:
            check_topic_name(name)
            return topic_settings(self._topics, topic_named(self._topics, name))
        if resource.resource_type == NODE_RESOURCE:
            settings = self._topics.broker_settings
            if not name:
                return cluster_settings(settings)
            if name != str(self._membership.me.node_id):
                raise InvalidRequest(f"this is node {self._membership.me.node_id}; ask node {name} for its settings")
            replication = min(self._config.default_replication, len(self._membership.nodes()))
            defaults = self._topics.static_defaults_for(replication)
            return node_settings(self._config, self._membership.me, defaults, settings)
        if resource.resource_type == GROUP_RESOURCE and self._subscriptions is not None:
            check_group_name(name)
            # An undeclared group has the defaults, as in Kafka.
            shared = share_group_settings(self._subscriptions.get(name))
            return chain(consumer_group_settings(self._groups, name), shared)
        raise InvalidRequest(
            f"resource type {resource.resource_type} has no settings; only topics, nodes and groups do"
        )


def check_group_name(name: str) -> None:
    """Raise `InvalidRequest` for an empty name, which for nodes means all of them: groups have no such default."""
    if not name:
        raise InvalidRequest("settings for all groups are those of the node (group-consumer-*); name one group")


def _build_result(view: SettingView, request: DescribeConfigsRequest) -> DescribeConfigsResourceResult:
    synonyms = view.synonyms if request.include_synonyms else ()
    return DescribeConfigsResourceResult(
        name=view.declared.name,
        value=view.value,
        read_only=view.read_only,
        config_source=i8(view.source),
        is_sensitive=view.declared.is_secret,
        synonyms=tuple(
            DescribeConfigsSynonym(name=synonym.name, value=synonym.value, source=i8(synonym.source))
            for synonym in synonyms
        ),
        config_type=i8(view.type_id),
        documentation=view.declared.description if request.include_documentation else None,
    )
