"""ListConfigResources (key 74), versions 0 and 1: lists the topics, nodes and groups that have settings.

Client metrics and loggers have none here, so none are listed. No types means all types; a type that Kafka does
not know gets UNSUPPORTED_VERSION for the whole request.

Version notes: 0 is about client metrics alone, and is always empty; 1 adds the types.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from kio.schema.errors import ErrorCode
from kio.schema.list_config_resources.v1.request import ListConfigResourcesRequest
from kio.schema.list_config_resources.v1.response import ConfigResource, ListConfigResourcesResponse
from kio.static.primitive import i8

from millstream.broker.cluster.declared_state import DeclaredGroups
from millstream.broker.cluster.membership import Membership
from millstream.broker.cluster.subscriptions import Subscriptions
from millstream.broker.cluster.topics import Topics
from millstream.broker.kafka.api import NO_THROTTLE, Api, ClientInfo
from millstream.broker.kafka.apis.describe_configs import NODE_RESOURCE, TOPIC_RESOURCE

_LOGGER_RESOURCE: Final = 8
_CLIENT_METRICS_RESOURCE: Final = 16
_GROUP_RESOURCE: Final = 32
_KNOWN: Final = frozenset({TOPIC_RESOURCE, NODE_RESOURCE, _LOGGER_RESOURCE, _CLIENT_METRICS_RESOURCE, _GROUP_RESOURCE})


class ListConfigResources(Api[ListConfigResourcesRequest, ListConfigResourcesResponse]):
    key = 74
    versions = (0, 1)
    changes = None

    def __init__(
        self,
        topics: Topics,
        membership: Membership,
        groups: DeclaredGroups,
        subscriptions: Subscriptions | None = None,
    ) -> None:
        self._topics = topics
        self._groups = groups
        self._subscriptions = subscriptions
        self._membership = membership

    def upgrade(self, version: int, request: Any) -> ListConfigResourcesRequest:
        """Version 0 asks for client metrics."""
        if version == 0:
            return ListConfigResourcesRequest(resource_types=(i8(_CLIENT_METRICS_RESOURCE),))
        return super().upgrade(version, request)

    async def handle(self, request: ListConfigResourcesRequest, client: ClientInfo) -> ListConfigResourcesResponse:
        requested = set(request.resource_types) or _KNOWN
        if not requested <= _KNOWN:
            return ListConfigResourcesResponse(
                throttle_time=NO_THROTTLE, error_code=ErrorCode.unsupported_version, config_resources=()
            )
        listed = tuple(
            ConfigResource(resource_name=name, resource_type=i8(kind))
            for kind, name in self._resources()
            if kind in requested
        )
        return ListConfigResourcesResponse(
            throttle_time=NO_THROTTLE, error_code=ErrorCode.none, config_resources=listed
        )

    def _resources(self) -> Iterator[tuple[int, str]]:
        for topic in self._topics.all():
            yield TOPIC_RESOURCE, topic.name
        for node in self._membership.nodes():
            yield NODE_RESOURCE, str(node.node_id)
        declared = () if self._subscriptions is None else self._subscriptions.all()
        shared = [subscription.name for subscription in declared if subscription.overrides]
        for name in dict.fromkeys([*self._groups.all(), *shared]):
            yield _GROUP_RESOURCE, name
